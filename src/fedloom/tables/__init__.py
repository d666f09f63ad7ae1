# SPDX-License-Identifier: Apache-2.0
"""Many runs in a folder: published tables, run again from their recipes, and tuning."""
