# SPDX-License-Identifier: Apache-2.0
"""What belongs to no method: client programs such as local training and evaluation, and training on the server."""
