# SPDX-License-Identifier: Apache-2.0
"""Files of results: what the tables made from them say, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import RunError
from fedloom.reports.measured import Line, Made, Measured, board, markdown

MADE = Made("abc1234", "2026-01-01", "a machine", "2.13.0")


def run(row: str, seed: int, best: float, *, val: float = 0.0, **chosen: Any) -> dict[str, Any]:
    return {"row": row, "seed": seed, "chosen": chosen, "made": 0, "metrics": {"val": val, "best": best}}


def measured(*runs: dict[str, Any], **more: Any) -> Measured:
    names = dict.fromkeys(one["row"] for one in (*runs, *more.get("means", ())))
    rows = more.pop("rows", [Line(name) for name in names])
    return Measured("r.yaml", "A table", ["best"], rows, made=[MADE], runs=runs, **more)


def test_a_mean_over_three_seeds_has_students_interval() -> None:
    """Of 0.80, 0.82, 0.84: mean 0.82, standard deviation 0.02, half an interval 4.303 x 0.02 / sqrt(3) = 0.0497."""
    cell = measured(*(run("a", seed, 0.80 + 0.02 * seed) for seed in range(3))).cell("a", "best")
    assert str(cell) == "82.0 ± 5.0"
    one = measured(run("a", 0, 0.8)).cell("a", "best")
    assert str(one) == "80.0"


def test_means_whose_runs_are_gone_have_the_same_interval() -> None:
    kept = {"row": "a", "chosen": {}, "made": 0, "seeds": 3, "metrics": {"best": [0.82, 0.02]}}
    assert str(measured(means=[kept]).cell("a", "best")) == "82.0 ± 5.0"


def test_validation_chooses_on_the_seeds_that_all_were_tried_with() -> None:
    """With seed 0 rate 1 is best by validation though not by test; that rate 2 has no other seed is no merit."""
    found = measured(
        run("a", 0, 0.1, val=0.9, rate=1), run("a", 1, 0.3, val=0.1, rate=1), run("a", 0, 0.8, val=0.5, rate=2)
    )
    assert found.choice("a") == {"rate": 1}
    cell = found.cell("a", "best")
    assert cell is not None and (cell.interval.mean, cell.seeds) == (0.2, 2)


def test_a_rate_at_which_a_seed_failed_is_passed_over() -> None:
    failed = {"row": "a", "seed": 0, "chosen": {"rate": 1}, "made": 0, "failed": "diverged"}
    assert measured(failed, run("a", 0, 0.5, val=0.5, rate=2)).choice("a") == {"rate": 2}


def test_the_board_begins_with_the_papers_and_the_controls() -> None:
    one = measured(run("Local", 0, 0.5), run("X, tuned", 0, 0.7), run("detail", 0, 0.1), setting="here",
                   length="60 of 500 rounds",
                   rows=[Line("Local", 68.1), Line("X, tuned", 70.25, "X"), Line("detail", None, "")])  # fmt: skip
    other = measured(run("FedAvg", 0, 0.4), run("X", 0, 0.6), setting="there")
    without = measured(run("X", 0, 0.6))
    assert board([one, other, without]).rows == [
        ["of the training", "60 of 500 rounds", "all"],
        ["best of the papers", "70.2", "–"],
        ["Local", "50.0", "–"],
        ["FedAvg", "–", "40.0"],
        ["FedAvg + prior", "–", "–"],
        ["X", "70.0", "60.0"],
    ]


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = measured(run("a", 0, 0.8, local_lr=0.05), rows=[Line("a", 81.5), Line("b")], note="n", setting="s")
    found.write(tmp_path / "r.json")
    again = Measured.read(tmp_path / "r.json")
    assert markdown(again.cells()) == markdown(found.cells())
    assert "| a (local lr 0.05) | 80.0 | 81.5 | 1 |" in markdown(again.cells())
    assert again.provenance() == "`fedloom table r.yaml`: a machine, torch 2.13.0, 2026-01-01, commit abc1234."


def test_provenance_says_how_much_and_puts_what_is_of_one_machine_together() -> None:
    made = [MADE, MADE._replace(commit="def5678", date="2026-01-03"), MADE._replace(hardware="another")]
    runs = [{**run("a", seed, 0.8), "made": seed} for seed in range(3)]
    found = Measured("r.yaml", "A table", ["best"], [Line("a")], length="6 of 50 rounds", made=made, runs=runs)
    assert found.provenance() == (
        "`fedloom table r.yaml`: 6 of 50 rounds; a machine, torch 2.13.0, 2026-01-01 to 2026-01-03, "
        "commits abc1234, def5678; another, torch 2.13.0, 2026-01-01, commit abc1234."
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 2}', '{"format": 1, "rows": 3}', '{"format": 1, "rows": [{"nmae": 1}]}',
     '{"format": 1, "recipe": "", "title": "", "columns": [], "rows": [], "more": 1}',
     '{"format": 1, "recipe": "", "title": "", "columns": [], "rows": [], "runs": [{}]}', "\xff"],
)  # fmt: skip
def test_what_is_no_file_of_results_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RunError, match="is no file of results"):
        Measured.read(tmp_path / "r.json")
