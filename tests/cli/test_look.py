# SPDX-License-Identifier: Apache-2.0
"""``report``, ``watch``, and what ``compare`` and ``evaluate`` do for them."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from made import made_run


def two(path: Path, seeds: int = 1) -> Path:
    for seed in range(seeds):
        for method, lift in (("fedavg", 0.0), ("pfedhn", 0.3)):
            made_run(path / f"{method}-{seed}", method=method, seed=seed, lift=lift)
    return path


def test_a_report_says_where_it_is(cli, tmp_path: Path) -> None:
    made_run(tmp_path / "run")
    outcome = cli("report", "run")
    assert (outcome.code, outcome.out) == (0, "run/report.html\n")
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
    assert cli("report", "run", "--out", "page.html").out == "page.html\n"


def test_a_figure_is_one_file(cli, tmp_path: Path) -> None:
    made_run(tmp_path / "run")
    assert cli("report", "run", "--figure", "curves", "--choose", "seconds", "--out", "c.svg").out == "c.svg\n"
    assert "seconds of training" in (tmp_path / "c.svg").read_text()
    assert cli("report", "run", "--figure", "clients").out == "clients.pdf\n"
    assert (tmp_path / "clients.pdf").read_bytes().startswith(b"%PDF")


def test_a_figure_that_takes_the_models_is_found_out(cli, tmp_path: Path) -> None:
    flags = ("--clients", 3, "--unseen", 1, "--rounds", 2, "--local-steps", 2, "--model", "mlp:hidden=4", "--quiet")
    cli("run", "pfedhn", *flags, "--admit-rounds", 2, "--out", "run")
    for name in ("mix", "admission"):
        assert cli("report", "run", "--figure", name, "--out", f"{name}.pdf").out == f"{name}.pdf\n"
        assert (tmp_path / "run" / f"{name}.json").is_file()
    outcome = cli("evaluate", "run", "--mix")
    assert outcome.code == 0 and "own body" in outcome.out
    found = json.loads(cli("evaluate", "run", "--mix", "--json").out)
    assert len(found["metric"]) == len(found["client"]) == 3
    assert "admission round" in cli("evaluate", "run", "--unseen", "--curve").out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("report", "run", "--choose", "seconds"), "--choose is about a figure; give --figure too."),
        (("report", "run", "--figure", "curv"), "Unknown figure of a run 'curv'"),
        (("report", "run", "--baseline", "x"), "--baseline is for several runs"),
        (("report", "nowhere"), "nowhere is not a run directory"),
        (("report", "run", "--out", "no/such/page.html"), "Cannot write no/such/page.html"),
        (("evaluate", "run", "--mix", "--unseen"), "--mix is about participants' own models"),
        (("evaluate", "run", "--curve"), "--curve is about clients that are admitted"),
        (("compare", "run", "--latex", "--csv"), "Give one of --latex, --markdown, --csv and --json."),
    ],
)
def test_refusals(refused, tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    made_run(tmp_path / "run")
    assert refused(*words).startswith(sentence)


def test_compare_says_what_the_runs_tell_apart(cli, tmp_path: Path) -> None:
    two(tmp_path / "runs")
    out = cli("compare", "runs").out
    assert re.search(r"pFedHN is right on \d+ more of 100 test samples than FedAvg\.", out)
    assert "One seed: nothing is said about the methods" in out and "standard deviation" not in out
    made_run(tmp_path / "same", method="local")
    made_run(tmp_path / "other", method="fedper")
    assert "are 0 of 100 test samples apart: too few to tell them apart." in cli("compare", "same", "other").out
    made_run(tmp_path / "late", method="fedper", seed=7, rounds=12)
    told = cli("compare", "same", "late").err
    assert "No seed and clients in common with FedAvg" in told
    assert "did not ask clients equally often" in told
    found = json.loads(cli("compare", "runs", "--json").out)
    assert len(found["comparison"]) == 2 and len(found["verdicts"]) == 2


def test_the_table_in_three_forms(cli, tmp_path: Path) -> None:
    two(tmp_path / "runs", seeds=2)
    rows = list(csv.reader(io.StringIO(cli("compare", "runs", "--baseline", "pfedhn", "--csv").out)))
    assert rows[0][0] == "method" and rows[2][rows[0].index("difference to pFedHN")] == "baseline"
    assert cli("compare", "runs", "--latex").out.count(r"\\") == 3
    assert cli("compare", "runs", "--markdown").out.startswith("| method |")
    made_run(tmp_path / "other", method="fedavg", partition="iid", seed=1)
    assert "These runs are not of one federation" in cli("compare", "runs", "other", "--latex").err


@pytest.mark.parametrize("form", ["--csv", "--latex", "--markdown", ""])
def test_names_of_methods_give_a_terminal_no_orders(cli, tmp_path: Path, form: str) -> None:
    for method in ("fedavg", "pfedhn"):
        run = made_run(tmp_path / "runs" / method, method=method)
        run.write_summary({**(run.summary() or {}), "name": f"{method}\x1b[31m\u202e"})
    out = cli("compare", "runs", *filter(None, [form])).out
    assert "x1b" in out and "\x1b" not in out and "\u202e" not in out


def test_watch_prints_an_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    import signal

    made_run(tmp_path / "run", finished=False)
    program = [sys.executable, "-m", "fedloom", "watch", str(tmp_path / "run")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(url) as answer:
            assert b"pFedHN" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert "stopped; the runs go on" in process.stderr.read()
