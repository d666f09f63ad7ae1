# SPDX-License-Identifier: Apache-2.0
"""How samples become what networks take: a small value that is fitted on training data and kept with the models.

Of a table it has the columns by name: numbers are centred and scaled, and a missing one becomes the mean; categories
become one feature each, 1 for the category that it is; a missing category is taken for the commonest, one that
training data did not have is none of them. Images of bytes are centred and scaled by channel. It is written down as
JSON, runs no code, and is in exported models.

Samples before that are *raw*: bytes (samples, channels, height, width); or float64 (samples, columns), with NaN for
what is missing and the number of its category for a text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from fedloom.core.errors import DataError

Kind = Literal["table", "images"]
NONE = -1
"""The number of a category that training data did not have."""
MOST_FEATURES = 1_000_000
LARGEST = 1e100
"""Numbers beyond this have squares that float64 cannot add up."""


@dataclass(frozen=True)
class Column:
    """A column of a table, or a channel of images."""

    name: str
    mean: float = 0.0
    """Of numbers; it stands for one that is missing."""
    scale: float = 1.0
    """Of numbers: their standard deviation, or 1 where they do not vary."""
    categories: tuple[str, ...] | None = None
    """None: the column has numbers."""
    fill: int = 0
    """Of categories: the number of the one that stands for a missing one."""

    @property
    def size(self) -> int:
        """How many features it becomes."""
        return 1 if self.categories is None else len(self.categories)

    def as_json(self) -> dict[str, Any]:
        """What it has."""
        if self.categories is None:
            return {"name": self.name, "mean": self.mean, "scale": self.scale}
        return {"name": self.name, "categories": list(self.categories), "fill": self.fill}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Column:
        """The column in a file; ValueError and its like for what is none."""
        if "categories" in content:
            categories, fill = tuple(map(str, content["categories"])), int(content.get("fill", 0))
            if len(set(categories)) != len(categories) or not 0 <= fill < max(1, len(categories)):
                raise ValueError("its categories cannot be")
            return cls(str(content["name"]), categories=categories, fill=fill)
        mean, scale = float(content.get("mean", 0.0)), float(content.get("scale", 1.0))
        if not (math.isfinite(mean) and math.isfinite(scale) and scale > 0):
            raise ValueError("a mean or a scale is no such number")
        return cls(str(content["name"]), mean, scale)


class Sums(NamedTuple):
    """What is to be known of training data: float64, one entry per column of numbers, and one per category."""

    number: np.ndarray
    """How many numbers are there."""
    mean: np.ndarray
    variance: np.ndarray
    categories: np.ndarray
    """How often each category is there, column after column."""


class Features(NamedTuple):
    """For each feature: the raw column that it is from, and what is done to it."""

    column: np.ndarray  # int64
    fill: np.ndarray
    mean: np.ndarray
    """Of a category: its number."""
    scale: np.ndarray
    is_category: np.ndarray  # bool


@dataclass(frozen=True)
class Preparation:
    """What is done to raw samples."""

    kind: Kind
    columns: tuple[Column, ...]
    targets: tuple[str, ...] = ()
    """Columns of a table that are predicted."""
    others: tuple[str, ...] = ()
    """Columns of a table that are no features: whose a sample is, which split it is in."""

    def __post_init__(self) -> None:
        names = [*(column.name for column in self.columns), *self.targets, *self.others]
        if not self.columns or len(set(names)) != len(names) or self.size > MOST_FEATURES:
            raise DataError("A preparation needs columns, each with a name of its own.")

    @property
    def size(self) -> int:
        """How many features the columns become."""
        return sum(column.size for column in self.columns)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features."""
        return tuple(
            column.name if one is None else f"{column.name}={one}"
            for column in self.columns
            for one in ((None,) if column.categories is None else column.categories)
        )

    def shape(self, raw: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a sample afterwards."""
        return (self.size,) if self.kind == "table" else raw

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether samples have that shape afterwards."""
        return shape == (self.size,) if self.kind == "table" else len(shape) == 3 and shape[0] == len(self.columns)

    @property
    def form(self) -> Preparation:
        """What is agreed on before anything is fitted."""
        plain = [replace(column, mean=0.0, scale=1.0, fill=0) for column in self.columns]
        return replace(self, columns=tuple(plain))

    @property
    def numbers(self) -> list[int]:
        """Which columns have numbers."""
        return [row for row, column in enumerate(self.columns) if column.categories is None]

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """What becomes of black and of white, by channel."""
        mean, scale = (np.array([getattr(one, name) for one in self.columns]) for name in ("mean", "scale"))
        return -mean / scale, (255 - mean) / scale

    def expanded(self) -> Features:
        """The columns, feature by feature."""
        rows = []
        for number, column in enumerate(self.columns):
            if column.categories is None:
                rows.append((number, column.mean, column.mean, column.scale, False))
            else:
                rows += [(number, column.fill, code, 1.0, True) for code in range(len(column.categories))]
        parts = list(zip(*rows)) or [()] * 5
        fill, mean, scale = (np.array(part, np.float64) for part in parts[1:4])
        return Features(np.array(parts[0], np.int64), fill, mean, scale, np.array(parts[4], bool))

    def apply(self, raw: np.ndarray) -> np.ndarray:
        """Raw samples as float32 for networks."""
        if self.kind == "images":
            x: np.ndarray = raw.astype(np.float32, order="C")
            x -= np.array([column.mean for column in self.columns], np.float32)[:, None, None]
            x /= np.array([column.scale for column in self.columns], np.float32)[:, None, None]
            return x
        column, fill, mean, scale, is_category = self.expanded()
        values = raw[:, column]
        values = np.where(np.isnan(values), fill, values)
        prepared: np.ndarray = np.where(is_category, values == mean, (values - mean) / scale).astype(np.float32)
        return prepared

    def sums(self, raw: np.ndarray) -> Sums:
        """What is to be known of raw training samples."""
        if self.kind == "images":
            number, mean, variance = np.array([_moments_of_bytes(raw[:, row]) for row in range(raw.shape[1])]).T
            return Sums(number, mean, variance, np.zeros(0))
        numbers = raw[:, self.numbers]
        there = ~np.isnan(numbers)
        count = there.sum(0).astype(np.float64)
        mean = np.where(there, numbers, 0).sum(0) / np.maximum(count, 1)
        variance = np.where(there, (numbers - mean) ** 2, 0).sum(0) / np.maximum(count, 1)
        codes = [
            [(raw[:, row] == code).sum() for code in range(column.size)]
            for row, column in enumerate(self.columns)
            if column.categories is not None
        ]
        return Sums(count, mean, variance, np.array([number for one in codes for number in one], np.float64))

    def fitted(self, sums: Sums) -> Preparation:
        """This preparation with what is known of training data; every category stays, seen or not."""
        moments = zip(sums.number.tolist(), sums.mean.tolist(), sums.variance.tolist())
        columns, start = [], 0
        for column in self.columns:
            if column.categories is None:
                number, mean, variance = next(moments)
                rounding = (
                    number * mean * float(np.finfo(np.float64).eps)
                )  # at most: numbers that are all one vary by it
                columns.append(replace(column, mean=mean, scale=variance**0.5 if variance > rounding**2 else 1.0))
            else:
                counts = sums.categories[start : start + column.size]
                start += column.size
                columns.append(replace(column, fill=int(counts.argmax()) if len(counts) else 0))
        return replace(self, columns=tuple(columns))

    def fit(self, raw: np.ndarray) -> Preparation:
        """Fitted to raw training samples; categories that these do not have are left out."""
        seen = [
            column
            if column.categories is None
            else replace(column, categories=tuple(np.array(column.categories, str)[_codes(raw[:, row])].tolist()))
            for row, column in enumerate(self.columns)
        ]
        found = replace(self, columns=tuple(seen)) if self.kind == "table" else self
        return found.fitted(found.sums(self.translated(raw, found)))

    def translated(self, raw: np.ndarray, other: Preparation) -> np.ndarray:
        """Raw samples with the numbers that ``other`` has for the same categories."""
        if self.kind == "images" or [c.categories for c in self.columns] == [c.categories for c in other.columns]:
            return raw
        found = raw.copy()
        for row, (column, wanted) in enumerate(zip(self.columns, other.columns)):
            if column.categories and wanted.categories is not None:
                table = {name: number for number, name in enumerate(wanted.categories)}
                numbers = np.array([*(table.get(name, NONE) for name in column.categories), NONE], np.float64)
                there = ~np.isnan(raw[:, row])
                found[there, row] = numbers[raw[there, row].astype(np.int64)]
        return found

    def encoded(self, columns: Mapping[str, np.ndarray], what: str) -> np.ndarray:
        """The columns of a table, by name and in any order, as raw samples."""
        wanted = [column.name for column in self.columns]
        missing = [name for name in wanted if name not in columns]
        extra = [name for name in columns if name not in {*wanted, *self.targets, *self.others}]
        for names, fault in ((missing, "has no column"), (extra, "has the unknown column")):
            if names:
                raise DataError(
                    f"{what} {fault} {', '.join(map(repr, names[:5]))}; expected the columns "
                    f"{', '.join(wanted[:20])}{' ...' if wanted[20:] else ''}, in any order."
                )
        parts = [
            as_numbers(columns[column.name], f"{what} has in the column {column.name!r}")
            if column.categories is None
            else _numbers_of(columns[column.name], column.categories)
            for column in self.columns
        ]
        return np.stack(parts, axis=1)

    def as_json(self) -> dict[str, Any]:
        """What is written down."""
        columns = [column.as_json() for column in self.columns]
        return {"kind": self.kind, "columns": columns, "targets": list(self.targets), "others": list(self.others)}

    def as_text(self) -> str:
        """The same, as text."""
        return json.dumps(self.as_json())

    @classmethod
    def of_json(cls, content: Any) -> Preparation:
        """The preparation in a file; refuses what is none."""
        try:
            if content["kind"] not in ("table", "images"):
                raise ValueError("it is of an unknown kind")
            columns = tuple(Column.of_json(one) for one in content["columns"])
            names = (tuple(map(str, content.get(name, ()))) for name in ("targets", "others"))
            return cls(content["kind"], columns, *names)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(f"This is not how samples are prepared: {error}.") from error

    @classmethod
    def of_text(cls, text: str) -> Preparation:
        """The preparation in a text."""
        try:
            return cls.of_json(json.loads(text))
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError("This is not how samples are prepared: it is no JSON.") from error


def images(channels: int) -> Preparation:
    """What is done to images of bytes, before it is fitted."""
    return Preparation("images", tuple(Column(str(number)) for number in range(channels)))


def images_as_shares(channels: int) -> Preparation:
    """Images of bytes as shares of white, from 0 to 1: for federations whose images are."""
    return Preparation("images", tuple(Column(str(number), 0.0, 255.0) for number in range(channels)))


def as_numbers(values: np.ndarray, what: str) -> np.ndarray:
    """A column as float64, NaN where nothing stands."""
    if values.dtype.kind in "buif":
        found = values.astype(np.float64)
    else:
        try:
            found = np.where(values == "", "nan", values).astype(np.float64)
        except ValueError:
            strange = next(text for text in values.tolist() if text and not is_number(text))
            raise DataError(f"{what} the text {strange!r}; expected numbers.") from None
    if (np.abs(found) > LARGEST).any():
        raise DataError(f"{what} infinite values, or such beyond {LARGEST:g}; remove or replace those samples.")
    return found


def is_number(text: str) -> bool:
    """Whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def as_texts(values: np.ndarray) -> np.ndarray:
    """A column as text, empty where nothing stands; whole numbers without a decimal point."""
    if values.dtype.kind == "f":
        return np.array(["" if np.isnan(v) else str(int(v)) if v == int(v) else repr(v) for v in values.tolist()], str)
    return values.astype(str)


def _numbers_of(values: np.ndarray, categories: Sequence[str]) -> np.ndarray:
    table = {"": math.nan, **{name: float(number) for number, name in enumerate(categories)}}
    found, inverse = np.unique(as_texts(values), return_inverse=True)
    return np.array([table.get(text, float(NONE)) for text in found.tolist()])[inverse]


def _codes(values: np.ndarray) -> np.ndarray:
    """The numbers of the categories that are there."""
    return np.unique(values[values >= 0]).astype(np.int64)


def _moments_of_bytes(values: np.ndarray) -> tuple[float, float, float]:
    counts = np.bincount(values.reshape(-1), minlength=256).astype(np.float64)
    number, levels = max(counts.sum(), 1.0), np.arange(256.0)
    mean = counts @ levels / number
    return counts.sum(), float(mean), float(counts @ (levels - mean) ** 2 / number)
