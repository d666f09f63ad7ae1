# SPDX-License-Identifier: Apache-2.0
"""Text as characters: a folder with one text per client, such as the roles of plays, and LEAF's JSON files.

A character's token is its place in the alphabet, which is that of the training text and is saved with a run. Its first
character stands for every other one, and for padding.

A folder of texts becomes sequences of which every character's label is the next one. Each text is cut in three along
its length, for training, validation and testing, and only then into sequences, which follow each other without a
character in common: no text is in two splits, nor twice in one.

LEAF (Caldas et al. 2018, arXiv:1812.01097) has files with ``users`` and ``user_data``, for each user ``x`` and ``y``;
in folders ``train`` and ``test``, or all in one. Text in x becomes characters, padded on the left to the longest; text
of one character in y is a character too, other labels are classes. Texts of a user that follow each other by one
character overlap; they are cut along their order, for validation and, without a split, for testing, and as many between
the parts as share characters with both are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.tokens import UNLABELLED
from fedloom.data.arrays import Arrays
from fedloom.data.labels import classes_of
from fedloom.data.own import from_arrays

UNKNOWN = "\ufffd"
"""Stands for characters that the alphabet does not have, and for padding: token 0."""

LENGTH = 80
"""Characters of a sequence, as in LEAF's Shakespeare."""

SHARES = {"train": 0.7, "val": 0.15, "test": 0.15}
"""How a text is cut along its length."""


def alphabet_of(texts: Iterable[str]) -> str:
    """The characters of some texts, in their order, after the one for unknown ones."""
    return UNKNOWN + "".join(sorted(set().union(*texts) - {UNKNOWN}))


def encode(text: str, alphabet: str) -> np.ndarray:
    """A text's tokens: (characters,) int64."""
    place = {character: number for number, character in enumerate(alphabet)}
    return np.array([place.get(character, 0) for character in text], dtype=np.int64)


def from_texts(path: str | Path, length: int = LENGTH) -> Arrays:
    """A dataset from a folder with one .txt file per client: sequences whose characters' labels are the next ones."""
    path = Path(path)
    files = sorted(path.glob("*.txt"))
    if not files:
        raise DataError(f"{path} holds no .txt file; expected one text per client.")
    if length < 1:
        raise DataError(f"Got sequences of {length} characters; expected at least 1.")
    return of_texts(path.resolve().name, {file.stem: _read(file) for file in files}, length)


def of_texts(name: str, texts: Mapping[str, str], length: int = LENGTH) -> Arrays:
    """A dataset from a text for each client: sequences whose characters' labels are the next ones."""
    parts = {client: _parts(text) for client, text in texts.items()}
    short = [client for client, own in parts.items() if len(own["train"]) < 2]
    if short:
        raise DataError(
            f"{name} has {len(short)} texts too short to train on, {short[0]} among them; expected at least 3 "
            "characters in each. Leave them out."
        )
    alphabet = alphabet_of(own["train"] for own in parts.values())
    sequences = [
        (client, split, *pair)
        for client, own in parts.items()
        for split, text in own.items()
        for pair in _sequences(encode(text, alphabet), length)
    ]
    clients, splits, x, y = zip(*sequences)
    return Arrays(
        name=name,
        x=np.stack(x),
        y=np.stack(y),
        num_classes=len(alphabet),
        split=np.array(splits),
        groups={"client": np.array(clients)},
        vocabulary=len(alphabet),
        alphabet=alphabet,
    )


def _text(file: Path) -> str:
    if not file.is_file():  # reading a pipe could last for ever
        raise OSError("it is not a file")
    return file.read_text(encoding="utf-8")


def _read(file: Path) -> str:
    try:
        return _text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as text in UTF-8 ({error}); save it so.") from error


def _parts(text: str) -> dict[str, str]:
    """A text in three, along its length."""
    ends = [round(len(text) * share) for share in np.cumsum(list(SHARES.values()))]
    return {split: text[start:end] for split, start, end in zip(SHARES, [0, *ends], ends)}


