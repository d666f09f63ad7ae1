# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fedloom.core.errors import RunError
from fedloom.reports.compare import Spread, compare, find_runs
from fedloom.reports.report import page
from fedloom.runs.directory import RunDirectory

TEST = "deployed/participants/test/accuracy"


def write_run(path: Path, best: float = 0.5, *, finished: bool = True, unseen: object = None, **config: object) -> Path:
    path.mkdir(parents=True)
    full = {"method": "fedavg", "seed": 0, "rounds": 2, "data_root": None, **config}
    (path / "config.yaml").write_text(yaml.safe_dump(full))
    summary = {
        "finished": finished,
        "metric": "accuracy",
        "seconds": 2.0,
        "bytes": {"down": 1_000_000, "up": 500_000},
        "best": {"round": 1, TEST: best, f"{TEST}_worst10": best / 2},
        "last": {"round": 2, TEST: best - 0.1},
        "unseen": unseen,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_counts_that_could_be_shares_are_written_as_counts(tmp_path: Path) -> None:
    for number in (0.25, 4.0):
        write_run(tmp_path / str(number), cohort=number)
    assert [str(row.options["cohort"]) for row in compare([tmp_path]).rows] == ["0.25", "4"]


def test_seeds_make_one_row_with_mean_and_spread(tmp_path):
    """0.4 and 0.6: the mean is 0.5, the standard deviation sqrt(0.01 + 0.01) = 0.1414."""
    for seed, best in enumerate((0.4, 0.6)):
        write_run(tmp_path / f"seed-{seed}", best, seed=seed, data_root=f"/data/{seed}")
    (row,) = compare([tmp_path]).rows
    assert row.seeds == (0, 1)
    assert row.best == pytest.approx((0.5, 0.02**0.5))
    assert row.last == pytest.approx((0.4, 0.02**0.5))
    assert row.worst10 == pytest.approx((0.25, 0.005**0.5))
    assert (row.seconds, row.megabytes) == (Spread(2.0, 0.0), Spread(1.5, 0.0))
    assert row.options == {}


def test_rows_show_what_differs(tmp_path):
    write_run(tmp_path / "a", rounds=2, local_lr=0.1)
    write_run(tmp_path / "b", rounds=2, local_lr=0.2)
    write_run(tmp_path / "c", method="pfedhn", embed_dim=4)
    rows = compare([tmp_path]).rows
    assert [(row.method, dict(row.options)) for row in rows] == [
        ("fedavg", {"local_lr": 0.1}),
        ("fedavg", {"local_lr": 0.2}),
        ("pfedhn", {}),  # an option that no other row has tells nothing
    ]


def test_runs_of_unlike_federations_are_said_to_be(tmp_path):
    for name, own in {"a": {}, "b": {"clients": 9}, "c": {"dataset": "mnist", "local_lr": 0.1}}.items():
        write_run(tmp_path / name, **{"dataset": "digits", "clients": 4, "local_lr": 0.2, **own})
    assert compare([tmp_path / "a", tmp_path / "c"]).unlike == (
        "These runs are not of one federation: they differ in dataset (digits, mnist). Compare rows that agree in it."
    )
    assert "differ in dataset (digits, mnist) and clients (4, 9)." in compare([tmp_path]).unlike
    assert compare([write_run(tmp_path / "d", dataset="digits", clients=4, local_lr=0.3), tmp_path / "a"]).unlike == ""


def test_the_same_run_twice_is_one_seed(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name)
    found = compare([tmp_path])
    assert found.rows[0].seeds == (0,) and found.rows[0].best == Spread(0.5, None)
    assert found.left_out == (f"{tmp_path / 'b'} is left out: it has the config and the seed of {tmp_path / 'a'}.",)


def test_another_metric_is_no_comparison(tmp_path):
    for name in ("accuracy", "rmse"):
        path = write_run(tmp_path / name, method=f"by_{name}")
        file = path / "summary.json"
        file.write_text(file.read_text().replace("accuracy", name))
    assert "they differ in metric (accuracy, rmse)" in compare([tmp_path]).unlike


def test_an_adapted_run_is_a_row_of_its_own(tmp_path):
    write_run(tmp_path / "a", adapt="none")
    write_run(tmp_path / "b", adapt="prior")
    assert [(row.method, dict(row.options)) for row in compare([tmp_path]).rows] == [
        ("fedavg", {}),
        ("fedavg + prior", {}),
    ]


def test_numbers_that_not_all_runs_have_are_none(tmp_path):
    known = {"deployed/unseen/test/accuracy": 0.3}
    write_run(tmp_path / "seed-0", seed=0, unseen=known)
    assert compare([tmp_path]).rows[0].unseen == Spread(0.3, None)
    write_run(tmp_path / "seed-1", seed=1, unseen={"reason": "it cannot"})
    assert compare([tmp_path]).rows[0].unseen is None


def test_newcomers_are_those_of_the_best_round(tmp_path):
    """As all else in the row; those of the last round are another model's."""
    name = "deployed/unseen/test/accuracy"
    path = write_run(tmp_path / "run", unseen={name: 0.3})
    summary = json.loads((path / "summary.json").read_text())
    summary["best"][name] = 0.2
    (path / "summary.json").write_text(json.dumps(summary))
    assert compare([tmp_path]).rows[0].unseen == Spread(0.2, None)


def test_runs_that_were_stopped_are_left_out(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", finished=False)
    (write_run(tmp_path / "c") / "summary.json").unlink()
    found = compare([tmp_path])
    assert found.rows[0].runs == (str(tmp_path / "a"),)
    assert [sentence.split()[0] for sentence in found.left_out] == [str(tmp_path / "b"), str(tmp_path / "c")]
    with pytest.raises(RunError, match="There is no finished run to compare"):
        compare([tmp_path / "b"])


def test_a_run_is_counted_once(tmp_path):
    write_run(tmp_path / "a")
    assert len(find_runs([tmp_path, tmp_path / "a"])) == 1


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"is not a run directory: it has no config\.yaml"):
        compare([tmp_path])


def test_spreads_as_text():
    assert str(Spread(0.5, None)) == "0.5000"
    assert str(Spread(0.5, 0.01)) == "0.5000 ± 0.0100"


def test_comparing_needs_no_torch():
    program = "import sys, fedloom.reports.compare; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_records_that_were_changed_are_told_in_a_sentence(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "config.yaml").write_text("method: fedavg\n")
    with pytest.raises(RunError, match=r"records are not what this fedloom writes .KeyError: 'seed'"):
        compare([path])
    write_run(tmp_path / "other")
    (tmp_path / "other" / "metrics.jsonl").write_text('{"round": 1}\n')
    with pytest.raises(RunError, match=r"records are not what this fedloom writes .KeyError: 'seconds'"):
        page([tmp_path / "other"])


def test_runs_on_other_samples_are_not_of_one_federation(tmp_path: Path) -> None:
    """Data given from Python have no name: their fingerprints in the checkpoints tell them apart."""
    for name, data in (("a", "one"), ("b", "one"), ("c", "another"), ("d", None)):
        run = write_run(tmp_path / name, dataset="python", local_lr=float(len(name)), method=f"method {name}")
        meta = {"digests": {"data": data}} if data else {}
        RunDirectory.open(run).save(1, {}, {}, meta, best=True)
    assert compare([tmp_path / "a", tmp_path / "b", tmp_path / "d"]).unlike == ""
    assert "they differ in what is in the data" in compare([tmp_path / "a", tmp_path / "c"]).unlike
    (tmp_path / "c" / "checkpoints" / "round-000001" / "meta.json").write_text("{")
    assert compare([tmp_path / "a", tmp_path / "c"]).unlike == ""


def test_other_targets_and_groups_are_other_federations(tmp_path: Path) -> None:
    for name, value in (("a", "height"), ("b", "weight")):
        write_run(tmp_path / name, target=value)
    assert "target (height, weight)" in compare([tmp_path / "a", tmp_path / "b"]).unlike


def test_folders_of_seeds_are_found_in_a_folder(tmp_path: Path) -> None:
    for method in ("local", "fedavg"):
        for seed in range(2):
            write_run(tmp_path / method / f"seed-{seed}", method=method, seed=seed)
    assert [run.path.relative_to(tmp_path).as_posix() for run in find_runs([tmp_path])] == [
        "fedavg/seed-0", "fedavg/seed-1", "local/seed-0", "local/seed-1",
    ]  # fmt: skip
