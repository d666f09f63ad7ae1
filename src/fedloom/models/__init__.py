# SPDX-License-Identifier: Apache-2.0
"""Target networks: what clients train and deploy. ``zoo/`` has the architectures, ``spec`` names them."""
