# SPDX-License-Identifier: Apache-2.0
"""The charts of one run. Each is a function of its facts, and None where the records have nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fedloom.reports.charts import Axis, Chart, Rule, Switch, thinned
from fedloom.reports.facts import Facts, Scores
from fedloom.reports.statistics import nearest, neighbours, principal, shares, wilson
from fedloom.runs.records import ADMISSION, MIX, panel

FEW_SAMPLES = 10
"""A client with fewer test samples than this says little by itself."""
MOST = 1_500
"""Clients of whom a chart shows one number, and marks of those of whom it shows several."""
MIXED = 100
"""Clients whose models are mixed in a chart."""
SHOWN = 200
"""Clients of whom a chart shows more than one number each."""
BAND = 0.1
"""Share of the clients at each end that a band leaves out."""

TEST, VAL, UNSEEN = "participants, test", "participants, validation", "unseen clients, test"
WHO = ("took part", "unseen")


def measure(facts: Facts, column: str = "metric", title: str = "") -> Axis:
    """An axis of the run's metric."""
    return Axis(column, title or words(facts.metric), "share" if facts.is_share else "number")


def tested(facts: Facts) -> Axis:
    """An axis of the metric on test data."""
    return measure(facts, title=f"test {words(facts.metric)}")


def words(name: str) -> str:
    """A name of code as words."""
    return name.replace("_", " ")


def curves(facts: Facts) -> Chart | None:
    """The metric of every evaluation, with the band in which most clients lie."""
    elapsed = facts.elapsed()
    columns = ("round", "seconds", "megabytes", "series", "metric", "low", "high", "plain")
    data: dict[str, list[Any]] = {name: [] for name in columns}
    for series, who, split in (
        (TEST, "participants", "test"),
        (VAL, "participants", "val"),
        (UNSEEN, "unseen", "test"),
    ):
        for record in facts.evaluated:
            number, value = record["round"], record["metrics"].get(f"deployed/{who}/{split}/{facts.metric}")
            if value is None:
                continue
            scores = facts.scores(number, who, split) if series == TEST else None
            low, high = scores.band(BAND) if scores else (None, None)
            row = (number, *elapsed[number], series, value, low, high, series == VAL)
            for column, entry in zip(data.values(), row, strict=True):
                column.append(entry)
    if not data["round"]:
        return None
    axes = {
        "rounds": Axis("round", "round", "count"),
        "seconds": Axis("seconds", "seconds of training"),
        "megabytes": Axis("megabytes", "MB sent, down and up"),
    }
    names = [name for name in (TEST, VAL, UNSEEN) if name in data["series"]]
    caption = (
        f"Mean over clients. In the shaded band lie all clients but the {BAND:.0%} that fare worst and the {BAND:.0%} "
        "that fare best. The round that is reported is the best by validation; test data choose nothing."
    )
    rules = {"rounds": facts.shown, **dict(zip(("seconds", "megabytes"), elapsed.get(facts.shown, (0.0, 0.0))))}
    return Chart(
        "curves", f"{words(facts.metric).capitalize()} over the rounds", caption, "lines",
        thinned(data, "round", [facts.shown]), axes["rounds"], measure(facts),
        Axis("series", "of", "name", order=names), low="low", high="high", dashed="plain",
        switches=(Switch("against", {
            name: {"x": axis, "rules": (Rule("x", rules[name], f"best: round {facts.shown}"),) if facts.best else ()}
            for name, axis in axes.items()
        }),),
        titles={"low": f"{BAND:.0%} are below", "high": f"{BAND:.0%} are above", "plain": "dashed"},
        height=300,
    )  # fmt: skip


def loss(facts: Facts) -> Chart | None:
    """The clients' mean training loss of every round."""
    found = [(number, value) for number, value in facts.local_losses() if value is not None]
    if not found:
        return None
    data = thinned({"round": [n for n, _ in found], "loss": [v for _, v in found]}, "round")
    caption = "Mean over the clients that were asked, of the batches that they trained on."
    return Chart(
        "loss",
        "Training loss",
        caption,
        "lines",
        data,
        Axis("round", "round", "count"),
        Axis("loss", "loss"),
        height=180,
    )


