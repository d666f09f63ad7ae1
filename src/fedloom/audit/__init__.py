# SPDX-License-Identifier: Apache-2.0
"""Attacks on a finished run, each beside what guessing gives and a setting in which it must succeed."""
