# SPDX-License-Identifier: Apache-2.0
"""MNIST and Fashion-MNIST: 70,000 grey images of 28x28 in 10 classes, in idx files.

Grey values become (value / 255 - mean) / std with the mean and std of the training part that papers use:
0.1307 and 0.3081 for MNIST, 0.2860 and 0.3530 for Fashion-MNIST.

QMNIST (Yadav and Bottou 2019) traced every image of MNIST back to the person who wrote it. Where its label
files are there too, MNIST has the grouping "writer".
"""

from functools import partial
from pathlib import Path

import numpy as np

from fedloom.data.arrays import Arrays
from fedloom.data.files import Dataset, File
from fedloom.data.formats import corrupt, read_idx, read_idx_pair, scaled

_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master"
_WRITER_FILES = tuple(
    File(f"QMNIST/raw/{name}", f"{_QMNIST}/{name}", md5, optional=True)
    for name, md5 in (
        ("qmnist-train-labels-idx2-int.gz", "0058f8dd561b90ffdd0f734c6a30e5e4"),
        ("qmnist-test-labels-idx2-int.gz", "5b5b05890a5e13444e108efe57b788aa"),
    )
)


def _files(folder: str, url: str, md5s: tuple[str, str, str, str]) -> tuple[File, ...]:
    names = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
    return tuple(File(f"{folder}/raw/{name}.gz", f"{url}/{name}.gz", md5) for name, md5 in zip(names, md5s))


_MNIST_FILES = _files(
    "MNIST",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)
_FASHION_FILES = _files(
    "FashionMNIST",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)


def _read(
    root: Path,
    name: str,
    files: tuple[File, ...],
    mean: float,
    std: float,
    class_names: tuple[str, ...],
    writer_files: tuple[File, ...] = (),
) -> Arrays:
    train_images, train_labels, test_images, test_labels = (file.at(root) for file in files)
    train_x, train_y = read_idx_pair(train_images, train_labels)
    test_x, test_y = read_idx_pair(test_images, test_labels)
    groups = {}
    paths = [file.at(root) for file in writer_files]
    if paths and all(path.is_file() for path in paths):
        groups["writer"] = np.concatenate([_writers(paths[0], train_y), _writers(paths[1], test_y)])
    return Arrays(
        name=name,
        x=scaled(np.concatenate([train_x, test_x])[:, None], [mean], [std]),
        y=np.concatenate([train_y, test_y]).astype(np.int64),
        num_classes=10,
        split=np.repeat(["train", "test"], [len(train_y), len(test_y)]),
        groups=groups,
        class_names=class_names,
    )


def _writers(path: Path, labels: np.ndarray) -> np.ndarray:
    # columns: digit, NIST series, writer, index, class code, global index, duplicate, unused;
    # the first rows of the test file are MNIST's test part, the others are QMNIST's own
    rows = read_idx(path)
    if rows.ndim != 2 or rows.shape[1] != 8 or len(rows) < len(labels):
        raise corrupt(path, f"expected at least {len(labels)} rows of 8 columns, got shape {rows.shape}")
    rows = rows[: len(labels)]
    if not np.array_equal(rows[:, 0], labels):
        raise corrupt(path, "its digits are not MNIST's labels")
    return rows[:, 2].astype(str)


MNIST = Dataset(
    name="mnist",
    about="70,000 handwritten digits, 28x28 grey, 10 classes; writers known through QMNIST",
    licence="CC BY-SA 3.0",
    files=(*_MNIST_FILES, *_WRITER_FILES),
    read=partial(
        _read,
        name="mnist",
        files=_MNIST_FILES,
        mean=0.1307,
        std=0.3081,
        class_names=tuple("0123456789"),
        writer_files=_WRITER_FILES,
    ),
)

FASHION_MNIST = Dataset(
    name="fashion_mnist",
    about="70,000 pictures of clothes, 28x28 grey, 10 classes",
    licence="MIT",
    files=_FASHION_FILES,
    read=partial(
        _read,
        name="fashion_mnist",
        files=_FASHION_FILES,
        mean=0.2860,
        std=0.3530,
        class_names=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
    ),
)
