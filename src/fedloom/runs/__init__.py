# SPDX-License-Identifier: Apache-2.0
"""The run directory: everything that survives of a run, the only hand-off to reports. Imports no torch."""
