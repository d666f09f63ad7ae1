# SPDX-License-Identifier: Apache-2.0
"""EMNIST (Cohen, Afshar, Tapson and van Schaik 2017): handwritten letters and digits, 28x28, in idx files.

Three of its six splits: ``emnist`` is "balanced" (47 classes: letters whose two cases look alike are merged),
``emnist_letters`` has 26 classes of either case, ``emnist_byclass`` has all 62 and 814,255 images. The
images are stored transposed and are turned here; the labels of "letters" start at 1 and are shifted. Grey
values become (value / 255 - 0.1736) / 0.3248, the figures for "balanced" that federated papers use.
"""

import string
from functools import partial
from pathlib import Path

import numpy as np

from fedloom.data.arrays import Arrays
from fedloom.data.files import Dataset, File
from fedloom.data.formats import read_idx_pair, scaled

_UNMERGED = "abdefghnqrt"  # lower-case letters that keep a class of their own in "balanced"


def _read(root: Path, name: str, files: tuple[File, ...], class_names: tuple[str, ...], first_label: int) -> Arrays:
    train_images, train_labels, test_images, test_labels = (file.at(root) for file in files)
    train_x, train_y = read_idx_pair(train_images, train_labels)
    test_x, test_y = read_idx_pair(test_images, test_labels)
    images = np.concatenate([train_x, test_x]).transpose(0, 2, 1)
    return Arrays(
        name=name,
        x=scaled(images[:, None], [0.1736], [0.3248]),
        y=np.concatenate([train_y, test_y]).astype(np.int64) - first_label,
        num_classes=len(class_names),
        split=np.repeat(["train", "test"], [len(train_y), len(test_y)]),
        class_names=class_names,
    )


def _dataset(name: str, part: str, about: str, class_names: str, first_label: int = 0) -> Dataset:
    files = tuple(
        File(
            f"EMNIST/raw/emnist-{part}-{split}-{kind}-ubyte.gz",
            url="https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            md5="58c8d27c78d21e728a6bc7b3cc06412e",
            archive="EMNIST/raw/gzip.zip",
        )
        for split in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    )
    read = partial(_read, name=name, files=files, class_names=tuple(class_names), first_label=first_label)
    return Dataset(name=name, about=about, licence="none stated by NIST, its publisher", files=files, read=read)


BALANCED = _dataset(
    "emnist",
    "balanced",
    "131,600 handwritten letters and digits, 28x28 grey, 47 classes of equal size",
    string.digits + string.ascii_uppercase + _UNMERGED,
)
LETTERS = _dataset(
    "emnist_letters",
    "letters",
    "handwritten letters, 28x28 grey, 26 classes of either case",
    string.ascii_lowercase,
    first_label=1,
)
BYCLASS = _dataset(
    "emnist_byclass",
    "byclass",
    "814,255 handwritten letters and digits, 28x28 grey, 62 unbalanced classes",
    string.digits + string.ascii_uppercase + string.ascii_lowercase,
)
