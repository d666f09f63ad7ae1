# SPDX-License-Identifier: Apache-2.0
"""Where the files of a dataset may lie, and what a user reads when they do not."""

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data.arrays import Arrays
from fedloom.data.files import Dataset, File

FILE = File("Toy/raw/images.gz", "http://example.org/images.gz", "0" * 32, also="images.gz")
EXTRA = File("Toy/raw/extra", "http://example.org/extra", "0" * 32, optional=True)


def read(root):
    return Arrays("toy", np.zeros((1, 1), np.float32), np.array([0]), 1)


TOY = Dataset("toy", "a toy", "CC0", (FILE, EXTRA), read)


@pytest.mark.parametrize("place", ["Toy/raw/images.gz", "Toy/raw/images", "images.gz"])
def test_a_file_is_found_where_it_may_lie(tmp_path, place):
    assert FILE.at(tmp_path) == tmp_path / FILE.path
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).touch()
    assert FILE.at(tmp_path) == tmp_path / place
    assert TOY.missing(tmp_path) == []
    assert TOY.load(tmp_path).name == "toy"


def test_missing_files_are_named_with_what_to_do(tmp_path):
    with pytest.raises(DataError) as caught:
        TOY.load(tmp_path)
    assert str(caught.value) == (
        f"Dataset 'toy' is not complete below {tmp_path}: put Toy/raw/images.gz there, "
        f"or run `fedloom data fetch toy --data-root {tmp_path}`."
    )