def clients(facts: Facts) -> Chart | None:
    """Every client's score at the round that is shown, from worst to best, with an interval of its own."""
    seen, unseen = facts.scores(facts.shown), facts.unseen()
    if seen is None:
        return None
    rows = [(c, float(m), int(n), WHO[who]) for who, s in enumerate((seen, unseen)) if s for c, m, n in
            zip(s.clients, s.metric, s.samples) if np.isfinite(m)]  # fmt: skip
    everybody = len(rows)
    rows = list(panel(rows, MOST))
    rows.sort(key=lambda row: row[1] if facts.higher_is_better else -row[1])
    data: dict[str, list[Any]] = {
        "rank": list(range(1, len(rows) + 1)),
        "client": [client for client, *_ in rows],
        "metric": [metric for _, metric, *_ in rows],
        "samples": [samples for *_, samples, _ in rows],
        "group": [who for *_, who in rows],
    }
    low = high = ""
    told = "From the client that fares worst to the one that fares best."
    if facts.is_share:
        bounds = [wilson(metric, samples) for _, metric, samples, _ in rows]
        data["low"], data["high"] = [low for low, _ in bounds], [high for _, high in bounds]
        low, high = "low", "high"
        told += " Bars are 95% intervals (Wilson) of each client's own test samples: few samples, long bar."
    everybody += seen.everybody - len(seen.clients)
    if everybody > len(rows):
        told += f" Shown are {len(rows):,} of {everybody:,} clients, evenly from the roster."
    mean = facts.of_all(seen)
    return Chart(
        "clients", f"Every client at round {facts.shown}", told, "ranked", data,
        Axis("client", f"{len(rows)} clients, worst to best", "name", order=data["client"] if len(rows) <= 600 else ()),
        tested(facts),
        Axis("group", "group", "name", order=[who for who in WHO if who in data["group"]]), low=low, high=high,
        rules=() if mean is None else (Rule("y", mean, "mean of participants"),),
        titles={"samples": "test samples", "low": "lower bound", "high": "upper bound"}, height=280,
    )  # fmt: skip


def histogram(facts: Facts) -> Chart | None:
    """How many clients score how much."""
    scores = facts.scores(facts.shown)
    if scores is None or len(scores.clients) < 10:
        return None
    values = scores.metric[np.isfinite(scores.metric)]
    if not len(values):
        return None
    low, high = (0.0, 1.0) if facts.is_share else (float(values.min()), float(values.max()))
    if high - low > 1e-9 * max(abs(low), abs(high)):
        counts, edges = np.histogram(values, bins=20, range=(low, high))
        shown = [f"{100 * a:.0f} to {100 * b:.0f}%" for a, b in pairwise(edges)] if facts.is_share else _ranges(edges)
    else:
        counts, shown = np.array([len(values)]), [f"{low:.6g}"]
    used = [i for i, count in enumerate(counts) if count]
    rows = range(used[0], used[-1] + 1)
    return Chart(
        "histogram", "How scores are spread", "Participants by their test score.", "bars",
        {"bin": [shown[i] for i in rows], "clients": [int(counts[i]) for i in rows]},
        Axis("bin", words(facts.metric), "name", order=[shown[i] for i in rows]), Axis("clients", "clients", "count"),
        height=200,
    )  # fmt: skip


def _ranges(edges: Iterable[float]) -> list[str]:
    """Bins in words, with as many digits as tell their bounds apart."""
    for digits in range(3, 18):
        bounds = [f"{edge:.{digits}g}" for edge in edges]
        if len(set(bounds)) == len(bounds):
            break
    return [f"{a} to {b}" for a, b in pairwise(bounds)]


