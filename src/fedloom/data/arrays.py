# SPDX-License-Identifier: Apache-2.0
"""A dataset in memory: what every reader returns and every partition takes, checked once on the way in."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.tokens import UNLABELLED, Tokens
from fedloom.data.labels import coded
from fedloom.data.preparation import Preparation

SPLITS = ("train", "val", "test")
RECODE = "recode them with y = np.unique(y, return_inverse=True)[1]"


@dataclass(frozen=True, eq=False)
class Arrays:
    """A dataset in memory, checked; the arrays are taken as they are, not copied.

    x            float32 (samples, ...), already normalised: features (F,), windows (C, L), images (C, H, W); or raw;
                 or int64 (samples, length), tokens 0 to vocabulary - 1
    y            int64 (samples,), classes 0 to num_classes - 1; or float32 (samples,) or (samples, k);
                 or int64 (samples, length), a class for each token, -1 for none
    num_classes  0 for regression and for labels of which several may hold
    split        (samples,) of "train", "val" and "test" where the publisher or the user fixed it, else None
    groups       natural groupings by name, e.g. "writer", "client"; each a (samples,) array of strings
    class_names  one per class, or per label or target in y's columns; or empty
    multilabel   y (samples, k) has 1 for each of k labels that holds, else 0
    notes        what a user should know of how they were read
    preparation  of raw samples: how they become float32, not fitted yet; x then is uint8 images, or a float64 table
    vocabulary   how many different tokens there are; 0: x is numbers
    alphabet     of text: token i stands for its character i
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int
    split: np.ndarray | None = None
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    multilabel: bool = False
    preparation: Preparation | None = None
    vocabulary: int = 0
    alphabet: str = ""
    notes: tuple[str, ...] = ()

    def raw(self, x: np.ndarray, preparation: Preparation) -> "Arrays":
        """These data with raw samples."""
        return replace(self, x=x, preparation=preparation)

    def prepared(self, fitted: Preparation | None) -> "Arrays":
        """The data as networks take them, by a preparation that is fitted; those that are not raw stay as they are."""
        if self.preparation is None:
            return self
        if fitted is None or fitted.kind != self.preparation.kind:
            raise DataError(f"Dataset {self.name!r} is raw, and there is no preparation for it; give prepared samples.")
        if fitted.kind == "table":
            mine, theirs = ([column.name for column in one.columns] for one in (self.preparation, fitted))
            if sorted(mine) != sorted(theirs):
                different = sorted(set(mine) ^ set(theirs))[0]
                raise DataError(
                    f"Dataset {self.name!r} {'has the unknown' if different in mine else 'has no'} column "
                    f"{different!r}; expected the columns {', '.join(theirs)}, in any order."
                )
            order = [mine.index(name) for name in theirs]
            given = replace(self.preparation, columns=tuple(self.preparation.columns[row] for row in order))
            x = fitted.apply(given.translated(self.x[:, order], fitted))
        else:
            x = fitted.apply(self.x)
        return replace(self, x=x, preparation=None)

    @property
    def num_outputs(self) -> int:
        """The number of classes, or of labels or targets."""
        return self.num_classes or (self.y.shape[1] if self.y.ndim > 1 else 1)

    @property
    def task(self) -> str:
        """The name of the task that the targets are for."""
        if self.per_token:
            return "seq"
        return "classification" if self.num_classes else "multilabel" if self.multilabel else "regression"

    @property
    def tokens(self) -> Tokens | None:
        """What samples of tokens are like; None: they are numbers."""
        return Tokens(self.vocabulary, self.y.ndim == 2 and self.num_classes > 0) if self.vocabulary else None

    @property
    def per_token(self) -> bool:
        """Whether every token has a label."""
        return self.tokens is not None and self.tokens.per_token

    @property
    def sample_classes(self) -> int:
        """How many classes samples are of; 0 where a sample has numbers, or a label for each token."""
        return 0 if self.per_token else self.num_classes

    @property
    def labels(self) -> np.ndarray:
        """What clients can be told apart by when samples are dealt: ``y``; zeros where each token has a label."""
        return np.zeros(len(self), np.float32) if self.per_token else self.y

    def __len__(self) -> int:
        return len(self.x)

    def with_classes(self, names: Sequence[str], number: int) -> "Arrays":
        """These data with the classes of another dataset: ``names``, or without any, ``number`` of them from 0."""
        if not self.num_classes or (self.class_names, self.num_classes) == (tuple(names), number):
            return self
        if self.per_token:
            return replace(self, num_classes=number, class_names=tuple(names))
        y = np.array(self.class_names)[self.y] if self.class_names else self.y
        labels = coded(f"Dataset {self.name!r}", y, names or [str(label) for label in range(number)])
        return replace(self, y=labels, num_classes=number, class_names=tuple(names))

    def digest(self) -> str:
        """A fingerprint of the samples, their order and their labels."""
        columns = () if self.preparation is None else (np.array(self.preparation.as_text()),)
        return digest_of(
            self.x, self.y, *(() if self.split is None else (self.split,)), *self.groups.values(), *columns
        )

    def __post_init__(self) -> None:
        what = f"Dataset {self.name!r}"
        kind = {"images": np.uint8, "table": np.float64}[self.preparation.kind] if self.preparation else np.float32
        if self.vocabulary:
            check_tokens(what, self.x, self.vocabulary)
        elif self.x.dtype != kind or self.x.ndim < 2:
            raise DataError(
                f"{what} has x of type {self.x.dtype} and shape {self.x.shape}; expected float32 with one "
                "row per sample: features (samples, F), windows (samples, C, L) or images (samples, C, H, W)."
            )
        if self.x.size == 0:
            raise DataError(f"{what} has no samples (x has shape {self.x.shape}); expected at least one.")
        if self.y.ndim == 0 or len(self.x) != len(self.y):
            raise DataError(
                f"{what} has {len(self.x)} samples in x but y has shape {self.y.shape}; "
                "give one target for every sample."
            )
        if not (self.preparation or self.vocabulary) and not _finite(self.x):
            raise DataError(f"{what} has NaN or infinite values in x; remove or replace those samples.")
        if self.per_token:
            check_labels_of_tokens(what, self.x, self.y, self.num_classes)
        elif self.num_classes:
            _check_labels(what, self.y, self.num_classes)
        else:
            _check_targets(what, self.y)
        if self.multilabel and (self.y.ndim != 2 or not np.isin(self.y, (0, 1)).all()):
            raise DataError(
                f"{what} has labels other than 0 and 1; expected one of these for each label that may hold."
            )
        if len(self.alphabet) not in (0, self.vocabulary):
            raise DataError(
                f"{what} has an alphabet of {len(self.alphabet)} characters for {self.vocabulary} tokens; give one for "
                "each."
            )
        if len(self.class_names) not in (0, self.num_outputs):
            raise DataError(
                f"{what} has {len(self.class_names)} class names for {self.num_outputs} classes; give one for each."
            )
        if self.split is not None:
            _check_split(what, self.split, len(self))
        for group, members in self.groups.items():
            if members.shape != (len(self),) or members.dtype.kind != "U":
                raise DataError(
                    f"{what} has the grouping {group!r} of type {members.dtype} and shape {members.shape}; "
                    f"expected one string for each of the {len(self)} samples."
                )


