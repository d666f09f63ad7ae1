# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: their table, paired differences against a baseline, charts, and the page of all that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import ConfigError, unknown
from fedloom.reports.charts import Axis, Chart, Rule, Switch, thinned
from fedloom.reports.compare import Comparison, Row, compare
from fedloom.reports.facts import Facts
from fedloom.reports.one import measure, tested, words
from fedloom.reports.page import Block, Page, Section, Tile, chart_block, code_block, table_block, text_block
from fedloom.reports.paired import Paired, paired
from fedloom.reports.single import lost_of
from fedloom.reports.statistics import Interval, over_seeds
from fedloom.reports.tables import Cells, as_csv, as_latex, as_markdown
from fedloom.runs.directory import RunDirectory
from fedloom.runs.records import panel

WRITTEN = 64
"""Cells of a sweep in which numbers have room."""
BARS = 300
"""Bars of a method, one for a client and seed."""
DERIVED = ("engine", "device", "threads", "workers", "precision", "convolutions")
"""Options of the machine: a run's config has what was chosen for it, which is no other experiment."""


@dataclass(frozen=True)
class Method:
    """A row of the comparison with its runs, by seed."""

    label: str
    row: Row
    runs: Mapping[int, Facts]

    @property
    def first(self) -> Facts:
        """One of its runs."""
        return next(iter(self.runs.values()))

    def over_seeds(self, of: str) -> Interval | None:
        """The mean, worst tenth or newcomers' mean at the best round, over seeds; None where not all runs have it."""
        found = [_number(facts, of) for facts in self.runs.values()]
        known = [number for number in found if number is not None]
        return over_seeds(known) if len(known) == len(found) and known else None

    @property
    def updates(self) -> float:
        """How often clients were asked, on average over the runs."""
        return float(np.mean([sum(record["clients"] for record in facts.records) for facts in self.runs.values()]))


@dataclass(frozen=True)
class Several:
    """Runs side by side."""

    comparison: Comparison
    methods: Sequence[Method]
    baseline: Method

    @property
    def others(self) -> list[Method]:
        """All but the baseline."""
        return [method for method in self.methods if method is not self.baseline]

    def paired(self, who: str = "participants") -> list[Paired]:
        """Every other method against the baseline; nothing for runs that are not of one federation."""
        if self.comparison.unlike:
            return []
        base = self.baseline
        found = [paired(m.label, m.runs, base.label, base.runs, who) for m in self.others]
        return [one for one in found if one is not None]

    def verdicts(self) -> list[str]:
        """What the runs say of the methods, and no more."""
        pairs = sorted(self.paired(), key=lambda one: -one.interval.mean)
        found = [one.sentence() for one in pairs]
        if found and any(len(method.runs) < 2 for method in self.methods):
            found.append("One seed: nothing is said about the methods, only about these runs. `--seeds 5` shows more.")
        return found

    @property
    def metrics(self) -> list[str]:
        """The metric; several where the runs have not the same, which have no axis in common."""
        return list(dict.fromkeys(words(method.row.metric) for method in self.methods))

    @property
    def share(self) -> bool:
        """Whether the metric is a share of the samples."""
        return len(self.metrics) == 1 and self.baseline.first.is_share


def several(paths: Iterable[Path | str], baseline: str | None = None) -> Several:
    """The runs at ``paths``; ``baseline`` names a row by its method or its label, and is the first one without."""
    comparison = compare(paths)
    labels = [Facts.read(RunDirectory.open(row.runs[0])).name for row in comparison.rows]
    # those that differ in the machine alone need its options to be told apart
    for options_of in (_own, _of_machine):
        labels = [_label(name, labels, options_of(row)) for name, row in zip(labels, comparison.rows)]
    methods = [
        Method(label, row, {seed: Facts.read(RunDirectory.open(path)) for seed, path in zip(row.seeds, row.runs)})
        for label, row in zip(labels, comparison.rows)
    ]
    return Several(comparison, methods, _baseline(methods, baseline))


def _label(name: str, names: Sequence[str], options: Mapping[str, Any]) -> str:
    """The name, with its options where others have the same."""
    if names.count(name) < 2 or not options:
        return name
    return f"{name}, {', '.join(f'{words(option)} {value}' for option, value in options.items())}"


