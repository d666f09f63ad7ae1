# SPDX-License-Identifier: Apache-2.0
"""Texts as characters: folders of them and LEAF's files, by hand, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.errors import DataError
from fedloom.core.tokens import Tokens
from fedloom.data import encode, from_leaf, from_texts, load
from fedloom.data.text import UNKNOWN, alphabet_of


def decoded(tokens: np.ndarray, alphabet: str) -> str:
    return "".join(alphabet[token] for token in tokens if token >= 0)


def test_a_text_is_cut_along_its_length_and_then_into_sequences(tmp_path: Path) -> None:
    """20 characters: 14 to train, 3 for validation, 3 to test; in sequences of 5 with their next characters."""
    (tmp_path / "romeo.txt").write_text("abcdefghijklmnopqrst")
    arrays = from_texts(tmp_path, length=5)
    assert arrays.alphabet == UNKNOWN + "abcdefghijklmn"  # that of the training text
    read = [(decoded(x[y >= 0], arrays.alphabet), decoded(y, arrays.alphabet)) for x, y in zip(arrays.x, arrays.y)]
    assert read[:3] == [("abcde", "bcdef"), ("fghij", "ghijk"), ("klm", "lmn")]
    assert read[3:] == [(UNKNOWN * 2, UNKNOWN * 2)] * 2
    assert arrays.split.tolist() == ["train"] * 3 + ["val", "test"]
    assert (arrays.tokens, arrays.num_classes, arrays.name) == (Tokens(15, True), 15, tmp_path.name)
    assert set(arrays.groups["client"]) == {"romeo"}


@given(st.lists(st.integers(3, 60), min_size=1, max_size=3), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_no_character_is_in_two_sequences(tmp_path_factory: Any, sizes: list[int], length: int) -> None:
    folder, start = tmp_path_factory.mktemp("texts"), 0x4E00  # every character is another one
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_text("".join(map(chr, range(start, start + size))), encoding="utf-8")
        start += size
    arrays = from_texts(folder, length)
    train = arrays.split == "train"
    inputs, labels = arrays.x[train][arrays.x[train] > 0], arrays.y[train][arrays.y[train] > 0]
    assert len(set(inputs.tolist())) == len(inputs) and len(set(labels.tolist())) == len(labels)
    # what is tested is of no training text: all of it is unknown to the alphabet of that
    assert not arrays.x[~train].any() and not arrays.y[~train].clip(0).any()


def leaf(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"users": list(data), "num_samples": [len(d["x"]) for d in data.values()],
                                "user_data": data}))  # fmt: skip


def test_leafs_next_characters(tmp_path: Path) -> None:
    leaf(tmp_path / "train" / "a.json", {"ROMEO": {"x": ["the", "e q"], "y": [" ", "u"]}})
    leaf(tmp_path / "test" / "a.json", {"ROMEO": {"x": ["qu"], "y": ["z"]}})
    arrays = from_leaf(tmp_path)
    assert arrays.alphabet == UNKNOWN + " ehqtu"
    assert arrays.x.tolist() == [[5, 3, 2], [2, 1, 4], [0, 4, 6]]  # shorter text is padded on the left
    assert arrays.y.tolist() == [1, 6, 0]
    assert arrays.split.tolist() == ["train", "train", "test"]
    assert (arrays.tokens, arrays.num_classes) == (Tokens(7), 7)
    assert load(tmp_path).digest() == arrays.digest()


def test_leafs_classes_and_numbers(tmp_path: Path) -> None:
    leaf(tmp_path / "text.json", {"u": {"x": ["good", "bad"], "y": [1, 0]}, "v": {"x": ["so"], "y": [1]}})
    text = load(tmp_path / "text.json")
    assert (text.num_classes, text.y.tolist(), text.groups["client"].tolist()) == (2, [1, 0, 1], ["u", "u", "v"])
    leaf(tmp_path / "images.json", {"u": {"x": [[0.5, 1.0], [0.0, 0.25]], "y": [0, 1]}})
    images = from_leaf(tmp_path / "images.json")
    assert (images.x.dtype, images.tokens) == (np.dtype("float32"), None)


def test_leafs_windows_of_one_text_share_no_character_between_splits(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 104)))
    windows = {"x": [text[i : i + 4] for i in range(100)], "y": [text[i + 4] for i in range(100)]}
    leaf(tmp_path / "a.json", {"u": windows})
    arrays = from_leaf(tmp_path / "a.json")
    assert [int((arrays.split == part).sum()) for part in ("train", "val", "test")] == [70, 11, 11]
    seen = {character for text in windows["x"][:70] for character in text}
    assert not seen & {character for text in windows["x"][74:] for character in text}
    leaf(tmp_path / "train" / "a.json", {"u": windows})
    leaf(tmp_path / "test" / "a.json", {"u": {"x": ["abcd"], "y": ["e"]}})
    (tmp_path / "a.json").unlink()
    assert [int((load(tmp_path).split == part).sum()) for part in ("train", "val", "test")] == [85, 11, 1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has no users or no user_data"),
        ('{"users": ["u"], "user_data": {}}', "no x and y of one length for user 'u'"),
        ('{"users": ["u"], "user_data": {"u": {"x": ["a"], "y": []}}}', "no x and y of one length"),
        ('{"users": [], "user_data": {}}', "has no samples"),
        ('{"users": ["u"], "user_data": {"u": {"x": [[1], [1, 2]], "y": [0, 1]}}}', "x of several kinds or lengths"),
        ('{"users": ["u"], "user_data": {"u": {"x": [""], "y": ["a"]}}}', "nothing but empty texts"),
    ],
)
def test_what_is_not_leafs_is_refused_in_a_sentence(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=words):
        load(tmp_path / "a.json")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("long enough")
    (tmp_path / "b.txt").write_text("no")
    with pytest.raises(DataError, match=r"1 texts too short to train on, b among them; expected at least 3"):
        load(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe text")
    with pytest.raises(DataError, match=r"b.txt cannot be read as text in UTF-8"):
        load(tmp_path)
    with pytest.raises(DataError, match="at least 1"):
        from_texts(tmp_path, 0)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
@pytest.mark.parametrize("kind", ["txt", "json"])
def test_a_pipe_among_the_files_of_a_folder_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"a.{kind}")
    with pytest.raises(DataError, match=r"cannot be read as .* \(it is not a file\)"):
        load(tmp_path)


def test_characters_that_the_alphabet_has_not_are_unknown() -> None:
    alphabet = alphabet_of(["ba", "c"])
    assert alphabet == UNKNOWN + "abc"
    assert encode("cab!", alphabet).tolist() == [3, 1, 2, 0]
