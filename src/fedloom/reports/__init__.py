# SPDX-License-Identifier: Apache-2.0
"""Run directories and splits as tables and pictures."""
