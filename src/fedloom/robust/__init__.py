# SPDX-License-Identifier: Apache-2.0
"""Servers that some clients may lie to: rules that combine replies, and attacks to try them with."""