def _baseline(methods: Sequence[Method], name: str | None) -> Method:
    if name is None:
        return methods[0]

    def plain(text: str) -> str:
        return text.replace(" ", "").lower()

    # a label first: the method of one row can be the label of another
    found = [method for method in methods if plain(method.label) == plain(name)]
    found = found or [method for method in methods if plain(method.row.method) == plain(name)]
    if not found:
        raise unknown("baseline", name, [method.row.method for method in methods])
    if len(found) > 1:
        raise ConfigError(
            f"--baseline {name} is {len(found)} rows: {'; '.join(m.label for m in found)}. Give one of these."
        )
    return found[0]


def _number(facts: Facts, of: str) -> float | None:
    scores = facts.unseen() if of == "unseen" else facts.scores(facts.shown)
    if scores is None:
        return None
    who = "unseen" if of == "unseen" else "participants"
    return facts.of_all(scores, who, "_worst10" if of == "worst" else "")


# the table


def cells(found: Several) -> Cells:
    """The comparison as texts: a row for each method."""
    pairs = {one.method: one for one in found.paired()}
    share, base = found.share, found.baseline.label
    options = any(_own(method.row) for method in found.methods)
    metric = f"test {' or '.join(found.metrics)}{', %' * share}"
    columns = ["method", *(["options"] if options else []), "seeds", metric, "worst tenth", "newcomers",
               f"difference to {base}", "clients that lose", "MB", "seconds"]  # fmt: skip
    rows = []
    for method in found.methods:
        one = pairs.get(method.label)
        own = ", ".join(f"{words(name)} {value}" for name, value in _own(method.row).items())
        difference = (
            "baseline"
            if method is found.baseline
            else "–"
            if one is None
            else _interval(one.interval, share, sign=True)
        )
        rows.append([
            method.label, *([own] if options else []), str(len(method.runs)),
            *(_interval(method.over_seeds(of), share) for of in ("mean", "worst", "unseen")),
            difference, "–" if one is None else f"{one.lose:.0%}",
            f"{method.row.megabytes.mean:,.1f}", f"{method.row.seconds.mean:,.1f}",
        ])  # fmt: skip
    note = "At the best round by validation; means over clients, then over seeds, ± half of Student's 95% interval."
    return Cells(columns, rows, note)


def _interval(found: Interval | None, share: bool, *, sign: bool = False) -> str:
    if found is None or not isfinite(found.mean):
        return "–"
    scale, digits = (100, 1) if share else (1, 4)
    mean = f"{scale * found.mean:{'+' if sign else ''}.{digits}f}"
    return mean if found.high is None else f"{mean} ± {scale * (found.high - found.mean):.{digits}f}"


def _own(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.options.items() if name not in DERIVED}


def _of_machine(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.options.items() if name in DERIVED}


# charts


def means(found: Several) -> Chart | None:
    """Every method's mean over clients and seeds, with its interval over seeds."""
    if len(found.metrics) > 1:
        return None
    known = [(m, i) for m in found.methods if (i := m.over_seeds("mean")) is not None]
    data: dict[str, list[Any]] = {
        "method": [m.label for m, _ in known], "metric": [i.mean for _, i in known], "low": [i.low for _, i in known],
        "high": [i.high for _, i in known], "seeds": [len(m.runs) for m, _ in known],
    }  # fmt: skip
    told = "Mean over clients and seeds at the best round by validation. Bars: Student's 95% interval over seeds"
    told += "; there is none for a single seed." if any(i.low is None for _, i in known) else "."
    axis = tested(found.baseline.first)
    return Chart(
        "means", "The methods", told, "forest", data, axis, Axis("method", "method", "name", order=data["method"]),
        low="low", high="high", titles={"low": "lower bound", "high": "upper bound"}, height=50 + 34 * len(known),
    )  # fmt: skip


