# SPDX-License-Identifier: Apache-2.0
"""The card of a bundle: what it is, what it was trained on, how well it does, what to mind. As JSON, and for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedloom.reports.privacy import statement
from fedloom.runs.directory import PRIVACY, RunDirectory
from fedloom.runs.roster import Roster
from fedloom.training.server import Server

LEVEL = 0.95
"""Of the intervals."""


def card_of(server: Server, directory: RunDirectory, joins: str | None) -> dict[str, Any]:
    """The card of a run; ``joins`` says how newcomers get models."""
    algorithm, roster = server.algorithm, server.roster
    return {
        "title": f"{algorithm.name} on {_named_data(directory)}",
        "method": {"name": algorithm.name, "family": algorithm.family, "citation": algorithm.citation},
        "round": server.round,
        "data": _data(server, directory),
        "samples": {
            "shape": list(roster.input_shape),
            "prepared": _prepared(roster),
            "classes": list(roster.class_names) or roster.num_classes,
            "outputs": roster.num_outputs,
            **({"tokens": roster.tokens.vocabulary, "alphabet": roster.alphabet} if roster.tokens else {}),
        },
        "architectures": architectures(server),
        "metrics": _metrics(server, directory),
        "newcomers": joins,
        "limits": _limits(server, joins),
        "privacy": _privacy(directory, server),
    }


def _prepared(roster: Roster) -> str:
    """How samples are to be given."""
    if roster.preparation is None:
        return "as the federation's were: the same scaling and order of axes"
    if roster.preparation.kind == "images":
        return "raw: bytes from 0 to 255, which are centred and scaled by what is in the bundle"
    names = ", ".join(column.name for column in roster.preparation.columns)
    return f"raw: a table with the columns {names}, by name, which is prepared by what is in the bundle"


def architectures(server: Server) -> list[dict[str, Any]]:
    """The networks of those who took part, each once, in order of first appearance."""
    found: dict[tuple[str | None, int], int] = {}
    for member in server.roster.members:
        if not member.unseen:
            found[member.model, member.size] = found.get((member.model, member.size), 0) + 1
    return [{"name": name, "parameters": size, "clients": number} for (name, size), number in found.items()]


def _named_data(directory: RunDirectory) -> str:
    """The data's name; a path says nothing to others, and may say more than is wanted."""
    from fedloom.data.registry import names

    name = str(directory.config.get("dataset"))
    return name if name in names() else "data of their own"


def _data(server: Server, directory: RunDirectory) -> str:
    config, members = directory.config, server.roster.members
    took, held = (sum(member.unseen is unseen for member in members) for unseen in (False, True))
    where = (
        "on machines of their own" if config.get("engine") == "flower" else f"simulated, dealt by {config['partition']}"
    )
    samples = sum(member.samples["train"] for member in members if not member.unseen)
    out = f"; {held} more were held out" if held else ""
    return (
        f"{_named_data(directory)}: {took} clients took part ({where}) with {samples:,} training samples together{out}."
    )


def _metrics(server: Server, directory: RunDirectory) -> list[dict[str, Any]]:
    """Means over clients on test data, with a t interval over the clients."""
    found = []
    for group, words in (("participants", "clients that took part"), ("unseen", "clients held out of training")):
        lines = [
            line
            for line in directory.scores()
            if tuple(map(line.get, ("model", "group", "split"))) == ("deployed", group, "test")
            and (group == "unseen" or line.get("round") == server.round)
            and any(value is not None for value in line["metric"])
        ]
        if lines:
            values = np.array([value for value in lines[-1]["metric"] if value is not None], dtype=float)
            before = " (without their label shares)" if server.options.adapt != directory.config.get("adapt") else ""
            found.append({"metric": server.setup.task.metric_name, "of": words + before, **_interval(values, server)})
    return found


def _interval(values: np.ndarray, server: Server) -> dict[str, Any]:
    from scipy import stats

    mean, number = float(values.mean()), len(values)
    bounds: tuple[float | None, float | None] = (None, None)
    if number > 1:
        half = float(stats.t.ppf((1 + LEVEL) / 2, number - 1) * values.std(ddof=1) / number**0.5)
        most = 1.0 if server.setup.task.metric_name == "accuracy" else mean + half  # an accuracy ends there
        bounds = (max(0.0, mean - half), min(most, mean + half))
    return {"mean": mean, "low": bounds[0], "high": bounds[1], "level": LEVEL, "clients": number}


def _limits(server: Server, joins: str | None) -> list[str]:
    base = server.algorithm.base or server.algorithm
    limits = [
        "Intervals are over clients of one run: they say how another client of the kind would fare, and nothing of "
        "another run with another seed.",
        "Samples that were prepared or taken in another way than the federation's are outside of what was tried.",
    ]
    if server.roster.num_classes and base.carries_prior:
        limits.append("A participant's model knows which classes its client had; it fits no other client.")
    if joins is None:
        limits.append(f"{base.name} has no model for clients that took no part.")
    return limits


def _privacy(directory: RunDirectory, server: Server) -> list[str]:
    """What was protected, in words, and what was not."""
    options = server.options
    told = [
        "The bundle has no samples, no labels and no memory of any client. Parameters were trained on participants' "
        "data, and can tell something of them.",
    ]
    config, prepared = directory.config | {"adapt": options.adapt}, server.roster.preparation is not None
    kept = statement(config, directory.lines(PRIVACY), prepared=prepared)
    return [*told, *kept.covered, *(sentence for sentence in kept.not_covered if "run directory" not in sentence)]


def as_markdown(card: Mapping[str, Any], digest: str) -> str:
    """The card for people."""
    method, samples = card["method"], card["samples"]
    classes = samples["classes"]
    named = ", ".join(classes) if isinstance(classes, Sequence) else str(classes)
    lines = [
        f"# {card['title']}",
        "",
        f"Bundle `{digest}`, after round {card['round']} of {method['name']}.",
        "",
        "## Data",
        "",
        card["data"],
        f"A sample has the shape {tuple(samples['shape'])}, {samples['prepared']}.",
        f"Classes: {named}." if classes else f"Outputs: {samples['outputs']}.",
        "",
        "## Networks",
        "",
        *(
            f"- {_named(one['name'])}: {one['parameters']:,} parameters, {one['clients']:,} clients"
            for one in card["architectures"]
        ),
        "",
        "## How well it does",
        "",
        *(_in_words(metric) for metric in card["metrics"]),
        *([] if card["metrics"] else ["It was not evaluated."]),
        "",
        "## Newcomers",
        "",
        card["newcomers"] or "None are served.",
        "",
        "## Limits",
        "",
        *(f"- {limit}" for limit in card["limits"]),
        "",
        "## Privacy",
        "",
        *(f"- {sentence}" for sentence in card["privacy"]),
        "",
    ]
    if method["citation"]:
        lines += ["## Citation", "", "```bibtex", method["citation"], "```", ""]
    return "\n".join(lines)


def _named(network: str | None) -> str:
    return "networks that only their clients know" if network is None else f"`{network}`"


def _in_words(metric: Mapping[str, Any]) -> str:
    line = f"- {metric['metric']} on test data, mean over {metric['clients']:,} {metric['of']}: {metric['mean']:.4f}"
    if metric["low"] is None:
        return line
    return f"{line} ({metric['level']:.0%} interval {metric['low']:.4f} to {metric['high']:.4f})"
