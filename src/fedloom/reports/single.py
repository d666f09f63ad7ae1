# SPDX-License-Identifier: Apache-2.0
"""The page of one run: a sentence, warnings, numbers, charts, what left each client, how to repeat it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, fields
from math import isfinite
from typing import Any

import numpy as np

from fedloom.reports import one
from fedloom.reports.charts import Chart
from fedloom.reports.facts import Facts, Scores
from fedloom.reports.left_out import left_out
from fedloom.reports.one import FEW_SAMPLES, pooled_samples, words
from fedloom.reports.page import (
    Block,
    Page,
    Section,
    Tile,
    chart_block,
    code_block,
    facts_block,
    image_block,
    table_block,
    text_block,
)
from fedloom.reports.privacy import statement
from fedloom.reports.statistics import wilson
from fedloom.robust import TRIGGERED
from fedloom.runs.directory import ESTIMATES
from fedloom.runs.options import PYTHON_DATA, RunOptions
from fedloom.runs.records import AUDIT

DIVERGED = 3.0
"""A loss of so many times the smallest one is a training that has come apart."""

LISTED = 500
"""Rows of a table of clients."""

SOFTWARE = """@software{fedloom,
  title={fedloom: federated learning with a model of its own for every client},
  year={2026}, license={Apache-2.0}}"""


def page_of(facts: Facts, *, quick: bool = False) -> Page:
    """The page of a run. ``quick``: without what takes seconds to compute."""
    sections = [
        Section("curves", "Training", _drawn(facts, "curves", ("loss", "half"), ("histogram", "half"))),
        Section("clients", "Clients", [*_drawn(facts, "clients", "split")]),
        Section("embeddings", "Embeddings", _embeddings(facts, quick)),
        Section(
            "method",
            "The method",
            [*_drawn(facts, "weights", "effective", "networks", "estimates"), *_decisions(facts)],
        ),
        Section("newcomers", "Newcomers", _drawn(facts, "newcomers", "admission", "mix")),
        Section("cost", "Cost", [*_drawn(facts, ("time_by_part", "half"), ("traffic", "half")), *_dropped(facts)]),
        Section("rule", "Whom the rule left out", _left_out(facts)),
        Section("privacy", "What left each client", _left(facts)),
        Section("attacks", "Attacks", _attacks(facts)),
        Section("repeat", "To repeat it", _repeat(facts)),
    ]
    return Page(
        title=f"{facts.name} on {facts.dataset}",
        verdict=verdict(facts),
        badges=_badges(facts),
        warnings=warnings(facts),
        tiles=_tiles(facts),
        sections=[section for section in sections if section.blocks],
        footer=f"{facts.path} · made by fedloom from the run's records; nothing is loaded from a network.",
        clients=[m.id for m in facts.roster.members] if facts.roster else [],
    )


def value(facts: Facts, number: float | None) -> str:
    """The metric as people write it."""
    if number is None or not isfinite(number):
        return "–"
    return f"{number:.1%}" if facts.is_share else f"{number:.4g}"


def lost_of(scores: Scores) -> int:
    """How many clients have a score that is no finite number."""
    return int((~np.isfinite(scores.metric)).sum())


def verdict(facts: Facts) -> list[str]:
    """What came of the run, in sentences."""
    scores = facts.scores(facts.shown)
    if scores is None:
        return [f"{facts.rounds} of {facts.planned} rounds are done, and nothing is evaluated yet."]
    metric, mean, worst = words(facts.metric), facts.of_all(scores), facts.of_all(scores, of="_worst10")
    clients = f"{scores.everybody:,} client{'s' * (scores.everybody != 1)}"
    reaches = f"{facts.name} reaches" if facts.finished else f"So far, {facts.name} has"
    found = [
        f"{reaches} a mean test {metric} of {value(facts, mean)} over {clients}; "
        f"the tenth that fares worst has {value(facts, worst)}."
    ]
    how = "chosen by validation" if facts.best else "the last one that was evaluated, as nothing was validated"
    more = f"These are the numbers of round {facts.shown} of {facts.planned}, {how}."
    unseen = facts.unseen()
    if unseen is not None:
        when = "" if unseen.round == facts.shown else f" (round {unseen.round})"
        more += (
            f" {unseen.everybody:,} client{'s' * (unseen.everybody != 1)} that took no part: "
            f"{value(facts, facts.of_all(unseen, 'unseen'))}{when}."
        )
    elif "reason" in (facts.summary.get("unseen") or {}):
        more += f" {facts.summary['unseen']['reason']}"
    return [*found, more, *([_sentence(facts.about.idea)] if facts.about.idea else [])]


def warnings(facts: Facts) -> list[str]:
    """What a reader should know before believing a number."""
    found, scores = [], facts.scores(facts.shown)
    if not facts.finished:
        found.append(f"The run has not finished: {facts.rounds} of {facts.planned} rounds are done.")
    if facts.stopped:
        found.append(f"The run ended before its last round: {facts.stopped}.")
    last = facts.evaluated[-1]["round"] if facts.evaluated else 0
    if facts.best and facts.finished and facts.shown == last and len(facts.evaluated) > 1:
        found.append("The best round is the last one: more rounds may raise the result.")
    if scores is not None:
        lost = lost_of(scores)
        if lost:
            found.append(
                f"{lost} of {len(scores.clients)} clients have a {words(facts.metric)} that is no finite number: their "
                "models came apart, and a mean over all has no value."
            )
        recorded = " whose scores are recorded" if len(scores.clients) < scores.everybody else ""
        silent = int((scores.samples == 0).sum())
        if silent:
            found.append(
                f"{silent:,} of {len(scores.clients):,} clients{recorded} gave no usable reply when they were tried: "
                "their scores count as the worst there are."
            )
        few = int(((scores.samples < FEW_SAMPLES) & (scores.samples > 0)).sum())
        if few:
            found.append(
                f"{few:,} of {len(scores.clients):,} clients{recorded} have fewer than {FEW_SAMPLES} test samples: "
                "what is said of one of them by itself says little."
            )
        total = pooled_samples(scores)
        if facts.is_share and total < 1000:
            low, high = wilson(scores.pooled, total)
            found.append(
                f"All test data together are {total} samples, which say no more than that the share of right answers "
                f"lies between {low:.1%} and {high:.1%}."
            )
    found += came_apart(facts)
    dropped = facts.dropped()
    if dropped:
        who = len({one["client"] for one in dropped})
        found.append(f"Replies were not used: {len(dropped)}, of {who} of the clients. The reasons are under Cost.")
    found.append("This is one run with one seed: it says what came of it, and nothing about the method.")
    notes = [*facts.summary.get("notes", ()), *(note for record in facts.records for note in record.get("notes", ()))]
    return [*found, *dict.fromkeys(_sentence(str(note)) for note in notes)]


def came_apart(facts: Facts) -> list[str]:
    """A sentence where the training loss says that nothing is learned any more."""
    losses = [loss for _, loss in facts.local_losses()]
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(losses) or (known and known[-1] > DIVERGED * max(min(known), 1e-12) and known[-1] > known[0]):
        return ["Training came apart: the training loss is no number, or far above what it was. Lower the rates."]
    return []


def _sentence(text: str) -> str:
    """With a capital letter, except for a name such as pFedHN, and a full stop."""
    first = text.split(" ", 1)[0]
    return (text[:1].upper() + text[1:] if first.islower() else text) + ("" if text.endswith((".", "!", "?")) else ".")


def _badges(facts: Facts) -> list[str]:
    config, env = facts.config, facts.environment
    roster = facts.roster
    unseen = sum(member.unseen for member in roster.members) if roster else 0
    given = [
        "ended early" if facts.stopped else "finished" if facts.finished else "stopped" if facts.summary else "running",
        f"seed {config.get('seed')}",
        f"{config.get('partition')}",
        f"{len(roster.participants):,} clients" if roster else "",
        f"{unseen} unseen" if unseen else "",
        f"{float(config.get('cohort') or 0):g} a round",
        f"{config.get('engine')} on {env.get('device', config.get('device'))}",
        *(
            f"model {name}"
            for name in dict.fromkeys(str(m.model) for m in (roster.members if roster else ()) if m.model)
        ),
    ]
    return [text for text in given if text][:12]


def _tiles(facts: Facts) -> list[Tile]:
    scores, unseen = facts.scores(facts.shown), facts.unseen()
    seconds, megabytes = facts.elapsed().get(facts.rounds, (0.0, 0.0))
    metric = words(facts.metric)
    found = []
    if scores is not None:
        mean, pooled, worst = (value(facts, facts.of_all(scores, of=of)) for of in ("", "_pooled", "_worst10"))
        found += [
            Tile(f"mean test {metric}", mean, f"{pooled} with every sample once"),
            Tile("worst tenth", worst, "mean of the clients that fare worst"),
        ]
    if unseen is not None:
        found.append(
            Tile(
                "newcomers",
                value(facts, facts.of_all(unseen, "unseen")),
                f"{unseen.everybody} clients, round {unseen.round}",
            )
        )
    door = facts.scores(facts.shown, split=TRIGGERED)
    if door is not None:
        found.append(Tile("back door", f"{door.pooled:.1%}", "of triggered test samples are taken for class 0"))
    found.append(Tile("best round" if facts.best else "round", f"{facts.shown}", f"of {facts.planned}"))
    found.append(
        Tile(
            "training",
            duration(seconds),
            f"{facts.summary['evaluation_seconds']:.1f} s evaluation" if "evaluation_seconds" in facts.summary else "",
        )
    )
    found.append(Tile("sent", f"{megabytes:,.1f} MB", "down and up, training"))
    return found


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _drawn(facts: Facts, *names: str | tuple[str, str]) -> list[Block]:
    """The blocks of those charts that the records have something for; a width can stand beside a name."""
    found = []
    for given in names:
        name, width = given if isinstance(given, tuple) else (given, "")
        chart = one.CHARTS[name](facts)
        if chart is not None and chart.rows:
            found.append({**chart_block(chart), "width": width})
    return found


def _embeddings(facts: Facts, quick: bool) -> list[Block]:
    chart: Chart | None = one.embeddings(facts, quick=quick)
    return [chart_block(chart)] if chart else []


def _decisions(facts: Facts) -> list[Block]:
    found = facts.estimates()
    if found is None:
        return []
    rows = list(zip(*(found[name] for name in ("client", "samples", "labelled", "decision", "weight"))))
    note = (
        "corrected: the label shares that were found are used; shrunk: with caution, as if from fewer samples; plain: "
        "the scores fit no mixture of the federation's classes, and the plain predictor is kept."
    )
    if len(rows) > LISTED:
        note += f" Listed are {LISTED} of {len(rows):,} newcomers, the first ones; {ESTIMATES} has all."
    counts = Counter(found["decision"])
    told = ", ".join(f"{number} {name}" for name, number in counts.most_common())
    return [
        table_block(
            "decisions",
            f"What newcomers decided: {told}",
            ["client", "samples", "labelled", "decision", "weight"],
            rows[:LISTED],
            note,
        )
    ]


def _dropped(facts: Facts) -> list[Block]:
    dropped = facts.dropped()
    if not dropped:
        return []
    counts = Counter((one["client"], one.get("program", ""), one["reason"]) for one in dropped)
    last = {(one["client"], one.get("program", ""), one["reason"]): one["round"] for one in dropped}
    rows = [(*key, number, last[key]) for key, number in counts.most_common(LISTED)]
    return [
        table_block(
            "dropped", "Replies that were not used", ["client", "program", "reason", "times", "last round"], rows
        )
    ]


def _left(facts: Facts) -> list[Block]:
    """What the method says that travels, and what was counted."""
    blocks: list[Block] = []
    if facts.about.travels:
        items = [(name, text.replace("``", "")) for name, text in facts.about.travels.items()]
        blocks.append(facts_block(items))
    told: dict[tuple[str, str], int] = {}
    asked = Counter(client for r in facts.records for client in r.get("cohort", {}).get("client", ()))
    for record in facts.records:
        for program, branches in record.get("told", {}).items():
            for branch, number in branches.items():
                told[program, branch] = told.get((program, branch), 0) + number
    if told:
        total = sum(asked.values()) or 1
        rows = [(p, b, number / 1e6, number / total) for (p, b), number in told.items()]
        note = (
            f"Counted in {sum(asked.values()):,} asks of {len(asked):,} clients. In evaluations each client also tells "
            "three sums: of its losses, of what was right, and of its samples."
        )
        blocks.append(
            table_block(
                "told",
                "What clients told in training",
                ["program", "part of the reply", "MB", "bytes a client and ask"],
                rows,
                note,
            )
        )
    prepared = facts.roster is not None and facts.roster.preparation is not None
    blocks.append(text_block(*statement(facts.config, facts.released, prepared=prepared).sentences))
    return blocks


def _attacks(facts: Facts) -> list[Block]:
    """What ``fedloom audit`` found, with the pictures that are there."""
    found = facts.extras.get(AUDIT, {})
    if not found:
        return []
    rows = [
        (
            name,
            measure["name"],
            *(run[key] for key in ("value", "low", "high", "chance")),
            there["value"],
            there["chance"],
        )
        for name, one in found.items()
        for measure in one["measures"]
        for run, there in [(measure["run"], measure["control"])]
    ]
    columns = ["attack", "measure", "run", "from", "to", "chance", "control", "its chance"]
    note = "From and to: a 95% interval. Chance: what a guess gives. Control: where the attack must succeed."
    blocks = [table_block("audit", "Beside chance and a control", columns, rows, note)]
    told = [
        f"{name}, after round {one['round']}: {one['verdict']} It sees {one['sees']}." for name, one in found.items()
    ]
    blocks.append(text_block(*told))
    for name, png in facts.pictures.items():
        alt = f"Rows of images: what {name} found, and the true samples. How like they are the table says in numbers."
        blocks.append(image_block(f"audit-{name}", f"What {name} reconstructed", png, alt))
    return blocks


def _left_out(facts: Facts) -> list[Block]:
    """How much of whom ``--aggregate`` left out."""
    found = left_out(facts.records, facts.roster)
    if not found:
        return []
    note = (
        "The mean over rounds of what did not count of each reply. Of honest clients, the third whose label shares are "
        "farthest from those of all together is by itself: that a rule is hardest on."
    )
    rows = [(group.who, group.clients, group.share) for group in found]
    return [table_block("left-out", "By honesty and skew", ["clients", "number", "share left out"], rows, note)]


def _repeat(facts: Facts) -> list[Block]:
    environment, path = facts.environment, str(facts.path)
    given = sorted(_told(facts.config).items())
    versions = environment.get("versions") or {}
    items = [
        ("started", environment.get("started")),
        ("command", environment.get("command")),
        (
            "machine",
            f"{environment.get('platform', '')}, {environment.get('cpus', '?')} cores, {environment.get('device', '')}",
        ),
        ("versions", ", ".join(f"{name} {number}" for name, number in versions.items() if number)),
        ("SHA-256 of the config", _digest(facts)),
    ]
    blocks: list[Block] = [
        text_block("Its data were given in Python: give them again, with the options below.")
        if facts.config.get("dataset") == PYTHON_DATA
        else code_block(
            "The same run again", f"fedloom run --config {shlex.quote(path + '/config.yaml')} --out runs/again"
        ),
        table_block(
            "options",
            "Options of the method, and others that are not the defaults",
            ["option", "value"],
            [(name, str(value)) for name, value in given],
        ),
        facts_block([(name, text) for name, text in items if text]),
    ]
    citation = "\n\n".join(text for text in (facts.about.citation, SOFTWARE) if text)
    if facts.about.paper:
        blocks.append(text_block(f"The method: {facts.about.paper}"))
    blocks.append(code_block("To cite it", citation))
    return blocks


def _digest(facts: Facts) -> str:
    from fedloom.runs.checkpoint import digest

    file = facts.path / "config.yaml"
    return digest(file.read_bytes()) if file.is_file() else ""


def _told(config: Any) -> dict[str, Any]:
    """Options whose values are not those of every run, and all of the method's own: their defaults need its code."""
    shared = {f.name: f.default for f in fields(RunOptions) if f.default is not MISSING}
    return {n: v for n, v in config.items() if n != "method" and (n not in shared or v != shared[n])}


def charts_of(facts: Facts) -> Sequence[str]:
    """The names of the figures that this run has something for."""
    return [name for name, draw in one.CHARTS.items() if (chart := draw(facts)) is not None and chart.rows]
