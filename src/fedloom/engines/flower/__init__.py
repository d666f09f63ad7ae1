# SPDX-License-Identifier: Apache-2.0
"""Clients on other machines, reached through Flower: ``ask`` over its Grid. Needs the extra ``fedloom[flower]``."""
