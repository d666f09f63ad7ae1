# SPDX-License-Identifier: Apache-2.0
"""Every figure of the page is a figure for paper too."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.core.errors import ConfigError, RunError
from fedloom.reports import figures, one, several
from fedloom.reports.report import chart, chart_of
from fedloom.runs.directory import RunDirectory
from fedloom.runs.records import by_client
from hostile import HOSTILE
from made import made_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run that has something for every figure, of clients with any names."""
    made = made_run(tmp_path_factory.mktemp("figures") / "run", clients=HOSTILE, unseen=5, rounds=10, estimates=True)
    clients = HOSTILE[:3]
    made.write_extra("mix.json", {"round": 10, "split": "test", "client": clients, "metric": [[0.9, 0.1, 0.2]] * 3})
    points = [{"admission_round": n, "client": ["new 0", "new 1"], "metric": [n / 9, 0.5]} for n in range(4)]
    made.write_extra("admission.json", {"round": 10, "split": "test", "points": points})
    roster = made.roster()
    members = [m._replace(model="mlp" if i % 2 else "lenet") for i, m in enumerate(roster.members)]
    made.write_roster(roster._replace(members=members))
    for number in range(11, 13):
        table = {"client": clients, "columns": ["body", "head"], "values": [[0.2, 0.3], [0.3, 0.3], [0.5, 0.4]]}
        found = {"local_loss": 0.1, "effective_clients.body": 2.5, "effective_clients.head": 2.9}
        made.append({"round": number, "clients": 3, "bytes": {"down": 1, "up": 1}, "seconds": {"round": 0.1},
                     "diagnostics": found, "tables": {"weights": table}, "dropped": [],
                     "cohort": by_client(clients, {}, {})})  # fmt: skip
    return made


@pytest.mark.parametrize("name", list(one.CHARTS))
def test_every_figure_of_a_run_is_written(run: RunDirectory, tmp_path: Path, name: str) -> None:
    made = chart_of(run, name)
    for ending, start in ((".pdf", b"%PDF"), (".svg", b"<?xml"), (".png", b"\x89PNG")):
        path = figures.save(made, tmp_path / f"{name}{ending}")
        assert path.read_bytes().startswith(start)


@pytest.mark.parametrize("name", list(one.CHARTS))
def test_every_choice_of_a_figure_draws(run: RunDirectory, name: str) -> None:
    made = chart_of(run, name)
    for switch in made.switches:
        for option in switch.options:
            assert figures.figure(made, choices=[option]).axes


@pytest.mark.parametrize("name", [name for name in several.CHARTS if name != "sweep"])
def test_every_figure_of_several_runs_is_written(tmp_path: Path, name: str) -> None:
    for seed in range(2):
        for method in ("fedavg", "pfedhn"):
            made_run(tmp_path / "runs" / f"{method}-{seed}", method=method, seed=seed)
    path = figures.save(chart([tmp_path / "runs"], name), tmp_path / f"{name}.svg")
    assert b"<svg" in path.read_bytes()


def test_the_same_run_gives_the_same_file(run: RunDirectory, tmp_path: Path) -> None:
    for ending in ("pdf", "svg"):
        one, other = (figures.save(chart_of(run, "curves"), tmp_path / f"{i}.{ending}") for i in range(2))
        assert one.read_bytes() == other.read_bytes()


def test_the_points_of_a_figure_are_those_of_the_records(run: RunDirectory) -> None:
    made = chart_of(run, "loss")
    (line,) = figures.figure(made).axes[0].lines
    assert line.get_xdata().tolist() == [record["round"] for record in run.records()]
    assert line.get_ydata().tolist() == [record["diagnostics"]["local_loss"] for record in run.records()]


def test_what_is_not_there_is_said(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no choice 'hours'; it has: rounds, seconds, megabytes"):
        figures.figure(chart_of(run, "curves"), choices=["hours"])
    with pytest.raises(ConfigError, match="Unknown figure of a run 'curve'"):
        chart_of(run, "curve")
    with pytest.raises(ConfigError, match=r"the name of a figure ends in one of: .*svg"):
        figures.save(chart_of(run, "curves"), tmp_path / "curves.doc")
    plain = made_run(tmp_path / "plain")
    with pytest.raises(RunError, match=r"has nothing for the figure weights .*; it has: curves"):
        chart_of(plain, "weights")


def test_bars_are_numbered_as_on_the_page(tmp_path: Path) -> None:
    for method in ("fedavg", "pfedhn"):
        made_run(tmp_path / method, method=method, lift=0.1 * (method == "pfedhn"))
    axes = figures.figure(chart([tmp_path], "winners")).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(n) for n in range(1, 11)]


def test_a_figure_that_cannot_be_written_leaves_what_was_there(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"Cannot write .*No such file or directory"):
        figures.save(chart_of(run, "loss"), tmp_path / "nowhere" / "loss.pdf")
    figures.save(chart_of(run, "loss"), tmp_path / "loss.pdf")
    assert [file.name for file in tmp_path.iterdir()] == ["loss.pdf"]


def test_a_notebook_shows_a_figure_and_its_owner_saves_it_with_fonts_that_publishers_take(
    run: RunDirectory, tmp_path: Path
) -> None:
    made = figures.figure(chart_of(run, "curves"))
    assert made._repr_png_().startswith(b"\x89PNG")
    made.savefig(tmp_path / "curves.pdf")
    assert b"/Subtype /Type3" not in (tmp_path / "curves.pdf").read_bytes()
    made.savefig(tmp_path / "curves.svg")
    assert "accuracy</text>" in (tmp_path / "curves.svg").read_text(encoding="utf-8")


def test_lines_across_are_named_and_axes_begin_where_the_pages_do(run: RunDirectory) -> None:
    for name, label in (("curves", "best: round"), ("newcomers", "mean of participants")):
        axes = figures.figure(chart_of(run, name)).axes[0]
        assert any(text.get_text().startswith(label) for text in axes.texts)
    assert axes.get_xlim()[0] <= 0  # of distances
