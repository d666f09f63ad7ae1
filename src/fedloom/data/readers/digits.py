# SPDX-License-Identifier: Apache-2.0
"""The handwritten digits that come with scikit-learn: small enough to try everything on, no files to fetch.

Grey values 0 to 16 are divided by 16. The 1,797 images are only the test part of the UCI set, so there is
no published split.
"""

from pathlib import Path

import numpy as np

from fedloom.data.arrays import Arrays
from fedloom.data.files import Dataset


def _read(root: Path) -> Arrays:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)  # (1797, 64)
    return Arrays(
        name="digits",
        x=(images / 16).astype(np.float32).reshape(-1, 1, 8, 8),
        y=labels.astype(np.int64),
        num_classes=10,
        class_names=tuple("0123456789"),
    )


DIGITS = Dataset(
    name="digits",
    about="1,797 handwritten digits, 8x8 grey, 10 classes; comes with scikit-learn",
    licence="CC BY 4.0",
    files=(),
    read=_read,
)
