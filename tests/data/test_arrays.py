# SPDX-License-Identifier: Apache-2.0
"""The checks of a dataset in memory, each by the message that a user reads."""

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data.arrays import Arrays

X = np.zeros((4, 3), np.float32)
Y = np.array([0, 1, 2, 1])


def make(**changes) -> Arrays:
    return Arrays(**{"name": "toy", "x": X, "y": Y, "num_classes": 3} | changes)


def with_value(value: float) -> np.ndarray:
    x = X.copy()
    x[1, 2] = value
    return x


def test_a_sound_dataset_is_taken_as_it_is():
    split = np.array(["train", "val", "test", "train"])
    data = make(split=split, groups={"writer": np.array(["a", "b", "a", "b"])}, class_names=("p", "q", "r"))
    assert len(data) == 4
    assert data.x is X
    assert data.split is split


def test_a_class_without_samples_is_allowed():
    assert make(num_classes=7).num_classes == 7


@pytest.mark.parametrize("shape", [(4,), (4, 2)])
def test_regression_has_float_targets(shape):
    assert make(y=np.ones(shape, np.float32), num_classes=0).y.shape == shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": X.astype(np.float64)}, r"x of type float64 and shape \(4, 3\); expected float32"),
        ({"x": X[:, 0]}, r"x of type float32 and shape \(4,\); expected float32 with one row per sample"),
        ({"x": X[:0], "y": Y[:0]}, r"has no samples .*; expected at least one"),
        ({"y": Y[:3]}, r"has 4 samples in x but y has shape \(3,\); give one target for every sample"),
        ({"y": np.int64(1)}, r"has 4 samples in x but y has shape \(\)"),
        ({"x": with_value(np.nan)}, "has NaN or infinite values in x; remove or replace those samples"),
        ({"x": with_value(np.inf)}, "has NaN or infinite values in x"),
        ({"x": with_value(-np.inf)}, "has NaN or infinite values in x"),
        (
            {"y": Y - 1},
            r"has labels from -1 to 1; expected 0 to 2 for 3 classes: recode .*return_inverse=True",
        ),
        ({"y": Y + 1}, "has labels from 1 to 3; expected 0 to 2 for 3 classes"),
        ({"y": Y + 0.5}, "has labels of type float64 .*expected int64"),
        ({"y": Y.astype(np.int32)}, "has labels of type int32 .*expected int64"),
        ({"y": Y[:, None]}, r"has labels of type int64 and shape \(4, 1\)"),
        ({"y": Y, "num_classes": 0}, "has regression targets of type int64 .*expected float32"),
        (
            {"y": X[:, :, None], "num_classes": 0},
            r"has regression targets of type float32 and shape \(4, 3, 1\)",
        ),
        ({"y": with_value(np.nan), "num_classes": 0}, "has NaN or infinite values in y"),
        ({"class_names": ("p", "q")}, "has 2 class names for 3 classes; give one for each"),
        ({"split": np.array(["train"])}, r"has a split of shape \(1,\); expected one name for each of the 4"),
        (
            {"split": np.array(["train", "tset"] * 2)},
            "has the split name 'tset'; expected only train, val, test",
        ),
        ({"groups": {"writer": np.array(["a"])}}, r"has the grouping 'writer' of type <U1 and shape \(1,\)"),
        ({"groups": {"writer": Y}}, "has the grouping 'writer' of type int64 .*expected one string for each"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(changes, message):
    with pytest.raises(DataError, match=message) as caught:
        make(**changes)
    assert str(caught.value).startswith("Dataset 'toy' has ")
    assert "\n" not in str(caught.value)