def split(facts: Facts) -> Chart | None:
    """Who holds how many samples of which class."""
    if facts.roster is None:
        return None
    members = [member for member in facts.roster.members if any(member.labels)]
    if not members:
        return None
    classes = facts.roster.classes
    some = panel(members, min(SHOWN, max(1, 2 * MOST // len(classes))))
    rows = [(m, name, count) for m in some for name, count in zip(classes, m.labels) if count]
    told = "A dot is as large as the client's number of samples of that class, all splits together."
    if len(some) < len(members):
        told += f" Shown are {len(some)} of {len(members):,} clients, evenly from the roster."
    return Chart(
        "split", "Who holds what", told, "bubbles",
        {"client": [m.id for m, *_ in rows], "class": [n for _, n, _ in rows], "samples": [c for *_, c in rows],
         "group": [WHO[m.unseen] for m, *_ in rows]},
        Axis("client", "client", "name", order=[m.id for m in some]), Axis("class", "class", "name", order=classes),
        Axis("group", "group", "name", order=[w for i, w in enumerate(WHO) if any(m.unseen == (i > 0) for m in some)]),
        Axis("samples", "samples", from_zero=True), height=max(180, min(20 * len(classes), 420)),
    )  # fmt: skip


def embeddings(facts: Facts, *, quick: bool = False) -> Chart | None:
    """Where the clients' embeddings lie, flat. ``quick``: without t-SNE, which takes seconds."""
    found = facts.embeddings()
    if found is None or len(found[0]) < 3 or not np.isfinite(found[1]).all():
        return None
    names, table, unseen = found
    own = np.array(unseen)
    (fitted, *rest), explained = principal(table[~own], *([table[own]] if own.any() else []))
    flat = np.concatenate([fitted, *rest])
    data: dict[str, list[Any]] = {"client": names, "x": _short(flat[:, 0]), "y": _short(flat[:, 1]), "unseen": unseen}
    x, y = Axis("x", f"first component ({explained[0]:.0%} of the variance)"), Axis("y", f"second ({explained[1]:.0%})")
    maps: dict[str, Mapping[str, Any]] = {"PCA": {"x": x, "y": y}}
    told = (
        f"Embeddings of {table.shape[1]} numbers as they are after round {facts.shown}, every step taken. Components "
        "are those of participants"
        f"{'; hollow: unseen clients, at the place that they were admitted to' if own.any() else ''}."
    )
    if not quick and len(names) >= 8:
        points, perplexity = neighbours(table)
        data["tsne_x"], data["tsne_y"] = _short(points[:, 0]), _short(points[:, 1])
        settings = f"(perplexity {perplexity:g}, seed 0)"
        maps["t-SNE"] = {"x": Axis("tsne_x", f"t-SNE {settings}"), "y": Axis("tsne_y", "t-SNE")}
        told += " In a t-SNE map only neighbourhoods mean something: distances between groups do not."
    colours = _colours(facts, names, data)
    switches = [Switch("map", maps), Switch("colour", {name: {"colour": axis} for name, axis in colours.items()})]
    return Chart(
        "embeddings", "Where clients lie", told, "points", data, x, y, next(iter(colours.values()), None),
        hollow="unseen", height=360, titles={"tsne_x": "t-SNE, first", "tsne_y": "t-SNE, second"},
        switches=tuple(switch for switch in switches if switch.options),
    )  # fmt: skip


def _colours(facts: Facts, names: Sequence[str], data: dict[str, list[Any]]) -> dict[str, Axis]:
    """The ways to colour clients that tell something; their columns go into ``data``."""
    found, members = {}, [facts.members.get(name) for name in names]
    if facts.roster and all(m is not None and any(m.labels) for m in members):
        classes = facts.roster.classes
        largest = [classes[int(np.argmax(m.labels))] for m in members if m]
        data["largest_class"] = largest
        found["largest class"] = Axis(
            "largest_class", "largest class", "name", order=[c for c in classes if c in largest]
        )
    score = {c: float(m) for s in (facts.scores(facts.shown), facts.unseen()) if s for c, m in zip(s.clients, s.metric)}
    if any(name in score for name in names):
        data["metric"] = [score.get(name) for name in names]
        found[words(facts.metric)] = measure(facts)
    groups = _groups(facts, names)
    if len(set(groups)) > 1:
        data["of_group"] = groups
        found["group"] = Axis("of_group", "group", "name")
    kinds = [m.model or f"{m.size:,} parameters" if m else "" for m in members]
    if len(set(kinds)) > 1:
        data["network"] = kinds
        found["network"] = Axis("network", "network", "name")
    return found


def _groups(facts: Facts, names: Sequence[str]) -> list[str]:
    """Whose samples clients got, where few groups were divided among many clients; nothing where each has its own."""
    if not str(facts.config.get("partition", "")).startswith("group:"):
        return []
    parts = {name: name.rpartition("/")[0] for name in names}
    if not any(f"{group}/1" in facts.members for group in parts.values()):
        return []
    return [group if f"{group}/1" in facts.members else name for name, group in parts.items()]


def networks(facts: Facts) -> Chart | None:
    """The scores by architecture, where there are several."""
    scores = facts.scores(facts.shown)
    if scores is None:
        return None
    kinds: dict[str, list[float]] = {}
    for client, metric in zip(scores.clients, scores.metric):
        member = facts.members.get(client)
        if member:
            kinds.setdefault(member.model or f"{member.size:,} parameters", []).append(float(metric))
    if len(kinds) < 2:
        return None
    from fedloom.reports.statistics import over_clients

    found = [over_clients(values) for values in kinds.values()]
    data: dict[str, list[Any]] = {
        "network": list(kinds), "metric": [i.mean for i in found], "low": [i.low for i in found],
        "high": [i.high for i in found], "clients": [len(v) for v in kinds.values()],
    }  # fmt: skip
    told = "Mean over the clients that have the network, with a bootstrap over them (95%)."
    return Chart(
        "networks", "By architecture", told, "forest", data, tested(facts),
        Axis("network", "network", "name", order=list(kinds)), low="low", high="high", height=40 + 34 * len(kinds),
        titles={"low": "lower bound", "high": "upper bound", "clients": "clients"},
    )  # fmt: skip


def weights(facts: Facts) -> Chart | None:
    """What each client counted in the aggregate, round by round, for methods whose server learns it."""
    told = [(r["round"], r["tables"]["weights"]) for r in facts.records if "weights" in r.get("tables", {})]
    if not told:
        return None
    rounds = panel(told, 60)
    clients = list(dict.fromkeys(c for _, table in told for c in table["client"]))
    some = set(panel(sorted(clients, key=_position(facts)), 60))
    layers = told[-1][1]["columns"]
    data: dict[str, list[Any]] = {"round": [], "client": [], **{f"layer{i}": [] for i in range(len(layers))}}
    for number, table in rounds:
        for client, row in zip(table["client"], table["values"]):
            if client in some:
                for column, entry in zip(data.values(), (number, client, *map(_digits, row)), strict=True):
                    column.append(entry)
    order = sorted(some, key=_position(facts))
    caption = "The weight of each client's change in the average. Blank: the client was not asked in that round."
    if len(rounds) < len(told) or len(some) < len(clients):
        caption += f" Shown are {len(rounds)} of {len(told)} rounds and {len(some)} of {len(clients)} clients, evenly."
    options = {layer: {"colour": Axis(f"layer{i}", "weight")} for i, layer in reversed(list(enumerate(layers)))}
    return Chart(
        "weights", "Aggregation weights", caption, "heat", data, Axis("round", "round", "count"),
        Axis("client", "client", "name", order=order), Axis(f"layer{len(layers) - 1}", "weight"),
        switches=(Switch("layer", options),), height=max(200, min(14 * len(order), 480)),
        titles={f"layer{i}": f"weight in {layer}" for i, layer in enumerate(layers)},
    )  # fmt: skip


def effective(facts: Facts) -> Chart | None:
    """How many clients the weights amount to, by layer."""
    prefix, data = "effective_clients.", {"round": [], "layer": [], "clients": []}  # type: ignore[var-annotated]
    for record in facts.records:
        for name, value in record["diagnostics"].items():
            if name.startswith(prefix):
                for column, entry in zip(data.values(), (record["round"], name.removeprefix(prefix), value)):
                    column.append(entry)
    if not data["round"]:
        return None
    return Chart(
        "effective", "How many clients count", "One over the sum of the squared weights: all of a cohort if all weigh "
        "the same, one if a single client is all there is.", "lines", thinned(data, "round"),
        Axis("round", "round", "count"), Axis("clients", "clients"), Axis("layer", "layer", "name"), height=200,
    )  # fmt: skip


def estimates(facts: Facts) -> Chart | None:
    """What unseen clients took their label shares to be, against what they are."""
    found = facts.estimates()
    if found is None or facts.roster is None:
        return None
    classes, rows = facts.roster.classes, []
    for client, estimated, low, high, decision in zip(
        *(found[n] for n in ("client", "share", "low", "high", "decision"))
    ):
        member = facts.members.get(client)
        if member and any(member.labels):
            true = shares([member.labels])[0]
            rows += [
                (client, name, t, e, lo, hi, decision)
                for name, t, e, lo, hi in zip(classes, true, estimated, low, high)
            ]
    if not rows:
        return None
    rows, everything = list(panel(rows, MOST)), len(rows)
    names = ("client", "class", "true", "estimated", "low", "high", "decision")
    data = {name: list(column) for name, column in zip(names, zip(*rows))}
    data["true"] = [_digits(value) for value in data["true"]]
    told = (
        f"Label shares of the {len(found['client'])} unseen clients, a mark for each client and class. They were found "
        "from samples without their labels, at the client; the true ones are known here because this is a simulation."
    )
    if everything > len(rows):
        told += f" Shown are {len(rows):,} of {everything:,} marks, evenly."
    return Chart(
        "estimates", "Estimated against true label shares", told, "points", data, Axis("true", "true share", "share"),
        Axis("estimated", "estimated share", "share"), Axis("decision", "decision", "name"), height=320,
        rules=(Rule("both", max(*data["true"], *data["estimated"]), ""),),
        titles={"class": "class", "low": "lower bound (90%)", "high": "upper bound (90%)"},
    )  # fmt: skip


def newcomers(facts: Facts) -> Chart | None:
    """How unseen clients fare against how far they are from the nearest participant."""
    scores = facts.unseen()
    found = [] if scores is None else [(c, m, n) for c, m, n in zip(scores.clients, scores.metric, scores.samples)]
    everybody = [one for one in found if one[0] in facts.members and any(facts.members[one[0]].labels)]
    known = panel(everybody, MOST // 2)
    others = [m for m in facts.members.values() if not m.unseen and any(m.labels)]
    if not known or not others or scores is None:
        return None
    at, away = nearest(shares([facts.members[c].labels for c, *_ in known]), shares([m.labels for m in others]))
    data: dict[str, list[Any]] = {
        "client": [client for client, *_ in known], "distance": _short(away), "metric": [float(m) for _, m, _ in known],
        "nearest": [others[i].id for i in at], "samples": [int(n) for *_, n in known],
    }  # fmt: skip
    told = (
        "Total variation between a newcomer's label shares and those of the participant nearest to it: 0 is the same "
        f"mix of classes, 1 has none in common. Scores of round {scores.round}."
    )
    if len(known) < len(everybody):
        told += f" Shown are {len(known):,} of {len(everybody):,} newcomers, evenly from the roster."
    mean = facts.best.get(f"deployed/participants/test/{facts.metric}")
    return Chart(
        "newcomers", "Newcomers, by how unlike they are", told, "points", data,
        Axis("distance", "distance to the nearest participant", from_zero=True), tested(facts),
        rules=() if mean is None else (Rule("y", mean, "mean of participants"),), height=300,
        titles={"nearest": "nearest participant", "samples": "test samples"},
    )  # fmt: skip


def admission(facts: Facts) -> Chart | None:
    """How newcomers fare while they are admitted."""
    found = facts.extras.get(ADMISSION)
    if not found or len(found["points"]) < 2:
        return None
    data: dict[str, list[Any]] = {"round": [], "series": [], "metric": [], "low": [], "high": [], "dashed": []}
    split = found["split"]
    seen = facts.scores(found["round"], split=split)
    for point in found["points"]:
        values = np.array(point["metric"], dtype=float)
        lines = [("newcomers", values, False)] + ([("participants", seen.metric, True)] if seen else [])
        for series, numbers, dashed in lines:
            low, high = (None, None) if dashed else map(float, np.quantile(numbers, [BAND, 1 - BAND]))
            row = (point["admission_round"], series, float(numbers.mean()), low, high, dashed)
            for column, entry in zip(data.values(), row, strict=True):
                column.append(entry)
    told = (
        f"Unseen clients are admitted to the model of round {found['round']}, which stays as it is; the band leaves "
        f"out the {BAND:.0%} of them at each end. Participants (dashed) are not touched."
    )
    return Chart(
        "admission", "While newcomers are admitted", told, "lines", data, Axis("round", "round of admission", "count"),
        measure(facts, title=f"{split} {words(facts.metric)}"), Axis("series", "of", "name"), low="low", high="high",
        dashed="dashed", height=260,
    )  # fmt: skip


def mix(facts: Facts) -> Chart | None:
    """Every client's output layer on every client's body."""
    found = facts.extras.get(MIX)
    if not found:
        return None
    everybody = found["client"]
    own = float(np.mean([found["metric"][i][i] for i in range(len(everybody))]))
    some = panel(range(len(everybody)), MIXED)
    clients = [everybody[i] for i in some]
    rows = [(everybody[i], everybody[j], found["metric"][i][j]) for i in some for j in some]
    split = found["split"]
    told = (
        f"The output layer of one client on the body of another, tried on {split} data of the first, after round "
        f"{found['round']}."
    )
    if facts.is_share:
        told += f" On the diagonal both are the client's own: {own:.1%} on average."
    if len(clients) < len(everybody):
        told += f" Shown are {len(clients)} of {len(everybody):,} clients, evenly from the roster."
    return Chart(
        "mix", "Mixed models", told, "heat",
        {"head": [a for a, *_ in rows], "body": [b for _, b, _ in rows], "metric": [v for *_, v in rows]},
        Axis("body", "whose body", "name", order=clients), Axis("head", "whose output layer", "name", order=clients),
        measure(facts, title=f"{split} {words(facts.metric)}"), height=max(220, min(16 * len(clients), 520)),
    )  # fmt: skip


PARTS = ("generate", "local_training", "server_step")


def time_by_part(facts: Facts) -> Chart | None:
    """Where the time of a round went, in parts of the run."""
    records = [r for r in facts.records if all(part in r["seconds"] for part in PARTS)]
    if not records:
        return None
    number = min(20, len(records))
    settled = any("settling" in r["seconds"] for r in records)
    shown = [*PARTS, *(["settling"] if settled else []), "evaluation"]
    data: dict[str, list[Any]] = {"rounds": [], "part": [], "seconds": []}
    order = []
    for group in np.array_split(np.arange(len(records)), number):
        first, last = records[group[0]]["round"], records[group[-1]]["round"]
        name = f"{first} to {last}" if first != last else str(first)
        order.append(name)
        for part in shown:
            taken = sum(records[i]["seconds"].get(part) or 0.0 for i in group)
            if part == "evaluation":  # settling is a part of it
                taken -= sum(records[i]["seconds"].get("settling") or 0.0 for i in group)
            for column, entry in zip(data.values(), (name, words(part), _digits(taken))):
                column.append(entry)
    told = "Seconds by part of the run."
    if settled:
        took = [r["seconds"]["settling"] for r in records if "settling" in r["seconds"]]
        clients = sum(not member.unseen for member in facts.members.values())
        told += (
            " Settling is calibration and tuning, before each evaluation: "
            f"{np.mean(took) / max(clients, 1):.2g} s for each of {clients:,} clients."
        )
    return Chart(
        "time", "Where the time went", told, "bars", data,
        Axis("rounds", "rounds", "name", order=order), Axis("seconds", "seconds", from_zero=True),
        Axis("part", "part", "name", order=[words(p) for p in shown]), height=220,
    )  # fmt: skip


def traffic(facts: Facts) -> Chart | None:
    """What travelled to and from each client in training."""
    down: dict[str, float] = {}
    up: dict[str, float] = {}
    asked: dict[str, int] = {}
    taken: dict[str, list[float]] = {}
    for record in facts.records:
        told = record.get("cohort")
        if not told:
            continue
        seconds = record["seconds"].get("clients") or [None] * len(told["client"])
        for client, d, u, s in zip(told["client"], told["down"], told["up"], seconds):
            down[client], up[client] = down.get(client, 0.0) + d / 1e6, up.get(client, 0.0) + u / 1e6
            asked[client] = asked.get(client, 0) + 1
            if s is not None:
                taken.setdefault(client, []).append(s)
    if not asked:
        return None
    order = sorted(asked, key=_position(facts))
    some = panel(order, SHOWN)
    rows = [(c, way, _digits(amounts[c]), asked[c], _digits(float(np.mean(taken[c]))) if c in taken else None)
            for c in some for way, amounts in (("down", down), ("up", up))]  # fmt: skip
    names = ("client", "way", "megabytes", "asked", "seconds")
    data = {name: list(column) for name, column in zip(names, zip(*rows)) if name != "seconds" or taken}
    options: dict[str, Mapping[str, Any]] = {
        "MB": {},
        "rounds": {
            "y": Axis("asked", "rounds in which it was asked", "count"),
            "colour": None,
            "only": ("way", "down"),
        },
    }
    if taken:
        seconds_axis = Axis("seconds", "seconds, mean of its asks")
        options["seconds"] = {"y": seconds_axis, "colour": None, "only": ("way", "down")}
    told_of = "What the server sent to each client and got from it in training, and how often it was asked."
    if len(some) < len(order):
        told_of += f" Shown are {len(some)} of {len(order):,} clients, evenly from the roster."
    return Chart(
        "traffic", "What each client took part in", told_of, "bars", data,
        Axis("client", "client", "name", order=some), Axis("megabytes", "MB", from_zero=True),
        Axis("way", "way", "name", order=["down", "up"]), switches=(Switch("show", options),), height=220,
        titles={"asked": "times asked", "seconds": "seconds, mean"},
    )  # fmt: skip


CHARTS: dict[str, Callable[[Facts], Chart | None]] = {
    function.__name__: function
    for function in (curves, loss, clients, histogram, split, embeddings, networks, weights, effective, estimates,
                     newcomers, admission, mix, time_by_part, traffic)
}  # fmt: skip
"""By the name that ``--figure`` takes."""


def _position(facts: Facts) -> Callable[[str], tuple[int, str]]:
    """In the roster's order; who is not in it comes last."""
    place = {client: i for i, client in enumerate(facts.members)}
    return lambda client: (place.get(client, len(place)), client)


def _short(values: Any) -> list[float]:
    return [_digits(value) for value in values]


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def pooled_samples(scores: Scores) -> int:
    """All test samples together."""
    return int(scores.samples.sum())
