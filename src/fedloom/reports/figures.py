# SPDX-License-Identifier: Apache-2.0
"""Charts for paper: as figures of matplotlib, in PDF or SVG, of the width of a text column."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.core.errors import ConfigError
from fedloom.reports.charts import FEW_POINTS, Axis, Chart, Rule
from fedloom.runs.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedloom.reports.drawn import Drawn

COLOURS = ("#2f62c4", "#c4570b", "#14805e", "#a33a8f", "#7a5c00", "#0b7b95", "#b3312b", "#5b5f68", "#5a7d1c", "#6a51c7",
           "#b04a6b", "#2d6b74")  # fmt: skip
WIDTH = 6.4
"""Inches."""
NAMES = 48
"""So many names fit along an axis."""
UPRIGHT = 12
"""More names than this stand upright."""
LONGEST, SHORT = 60, 24
"""Characters of a name in a legend, and along an axis."""
STYLE: Any = {
    "font.size": 8.0, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False, "svg.fonttype": "none",
    "svg.hashsalt": "fedloom", "pdf.fonttype": 42, "figure.dpi": 150, "legend.frameon": False, "axes.titlesize": 9.0,
}  # fmt: skip


def figure(chart: Chart, *, choices: Sequence[str] = ()) -> Drawn:
    """The chart as a figure; ``choices`` are options of its switches, the first of each without."""
    import matplotlib as mpl
    from matplotlib.ticker import PercentFormatter

    from fedloom.reports.drawn import Drawn

    chart = _chosen(chart, choices)
    with mpl.rc_context(STYLE):
        made = Drawn(STYLE, (WIDTH, max(1.6, chart.height / 100) + _below(chart)))
        axes = made.add_subplot()
        draw = {
            "lines": _lines, "ranked": _ranked, "points": _points, "bubbles": _bubbles, "heat": _heat, "bars": _bars,
            "forest": _forest,
        }[chart.kind]  # fmt: skip
        draw(axes, chart)
        for rule in chart.rules:
            _rule(axes, rule)
        for which, axis in (("x", chart.x), ("y", chart.y)):
            getattr(axes, f"set_{which}label")(_plain(axis.title) if which == "x" or chart.kind != "forest" else "")
            low, high = getattr(axes, f"get_{which}lim")()
            if axis.from_zero and chart.kind in ("points", "forest"):
                getattr(axes, f"set_{which}lim")(min(low, 0), max(high, 0))
            if axis.kind == "share":
                getattr(axes, f"{which}axis").set_major_formatter(PercentFormatter(1.0))
            elif axis.kind == "count" and chart.kind not in ("heat", "bars"):
                getattr(axes, f"{which}axis").get_major_locator().set_params(integer=True)
    return made


def save(chart: Chart, path: Path, *, choices: Sequence[str] = ()) -> Path:
    """Write the figure; the name's ending says in which form."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = FigureCanvasAgg.get_supported_filetypes()
    kind = path.suffix.removeprefix(".")
    if kind not in kinds:
        raise ConfigError(f"--out is {path}; the name of a figure ends in one of: {', '.join(sorted(kinds))}.")
    made, drawn = figure(chart, choices=choices), io.BytesIO()
    undated: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a name in another script: a box stands for it
        made.savefig(drawn, format=kind, metadata=undated.get(kind))
    write_file(path, drawn.getvalue())
    return path


def _rule(axes: Axes, rule: Rule) -> None:
    look: dict[str, Any] = {"color": "#777777", "lw": 0.8, "ls": ":", "zorder": 0}
    label: dict[str, Any] = {"color": "#555555", "fontsize": 6.5, "va": "bottom"}
    if rule.axis == "both":
        axes.plot([0, rule.value], [0, rule.value], **look)
    elif rule.axis == "x":
        axes.axvline(rule.value, **look)
        axes.text(rule.value, 0.02, rule.label, transform=axes.get_xaxis_transform(), rotation=90, ha="right", **label)
    else:
        axes.axhline(rule.value, **look)
        axes.text(0.01, rule.value, rule.label, transform=axes.get_yaxis_transform(), **label)


def _below(chart: Chart) -> float:
    """Inches for names that stand upright below the chart."""
    names = {str(name) for name in chart.data[chart.x.column]} if chart.x.kind == "name" else set()
    return 0.06 * min(SHORT, max(map(len, names))) if UPRIGHT < len(names) <= NAMES else 0.0


