# SPDX-License-Identifier: Apache-2.0
"""Noise with a guarantee: mechanisms that client programs apply before anything leaves, and their accounting."""
