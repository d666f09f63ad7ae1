# SPDX-License-Identifier: Apache-2.0
"""The readers of published datasets; every ``Dataset`` at the top level of a file here counts."""
