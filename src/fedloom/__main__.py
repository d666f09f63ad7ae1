# SPDX-License-Identifier: Apache-2.0
"""``python -m fedloom``, the same as ``fedloom``."""

from fedloom.cli.main import main

if __name__ == "__main__":
    main()
