# SPDX-License-Identifier: Apache-2.0
"""MNIST, its writers through QMNIST, and Fashion-MNIST: published files and small ones in their format."""

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data import load

LABELS = {"train": np.array([5, 0, 4], np.uint8), "t10k": np.array([7, 2], np.uint8)}


@pytest.fixture
def small(tmp_path, write_idx):
    for part, labels in LABELS.items():
        images = np.full((len(labels), 28, 28), labels[:, None, None], np.uint8)
        for folder in ("MNIST", "FashionMNIST"):
            write_idx(tmp_path / f"{folder}/raw/{part}-images-idx3-ubyte.gz", images)
            write_idx(tmp_path / f"{folder}/raw/{part}-labels-idx1-ubyte", labels)
    return tmp_path


@pytest.fixture
def small_with_writers(small, write_idx):
    for part, labels, first in (("train", LABELS["train"], 100), ("test", np.r_[LABELS["t10k"], 9], 200)):
        rows = np.zeros((len(labels), 8), np.int32)
        rows[:, 0] = labels
        rows[:, 2] = first + np.arange(len(labels))
        write_idx(small / f"QMNIST/raw/qmnist-{part}-labels-idx2-int.gz", rows)
    return small


@pytest.mark.parametrize(("name", "mean", "std"), [("mnist", 0.1307, 0.3081), ("fashion_mnist", 0.2860, 0.3530)])
def test_files_gzipped_or_not_are_read(small, name, mean, std):
    data = load(name, small)
    assert data.y.tolist() == [5, 0, 4, 7, 2]
    assert data.split.tolist() == ["train"] * 3 + ["test"] * 2
    assert data.groups == {}
    np.testing.assert_allclose(data.x[:, 0, 3, 4], (data.y / 255 - mean) / std, rtol=1e-6)


def test_writers_are_known_where_the_files_are_there(small_with_writers):
    data = load("mnist", small_with_writers)
    assert data.groups["writer"].tolist() == ["100", "101", "102", "200", "201"]
    assert load("fashion_mnist", small_with_writers).groups == {}


def test_writers_of_other_digits_are_refused(small_with_writers, write_idx):
    path = small_with_writers / "QMNIST/raw/qmnist-train-labels-idx2-int.gz"
    write_idx(path, np.ones((3, 8), np.int32))
    with pytest.raises(DataError, match=r"qmnist-train.* is damaged .*its digits are not MNIST's labels"):
        load("mnist", small_with_writers)
    write_idx(path, np.ones((2, 8), np.int32))
    with pytest.raises(DataError, match=r"expected at least 3 rows of 8 columns, got shape \(2, 8\)"):
        load("mnist", small_with_writers)


def test_a_label_too_many_is_refused(small, write_idx):
    write_idx(small / "MNIST/raw/t10k-labels-idx1-ubyte", np.zeros(3, np.uint8))
    with pytest.raises(DataError, match="it has 3 labels for the 2 images"):
        load("mnist", small)


def test_the_published_mnist(real):
    data = real("mnist")
    assert data.x.shape == (70000, 1, 28, 28)
    assert data.y[:5].tolist() == [5, 0, 4, 1, 9]
    train = data.split == "train"
    assert train.sum() == 60000
    assert abs(data.x[train].mean()) < 1e-3
    assert abs(data.x[train].std() - 1) < 1e-3
    if not data.groups:
        pytest.skip("the label files of QMNIST are not below FEDLOOM_DATA")
    writers = data.groups["writer"]
    assert not set(writers[train]) & set(writers[~train])  # the authors of MNIST kept them apart


def test_the_published_fashion_mnist(real):
    data = real("fashion_mnist")
    assert np.bincount(data.y).tolist() == [7000] * 10
    assert data.class_names[data.y[0]] == "Ankle boot"
    train = data.split == "train"
    assert abs(data.x[train].mean()) < 1e-3
    assert abs(data.x[train].std() - 1) < 1e-3
