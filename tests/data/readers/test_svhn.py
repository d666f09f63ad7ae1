# SPDX-License-Identifier: Apache-2.0
"""SVHN on small MATLAB files in the published format."""

import numpy as np
import pytest
from scipy.io import savemat

from fedloom.core.errors import DataError
from fedloom.data import load


def write(path, labels, images=None):
    images = np.zeros((32, 32, 3, len(labels)), np.uint8) if images is None else images
    path.parent.mkdir(exist_ok=True)
    savemat(path, {"X": images, "y": np.array(labels, np.uint8)[:, None]}, do_compression=True)


@pytest.mark.parametrize("folder", ["", "svhn"])
def test_files_are_read_in_either_place(tmp_path, folder):
    images = np.zeros((32, 32, 3, 3), np.uint8)
    images[4, 7, 2, 1] = 255
    write(tmp_path / folder / "train_32x32.mat", [1, 10, 9], images)
    write(tmp_path / folder / "test_32x32.mat", [10])
    data = load("svhn", tmp_path)
    assert data.y.tolist() == [1, 0, 9, 0]
    assert data.split.tolist() == ["train"] * 3 + ["test"]
    assert np.argwhere(data.x > 1).tolist() == [[1, 2, 4, 7]]
    np.testing.assert_allclose(data.x[1, 2, 4, 7], (1 - 0.4728) / 0.1970, rtol=1e-6)


@pytest.mark.parametrize(
    ("labels", "images", "message"),
    [
        ([0], None, "it has labels from 0 to 0, expected 1 to 10"),
        ([1, 2], np.zeros((32, 32, 3, 1), np.uint8), r"it has images uint8 \(32, 32, 3, 1\) for 2 labels"),
        ([1, 2], np.zeros((32, 32, 3, 2)), r"it has images float64 \(32, 32, 3, 2\) for 2 labels"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, labels, images, message):
    write(tmp_path / "train_32x32.mat", [1, 2])
    write(tmp_path / "test_32x32.mat", labels, images)
    with pytest.raises(DataError, match=message) as caught:
        load("svhn", tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "test_32x32.mat"))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: b"no matlab", lambda raw: raw[:150]])
def test_a_damaged_file_is_named(tmp_path, damage):
    write(tmp_path / "train_32x32.mat", [1, 2])
    write(tmp_path / "test_32x32.mat", [1, 2])
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"train_32x32\.mat is damaged .*delete it and fetch it again"):
        load("svhn", tmp_path)
