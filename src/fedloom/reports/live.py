# SPDX-License-Identifier: Apache-2.0
"""What a page says of a run that goes on: how far it is, when it will be done, who answered, what looks wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from fedloom.reports import single
from fedloom.reports.charts import Axis, Chart, thinned
from fedloom.reports.facts import Facts
from fedloom.reports.follow import Follower
from fedloom.reports.one import measure
from fedloom.reports.page import Block, Page, Section, chart_block, table_block
from fedloom.reports.single import duration
from fedloom.runs.records import NO_ANSWER

STALLED = 5.0
"""A round that takes so many times the usual one has stalled, after ``PATIENT`` seconds at least."""
PATIENT = 30.0
RECENT = 10
"""Rounds whose time says how long the next ones take."""
NEWEST = 200
"""Clients that are listed."""


def page_of(runs: Sequence[Follower], now: float | None = None) -> Page:
    """The page of runs that go on; of a single one, all that its report has, with news in front."""
    now = time.time() if now is None else now
    if len(runs) == 1:
        (run,) = runs
        facts = run.facts
        page = single.page_of(facts, quick=True)
        sections = [Section("now", "Now", _who(facts)), *page.sections] if facts.records else page.sections
        progress = {"done": facts.rounds, "planned": facts.planned, "sentences": sentences(facts, run.seen, now)}
        alarmed = [*alerts(facts, run.seen, now), *(text for text in page.warnings if "has not finished" not in text)]
        return replace(page, sections=sections, progress=progress, warnings=alarmed)
    found = [(run, run.facts) for run in runs]
    rows = [
        (
            facts.name, str(run.path), f"{facts.rounds} of {facts.planned}", _state(facts, run.seen, now),
            single.value(facts, _newest(facts)), facts.local_losses()[-1][1] if facts.local_losses() else None,
            len(facts.dropped()), " ".join([*alerts(facts, run.seen, now), *single.came_apart(facts)]),
        )
        for run, facts in found
    ]  # fmt: skip
    columns = ["method", "run", "rounds", "state", "newest test", "newest loss", "dropped", "alerts"]
    chart = _curves([facts for _, facts in found])
    blocks: list[Block] = [table_block("runs", "The runs", columns, rows), *([chart_block(chart)] if chart else [])]
    done = sum(facts.rounds for _, facts in found)
    planned = sum(facts.planned for _, facts in found)
    going = sum(not facts.finished for _, facts in found)
    return Page(
        title=f"{len(runs)} runs",
        verdict=[f"{going} of {len(runs)} runs go on." if going else f"All {len(runs)} runs have finished."],
        sections=[Section("runs", "Side by side", blocks)],
        progress={"done": done, "planned": planned, "sentences": [f"{done} of {planned} rounds of all runs are done."]},
        footer="Read from the runs' records as they are written; nothing can be changed from here.",
    )


def sentences(facts: Facts, seen: float, now: float) -> list[str]:
    """How far the run is and when it will be done."""
    if facts.finished:
        return [f"The run has ended: {facts.stopped}." if facts.stopped else f"All {facts.planned} rounds are done."]
    if not facts.records:
        return ["The first round is not done yet."]
    found = [f"{facts.rounds} of {facts.planned} rounds are done."]
    left = facts.planned - facts.rounds
    if facts.summary:
        return [*found, "The run was stopped; `fedloom resume` goes on with it."]
    if left > 0:
        found.append(f"About {duration(left * _usual(facts))} to go, as the last rounds went.")
    found.append(f"The last record came {duration(max(0.0, now - seen))} ago.")
    return found


def alerts(facts: Facts, seen: float, now: float) -> list[str]:
    """What somebody should look at."""
    found = []
    going = bool(facts.records) and not facts.summary and facts.rounds < facts.planned
    if going and now - seen > max(PATIENT, STALLED * _usual(facts)):
        found.append(
            f"Round {facts.rounds + 1} has stalled: nothing came for {duration(now - seen)}, and a round takes "
            f"{duration(_usual(facts))}. The process may be gone, or waits for clients."
        )
    poisoned = [one for one in facts.dropped() if "NaN" in str(one["reason"])]
    if poisoned:
        who = ", ".join(dict.fromkeys(str(one["client"]) for one in poisoned[-5:]))
        found.append(f"Replies with NaN or Inf were refused ({len(poisoned)} so far), the last ones of: {who}.")
    for record in list(facts.records)[-RECENT:]:
        found += [f"Round {record['round']} was done again: {text}" for text in record.get("repeated", ())]
        found += [f"Refused before round {record['round']}: {text}" for text in record.get("refused", ())]
    return found


def _usual(facts: Facts) -> float:
    """Seconds of a round with its evaluation, of late."""
    last = list(facts.records)[-RECENT:]
    return median(r["seconds"]["round"] or 0.0 for r in last) + sum(
        r["seconds"].get("evaluation") or 0.0 for r in last
    ) / max(len(last), 1)


def _state(facts: Facts, seen: float, now: float) -> str:
    if facts.finished:
        return facts.stopped or "finished"
    if facts.summary:
        return "stopped"
    return f"about {duration((facts.planned - facts.rounds) * _usual(facts))} to go" if facts.records else "began"


def _newest(facts: Facts) -> float | None:
    name = f"deployed/participants/test/{facts.metric}"
    return facts.evaluated[-1]["metrics"].get(name) if facts.evaluated else None


def _who(facts: Facts) -> list[Block]:
    """Every client: when it was asked last, what came of it."""
    last: dict[str, list[Any]] = {}
    for record in facts.records:
        told = record.get("cohort") or {"client": []}
        seconds = record["seconds"].get("clients") or [None] * len(told["client"])
        refused = {one["client"]: one["reason"] for one in record.get("dropped", ())}
        asked = dict(zip(told["client"], seconds)) | {c: None for c in refused if c not in told["client"]}
        for client, taken in asked.items():
            entry = last.setdefault(client, [0, 0, 0, None, ""])
            entry[0], entry[1] = record["round"], entry[1] + 1
            entry[2] += client in refused
            entry[3] = taken if taken is not None else entry[3]
            entry[4] = refused.get(client, "")
    members = [m.id for m in facts.roster.members] if facts.roster else list(last)
    rows = []
    for client in members:
        if client in last:
            round, asked, dropped, taken, reason = last[client]
            state = "not asked" if round < facts.rounds else _came_of(reason)
            rows.append((client, state, round, asked, dropped, taken, reason))
        else:
            unseen = client in facts.members and facts.members[client].unseen
            rows.append((client, "newcomer" if unseen else "never asked", None, 0, 0, None, ""))
    order = ("late", "dropped", "answered", "not asked", "never asked", "newcomer")
    rows.sort(key=lambda row: (order.index(row[1]), not row[-1]))
    columns = ["client", f"in round {facts.rounds}", "last asked", "times asked", "times dropped", "seconds", "why not"]
    note = "Those who did not answer in time first, then those whose replies were not used; why, when last asked."
    if len(rows) > NEWEST:
        note += f" Shown are {NEWEST} of {len(rows):,} clients."
    return [table_block("who", "Who answered", columns, rows[:NEWEST], note)]


def _came_of(reason: str) -> str:
    return "answered" if not reason else "late" if NO_ANSWER in reason else "dropped"


def _curves(runs: Sequence[Facts]) -> Chart | None:
    data: dict[str, list[Any]] = {"round": [], "run": [], "metric": []}
    for facts in runs:
        name = f"deployed/participants/test/{facts.metric}"
        for record in facts.evaluated:
            value = record["metrics"].get(name)
            if value is not None:
                for column, entry in zip(data.values(), (record["round"], str(facts.path), value)):
                    column.append(entry)
    if not data["round"]:
        return None
    axis = measure(runs[0], title="test metric")
    return Chart(
        "curves", "On the way", "Test metric of participants, mean over clients.", "lines", thinned(data, "round"),
        Axis("round", "round", "count"), axis, Axis("run", "run", "name"), height=300,
    )  # fmt: skip
