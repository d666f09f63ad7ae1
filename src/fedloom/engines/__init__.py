# SPDX-License-Identifier: Apache-2.0
"""Ways to reach clients: each engine is an implementation of ``ask`` (see ``core.contract``)."""