def digest_of(*parts: np.ndarray) -> str:
    """A fingerprint of arrays, their types, shapes and order."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(f"{part.dtype}{part.shape}".encode())
        found.update(np.ascontiguousarray(part).data.cast("B"))
    return found.hexdigest()


def check_tokens(what: str, x: np.ndarray, vocabulary: int) -> None:
    """Refuse samples that are no sequences of tokens 0 to ``vocabulary - 1``."""
    if x.dtype != np.int64 or x.ndim != 2 or not x.size:
        raise DataError(
            f"{what} has x of type {x.dtype} and shape {x.shape}; expected tokens: int64 of shape (samples, length)."
        )
    fault = Tokens(vocabulary).fault(int(x.min()), int(x.max()))
    if fault:
        raise DataError(
            f"{what} has {fault}. Give the vocabulary that the samples were made with; or, if they are features, give "
            "them as floating-point numbers."
        )


def check_labels_of_tokens(what: str, x: np.ndarray, y: np.ndarray, num_classes: int) -> None:
    """Refuse labels that are not one for each token, 0 to ``num_classes - 1`` or -1 for none."""
    if y.dtype != np.int64 or y.shape != x.shape:
        raise DataError(
            f"{what} has labels of type {y.dtype} and shape {y.shape} for tokens of shape {x.shape}; expected one "
            "whole number for each token, or one for each sample."
        )
    if y.min() < UNLABELLED or y.max() >= num_classes:
        raise DataError(
            f"{what} has labels from {y.min()} to {y.max()}; expected 0 to {num_classes - 1}, or {UNLABELLED} for a "
            "token that has none."
        )
    if not (y != UNLABELLED).any(1).all():
        raise DataError(
            f"{what} has {int((y == UNLABELLED).all(1).sum())} samples without a label on any token; leave them out."
        )


def _finite(values: np.ndarray) -> bool:
    # the extremes carry any NaN or infinity along, and need no temporary as large as the data
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def _check_labels(what: str, y: np.ndarray, num_classes: int) -> None:
    if y.dtype != np.int64 or y.ndim != 1:
        raise DataError(
            f"{what} has labels of type {y.dtype} and shape {y.shape}; expected int64 of shape (samples,): {RECODE}."
        )
    if y.min() < 0 or y.max() >= num_classes:
        raise DataError(
            f"{what} has labels from {y.min()} to {y.max()}; expected 0 to {num_classes - 1} for "
            f"{num_classes} classes: {RECODE}."
        )


def _check_targets(what: str, y: np.ndarray) -> None:
    if y.dtype != np.float32 or y.ndim > 2 or y.size == 0:
        raise DataError(
            f"{what} has regression targets of type {y.dtype} and shape {y.shape}; "
            "expected float32 of shape (samples,) or (samples, k)."
        )
    if not _finite(y):
        raise DataError(f"{what} has NaN or infinite values in y; remove or replace those samples.")


def _check_split(what: str, split: np.ndarray, samples: int) -> None:
    if split.shape != (samples,):
        raise DataError(
            f"{what} has a split of shape {split.shape}; expected one name for each of the {samples} samples."
        )
    strange = sorted(set(np.unique(split).tolist()) - set(SPLITS), key=str)
    if strange:
        raise DataError(f"{what} has the split name {strange[0]!r}; expected only {', '.join(SPLITS)}.")
