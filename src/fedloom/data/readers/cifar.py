# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 60,000 colour images of 32x32, in Python pickles.

Values become (value / 255 - mean) / std per channel, with the constants of pFedHN's published code:
CIFAR-10 (0.4914, 0.4822, 0.4465) and (0.2023, 0.1994, 0.2010), CIFAR-100 (0.5071, 0.4865, 0.4409) and
(0.2673, 0.2564, 0.2762). CIFAR-100 has the grouping "coarse": its 20 superclasses.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.arrays import Arrays
from fedloom.data.files import Dataset, File
from fedloom.data.formats import corrupt, read_pickle, scaled

_URL = "https://www.cs.toronto.edu/~kriz"


def _files(folder: str, archive: str, md5: str, names: tuple[str, ...]) -> tuple[File, ...]:
    return tuple(File(f"{folder}/{name}", f"{_URL}/{archive}", md5, archive) for name in names)


def _read(
    root: Path,
    name: str,
    files: tuple[File, ...],
    key: str,
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    num_coarse: int = 0,
) -> Arrays:
    """The files are the batches of the training part, that of the test part, and the names of the classes."""
    *batches, meta = (file.at(root) for file in files)
    contents = [read_pickle(path) for path in batches]
    images = [_images(path, content) for path, content in zip(batches, contents)]
    sizes = [len(part) for part in images]

    def labels(key: str, classes: int) -> np.ndarray:
        parts = zip(batches, contents, sizes)
        return np.concatenate([_labels(path, content, key, size, classes) for path, content, size in parts])

    groups = {}
    if num_coarse:
        coarse_names = _names(meta, "coarse_label_names", num_coarse)
        groups["coarse"] = coarse_names[labels("coarse_labels", num_coarse)]
    return Arrays(
        name=name,
        x=scaled(np.concatenate(images), mean, std),
        y=labels(f"{key}labels", num_classes),
        num_classes=num_classes,
        split=np.repeat(["train", "test"], [sum(sizes[:-1]), sizes[-1]]),
        groups=groups,
        class_names=tuple(_names(meta, f"{key}label_names", num_classes).tolist()),
    )


def _images(path: Path, content: dict[str, Any]) -> np.ndarray:
    data = content.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3 * 32 * 32,):
        raise corrupt(path, "it holds no rows of 3072 bytes under 'data'")
    return data.reshape(-1, 3, 32, 32)


def _labels(path: Path, content: dict[str, Any], key: str, images: int, classes: int) -> np.ndarray:
    labels = content.get(key)
    if not isinstance(labels, list) or not all(label in range(classes) for label in labels):
        raise corrupt(path, f"it holds no list of numbers from 0 to {classes - 1} under {key!r}")
    if len(labels) != images:
        raise corrupt(path, f"it has {len(labels)} {key} for {images} images")
    return np.array(labels, np.int64)


def _names(path: Path, key: str, expected: int) -> np.ndarray:
    names = read_pickle(path).get(key)
    if not isinstance(names, list) or len(names) != expected:
        raise corrupt(path, f"it holds no list of {expected} names under {key!r}")
    return np.array(names, str)


_CIFAR10_FILES = _files(
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
    "c58f30108f718f92721af3b95e74349a",
    (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
)
_CIFAR100_FILES = _files(
    "cifar-100-python",
    "cifar-100-python.tar.gz",
    "eb9058c3a382ffc7106e4002c42a8d85",
    ("train", "test", "meta"),
)

CIFAR10 = Dataset(
    name="cifar10",
    about="60,000 colour pictures, 32x32, 10 classes",
    licence="none stated; cite Krizhevsky 2009",
    files=_CIFAR10_FILES,
    read=partial(
        _read,
        name="cifar10",
        files=_CIFAR10_FILES,
        key="",
        num_classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
    ),
)

CIFAR100 = Dataset(
    name="cifar100",
    about="60,000 colour pictures, 32x32, 100 classes in 20 superclasses",
    licence="none stated; cite Krizhevsky 2009",
    files=_CIFAR100_FILES,
    read=partial(
        _read,
        name="cifar100",
        files=_CIFAR100_FILES,
        key="fine_",
        num_classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        num_coarse=20,
    ),
)
