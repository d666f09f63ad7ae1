# SPDX-License-Identifier: Apache-2.0
"""A chart as a value: what is drawn, from which columns. ``vega`` draws it in a page, ``figures`` on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, NamedTuple

Kind = Literal["lines", "ranked", "points", "bubbles", "heat", "bars", "forest"]
"""Lines with bands; clients in order of their scores; a scatter plot; dots of two names, sized; a table of colours;
bars, stacked; rows with an interval each."""

MOST_POINTS = 400
"""Of a line: more cannot be told apart on a screen."""
FEW_POINTS = 12
"""Of a line: each is marked."""
MOST_ROWS = 4_000
"""Of all lines of a chart: more make a page heavy."""


@dataclass(frozen=True)
class Axis:
    """What a column means to a reader."""

    column: str
    title: str
    kind: Literal["number", "count", "share", "name"] = "number"
    from_zero: bool = False
    order: Sequence[str] = ()
    """Of names: as they are to stand; else as they come."""
    colours: Sequence[int] = ()
    """The colours of those names, by number; else the first, the second, ..."""


class Rule(NamedTuple):
    """A line across the chart, at a value of one axis; of both, the line of equals up to that value."""

    axis: Literal["x", "y", "both"]
    value: float
    label: str


class Switch(NamedTuple):
    """A choice of the reader: how the chart changes with each."""

    title: str
    options: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A chart with its data. ``low`` and ``high`` name the columns of a band or an interval."""

    name: str
    title: str
    caption: str
    kind: Kind
    data: Mapping[str, Sequence[Any]]
    """Columns of equal length; one called ``client`` lets a client be found in every chart."""
    x: Axis
    y: Axis
    colour: Axis | None = None
    size: Axis | None = None
    low: str = ""
    high: str = ""
    detail: str = ""
    """A column that divides lines of one colour."""
    hollow: str = ""
    """A column of True where a mark is to be hollow."""
    dashed: str = ""
    """A column of True where a line is to be dashed."""
    written: bool = False
    """The number of each cell of a table of colours stands in it."""
    only: tuple[str, str] | None = None
    """A column and the value that rows must have in it to be drawn."""
    rules: tuple[Rule, ...] = ()
    switches: tuple[Switch, ...] = ()
    titles: Mapping[str, str] = field(default_factory=dict)
    """Of columns that no axis names, for the table behind the chart."""
    height: int = 260

    @property
    def rows(self) -> int:
        """How many rows the data have."""
        return len(next(iter(self.data.values()), ()))

    def variants(self) -> dict[str, Chart]:
        """The chart for each combination of choices, by their numbers: "0", or "1|0"."""
        found = {}
        for chosen in product(*(range(len(switch.options)) for switch in self.switches)):
            changes: dict[str, Any] = {}
            for switch, number in zip(self.switches, chosen):
                changes |= list(switch.options.values())[number]
            found["|".join(map(str, chosen))] = replace(self, **changes, switches=())
        return found

    def column_titles(self) -> dict[str, str]:
        """What each column of the data is, for a table."""
        named: dict[str, str] = {}
        for variant in self.variants().values():
            for axis in (variant.x, variant.y, variant.colour, variant.size):
                if axis is not None:
                    named.setdefault(axis.column, axis.title)
        return {column: self.titles.get(column, named.get(column, column.replace("_", " "))) for column in self.data}


def thinned(columns: Mapping[str, Sequence[Any]], by: str, keep: Sequence[Any] = ()) -> dict[str, list[Any]]:
    """Columns of lines with at most ``MOST_POINTS`` values of ``by``, fewer if that makes more than ``MOST_ROWS`` rows.

    They are evenly spaced; the last and ``keep`` stay.
    """
    values = sorted(set(columns[by]))
    step = max(-(-len(values) // MOST_POINTS), -(-len(columns[by]) // MOST_ROWS), 1)
    kept = {*values[::step], *values[-1:], *keep}
    rows = [row for row, value in enumerate(columns[by]) if value in kept]
    return {name: [column[row] for row in rows] for name, column in columns.items()}