def _chosen(chart: Chart, choices: Sequence[str]) -> Chart:
    """The chart as the choices have it, with the rows that are drawn."""
    changes: dict[str, Any] = {}
    left = list(choices)
    for switch in chart.switches:
        picked = next((name for name in switch.options if name in left), next(iter(switch.options)))
        if picked in left:
            left.remove(picked)
        changes |= switch.options[picked]
    if left:
        known = [name for switch in chart.switches for name in switch.options]
        raise ConfigError(f"The figure {chart.name} has no choice {left[0]!r}; it has: {', '.join(known) or 'none'}.")
    chart = replace(chart, **changes, switches=())
    if chart.only is None:
        return chart
    column, value = chart.only
    rows = [row for row, entry in enumerate(chart.data[column]) if entry == value]
    return replace(
        chart, data={name: [entries[row] for row in rows] for name, entries in chart.data.items()}, only=None
    )


def _plain(text: str) -> str:
    """A name as it is: matplotlib would take what stands between dollar signs for mathematics."""
    shown = "".join(one if one.isprintable() else "�" for one in " ".join(str(text).split()))
    return (shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…").replace("$", r"\$")


def _numbers(chart: Chart, column: str) -> Any:
    return np.array([np.nan if v is None else v for v in chart.data[column]], dtype=float)


def _groups(chart: Chart, axis: Axis | None) -> Iterator[tuple[str, list[int], str]]:
    """The names of a colour axis, their rows and their colours; everything as one where there is none."""
    if axis is None or axis.kind != "name":
        yield "", list(range(chart.rows)), COLOURS[0]
        return
    names = [str(v) for v in chart.data[axis.column]]
    order = [str(v) for v in axis.order] or list(dict.fromkeys(names))
    for number, name in enumerate(order):
        rows = [row for row, one in enumerate(names) if one == name]
        colour = (axis.colours or range(len(order)))[number]
        if rows:
            yield name, rows, COLOURS[colour % len(COLOURS)]


def _legend(axes: Axes, number: int) -> None:
    if 1 < number <= 12:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(number, 4), fontsize=7)


def _lines(axes: Axes, chart: Chart) -> None:
    x, y = _numbers(chart, chart.x.column), _numbers(chart, chart.y.column)
    groups = list(_groups(chart, chart.colour))
    for name, rows, colour in groups:
        details = chart.data[chart.detail] if chart.detail else [""] * chart.rows
        for detail in dict.fromkeys(details[row] for row in rows):
            own = [row for row in rows if details[row] == detail]
            dashed = bool(chart.dashed and chart.data[chart.dashed][own[0]])
            width = float(chart.data[chart.size.column][own[0]]) if chart.size else 1.6
            thin = chart.size is not None and width <= 1
            axes.plot(
                x[own], y[own], color=colour, lw=0.6 if thin else 1.6, alpha=0.45 if thin else 1,
                ls="--" if dashed else "-", label=None if thin else _plain(name),
                marker="o" if len(own) <= FEW_POINTS else "", ms=4,
            )  # fmt: skip
            if chart.low:
                axes.fill_between(x[own], _numbers(chart, chart.low)[own], _numbers(chart, chart.high)[own],
                                  color=colour, alpha=0.14, lw=0)  # fmt: skip
    axes.grid(axis="y", alpha=0.25)
    _legend(axes, len(groups))


def _ranked(axes: Axes, chart: Chart) -> None:
    y, groups = _numbers(chart, chart.y.column), list(_groups(chart, chart.colour))
    for name, rows, colour in groups:
        if chart.low:
            low, high = _numbers(chart, chart.low)[rows], _numbers(chart, chart.high)[rows]
            axes.vlines(rows, low, high, color=colour, alpha=0.35, lw=1.2 if chart.rows < 200 else 0.4)
        axes.plot(rows, y[rows], "o", ms=3 if chart.rows < 200 else 1, color=colour, label=_plain(name))
    _name_ticks(axes, "x", [str(v) for v in chart.data[chart.x.column]])
    axes.grid(axis="y", alpha=0.25)
    _legend(axes, len(groups))


def _name_ticks(axes: Axes, which: str, names: Sequence[str]) -> None:
    """Names along an axis, where they have room."""
    if len(names) > NAMES:
        getattr(axes, f"set_{which}ticks")([])
        return
    shown = [_plain(name if len(name) <= SHORT else f"{name[: SHORT - 1]}…") for name in names]
    turned = {"rotation": 90 if len(names) > UPRIGHT else 0} if which == "x" else {}
    getattr(axes, f"set_{which}ticks")(range(len(names)), shown, fontsize=6.5, **turned)


