# SPDX-License-Identifier: Apache-2.0
"""From clients' replies to named numbers. A name says whose model, which clients, which split, which metric."""
