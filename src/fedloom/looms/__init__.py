# SPDX-License-Identifier: Apache-2.0
"""Looms: from a client's embedding to the parameters of its model, as functions of the loom's own parameters."""