def _number_ticks(axes: Axes, which: str, numbers: Sequence[str]) -> None:
    """Numbers that stand side by side as names do, about ten of them."""
    step = -(-len(numbers) // 10)
    getattr(axes, f"set_{which}ticks")(range(0, len(numbers), step), numbers[::step])


def _points(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import PercentFormatter

    x, y = _numbers(chart, chart.x.column), _numbers(chart, chart.y.column)
    hollow = np.array(chart.data[chart.hollow], dtype=bool) if chart.hollow else np.zeros(chart.rows, dtype=bool)
    if chart.colour is not None and chart.colour.kind != "name":
        values = _numbers(chart, chart.colour.column)
        drawn = axes.scatter(x[~hollow], y[~hollow], c=values[~hollow], s=22, cmap="viridis",
                             vmin=np.nanmin(values), vmax=np.nanmax(values))  # fmt: skip
        edges: Any = drawn.cmap(drawn.norm(values[hollow]))
        axes.scatter(x[hollow], y[hollow], s=22, facecolors="none", edgecolors=edges, linewidths=1.1)
        bar = axes.figure.colorbar(drawn, ax=axes, label=_plain(chart.colour.title))
        if chart.colour.kind == "share":
            bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        groups = list(_groups(chart, chart.colour))
        for name, rows, colour in groups:
            own = np.array(rows)
            full, rings = own[~hollow[own]], own[hollow[own]]
            axes.scatter(x[full], y[full], s=22, label=_plain(name), linewidths=1.1, color=colour)
            axes.scatter(x[rings], y[rings], s=22, linewidths=1.1, facecolors="none", edgecolors=colour)
        _legend(axes, len(groups))
    axes.grid(alpha=0.2)


def _places(chart: Chart, axis: Axis) -> tuple[list[str], list[int]]:
    """The names or values along an axis in their order, and where each row is."""
    values = list(chart.data[axis.column])
    order = list(axis.order) or (sorted(set(values)) if axis.kind != "name" else list(dict.fromkeys(values)))
    place = {value: i for i, value in enumerate(order)}
    return [f"{v:g}" if isinstance(v, float) else str(v) for v in order], [place[v] for v in values]


def _bubbles(axes: Axes, chart: Chart) -> None:
    assert chart.size is not None
    (across, x), (down, y) = _places(chart, chart.x), _places(chart, chart.y)
    sizes = _numbers(chart, chart.size.column)
    groups = list(_groups(chart, chart.colour))
    for name, rows, colour in groups:
        own = np.array(rows)
        area = 70 * sizes[own] / sizes.max()
        axes.scatter(np.array(x)[own], np.array(y)[own], s=area, color=colour, label=_plain(name), linewidths=0)
    _name_ticks(axes, "x", across)
    _name_ticks(axes, "y", down)
    axes.set_ylim(len(down) - 0.5, -0.5)
    _legend(axes, len(groups))


def _heat(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import PercentFormatter

    assert chart.colour is not None
    (across, x), (down, y) = _places(chart, chart.x), _places(chart, chart.y)
    table = np.full((len(down), len(across)), np.nan)
    table[y, x] = _numbers(chart, chart.colour.column)
    drawn = axes.imshow(table, aspect="auto", cmap="viridis", interpolation="nearest")
    bar = axes.figure.colorbar(drawn, ax=axes, label=_plain(chart.colour.title))
    if chart.colour.kind == "share":
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if chart.written:
        middle = (np.nanmin(table) + np.nanmax(table)) / 2
        for row, column in zip(y, x):
            value = table[row, column]
            text = f"{value:.1%}" if chart.colour.kind == "share" else f"{value:.4g}"
            colour = "black" if value > middle else "white"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    for which, names, axis in (("x", across, chart.x), ("y", down, chart.y)):
        if axis.kind == "name":
            _name_ticks(axes, which, names)
        else:
            _number_ticks(axes, which, names)


def _bars(axes: Axes, chart: Chart) -> None:
    names, x = _places(chart, chart.x)
    y, below = _numbers(chart, chart.y.column), np.zeros(len(names))
    groups = list(_groups(chart, chart.colour))
    for name, rows, colour in groups:
        own = np.array(x)[rows]
        axes.bar(own, y[rows], bottom=below[own], color=colour, label=_plain(name), width=0.85)
        below[own] += np.where(np.isfinite(y[rows]), y[rows], 0)
    if chart.x.kind == "name":
        _name_ticks(axes, "x", names)
    else:
        _number_ticks(axes, "x", names)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    _legend(axes, len(groups))


def _forest(axes: Axes, chart: Chart) -> None:
    x, (names, y) = _numbers(chart, chart.x.column), _places(chart, chart.y)
    low, high = _numbers(chart, chart.low), _numbers(chart, chart.high)
    known = np.isfinite(low)
    axes.hlines(np.array(y)[known], low[known], high[known], color=COLOURS[0], alpha=0.5, lw=2.2)
    axes.plot(x, y, "o", color=COLOURS[0], ms=5)
    axes.set_yticks(range(len(names)), [_plain(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.25)