def differences(found: Several) -> Chart | None:
    """The paired difference of every other method to the baseline, of participants and of newcomers."""
    groups = {"participants": found.paired(), "newcomers": found.paired("unseen")}
    pairs = [one for some in groups.values() for one in some]
    if not groups["participants"]:
        return None
    intervals = [one.interval for one in pairs]
    data: dict[str, list[Any]] = {
        "of": [who for who, some in groups.items() for _ in some], "method": [one.method for one in pairs],
        **{name: [_scaled(getattr(i, of), found) for i in intervals]
           for name, of in (("difference", "mean"), ("low", "low"), ("high", "high"))},
        "lose": [one.lose for one in pairs], "seeds": [len(one.seeds) for one in pairs],
    }  # fmt: skip
    told = (
        f"Difference to {found.baseline.label}: same clients, same seeds, averaged over clients, then over seeds. "
        "To the right of zero is better. Bars: Student's 95% interval over seeds"
        f"{'; there is none for a single seed' if any(i.low is None for i in intervals) else ''}."
    )
    return Chart(
        "differences", f"Against {found.baseline.label}", told, "forest", data,
        Axis("difference", _difference(found), from_zero=True),
        Axis("method", "method", "name", order=list(dict.fromkeys(data["method"]))), low="low", high="high",
        rules=(Rule("x", 0.0, ""),), only=("of", "participants"),
        switches=(Switch("of", {who: {"only": ("of", who)} for who, some in groups.items() if some}),),
        titles={"low": "lower bound", "high": "upper bound", "lose": "share of clients that lose"},
        height=50 + 34 * len(groups["participants"]),
    )  # fmt: skip


def winners(found: Several) -> Chart | None:
    """Every client's difference, from who loses most to who gains most."""
    pairs = found.paired()[:8]
    if not pairs:
        return None
    data: dict[str, list[Any]] = {name: [] for name in ("rank", "client", "difference", "method", "seed", "who")}
    everybody = 0
    for one in pairs:
        rows = [(float(d), c, s.seed) for s in one.seeds for c, d in zip(s.clients, s.differences)]
        everybody = max(everybody, len(rows))
        for rank, (difference, client, seed) in panel(list(enumerate(sorted(rows), start=1)), BARS):
            who = "loses" if difference < 0 else "gains" if difference > 0 else "same"
            for column, entry in zip(data.values(), (rank, client, _scaled(difference, found), one.method, seed, who)):
                column.append(entry)
    options = {one.method: {"only": ("method", one.method)} for one in pairs}
    losers = "; ".join(
        f"{one.method}: {one.lose:.0%}" + (f", the worst {_points(-one.worst[1], found.share)}" if one.lose else "")
        for one in pairs
    )
    told = f"A bar for each client and seed. A gain of the mean can hide losers. Clients that lose: {losers}."
    if everybody > BARS:
        told += f" Of more than {BARS} bars some are shown, evenly."
    return Chart(
        "winners", f"Who gains and who loses against {found.baseline.label}", told, "bars", data,
        Axis("rank", "clients, from who loses most", "count"),
        Axis("difference", _difference(found)),
        Axis("who", "who", "name", order=["loses", "same", "gains"], colours=(6, 7, 2)),
        switches=(Switch("method", options),),
        only=("method", pairs[0].method), height=240,
    )  # fmt: skip


