# SPDX-License-Identifier: Apache-2.0
"""Servers that some clients may lie to: rules that combine replies, and attacks to try them with."""

TRIGGERED = "triggered"
"""The split of test samples with a back door's trigger (``--attack backdoor``)."""