def _sequences(tokens: np.ndarray, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sequences that follow each other, with the next tokens; the last one is padded."""
    found = []
    for start in range(0, len(tokens) - 1, length):
        own, following = tokens[start : start + length], tokens[start + 1 : start + length + 1]
        x, y = np.zeros(length, np.int64), np.full(length, UNLABELLED, np.int64)
        x[: len(own)], y[: len(following)] = own, following
        found.append((x, y))
    return found


def leaf_files(path: Path) -> list[tuple[str, Path]]:
    """LEAF's files at a path, each with the split that it is of; empty where there are none."""
    if path.suffix == ".json":
        return [("", path)]
    if not path.is_dir():
        return []
    found = [(split, file) for split in SHARES for file in sorted((path / split).glob("*.json"))]
    return found or [("", file) for file in sorted(path.glob("*.json"))]


def from_leaf(path: str | Path) -> Arrays:
    """A dataset from LEAF's JSON: a file, a folder of them, or one with folders ``train`` and ``test``."""
    path = Path(path)
    files = leaf_files(path)
    if not files:
        raise DataError(f"{path} holds no .json file; expected LEAF's, with users and user_data.")
    clients: list[str] = []
    splits: list[str] = []
    xs: list[Any] = []
    ys: list[Any] = []
    for split, file in files:
        for user, x, y in _users(file):
            for part, rows in _kept(split, x).items():
                clients += [user] * len(rows)
                splits += [part] * len(rows)
                xs += [x[row] for row in rows]
                ys += [y[row] for row in rows]
    if not xs:
        raise DataError(f"{path} has no samples.")
    what, named = f"Dataset {path.resolve().stem!r}", path.resolve().stem
    given = np.array(splits) if any(splits) else None
    if not all(isinstance(x, str) for x in xs):
        return from_arrays(_array(what, "x", xs), _array(what, "y", ys), np.array(clients), given, named)
    characters = all(isinstance(y, str) and len(y) == 1 for y in ys)
    trained = [number for number, split in enumerate(splits) if split in ("", "train")]
    following = {ys[number] for number in trained} if characters else set()
    alphabet = alphabet_of([*(xs[number] for number in trained), *following])
    longest = max(map(len, xs))
    if not longest:
        raise DataError(f"{what} has nothing but empty texts in x.")
    tokens = np.stack([np.pad(encode(text, alphabet), (longest - len(text), 0)) for text in xs])
    names: tuple[str, ...] = ()
    if characters:
        labels, classes = encode("".join(ys), alphabet), len(alphabet)
    else:
        labels, names = classes_of(what, _array(what, "y", ys))
        classes = len(names) or int(labels.max()) + 1
    groups = {"client": np.array(clients)}
    return Arrays(named, tokens, labels, classes, given, groups, names, vocabulary=len(alphabet), alphabet=alphabet)


def _users(file: Path) -> Iterable[tuple[str, Sequence[Any], Sequence[Any]]]:
    """Each user of a file with samples and labels."""
    try:
        content = json.loads(_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read as JSON ({error}); give a file of LEAF's.") from error
    data = content.get("user_data") if isinstance(content, Mapping) else None
    users = content.get("users") if isinstance(content, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(users, list):
        raise DataError(f"{file} has no users or no user_data; expected LEAF's JSON, with both.")
    for user in users:
        own = data.get(user) if isinstance(user, str) else None
        x, y = (own.get("x"), own.get("y")) if isinstance(own, Mapping) else (None, None)
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise DataError(f"{file} has no x and y of one length for user {user!r}; expected a list of each.")
        yield user, x, y


def _kept(split: str, x: Sequence[Any]) -> dict[str, range]:
    """A user's samples by split. Texts that overlap are cut along their order, and those between two parts left out."""
    if split in ("val", "test") or not _overlap(x):
        return {split: range(len(x))}
    wanted = SHARES if not split else {"train": SHARES["train"] + SHARES["test"], "val": SHARES["val"]}
    ends = [round(len(x) * share) for share in np.cumsum(list(wanted.values()))]
    starts = [0, *(end + len(x[0]) for end in ends)]
    return {part: range(start, max(start, end)) for part, start, end in zip(wanted, starts, ends)}


def _overlap(x: Sequence[Any]) -> bool:
    """Whether samples are windows of one text, each a character further than the one before it."""
    texts = [text for text in x[:2] if isinstance(text, str) and len(text) > 1]
    return len(texts) == 2 and texts[0][1:] == texts[1][:-1]


def _array(what: str, key: str, values: Sequence[Any]) -> np.ndarray:
    try:
        found = np.array(values)
    except ValueError:
        found = np.array(None)
    if found.dtype.kind not in "buifU":
        raise DataError(f"{what} has {key} of several kinds or lengths; expected numbers, or text, of one shape.")
    return found