def _follows(name: str, other: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an option is settled by another: each value of the other comes with one value of it."""
    return len({(repr(own[other]), repr(own[name])) for own in rows}) == len({repr(own[other]) for own in rows})


def _numbered(name: str, values: Sequence[Any]) -> tuple[str, list[float]]:
    """An option as an axis: its title, and its values as numbers, or those after ``dirichlet:``; "" if it is none."""
    kinds, numbers = zip(*(value.rpartition(":")[::2] if isinstance(value, str) else ("", value) for value in values))
    try:
        found = [float(number) for number in numbers if not isinstance(number, bool)]
    except (TypeError, ValueError):
        return "", []
    if len(found) < len(values) or len(set(kinds)) > 1:
        return "", []
    return f"{words(name)}, {kinds[0]}" if kinds[0] else words(name), found


def _scaled(number: float | None, found: Several) -> float | None:
    """As it is drawn: of shares, in percentage points."""
    return None if number is None else 100 * number if found.share else number


def _difference(found: Several) -> str:
    return "difference, percentage points" if found.share else "difference"


def _points(number: float, share: bool) -> str:
    return f"{100 * number:.0f} points" if share else f"{number:.3g}"


def curves(found: Several) -> Chart | None:
    """The test metric of every run, and the mean of each method, against rounds, seconds and megabytes."""
    if len(found.metrics) > 1:
        return None
    axes = {"rounds": Axis("round", "round", "count"), "megabytes": Axis("megabytes", "MB sent, down and up"),
            "seconds": Axis("seconds", "seconds of training")}  # fmt: skip
    data: dict[str, list[Any]] = {n: [] for n in ("method", "run", "round", "seconds", "megabytes", "metric", "width")}
    for method in found.methods:
        lines = []
        for seed, facts in method.runs.items():
            elapsed, name = facts.elapsed(), f"deployed/participants/test/{facts.metric}"
            line = [(r["round"], *elapsed[r["round"]], r["metrics"].get(name)) for r in facts.evaluated]
            lines.append((f"seed {seed}", [row for row in line if row[-1] is not None]))
        shared = set.intersection(*({row[0] for row in line} for _, line in lines)) if lines else set()
        rows = [(run, row, 1.0) for run, line in lines for row in line] if len(lines) > 1 else []
        for number in sorted(shared):
            at = [next(row for row in line if row[0] == number) for _, line in lines]
            rows.append(
                ("mean" if len(lines) > 1 else lines[0][0], tuple(np.mean(np.array(at, dtype=float), axis=0)), 2.5)
            )
        for run, (number, seconds, megabytes, metric), width in rows:
            entries = (method.label, run, int(number), seconds, megabytes, float(metric), width)
            for column, entry in zip(data.values(), entries):
                column.append(entry)
    if not data["round"]:
        return None
    several_seeds = any(len(method.runs) > 1 for method in found.methods)
    told = "Test metric of participants, mean over clients." + (
        " Thin: each seed; bold: their mean." if several_seeds else ""
    )
    return Chart(
        "curves", f"{words(found.baseline.row.metric).capitalize()} on the way", told, "lines", thinned(data, "round"),
        axes["rounds"], measure(found.baseline.first),
        Axis("method", "method", "name", order=[m.label for m in found.methods]), detail="run",
        size=Axis("width", "width"), switches=(Switch("against", {n: {"x": a} for n, a in axes.items()}),),
        height=320,
    )  # fmt: skip


def sweep(found: Several) -> Chart | None:
    """The metric against the option in which runs differ; a table of colours where two do."""
    rows = [(method, _own(method.row)) for method in found.methods]
    names = sorted({name for _, own in rows for name in own})
    if len(rows) < 3 or len(found.metrics) > 1 or not all(set(own) == set(names) for _, own in rows):
        return None
    # what goes with another option, e.g. the bound that noise comes with, is no axis of its own
    settings = [own | {"method": method.row.method} for method, own in rows]
    fixed = [name for name in names if _follows(name, "method", settings)]
    options = [name for name in names if name not in fixed]
    for name in sorted(options, key=lambda name: (len({repr(own[name]) for own in settings}), name)):
        if any(_follows(name, other, settings) for other in options if other != name):
            options.remove(name)
    named = [_numbered(name, [own[name] for _, own in rows]) for name in options]
    titles = [title for title, _ in named]
    if len(options) not in (1, 2) or not all(titles):
        return None
    places = list(zip(*(numbers for _, numbers in named)))
    left = [words(name) for name in names if name not in options and name not in fixed]
    along = f" Along with it changes: {', '.join(left)}." if left else ""
    along += f" Each method has its own: {', '.join(map(words, fixed))}." if fixed else ""
    known = [(m, at, i) for (m, _), at in zip(rows, places) if (i := m.over_seeds("mean")) is not None]
    known.sort(key=lambda one: one[1])
    metric = tested(found.baseline.first)
    if len(options) == 2:
        first, second = titles
        data: dict[str, list[Any]] = {
            "first": [at[0] for _, at, _ in known], "second": [at[1] for _, at, _ in known],
            "metric": [i.mean for *_, i in known], "method": [m.first.name for m, *_ in known],
        }  # fmt: skip
        cells = len({at for _, at, _ in known})
        # methods with a number for the same cell have a table each
        each = {name: {"only": ("method", name)} for name in data["method"]} if cells < len(known) else {}
        return Chart(
            "sweep", f"{first.capitalize()} and {second}", f"Mean over clients and seeds.{along}", "heat", data,
            Axis("first", first), Axis("second", second), metric, written=cells <= WRITTEN, height=280,
            switches=(Switch("method", each),) if each else (), only=("method", data["method"][0]) if each else None,
        )  # fmt: skip
    (option,) = titles
    data = {
        "value": [at[0] for _, at, _ in known], "metric": [i.mean for *_, i in known],
        "low": [i.low for *_, i in known], "high": [i.high for *_, i in known],
        "method": [m.first.name for m, *_ in known],
    }  # fmt: skip
    told = (
        f"Mean over clients and seeds; the band is Student's 95% interval over seeds, where there are several.{along}"
    )
    return Chart(
        "sweep", f"{words(found.baseline.row.metric).capitalize()} against {option}", told, "lines", data,
        Axis("value", option), metric, Axis("method", "method", "name"), low="low", high="high", height=280,
    )  # fmt: skip


CHARTS = {function.__name__: function for function in (means, differences, winners, curves, sweep)}
"""By the name that ``--figure`` takes, with several runs."""


# the page


def page_of(found: Several) -> Page:
    """The page of several runs."""
    table = cells(found)
    verdicts, pairs = found.verdicts(), found.paired()
    base = found.baseline
    blocks = {
        name: chart_block(chart) for name, draw in CHARTS.items() if (chart := draw(found)) is not None and chart.rows
    }
    narrow = {"means", "differences"} <= set(blocks)
    overview: list[Block] = [table_block("table", "All methods", table.columns, table.rows, table.note)]
    overview += [{**blocks[n], "width": "half" if narrow else ""} for n in ("means", "differences") if n in blocks]
    by_client = [blocks["winners"]] if "winners" in blocks else []
    sections = [
        Section("overview", "Side by side", overview),
        Section("pairs", "Client by client", [*by_client, *_pair_table(pairs, found)]),
        Section("curves", "On the way", [blocks[n] for n in ("curves", "sweep") if n in blocks]),
        Section("honest", "How this was compared", [text_block(*_how(found))]),
        Section("copy", "To put into a paper", [
            code_block("LaTeX", as_latex(table), folded=True), code_block("Markdown", as_markdown(table), folded=True),
            code_block("CSV", as_csv(table), folded=True),
        ]),
        Section("runs", "The runs", [table_block("runs", "Directories", ["method", "seed", "best round", "run"], [
            (m.label, seed, facts.shown, str(facts.path)) for m in found.methods for seed, facts in m.runs.items()
        ])]),
    ]  # fmt: skip
    dataset, clients = base.first.dataset, base.first.config.get("clients")
    return Page(
        title=f"{len(found.methods)} methods on {dataset}" if len(found.methods) > 1 else f"{base.label} on {dataset}",
        verdict=verdicts or ["These runs cannot be compared." if found.comparison.unlike else _alone(base)],
        badges=[
            f"{base.first.config.get('partition')}", f"{clients} clients",
            f"seeds {', '.join(map(str, sorted({s for m in found.methods for s in m.runs})))}",
            *([f"baseline: {base.label}"] if found.others else []),
        ],
        warnings=[*_warnings(found), *found.comparison.left_out],
        refusal=found.comparison.unlike,
        tiles=[_tile(method, found.share) for method in found.methods][:6],
        sections=[section for section in sections if section.blocks],
        footer="Made by fedloom from the runs' records; nothing is loaded from a network.",
        clients=sorted({c for one in pairs for seed in one.seeds for c in seed.clients}),
    )  # fmt: skip


def _alone(method: Method) -> str:
    mean, metric = method.over_seeds("mean"), words(method.row.metric)
    unit = "%" if method.first.is_share else ""
    value = _interval(mean, method.first.is_share) + unit
    seeds = f"{len(method.runs)} seed{'s' * (len(method.runs) != 1)}"
    return f"{method.label} reaches a mean test {metric} of {value} over {seeds}."


def _tile(method: Method, share: bool) -> Tile:
    mean, unseen = method.over_seeds("mean"), method.over_seeds("unseen")
    roster = method.first.roster
    held_out = roster is not None and any(member.unseen for member in roster.members)
    note = f"newcomers {_interval(unseen, share)}" if unseen else "no model for newcomers" * held_out
    return Tile(method.label, _interval(mean, share) + "%" * share, note)


def _pair_table(pairs: Sequence[Paired], found: Several) -> list[Block]:
    rows = []
    for one in pairs:
        for seed in one.seeds:
            inner = _interval_of_clients(one, seed.seed, found.share)
            lose = float((seed.differences < 0).mean())
            rows.append(
                (one.method, seed.seed, len(seed.clients), _sized(seed.mean, found.share), inner, f"{lose:.0%}")
            )
    if not rows:
        return []
    note = (
        "The interval is a bootstrap over the clients of that seed: what other clients of the kind would make of it, "
        "with the training as it went. Clients of one run share its training: it understates what another seed changes."
    )
    columns = ["method", "seed", "clients", "mean difference", "95% over clients", "clients that lose"]
    return [table_block("seeds", f"Seed by seed, against {found.baseline.label}", columns, rows, note)]


def _interval_of_clients(one: Paired, number: int, share: bool) -> str:
    from fedloom.reports.statistics import over_clients

    found = over_clients(next(s for s in one.seeds if s.seed == number).differences.tolist())
    if found.low is None or found.high is None:
        return "–"
    return f"{_sized(found.low, share)} to {_sized(found.high, share)}"


def _sized(number: float, share: bool) -> str:
    return f"{100 * number:+.1f}" if share else f"{number:+.4g}"


def _warnings(found: Several) -> list[str]:
    told = caveats(found)
    if any(len(method.runs) < 2 for method in found.methods):
        told.append("With one seed nothing is said about a method: another seed may turn the order round.")
    late = [
        m.label for m in found.methods for f in m.runs.values() if f.evaluated and f.shown == f.evaluated[-1]["round"]
    ]
    if late:
        listed = "; ".join(dict.fromkeys(late))
        told.append(f"Best at the last round, with one seed at least, so that more rounds may raise them: {listed}.")
    return told


def caveats(found: Several) -> list[str]:
    """What keeps a difference of the rows from being one of the methods."""
    told = []
    if len({len(method.runs) for method in found.methods}) > 1:
        told.append("The methods have unequal numbers of seeds; a difference is of the seeds that both have.")
    scored = {m.label: [s for f in m.runs.values() if (s := f.scores(f.shown)) is not None] for m in found.methods}
    lost = {label: sum(map(lost_of, scores)) for label, scores in scored.items()}
    if any(lost.values()):
        listed = "; ".join(f"{label}: {number}" for label, number in lost.items() if number)
        told.append(
            f"Clients whose score is no finite number: {listed}. Differences are of the others, and flatter these "
            "methods."
        )
    updates = {method.label: method.updates for method in found.methods}
    if max(updates.values()) > 1.05 * min(updates.values()):
        listed = "; ".join(f"{label}: {number:,.0f}" for label, number in updates.items())
        told.append(f"The methods did not ask clients equally often: {listed}.")
    early = {f"{m.label} ({f.stopped})": None for m in found.methods for f in m.runs.values() if f.stopped}
    if early:
        told.append(f"Ended before the last round: {'; '.join(early)}.")
    missing = [m.label for m in found.others if m.label not in {one.method for one in found.paired()}]
    if missing and not found.comparison.unlike:
        told.append(
            f"No seed and clients in common with {found.baseline.label}, hence no difference: {'; '.join(missing)}."
        )
    return told


def _how(found: Several) -> list[str]:
    n = min(len(method.runs) for method in found.methods)
    scores = found.baseline.first.scores(found.baseline.first.shown)
    panel_only = scores is not None and len(scores.clients) < scores.everybody
    return [
        "Every run is read at the round that was best on its participants' validation data. Test data choose nothing.",
        "With one seed, all methods have the same clients with the same samples; differences are taken by client "
        "before anything is averaged. The interval over seeds is Student's, and is the one that speaks of the method"
        f"{f'; with {n} seeds it is wide on purpose' if 1 < n < 5 else ''}. Intervals of several methods are each by "
        "itself, with no correction for their number.",
        "A mean over clients counts each client once, whatever its number of samples.",
        *(["Differences are of the clients whose scores are recorded, evenly from the roster."] if panel_only else []),
    ]
