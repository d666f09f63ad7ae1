# SPDX-License-Identifier: Apache-2.0
"""What the page of one run says, and what it does without."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from fedloom.reports import one
from fedloom.reports.facts import Facts
from fedloom.reports.figures import figure
from fedloom.reports.page import Page
from fedloom.reports.single import charts_of, page_of, warnings
from fedloom.reports.vega import spec_of
from fedloom.runs.directory import METRICS, SCORES, RunDirectory
from fedloom.runs.records import scores_line
from made import PNG, attacked, broken, made_run

ERROR = {"name": "absolute_error", "higher_is_better": False}


def facts(run: RunDirectory) -> Facts:
    return Facts.read(run)


def test_a_run_is_read_at_the_round_that_validation_chose(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", rounds=8, finished=False)
    found = facts(run)
    values = {r["round"]: r["metrics"]["deployed/participants/val/accuracy"] for r in run.records() if "metrics" in r}
    assert found.shown == max(values, key=lambda number: (values[number], -number))
    assert warnings(found)[0] == "The run has not finished: 8 of 8 rounds are done."


def test_a_smaller_error_is_better(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {"method": "fedavg", "rounds": 2, "seed": 0, "dataset": "waves"})
    for number, value in ((1, 0.5), (2, 0.7)):
        for split in ("val", "test"):
            columns = {"metric": [value, value + 0.2], "loss": [1.0, 1.0], "samples": [5, 5]}
            group = ("deployed", "participants", split)
            run.append_to(SCORES, scores_line(number, group, ERROR, ["a", "b"], columns))
        metrics = {f"deployed/participants/{split}/absolute_error": value + 0.1 for split in ("val", "test")}
        run.append(record(number, metrics=metrics))
    found = facts(run)
    assert (found.metric, found.higher_is_better, found.is_share, found.shown) == ("absolute_error", False, False, 1)
    chart = one.clients(found)
    assert chart is not None and chart.data["client"] == ["b", "a"] and not chart.low  # worst first, no interval
    assert (
        "mean test absolute error of 0.6 over 2 clients; the tenth that fares worst has 0.7"
        in page_of(found).verdict[0]
    )


def record(number: int, **more: Any) -> dict[str, Any]:
    return {
        "round": number, "clients": 2, "dropped": [], "bytes": {"down": 1, "up": 1}, "seconds": {"round": 0.1},
        "diagnostics": {"local_loss": 1.0}, "notes": [], **more,
    }  # fmt: skip


@pytest.mark.parametrize("lost", [5, 12])
def test_clients_whose_models_came_apart_are_said(tmp_path: Path, lost: int) -> None:
    run = broken(made_run(tmp_path / "run", clients=12), lost)
    made = page_of(facts(run))
    assert made.tiles[0].value == "–" and "rmse of – over 12 clients" in made.verdict[0]
    assert any(text.startswith(f"{lost} of 12 clients have a rmse that is no finite number") for text in made.warnings)


def test_a_federation_of_machines_has_no_class_counts(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    roster = run.roster()
    run.write_roster(roster._replace(members=[m._replace(labels=(), model=None) for m in roster.members]))
    found = facts(run)
    names = charts_of(found)
    assert not {"split", "newcomers"} & set(names) and {"curves", "clients", "embeddings", "traffic"} <= set(names)
    assert page_of(found).sections


def test_training_that_came_apart_is_said(tmp_path: Path) -> None:
    for name, losses in (("nan", [1.0, None]), ("high", [1.0, 0.5, 9.0])):
        run = made_run(tmp_path / name, rounds=2)
        (run.path / "metrics.jsonl").unlink()
        for number, loss in enumerate(losses, start=1):
            run.append(record(number, diagnostics={"local_loss": loss}))
        assert any(text.startswith("Training came apart") for text in warnings(facts(run)))
    assert not any("came apart" in text for text in warnings(facts(made_run(tmp_path / "fine"))))


def test_few_samples_dropped_replies_and_late_bests_are_said(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", rounds=4, lift=-0.3)
    last = run.records()[-1]
    dropped = [{"client": "1", "program": "train", "reason": "is gone"}]
    (run.path / "metrics.jsonl").write_text("")
    for number in range(1, 5):
        run.append({**last, "round": number, "dropped": dropped})
    told = " ".join(warnings(facts(run)))
    assert "Replies were not used: 4, of 1 of the clients." in told
    assert "All test data together are 100 samples" in told
    tables = [
        block for section in page_of(facts(run)).sections for block in section.blocks if block.get("id") == "dropped"
    ]
    assert tables[0]["rows"] == [["1", "train", "is gone", 4, 4]]


def test_large_federations_show_a_panel_and_say_so(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", clients=one.MOST + 500, unseen=0, rounds=2)
    chart = one.clients(facts(run))
    assert chart is not None and chart.rows <= one.MOST
    assert f"of {one.MOST + 500:,} clients, evenly from the roster" in chart.caption


def test_bands_of_a_panel_are_those_of_everybody(tmp_path: Path) -> None:
    """Quantiles of all clients are in the line: 0, 1, ... 100."""
    run = made_run(tmp_path / "run", rounds=2)
    columns = {"metric": [0.5], "loss": [1.0], "samples": [1]}
    line = scores_line(
        9, ("deployed", "participants", "test"), {"name": "accuracy", "higher_is_better": True}, ["a"], columns
    )
    run.append_to(SCORES, {**line, "clients": 20_000, "quantiles": {"metric": [p / 100 for p in range(101)]}})
    scores = facts(run).scores(9)
    assert scores is not None and scores.band(0.1) == pytest.approx((0.1, 0.9)) and scores.everybody == 20_000


@pytest.mark.parametrize("name", ["mix.json", "admission.json"])
def test_what_was_found_out_later_is_shown(tmp_path: Path, name: str) -> None:
    run = made_run(tmp_path / "run")
    points = [{"admission_round": n, "client": ["new 0"], "metric": [0.5]} for n in range(3)]
    extra = {
        "mix.json": {"round": 6, "split": "test", "client": ["0"], "metric": [[1.0]]},
        "admission.json": {"round": 6, "split": "test", "points": points},
    }
    assert name.removesuffix(".json") not in charts_of(facts(run))
    run.write_extra(name, extra[name])
    assert name.removesuffix(".json") in charts_of(facts(run))


def blocks(made: Page, section: str) -> list[dict[str, Any]]:
    return next(([*part.blocks] for part in made.sections if part.id == section), [])


def test_attacks_are_told_with_their_pictures(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert not blocks(page_of(facts(run)), "attacks")
    attacked(run, ["invert", "labels"])
    (run.path / "audit-labels.png").unlink()
    table, text, picture = blocks(page_of(facts(run)), "attacks")
    assert table["rows"][0] == ["invert", "likeness", 20.5, None, None, 11.0, 20.5, 11.0]
    assert "It succeeded." in text["paragraphs"][0] and len(text["paragraphs"]) == 2
    assert picture["type"] == "image" and base64.b64decode(picture["png"]) == PNG
    assert "invert" in picture["alt"]


@pytest.mark.parametrize(
    ("name", "picture"), [("../../run/x", PNG), ("invert", b"<svg onload=alert(1)>"), ("invert", PNG + bytes(200_000))]
)
def test_a_picture_that_is_none_or_is_elsewhere_or_large_is_left_out(name: str, picture: bytes, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    attacked(run, [name], picture)
    assert [block["type"] for block in blocks(page_of(facts(run)), "attacks")] == ["table", "text"]


def test_whom_a_rule_left_out(tmp_path: Path) -> None:
    """Client 9 lies and is left out; of the honest, 8, whose labels are of one class alone, is half the time."""
    run = made_run(tmp_path / "run", clients=10, unseen=0, rounds=0, finished=False)
    roster = run.roster()
    rows = [m._replace(labels=(40, 0, 0, 0) if m.id == "8" else (10, 10, 10, 10)) for m in roster.members]
    run.write_roster(roster._replace(members=rows))
    for number in (1, 2):
        values = [[1.0 if number == 1 or i != 8 else 0.0, 0.0] for i in range(9)] + [[0.0, 1.0]]
        table = {"client": [str(i) for i in range(10)], "columns": ["kept", "lies"], "values": values}
        run.append(record(number, tables={"kept": table}))
    (table,) = blocks(page_of(facts(run)), "rule")
    assert table["rows"] == [
        ["honest", 9, pytest.approx(0.5 / 9)],
        ["honest, most skewed third", 3, pytest.approx(0.5 / 3)],
        ["liars", 1, 1.0],
    ]


def test_an_open_back_door_is_among_the_first_numbers(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", attack="backdoor")
    number = facts(run).shown
    columns = {"metric": [0.5, 1.0], "loss": [1.0, 1.0], "samples": [30, 10]}
    group = ("deployed", "participants", "triggered")
    run.append_to(
        SCORES, scores_line(number, group, {"name": "accuracy", "higher_is_better": True}, ["0", "1"], columns)
    )
    (tile,) = [tile for tile in page_of(facts(run)).tiles if tile.label == "back door"]
    assert tile.value == "62.5%"


def test_of_more_clients_than_are_recorded_the_numbers_are_of_all(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", clients=10_400, unseen=0, rounds=2)
    told = run.records()[-1]["metrics"]["deployed/participants/test/accuracy"]
    found = facts(run)
    scores = found.scores(2)
    assert scores is not None and len(scores.clients) == 5_200
    assert abs(scores.metric.mean() - told) > 1e-7
    assert found.of_all(scores) == told
    made = page_of(found)
    assert made.tiles[0].value == f"{told:.1%}" and f"{told:.1%} over 10,400 clients" in made.verdict[0]
    assert made.tiles[1].value == "50.0%"  # as the summary has it


def test_notes_are_sentences(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    notes = ["the loom is large", "pFedHN is slow.", "3 clients have no test samples"]
    run.write_summary({**(run.summary() or {}), "notes": notes})
    assert warnings(facts(run))[-3:] == ["The loom is large.", "pFedHN is slow.", "3 clients have no test samples."]


def test_whole_numbers_have_whole_ticks(tmp_path: Path) -> None:
    made = one.curves(facts(made_run(tmp_path / "run", rounds=4)))
    assert made is not None
    layer = spec_of(made)["layer"][0]["encoding"]
    assert layer["x"]["axis"]["tickMinStep"] == 1 and "tickMinStep" not in layer["y"]["axis"]
    assert all(tick == round(tick) for tick in figure(made).axes[0].get_xticks())


def test_data_without_a_name_have_one_on_the_page(tmp_path: Path) -> None:
    assert page_of(facts(made_run(tmp_path / "run", dataset="python"))).title == "pFedHN on data given in Python"


def test_clients_that_did_not_answer_are_not_taken_for_small_ones(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", clients=["a", "b", "c"], unseen=0)
    columns = {"metric": [1.0, 0.0, 0.5], "loss": [0.1, 9.0, 0.2], "samples": [12, 0, 4]}
    task = {"name": "accuracy", "higher_is_better": True}
    run.append_to(
        SCORES,
        scores_line(facts(run).shown, ("deployed", "participants", "test"), task, ["a", "b", "c"], columns),
    )
    told = warnings(facts(run))
    assert any(text.startswith("1 of 3 clients gave no usable reply") for text in told)
    assert any(text.startswith("1 of 3 clients have fewer than 10 test samples") for text in told)


def test_what_settling_takes_is_told_by_client_and_counted_once(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", rounds=4)
    records = run.records()
    (run.path / METRICS).unlink()
    for line in records:
        if "metrics" in line:
            line["seconds"] |= {"evaluation": 3.0, "settling": 2.0}
        run.append(line)
    chart = one.time_by_part(facts(run))
    assert chart is not None and "0.2 s for each of 10 clients" in chart.caption
    told = list(zip(chart.data["part"], chart.data["seconds"]))
    assert [sum(seconds for part, seconds in told if part == name) for name in ("settling", "evaluation")] == [4, 2]


def test_a_run_that_ended_early_is_not_called_finished(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert page_of(facts(run)).badges[0] == "finished"
    run.write_summary({**(run.summary() or {}), "stopped": "--max-epsilon 3 allows 6 rounds of 12"})
    made = page_of(facts(run))
    assert made.badges[0] == "ended early"
    assert "The run ended before its last round: --max-epsilon 3 allows 6 rounds of 12." in made.warnings


def test_what_was_found_out_later_names_its_data(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    found = {"split": "val", "client": ["0", "1"]}
    run.write_extra("mix.json", {"round": 6, **found, "metric": [[1.0, 0.5], [0.5, 1.0]]})
    points = [{"admission_round": n, **found, "metric": [0.5, 0.5]} for n in range(2)]
    run.write_extra("admission.json", {"round": 6, "split": "val", "points": points})
    mixed, admitted = one.mix(facts(run)), one.admission(facts(run))
    assert mixed is not None and "tried on val data" in mixed.caption and mixed.colour is not None
    assert admitted is not None and admitted.y.title == mixed.colour.title == "val accuracy"
    val = facts(run).scores(6, split="val")
    assert val is not None
    assert admitted.data["metric"][1] == pytest.approx(val.metric.mean())  # of participants, on the same split


def test_clients_of_divided_groups_are_coloured_by_group(tmp_path: Path) -> None:
    names = ["north/0", "north/1", "south/0", "south/1", "a/b"]
    made = one.embeddings(facts(made_run(tmp_path / "run", clients=names, partition="group:side", unseen=0)))
    assert made is not None
    assert dict(zip(made.data["client"], made.data["of_group"])) == {
        "north/0": "north", "north/1": "north", "south/0": "south", "south/1": "south", "a/b": "a/b",
    }  # fmt: skip
    assert "group" in made.switches[-1].options
    alone = one.embeddings(facts(made_run(tmp_path / "alone", partition="group:writer", unseen=0)))
    assert alone is not None and "of_group" not in alone.data


@pytest.mark.parametrize(
    ("values", "bins"), [([1000.0] * 12, ["1000"]), ([102 + n / 11 for n in range(12)], None), ([0.0] * 12, ["0"])]
)
def test_errors_that_are_close_have_bins_of_their_own(
    tmp_path: Path, values: list[float], bins: list[str] | None
) -> None:
    run = broken(made_run(tmp_path / "run", clients=12), 0)
    columns = {"metric": values, "loss": values, "samples": [1] * 12}
    names = [str(n) for n in range(12)]
    group = ("deployed", "participants", "test")
    run.append_to(SCORES, scores_line(facts(run).shown, group, {**ERROR, "name": "rmse"}, names, columns))
    made = one.histogram(facts(run))
    assert made is not None and sum(made.data["clients"]) == 12
    assert len(set(made.data["bin"])) == made.rows
    assert bins is None or list(made.data["bin"]) == bins
