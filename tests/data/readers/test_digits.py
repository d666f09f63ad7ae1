# SPDX-License-Identifier: Apache-2.0
"""The digits of scikit-learn."""

import numpy as np

from fedloom.data import load


def test_digits_are_there_without_files():
    data = load("digits")
    assert data.x.shape == (1797, 1, 8, 8)
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert np.bincount(data.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert data.split is None
    assert data.x[0, 0, 0].tolist() == [0, 0, 5 / 16, 13 / 16, 9 / 16, 1 / 16, 0, 0]
