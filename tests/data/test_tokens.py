# SPDX-License-Identifier: Apache-2.0
"""Users' sequences of tokens: whole numbers in, whole numbers out, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.core.errors import DataError
from fedloom.core.tokens import Tokens
from fedloom.data import from_arrays, from_folder, from_npz
from fedloom.data.own import samples_from_npz
from fedloom.data.samples import checked_labels, checked_samples

X = np.array([[257, 0, 3], [1, 2, 256]])
Y = np.array([0, 1])


def test_whole_numbers_on_two_axes_are_tokens() -> None:
    arrays = from_arrays(X.astype(np.int16), Y)
    assert (arrays.x.dtype, arrays.vocabulary, arrays.tokens) == (np.dtype("int64"), 258, Tokens(258))
    assert arrays.x.tolist() == X.tolist()
    given = from_arrays(X, np.array([[0, 1, -1], [2, -1, -1]]), vocabulary=300)
    assert (given.tokens, given.num_classes, given.sample_classes) == (Tokens(300, True), 3, 0)
    assert given.labels.tolist() == [0, 0]


@pytest.mark.parametrize("x", [X.astype(float), (X % 256).astype(np.uint8), np.ones((2, 1, 3), int)], ids=str)
def test_other_numbers_stay_numbers(x: np.ndarray) -> None:
    arrays = from_arrays(x, Y)
    assert (arrays.x.dtype, arrays.tokens) == (np.dtype("float32"), None)


@pytest.mark.parametrize(
    ("x", "y", "vocabulary", "words"),
    [
        (X, Y, 257, "tokens from 0 to 257; expected 0 to 256"),
        (X - 1, Y, None, "from -1 to 256 in x, on two axes, which are tokens from 0; if they are features"),
        (X.astype(float), Y, 300, "with a vocabulary; expected whole numbers"),
        (X, np.array([[0, 2], [1, 0]]), 300, "one whole number for each token, or one for each sample"),
        (X, np.array([[0, 1, 2], [-1, -1, -1]]), 300, "1 samples without a label on any token"),
        (X, np.array([[0, 1, 2], [-2, 0, 0]]), 300, "labels from -2 to 2; expected 0 to 2, or -1"),
    ],
)
def test_what_cannot_be_is_refused(x: np.ndarray, y: np.ndarray, vocabulary: int | None, words: str) -> None:
    with pytest.raises(DataError, match=words):
        from_arrays(x, y, vocabulary=vocabulary)


def test_files_say_how_many_tokens_there_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", x=X, y=Y, vocabulary=300)
    assert from_npz(tmp_path / "one.npz").vocabulary == 300
    np.savez(tmp_path / "two.npz", x=X % 7, y=Y, vocabulary=400)
    assert from_folder(tmp_path).vocabulary == 400
    np.savez(tmp_path / "one.npz", x=X, y=Y, vocabulary=np.array([1, 2]))
    with pytest.raises(DataError, match="expected one whole number, how many tokens there are"):
        from_folder(tmp_path)
    np.savez(tmp_path / "new.npz", x=X)
    assert samples_from_npz(tmp_path / "new.npz")[0].dtype == np.int64


def test_newcomers_samples_are_tokens_of_the_vocabulary() -> None:
    tokens = Tokens(258, True)
    assert checked_samples(X.tolist(), (3,), tokens).dtype == torch.int64
    with pytest.raises(DataError, match="Got tokens from 0 to 257; expected 0 to 256, as in this federation"):
        checked_samples(X, (3,), Tokens(257))
    with pytest.raises(DataError, match=r"samples of type torch.float64; expected tokens, whole numbers"):
        checked_samples(X.astype(float), (3,), tokens)
    assert checked_samples(X, (3,)).tolist() == X.tolist()  # to a federation of numbers they are numbers
    assert checked_labels([[0, 1, -1]], (1, 3), 2).tolist() == [[0, 1, -1]]
