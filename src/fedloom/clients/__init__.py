# SPDX-License-Identifier: Apache-2.0
"""Clients and the samples that each of them holds."""
