# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10 and CIFAR-100: the published files, and small ones in their format."""

import pickle

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data import load


def batch(size, **labels):
    data = np.zeros((size, 3072), np.uint8)
    data[:, 1024:2048] = 255  # the green channel
    return {"data": data, **labels}


@pytest.fixture
def dump(tmp_path):
    def write(path, content):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(pickle.dumps(content, protocol=2))
        return tmp_path

    return write


@pytest.fixture
def small(dump):
    for number in range(1, 6):
        dump(f"cifar-10-batches-py/data_batch_{number}", batch(1, labels=[number]))
    dump("cifar-10-batches-py/test_batch", batch(2, labels=[9, 0]))
    dump("cifar-10-batches-py/batches.meta", {"label_names": list("abcdefghij")})
    for name, size in (("train", 3), ("test", 1)):
        fine, coarse = [99, *range(size - 1)], [19, *range(size - 1)]
        dump(f"cifar-100-python/{name}", batch(size, fine_labels=fine, coarse_labels=coarse))
    names = {
        "fine_label_names": [f"f{n}" for n in range(100)],
        "coarse_label_names": [f"c{n}" for n in range(20)],
    }
    return dump("cifar-100-python/meta", names)


def test_batches_are_joined_in_order(small):
    data = load("cifar10", small)
    assert data.x.shape == (7, 3, 32, 32)
    assert data.y.tolist() == [1, 2, 3, 4, 5, 9, 0]
    assert data.split.tolist() == ["train"] * 5 + ["test"] * 2
    assert data.class_names == tuple("abcdefghij")
    expected = [-0.4914 / 0.2023, (1 - 0.4822) / 0.1994, -0.4465 / 0.2010]
    np.testing.assert_allclose(data.x[6, :, 31, 0], expected, rtol=1e-6)


def test_superclasses_are_a_grouping(small):
    data = load("cifar100", small)
    assert data.y.tolist() == [99, 0, 1, 99]
    assert data.groups["coarse"].tolist() == ["c19", "c0", "c1", "c19"]
    assert data.class_names[99] == "f99"
    expected = [-0.5071 / 0.2673, (1 - 0.4865) / 0.2564, -0.4409 / 0.2762]
    np.testing.assert_allclose(data.x[0, :, 0, 31], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("test_batch", batch(2, labels=[1]), "it has 1 labels for 2 images"),
        ("test_batch", batch(1, labels=[10]), "no list of numbers from 0 to 9 under 'labels'"),
        ("test_batch", batch(1, labels=["1"]), "no list of numbers from 0 to 9 under 'labels'"),
        ("test_batch", batch(1), "no list of numbers from 0 to 9 under 'labels'"),
        ("test_batch", {"labels": [1]}, "no rows of 3072 bytes under 'data'"),
        ("test_batch", {"labels": [1], "data": np.zeros((1, 3072))}, "no rows of 3072 bytes"),
        ("batches.meta", {"label_names": ["a"]}, "no list of 10 names under 'label_names'"),
        ("batches.meta", {"label_names": print}, r"its pickle asks for \w+\.print, which is refused"),
    ],
)
def test_a_damaged_batch_is_named(small, dump, path, content, message):
    dump(f"cifar-10-batches-py/{path}", content)
    with pytest.raises(DataError, match=message) as caught:
        load("cifar10", small)
    assert str(caught.value).startswith(str(small / f"cifar-10-batches-py/{path}"))


def test_a_batch_that_breaks_off_is_named(small):
    path = small / "cifar-100-python/train"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"cifar-100-python/train is damaged .*delete it and fetch it again"):
        load("cifar100", small)


@pytest.mark.slow
def test_the_published_cifar10(real):
    data = real("cifar10")
    assert data.x.shape == (60000, 3, 32, 32)
    assert np.bincount(data.y).tolist() == [6000] * 10
    assert data.class_names[data.y[0]] == "frog"
    train = data.split == "train"
    assert train.sum() == 50000
    # the mean is the training part's own
    np.testing.assert_allclose(data.x[train].mean(axis=(0, 2, 3)), 0, atol=2e-3)


@pytest.mark.slow
def test_the_published_cifar100(real):
    data = real("cifar100")
    assert np.bincount(data.y).tolist() == [600] * 100
    coarse = data.groups["coarse"]
    assert len(set(coarse)) == 20
    assert len(set(zip(data.y.tolist(), coarse.tolist()))) == 100  # every class lies in one superclass
    train = data.split == "train"
    np.testing.assert_allclose(data.x[train].mean(axis=(0, 2, 3)), 0, atol=2e-3)
    np.testing.assert_allclose(data.x[train].std(axis=(0, 2, 3)), 1, atol=2e-3)
