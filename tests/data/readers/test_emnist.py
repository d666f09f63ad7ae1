# SPDX-License-Identifier: Apache-2.0
"""EMNIST on small files in the published format."""

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data import load


def write(root, write_idx, part, train, test):
    for split, labels in (("train", train), ("test", test)):
        images = np.zeros((len(labels), 28, 28), np.uint8)
        images[:, 5, 20] = 255  # stored transposed: row 20, column 5
        write_idx(root / f"EMNIST/raw/emnist-{part}-{split}-images-idx3-ubyte.gz", images)
        write_idx(root / f"EMNIST/raw/emnist-{part}-{split}-labels-idx1-ubyte.gz", np.array(labels, np.uint8))


@pytest.mark.parametrize(
    ("name", "part", "first", "classes", "names"),
    [
        ("emnist", "balanced", 0, 47, "0Aat"),
        ("emnist_letters", "letters", 1, 26, "akz"),
        ("emnist_byclass", "byclass", 0, 62, "0Aaz"),
    ],
)
def test_the_splits_are_read_upright(tmp_path, write_idx, name, part, first, classes, names):
    write(tmp_path, write_idx, part, [first, first + 10], [first + classes - 1])
    data = load(name, tmp_path)
    assert data.num_classes == classes
    assert data.y.tolist() == [0, 10, classes - 1]
    assert data.split.tolist() == ["train", "train", "test"]
    assert data.x.shape == (3, 1, 28, 28)
    assert np.argwhere(data.x[0, 0] > 0).tolist() == [[20, 5]]
    assert set(names) <= set(data.class_names)
    assert (data.class_names[0], data.class_names[-1]) == (names[0], names[-1])
    np.testing.assert_allclose(data.x[0, 0, 20, 5], (1 - 0.1736) / 0.3248, rtol=1e-6)


def test_a_label_that_the_split_does_not_have_is_refused(tmp_path, write_idx):
    write(tmp_path, write_idx, "letters", [0], [1])
    with pytest.raises(DataError, match="has labels from -1 to 0; expected 0 to 25"):
        load("emnist_letters", tmp_path)
