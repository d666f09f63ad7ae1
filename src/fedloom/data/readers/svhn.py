# SPDX-License-Identifier: Apache-2.0
"""SVHN (Netzer and others 2011): house numbers from street views, 32x32 colour, 10 digits, in MATLAB files.

The cropped digits of the "train" and "test" parts; the label 10, which stands for the digit 0, becomes 0.
Values become (value / 255 - mean) / std with the training part's (0.4377, 0.4438, 0.4728) and (0.1980,
0.2010, 0.1970).
"""

from pathlib import Path

import numpy as np

from fedloom.data.arrays import Arrays
from fedloom.data.files import Dataset, File
from fedloom.data.formats import corrupt, scaled

_FILES = tuple(
    File(name, f"http://ufldl.stanford.edu/housenumbers/{name}", md5, also=f"svhn/{name}")
    for name, md5 in (
        ("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        ("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    )
)


def _read(root: Path) -> Arrays:
    (train_x, train_y), (test_x, test_y) = (_read_mat(file.at(root)) for file in _FILES)
    return Arrays(
        name="svhn",
        x=scaled(np.concatenate([train_x, test_x]), (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        y=np.concatenate([train_y, test_y]),
        num_classes=10,
        split=np.repeat(["train", "test"], [len(train_y), len(test_y)]),
        class_names=tuple("0123456789"),
    )


def _read_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from scipy.io import loadmat

    try:
        content = loadmat(path, variable_names=("X", "y"))
        images, labels = content["X"], content["y"].ravel().astype(np.int64)
    except Exception as error:  # a damaged MATLAB file can raise anything at all
        raise corrupt(path, f"{type(error).__name__}: {error}") from error
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
        raise corrupt(path, f"it has images {images.dtype} {images.shape} for {len(labels)} labels")
    if not ((labels >= 1) & (labels <= 10)).all():
        raise corrupt(path, f"it has labels from {labels.min()} to {labels.max()}, expected 1 to 10")
    return images.transpose(3, 2, 0, 1), labels % 10


SVHN = Dataset(
    name="svhn",
    about="99,289 digits of house numbers, 32x32 colour, 10 classes",
    licence="non-commercial use only",
    files=_FILES,
    read=_read,
)
