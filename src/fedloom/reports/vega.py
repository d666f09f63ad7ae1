# SPDX-License-Identifier: Apache-2.0
"""Charts as Vega-Lite specifications. Colours are variables of the page's style, so that light, dark and print agree.

Names that users choose are data here, never part of an expression or of a field's name.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from fedloom.reports.charts import FEW_POINTS, Axis, Chart, Rule

Spec = dict[str, Any]

COLOURS = [f"var(--c{number})" for number in range(1, 13)]
NAMES = 48
"""So many names fit along an axis."""
MARKS = 600
"""More marks of their own are slow; clients in order are then drawn as one line with a band."""


def spec_of(chart: Chart) -> Spec:
    """The specification of a chart without choices; its data are to be given as ``data``."""
    draw = {
        "lines": _lines, "ranked": _ranked, "points": _points, "bubbles": _bubbles, "heat": _heat, "bars": _bars,
        "forest": _forest,
    }[chart.kind]  # fmt: skip
    only = chart.only and f"datum[{json.dumps(chart.only[0])}] === {json.dumps(chart.only[1])}"
    return {
        "data": {"name": "data"},
        **({"transform": [{"filter": only}]} if only else {}),
        "width": "container",
        "height": chart.height,
        "autosize": {"type": "fit", "contains": "padding", "resize": True},
        "params": [{"name": "picked", "value": ""}],
        **draw(chart),
    }


def _encoding(chart: Chart, axis: Axis, *, along: str, rows: int = 0, **more: Any) -> Spec:
    """An axis of a chart; ``along`` x or y."""
    found: Spec = {"field": axis.column, "title": axis.title, **more}
    if axis.kind == "name":
        crowded = rows > NAMES
        look: Spec = {
            "labelLimit": 120,
            "labelOverlap": "greedy",
            **({"labelSeparation": 4} if along == "x" else {}),
            "labels": not crowded,
            "ticks": not crowded,
            "labelAngle": -45 if along == "x" else 0,
        }
        if along == "x" and rows <= 8:
            look["labelAngle"] = 0
        # not as ``sort``, of which Vega-Lite makes an expression with every name in it
        domain = {"scale": {"domain": list(axis.order)}} if axis.order else {}
        return {**found, "type": "nominal", "sort": None, "axis": look, **domain}
    # without one, or without digits in it, Vega gives as many as tell ticks apart
    form = {"format": "%"} if axis.kind == "share" else {"format": "~s"} if _largest(chart, axis) >= 1e4 else {}
    whole = {"tickMinStep": 1} if axis.kind == "count" else {}
    return {
        **found,
        "type": "quantitative",
        "scale": {"zero": axis.from_zero, "nice": True},
        "axis": {**form, **whole, "grid": along == "y", "tickCount": 5},
    }


def _bounds(chart: Chart, axis: Axis) -> list[float]:
    known = [value for value in chart.data[axis.column] if isinstance(value, int | float)]
    return [min(known), max(known)]


def _largest(chart: Chart, axis: Axis) -> float:
    return max((abs(v) for v in chart.data[axis.column] if isinstance(v, int | float)), default=0.0)


def _colour(chart: Chart, **more: Any) -> Spec:
    """By the colour axis; one colour where there is none."""
    axis = chart.colour
    if axis is None:
        return {"value": COLOURS[0], **more}
    if axis.kind == "name":
        domain = legend_of(chart)
        chosen = axis.colours or range(len(domain))
        scale = {"domain": domain, "range": [COLOURS[i % len(COLOURS)] for i in chosen]}
        # a list of dozens of names explains nothing
        legend = None
        if len(domain) > 1:
            legend = {"title": None, "orient": "top", "symbolLimit": 12, "labelLimit": 220, "symbolOpacity": 1}
        return {"field": axis.column, "type": "nominal", "scale": scale, "legend": legend, **more}
    legend = {"title": axis.title, "orient": "top", "gradientLength": 160, "format": _format(axis)}
    # without its darkest part, which on a dark page looks like nothing
    gradient: Spec = {"scheme": {"name": "viridis", "extent": [0.12, 1]}, "zero": False}
    if chart.only:  # a colour is the same number whatever is chosen
        gradient["domain"] = _bounds(chart, axis)
    return {"field": axis.column, "type": "quantitative", "scale": gradient, "legend": legend, **more}


def legend_of(chart: Chart) -> list[str]:
    """The names that colours stand for."""
    axis = chart.colour
    if axis is None or axis.kind != "name":
        return []
    return list(axis.order) or list(dict.fromkeys(map(str, chart.data[axis.column])))


def _format(axis: Axis) -> str:
    return ".1%" if axis.kind == "share" else ".4~g"


def _tooltip(chart: Chart, *extra: str) -> list[Spec]:
    """What a pointer is told: client first, then what the axes are."""
    titles, found = chart.column_titles(), []
    axes = {a.column: a for a in (chart.x, chart.y, chart.colour, chart.size) if a is not None}
    for column in dict.fromkeys(["client", *axes, *extra]):
        if column in chart.data:
            axis = axes.get(column)
            number = axis is not None and axis.kind != "name"
            look = (
                {"type": "quantitative", "format": _format(axis)}
                if axis is not None and number
                else {"type": "nominal"}
            )
            if column in (chart.low, chart.high):
                look = {"type": "quantitative", "format": _format(chart.y if chart.kind != "forest" else chart.x)}
            found.append({"field": column, "title": titles[column], **look})
    return found


def _rules(chart: Chart) -> list[Spec]:
    """Lines across, each with its label."""
    found = []
    for rule in chart.rules:
        look = {"color": "var(--muted)", "strokeDash": [3, 3], "aria": False}
        if rule.axis == "both":
            place = {axis: {"field": "at", "type": "quantitative"} for axis in ("x", "y")}
            ends = {"values": [{"at": 0}, {"at": rule.value}]}
            found.append({"data": ends, "mark": {"type": "line", "strokeWidth": 1, **look}, "encoding": place})
            continue
        at = {"data": {"values": [{}]}, "encoding": {rule.axis: {"datum": rule.value}}}
        found.append({**at, "mark": {"type": "rule", **look}})
        if rule.label:
            found += _label(rule)
    return found


def _label(rule: Rule) -> list[Spec]:
    """Above the chart for a value of x, at its right end for one of y; on a halo, whatever is below."""
    if rule.axis == "x":
        look: Spec = {"align": "center", "baseline": "bottom", "dy": -4}
        place: Spec = {"x": {"datum": rule.value}, "y": {"value": 0}}
    else:
        look = {"align": "right", "baseline": "top", "dx": -3, "dy": 4}
        place = {"y": {"datum": rule.value}, "x": {"value": "width"}}
    text = {"type": "text", "text": rule.label, **look, "tooltip": None}
    halo = {**text, "stroke": "var(--paper)", "strokeWidth": 4, "color": "var(--paper)", "strokeJoin": "round"}
    return [
        {"data": {"values": [{}]}, "mark": {**mark, "aria": mark is text}, "encoding": place} for mark in (halo, text)
    ]


def _picked(value: Any, otherwise: Any) -> Spec:
    """One value for the client that the reader has picked, another for the rest."""
    return {"condition": {"test": "picked !== '' && datum.client === picked", "value": value}, "value": otherwise}


def _lines(chart: Chart) -> Spec:
    x, y = _encoding(chart, chart.x, along="x"), _encoding(chart, chart.y, along="y")
    common: Spec = {"x": {**x, "scale": {"zero": False, "nice": False}}, "color": _colour(chart)}
    if chart.detail:
        common["detail"] = {"field": chart.detail, "type": "nominal"}
    layers: list[Spec] = []
    if chart.low:
        band = {"y": {**y, "field": chart.low}, "y2": {"field": chart.high}}
        layers.append({
            "transform": [{"filter": f"isValid(datum[{json.dumps(chart.low)}])"}],
            "mark": {"type": "area", "opacity": 0.14, "tooltip": None, "aria": False}, "encoding": {**common, **band},
        })  # fmt: skip
    line: Spec = {**common, "y": y}
    if chart.dashed:
        line["strokeDash"] = {
            "condition": {"test": f"datum[{json.dumps(chart.dashed)}]", "value": [5, 4]}, "value": [1, 0],
        }  # fmt: skip
        line["detail"] = [*([line["detail"]] if "detail" in line else []), {"field": chart.dashed, "type": "nominal"}]
    thin = chart.size is not None
    if thin:
        assert chart.size is not None
        line["strokeWidth"] = {"field": chart.size.column, "type": "quantitative", "scale": None, "legend": None}
        line["opacity"] = {
            "condition": {"test": f"datum[{json.dumps(chart.size.column)}] > 1", "value": 1},
            "value": 0.4,
        }
    mark = {"type": "line", "strokeWidth": 2, "interpolate": "linear", "point": _is_sparse(chart)}
    layers.append({"mark": mark, "encoding": line})
    layers += _rules(chart)
    near = {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}
    layers.append({
        "params": [{"name": "near", "select": near}],
        "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
        "encoding": {
            **common, "y": y, "tooltip": _tooltip(chart, chart.low, chart.high, chart.detail),
            "opacity": {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0},
        },
    })  # fmt: skip
    return {"layer": layers}


def _is_sparse(chart: Chart) -> bool:
    """Whether points of lines are to be seen: where there are few, or a single one, which no stroke shows."""
    parts = [axis.column for axis in [chart.colour] if axis] + [name for name in (chart.detail, chart.dashed) if name]
    sizes = Counter(zip(*(chart.data[name] for name in parts))).values() or [chart.rows]
    return 1 in sizes or max(sizes) <= FEW_POINTS


def _ranked(chart: Chart) -> Spec:
    if chart.rows > MARKS:
        return _long_ranked(chart)
    tooltip = _tooltip(chart, chart.low, chart.high, "samples")
    y = _encoding(chart, chart.y, along="y")
    common: Spec = {"x": _encoding(chart, chart.x, along="x", rows=chart.rows), "color": _colour(chart)}
    layers: list[Spec] = []
    if chart.low:
        bounds = {**common, "y": {**y, "field": chart.low}, "y2": {"field": chart.high}, "tooltip": tooltip}
        bounds["opacity"] = _picked(1, 0.35)
        layers.append({"mark": {"type": "rule", "strokeWidth": 2, "aria": False}, "encoding": bounds})
    dots = {**common, "y": y, "tooltip": tooltip, "size": _picked(190, 44 if chart.rows <= 100 else 16)}
    layers.append({"mark": {"type": "circle", "opacity": 1}, "encoding": dots})
    return {"layer": [*layers, *_rules(chart)]}


def _long_ranked(chart: Chart) -> Spec:
    """One line and one band for all, as quick to draw as a short one."""
    assert chart.colour is not None
    y, group = _encoding(chart, chart.y, along="y"), [chart.colour.column]
    place = [  # in its own group, as a share of it: groups are of unlike sizes
        {"joinaggregate": [{"op": "count", "as": "of"}], "groupby": group},
        {"window": [{"op": "row_number", "as": "place"}], "groupby": group},
        {"calculate": "(datum.place - 1) / max(datum.of - 1, 1)", "as": "place"},
    ]
    axis = {"grid": False, "format": "%"}
    common: Spec = {
        "x": {"field": "place", "title": chart.x.title, "type": "quantitative", "axis": axis},
        "color": _colour(chart),
    }
    band = {**common, "y": {**y, "field": chart.low}, "y2": {"field": chart.high}}
    layers: list[Spec] = (
        [{"mark": {"type": "area", "opacity": 0.2, "aria": False}, "encoding": band}] if chart.low else []
    )
    line = {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": {**common, "y": y}}
    return {"transform": place, "layer": [*layers, line, *_rules(chart)]}


def _points(chart: Chart) -> Spec:
    encoding: Spec = {
        "x": _encoding(chart, chart.x, along="x"),
        "y": _encoding(chart, chart.y, along="y"),
        "stroke": _colour(chart),
        "size": _picked(260, 70 if chart.rows <= 200 else 26),
        "tooltip": _tooltip(chart, chart.hollow, "samples"),
    }
    fill = _colour(chart)
    if chart.hollow:
        fill = {"condition": {"test": f"datum[{json.dumps(chart.hollow)}]", "value": "var(--paper)"}, **_colour(chart)}
    for axis in ("x", "y"):
        encoding[axis]["axis"] = {**encoding[axis]["axis"], "grid": True}
    mark = {"type": "point", "shape": "circle", "strokeWidth": 1.8, "fillOpacity": 0.8}
    return {"layer": [*_rules(chart), {"mark": mark, "encoding": {**encoding, "fill": fill}}]}


def _bubbles(chart: Chart) -> Spec:
    assert chart.size is not None
    number = len(set(chart.data[chart.x.column]))
    encoding: Spec = {
        "x": _encoding(chart, chart.x, along="x", rows=number),
        "y": _encoding(chart, chart.y, along="y", rows=len(set(chart.data[chart.y.column]))),
        "size": {
            "field": chart.size.column, "title": chart.size.title, "type": "quantitative",
            "scale": {"range": [0, 240 if number <= 40 else 90]}, "legend": None,
        },
        "color": _colour(chart),
        "tooltip": _tooltip(chart),
        "opacity": _picked(1, 0.75),
    }  # fmt: skip
    return {"mark": {"type": "circle"}, "encoding": encoding}


def _heat(chart: Chart) -> Spec:
    assert chart.colour is not None
    sizes = [len(set(chart.data[axis.column])) for axis in (chart.x, chart.y)]
    x = _encoding(chart, chart.x, along="x", rows=sizes[0])
    y = _encoding(chart, chart.y, along="y", rows=sizes[1])
    for one, axis in ((x, chart.x), (y, chart.y)):
        if axis.kind != "name":  # rounds, say: one column for each value
            one |= {"type": "ordinal", "axis": {"labelOverlap": True, "labelAngle": 0, "ticks": False}}
            one.pop("scale", None)
        one["scale"] = {**one.get("scale", {}), "padding": 0}
    encoding: Spec = {"x": x, "y": y, "color": _colour(chart), "tooltip": _tooltip(chart)}
    if not chart.written:
        return {"mark": {"type": "rect"}, "encoding": encoding}
    column = chart.colour.column
    light = f"datum[{json.dumps(column)}] > {sum(_bounds(chart, chart.colour)) / 2}"
    number = {"field": column, "type": "quantitative", "format": _format(chart.colour)}
    ink = {"condition": {"test": light, "value": "#000000"}, "value": "#ffffff"}
    text = {"mark": {"type": "text", "aria": False}, "encoding": {"x": x, "y": y, "text": number, "color": ink}}
    return {"layer": [{"mark": {"type": "rect"}, "encoding": encoding}, text]}


def _bars(chart: Chart) -> Spec:
    y = _encoding(chart, chart.y, along="y", stack="zero")
    y["scale"] = {"zero": True}
    encoding: Spec = {
        "x": _encoding(chart, chart.x, along="x", rows=len(set(chart.data[chart.x.column]))),
        "y": y,
        "color": _colour(chart),
        "tooltip": _tooltip(chart),
        "opacity": _picked(1, 0.9),
    }
    if chart.x.kind != "name":
        encoding["x"] |= {"type": "ordinal", "axis": {"labelOverlap": True, "labelAngle": 0}, "scale": {}}
    return {"layer": [{"mark": {"type": "bar", "cornerRadiusEnd": 1}, "encoding": encoding}, *_rules(chart)]}


def _forest(chart: Chart) -> Spec:
    x, tooltip = _encoding(chart, chart.x, along="x"), _tooltip(chart, chart.low, chart.high)
    x["axis"] = {**x["axis"], "grid": True}
    y = _encoding(chart, chart.y, along="y", rows=chart.rows)
    y["axis"] = {"labelLimit": 260, "ticks": False, "domain": False, "title": None}
    common: Spec = {"y": y, "color": _colour(chart), "tooltip": tooltip}
    bounds = {**common, "x": {**x, "field": chart.low}, "x2": {"field": chart.high}}
    return {
        "layer": [
            *_rules(chart),
            {"transform": [{"filter": f"isValid(datum[{json.dumps(chart.low)}])"}],
             "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.5, "aria": False}, "encoding": bounds},
            {"mark": {"type": "circle", "size": 110, "opacity": 1}, "encoding": {**common, "x": x}},
        ]
    }  # fmt: skip
