# SPDX-License-Identifier: Apache-2.0
"""A run in memory: the server, its rounds and evaluations, and the loop that writes the run directory."""
