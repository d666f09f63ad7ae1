# SPDX-License-Identifier: Apache-2.0
"""Following a directory that is written to: by offset, whole lines only, anew where a file was put in its place."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fedloom.core.errors import RunError
from fedloom.reports import live
from fedloom.reports.follow import Follower, Lines
from fedloom.runs import files
from fedloom.runs.directory import METRICS, RunDirectory
from made import made_run, summary_of, write_rounds


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    lines = Lines(path)
    assert not lines.look()
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    assert lines.look()
    assert lines.lines == [{"a": 1}, {"a": 2}]
    assert not lines.look()
    parsed: list[bytes] = []
    before = files.from_json
    monkeypatch.setattr(files, "from_json", lambda line: parsed.append(line) or before(line))
    with path.open("ab") as file:
        file.write(b": 3}\n")
    assert lines.look()
    assert parsed == [b'{"a": 3}']
    assert [line["a"] for line in lines.lines] == [1, 2, 3]


def test_a_file_in_the_place_of_another_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n')
    lines = Lines(path)
    lines.look()
    (tmp_path / "new").write_bytes(b'{"b": 1}\n{"b": 2}\n{"b": 3}\n')
    (tmp_path / "new").replace(path)
    assert lines.look()
    assert lines.lines == [{"b": 1}, {"b": 2}, {"b": 3}]
    path.unlink()
    assert lines.look() and lines.lines == []


def test_a_line_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"nonsense\n")
    lines = Lines(path)
    for _ in range(2):  # it is said until it is mended, and nothing after it is lost
        with pytest.raises(RunError, match="is not a JSON object"):
            lines.look()
    path.write_bytes(b'{"round": 1}\n')
    assert lines.look() and lines.lines == [{"round": 1}]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lines.jsonl")
    with pytest.raises(RunError, match=r"lines.jsonl: it is not a file"):
        Lines(tmp_path / "lines.jsonl").look()


def test_a_resumed_run_is_followed_back_and_on(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", rounds=6)
    follower = Follower(run.path)
    assert follower.look() and follower.facts.finished and follower.facts.rounds == 6
    run.rewind(4)
    assert follower.look()
    assert (follower.facts.rounds, follower.facts.finished) == (4, False)
    best = write_rounds(run, range(5, 7))
    run.write_summary(summary_of(run, best))
    assert follower.look() and follower.facts.finished
    assert not follower.look()


@pytest.fixture
def going(tmp_path: Path) -> RunDirectory:
    """Four of eight rounds are done; a round takes 0.1 s."""
    run = made_run(tmp_path / "run", rounds=4, finished=False)
    run.update_config(rounds=8)
    return run


def follow(run: RunDirectory) -> Follower:
    follower = Follower(run.path)
    follower.look()
    return follower


def test_progress_and_the_time_that_is_left(going: RunDirectory) -> None:
    follower = follow(going)
    page = live.page_of([follower], now=follower.seen + 2)
    assert page.progress is not None
    assert (page.progress["done"], page.progress["planned"]) == (4, 8)
    assert page.progress["sentences"] == [
        "4 of 8 rounds are done.",
        "About 0.4 s to go, as the last rounds went.",
        "The last record came 2.0 s ago.",
    ]
    assert not any("stalled" in text for text in page.warnings)


def test_a_stalled_round_is_an_alert(going: RunDirectory) -> None:
    follower = follow(going)
    (alert,) = live.alerts(follower.facts, follower.seen, follower.seen + 60)
    assert alert.startswith("Round 5 has stalled: nothing came for 60.0 s, and a round takes 0.1 s.")


def test_who_was_dropped_and_why(going: RunDirectory) -> None:
    last = going.records()[-1]
    client = last["cohort"]["client"][0]
    dropped = [{"client": client, "program": "train", "reason": "replied with NaN or Inf"}]
    more = {"repeated": ["3 of 5 clients gave a usable reply"], "refused": ["node 7 has no key"]}
    going.append({**last, "round": 5, "dropped": dropped, **more})
    page = live.page_of([follow(going)], now=time.time())
    text = " ".join(page.warnings)
    assert f"Replies with NaN or Inf were refused (1 so far), the last ones of: {client}." in text
    assert "Round 5 was done again: 3 of 5 clients" in text and "Refused before round 5: node 7" in text
    (table,) = [block for block in page.sections[0].blocks if block["id"] == "who"]
    assert table["rows"][0][:2] == [client, "dropped"] and table["rows"][0][-1] == "replied with NaN or Inf"
    assert {row[1] for row in table["rows"]} >= {"dropped", "answered", "newcomer"}


def test_who_is_late_and_who_was_dropped_earlier(going: RunDirectory) -> None:
    """What came of the newest round, with the reason of an earlier one beside it; also of clients with no bytes."""
    last = going.records()[-1]
    cohort = {"client": [], "down": [], "up": []}
    dropped = [
        {"client": "0", "program": "train", "reason": "did not answer within 600 seconds"},
        {"client": "1", "program": "train", "reason": "is gone"},
    ]
    going.append({**last, "round": 5, "cohort": cohort, "seconds": {"round": 0.1}, "dropped": dropped})
    going.append({**last, "round": 6, "cohort": cohort, "seconds": {"round": 0.1}, "dropped": dropped[:1]})
    page = live.page_of([follow(going)], now=time.time())
    (table,) = [block for block in page.sections[0].blocks if block["id"] == "who"]
    rows = {row[0]: row for row in table["rows"]}
    assert table["rows"][0] == rows["0"]
    assert (rows["0"][1], rows["0"][2], rows["0"][-1]) == ("late", 6, "did not answer within 600 seconds")
    assert (rows["1"][1], rows["1"][2], rows["1"][-1]) == ("not asked", 5, "is gone")


def test_a_long_list_of_clients_is_cut_and_says_so(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", clients=live.NEWEST + 5, unseen=0, rounds=2, finished=False)
    page = live.page_of([follow(run)], now=time.time())
    (table,) = [block for block in page.sections[0].blocks if block["id"] == "who"]
    assert len(table["rows"]) == live.NEWEST
    assert f"Shown are {live.NEWEST} of {live.NEWEST + 5} clients." in table["note"]


def test_a_run_before_its_first_round(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", rounds=2, finished=False)
    (run.path / METRICS).unlink()
    (run.path / "scores.jsonl").unlink()
    (run.path / "embeddings.jsonl").unlink()
    page = live.page_of([follow(run)])
    assert page.progress is not None and page.progress["sentences"] == ["The first round is not done yet."]


def test_several_runs_are_a_table_and_a_chart(tmp_path: Path) -> None:
    followers = [follow(made_run(tmp_path / str(i), rounds=4, finished=bool(i))) for i in range(2)]
    page = live.page_of(followers)
    assert page.verdict == ["1 of 2 runs go on."]
    table, chart = page.sections[0].blocks
    assert [row[3] for row in table["rows"]] == ["about 0.0 s to go", "finished"]
    assert chart["id"] == "curves"


def test_a_run_that_ended_early_has_not_done_all_rounds(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", rounds=4)
    run.write_summary({**(run.summary() or {}), "stopped": "paused after 4 rounds of 8"})
    run.update_config(rounds=8)
    follower = Follower(run.path)
    follower.look()
    made = live.page_of([follower])
    assert made.progress is not None
    assert made.progress["sentences"] == ["The run has ended: paused after 4 rounds of 8."]


def test_several_runs_have_their_divergence_told(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / str(i), rounds=4, finished=False) for i in range(2)]
    last = runs[1].records()[-1]
    runs[1].append({**last, "round": 5, "diagnostics": {"local_loss": 50.0}})
    table, _ = live.page_of([follow(run) for run in runs]).sections[0].blocks
    assert [row[-1].startswith("Training came apart") for row in table["rows"]] == [False, True]
