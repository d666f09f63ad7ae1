# SPDX-License-Identifier: Apache-2.0
"""Published tables, run again: what a recipe says, and running it."""
