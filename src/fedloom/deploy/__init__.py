# SPDX-License-Identifier: Apache-2.0
"""A federation of machines: the two halves of a Flower app, and what starts, stops and secures one."""
