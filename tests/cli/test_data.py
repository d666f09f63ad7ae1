# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import numpy as np

from fedloom.runs.options import RunOptions


def test_show_is_a_table_with_notes(cli):
    out = cli("data", "show", "--clients", 3, "--unseen", 1).out
    assert "skew" in out and "unseen" in out
    assert "note: " in out


def test_a_name_in_a_file_gives_the_terminal_no_orders(cli):
    ids = np.repeat(["\x1b[2Jcleared", "\u202egnp.exe", "a\nb", "مستشفى"], 20)
    np.savez("own.npz", x=np.random.default_rng(0).random((80, 3)), y=np.arange(80) % 2, client=ids)
    shown = cli("data", "show", "--dataset", "own.npz", "--partition", "group:client").out
    assert not {"\x1b", "\u202e"} & set(shown) and "a\\nb" in shown and "مستشفى" in shown
    assert r"\x1b[2Jcleared" in shown and r"\u202egnp.exe" in shown


def test_show_saves_a_picture(cli):
    outcome = cli("data", "show", "--partition", "dirichlet:0.3", "--clients", 10, "--out", "split.png")
    assert outcome.out.splitlines()[-1] == "split.png"
    assert Path("split.png").read_bytes().startswith(b"\x89PNG")


def test_show_takes_regression_data(cli):
    rng = np.random.default_rng(0)
    np.savez("own.npz", x=rng.normal(size=(60, 3)).astype(np.float32), y=rng.normal(size=60).astype(np.float32))
    outcome = cli("data", "show", "--dataset", "own.npz", "--partition", "iid", "--clients", 3, "--out", "own.png")
    assert outcome.code == 0
    assert "–" in outcome.out  # no classes
    assert Path("own.png").is_file()


def test_show_says_what_data_are_taken_for(cli, refused):
    rng = np.random.default_rng(0)
    np.savez("own.npz", x=rng.integers(0, 9, (40, 5)), y=np.arange(40) % 2)
    shown = cli("data", "show", "--dataset", "own.npz", "--clients", 2).out
    assert "taken for sequences of 9 different tokens" in " ".join(shown.split())
    table = ("data", "show", "--dataset", "gap.csv", "--target", "age", "--partition", "iid", "--clients", 2)
    Path("gap.csv").write_text("a,age\n" + "".join(f"{row},{2 * row}\n" for row in range(60)))
    assert "--task says which" in refused(*table)
    assert "–" in cli(*table, "--task", "regression").out


def test_show_refuses(refused):
    assert "Unknown dataset 'digitz'" in refused("data", "show", "--dataset", "digitz")
    assert "--clients is 0; it must be at least 1" in refused("data", "show", "--clients", 0)
    assert "more classes per client (99)" in refused("data", "show", "--partition", "classes:99")


def test_show_refuses_a_picture_of_unknown_kind(cli):
    outcome = cli("data", "show", "--clients", 3, "--out", "split.txt")
    assert outcome.code == 2
    assert outcome.err.startswith("fedloom: --out is split.txt; the name of a picture ends in one of:")
    assert "Cannot write no/split.png" in cli("data", "show", "--clients", 3, "--out", "no/split.png").err


def test_split_options_are_run_options():
    from fedloom.cli.data import SPLIT_OPTIONS

    assert set(SPLIT_OPTIONS) <= set(RunOptions.__dataclass_fields__)


def test_fetch_calls_the_library_and_prints_paths(cli, monkeypatch, tmp_path):
    def fetch(name, root, progress):
        progress("a.gz", 1, None)
        progress("a.gz", 2, 2)
        return [root / name / "a.gz"]

    monkeypatch.setattr("fedloom.data.fetch.fetch", fetch)
    assert cli("data", "fetch", "mnist", "--data-root", tmp_path).out == f"{tmp_path / 'mnist' / 'a.gz'}\n"


def test_fetch_refuses(refused):
    assert "Unknown dataset 'mnits'; did you mean 'mnist'" in refused("data", "fetch", "mnits")
    assert "No data root is given" in refused("data", "fetch", "mnist")


def test_fetch_has_nothing_to_do_for_installed_data(cli):
    assert cli("data", "fetch", "digits").err == (
        "fedloom: digits comes with an installed package; there is nothing to fetch.\n"
    )
