# SPDX-License-Identifier: Apache-2.0
"""The contract between methods and engines, and what both are made of. Imports nothing else of fedloom."""
