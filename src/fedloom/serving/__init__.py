# SPDX-License-Identifier: Apache-2.0
"""A trained run handed on: a bundle of all that is needed, a service that gives out models from it, and who joins."""
