# SPDX-License-Identifier: Apache-2.0
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import fedloom
from fedloom import algorithms
from fedloom.cli.run import application, first_line
from fedloom.core.config import flag
from fedloom.runs.options import RunOptions

TINY = ("--clients", 4, "--rounds", 2, "--local-steps", 2, "--model", "mlp")

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, num_outputs):
        super().__init__()
        self.flat, self.out = nn.Flatten(), nn.Linear(64, num_outputs)

    def forward(self, x):
        return self.out(self.flat(x))
"""


def test_the_first_command_of_the_readme(cli):
    outcome = cli("run", "pfedhn", "--dataset", "digits", "--clients", 10, "--rounds", 2)
    assert outcome.code == 0
    assert "round 2/2: accuracy val" in outcome.err
    assert "test accuracy" in outcome.out
    assert Path("runs/pfedhn-digits-seed0/summary.json").is_file()


def test_json_is_rounds_and_then_the_summary(cli):
    outcome = cli("run", "fedavg", *TINY, "--json")
    assert outcome.err == ""
    *rounds, summary = map(json.loads, outcome.out.splitlines())
    assert [record["round"] for record in rounds] == [1, 2]
    assert summary["finished"] and summary["last"]["round"] == 2


def test_quiet_prints_where_the_run_is(cli):
    assert cli("run", "local", *TINY, "--quiet") == (0, "runs/local-digits-seed0\n", "")


def test_flags_win_over_the_file(cli):
    Path("tiny.yaml").write_text("clients: 4\nrounds: 5\nlocal-steps: 2\nmodel: mlp\nmethod: fedavg\nlocal_lr: 1e-3\n")
    assert cli("run", "fedavg", "--config", "tiny.yaml", "--rounds", 1, "--out", "a", "--keep-optimiser").code == 0
    config = yaml.safe_load(Path("a/config.yaml").read_text())
    assert (config["rounds"], config["local_steps"], config["local_lr"]) == (1, 2, 0.001)
    assert config["keep_optimiser"] is True


@pytest.mark.parametrize("spelling", [("--config", "a/config.yaml"), ("--config=a/config.yaml",)])
def test_a_run_is_repeated_from_its_config(cli, spelling):
    cli("run", "fedavg", *TINY, "--unseen", 1, "--seed", 3, "--out", "a", "--quiet")
    assert cli("run", *spelling, "--out", "b", "--quiet").code == 0
    last = [json.loads(Path(run, "summary.json").read_text())["last"] for run in "ab"]
    assert last[0] == last[1]
    assert Path("a/config.yaml").read_text() == Path("b/config.yaml").read_text()


def test_a_preset_wins_over_the_values_of_another_one_in_a_file_and_other_flags_over_both(cli):
    tiny = ("--dataset", "digits", "--clients", 4, "--rounds", 1, "--model", "mlp:hidden=5", "--local-steps", 1)
    assert cli("run", "mh_pfedhn", *tiny, "--weight-decay", 0.5, "--out", "text", "--quiet").code == 0
    for out, file, preset, more, rates in (
        ("code", "text", "code", (), (5e-3, 5e-4)),
        ("decayed", "text", "code", ("--weight-decay", 0.25), (5e-3, 0.25)),
        ("back", "code", "text", (), (1e-3, 1e-4)),
        ("same", "text", "text", (), (1e-3, 0.5)),
    ):
        config = ("--config", f"{file}/config.yaml", "--preset", preset)
        assert cli("run", *config, *more, "--out", out, "--quiet").code == 0
        found = yaml.safe_load(Path(out, "config.yaml").read_text())
        assert (found["preset"], found["local_lr"], found["weight_decay"]) == (preset, *rates)


def test_seeds_have_directories_of_their_own_and_are_compared(cli):
    outcome = cli("run", "fedavg", *TINY, "--seed", 5, "--seeds", 2, "--out", "many")
    assert sorted(run.name for run in Path("many").iterdir()) == ["seed-5", "seed-6"]
    assert " ± " in outcome.out and "test accuracy, mean ± standard deviation over seeds" in outcome.out


def test_seeds_as_json(cli):
    lines = [json.loads(line) for line in cli("run", "fedavg", *TINY, "--seeds", 2, "--json").out.splitlines()]
    assert [line.get("seed") for line in lines if "finished" in line] == [0, 1]
    assert lines[-1]["comparison"][0]["seeds"] == [0, 1]


def test_a_network_of_the_user_s_own(cli):
    Path("nets_of_mine.py").write_text(NET)
    outcome = cli("run", "fedavg", "--clients", 4, "--rounds", 1, "--local-steps", 1, "--model", "nets_of_mine:Net")
    assert outcome.code == 0
    assert "model nets_of_mine:Net" in outcome.err


def test_an_option_of_another_method_is_told_apart_from_a_slip(cli):
    outcome = cli("run", "pfedhn", *TINY, "--mu=0.1")
    assert outcome.code == 2 and "--mu is an option of fedprox, moon, not of pfedhn." in outcome.err
    outcome = cli("run", "pfedhn", *TINY, "--embeddim", 3)
    assert outcome.code == 2 and "--embed-dim" in outcome.err
    assert cli("run", "pfedhn", *TINY, "--no-spectral-norm", "--quiet").code == 0


def test_every_method_is_listed_with_its_line(cli):
    listed = cli("run", "--help").out
    for name in algorithms.names():
        assert name in listed
        assert first_line(name)[:40] in listed


@pytest.mark.parametrize("method", algorithms.names())
def test_every_field_of_a_config_is_a_flag(method):
    command = get_command(application(["run", method])).commands[method]
    listed = {name for option in command.params for name in option.opts}
    assert {flag(field.name) for field in (*fields(RunOptions), *fields(algorithms.get(method).config))} <= listed


def test_help_lists_the_flags(cli):
    listed = cli("run", "pfedhn", "--help").out
    for field in (*fields(RunOptions), *fields(algorithms.get("pfedhn").config)):
        assert f"{flag(field.name)} " in listed


def test_a_method_file_that_is_not_python_does_not_break_the_list(monkeypatch, tmp_path):
    (tmp_path / "halfdone.py").write_text('"""Half: done."""\ndef (')
    monkeypatch.setattr(algorithms, "__path__", [str(tmp_path)])
    assert algorithms.names() == ["halfdone"]
    assert first_line("halfdone") == "(line 2 of its file is not Python)"


REFUSALS = [
    (["pfedhm"], "Unknown method 'pfedhm'; did you mean 'pfedme' or 'pfedhn'"),
    (["fedavg", "--clients", "many"], "--clients is 'many'; expected a whole number"),
    (["fedavg", "--clients", "0"], "--clients is 0; it must be at least 1"),
    (["fedavg", "--rounds", "-3"], "--rounds is -3; it must be at least 0"),
    (["fedavg", "--local-lr", "inf"], "--local-lr is inf; it must be at least 0, and finite."),
    (["fedavg", "--model", ","], "--model ',' names no network. Give one, or leave it out for auto."),
    (["fedavg", "--clients", "4", "--cohort", "5"], "--cohort is 5, but there are 4 clients"),
    (["fedavg", "--partition", "classes:11"], "more classes per client (11) than classes in the data (10)"),
    (["fedavg", "--partition", "clases:2"], "Unknown partition scheme 'clases:2'; did you mean 'classes:K'"),
    (["fedavg", "--dataset", "digit"], "Unknown dataset 'digit'; did you mean 'digits'"),
    (["fedavg", "--dataset", "mnist"], "No data root is given; set --data-root"),
    (["fedavg", "--dataset", "mnist", "--data-root", "nowhere"], "not complete below nowhere"),
    (["fedavg", "--model", "lennet"], "Unknown model 'lennet'; did you mean 'lenet'"),
    (["fedavg", "--model", "nowhere:Net"], "cannot import 'nowhere'"),
    (["fedavg", "--engine", "vectorized"], "Unknown engine 'vectorized'; did you mean 'vectorised'"),
    (["fedavg", "--optimiser", "adamm"], "Unknown value for --optimiser 'adamm'; did you mean 'adam'"),
    (["fedavg", "--local-lr", "nan"], "--local-lr is nan"),
    (["fedavg", "--model", "mlp,lenet"], "FedAvg needs one architecture for all clients; got 2"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSALS, ids=[" ".join(words) for words, _ in REFUSALS])
def test_refusals(refused, words, sentence):
    assert sentence in refused("run", *words)
    assert not Path("runs").exists()


FILES = [
    ("clints: 4", "Unknown option of fedavg 'clints'; did you mean 'clients'"),
    ("method: pfedhn", "is for the method 'pfedhn', not 'fedavg'; write `fedloom run pfedhn`."),
    ("clients: [4]", "--clients is [4]; expected a whole number"),
    ("model: 5", "Unknown model '5'"),
    ("- clients", "holds no mapping; write one `option: value` per line."),
    ("clients: [", "is not YAML"),
]


@pytest.mark.parametrize(("text", "sentence"), FILES, ids=[text for text, _ in FILES])
def test_refusals_of_files(refused, text, sentence):
    Path("bad.yaml").write_text(text)
    assert sentence in refused("run", "fedavg", "--config", "bad.yaml")


def test_refuses_a_file_that_is_not_there(refused):
    assert "Cannot read --config none.yaml: No such file" in refused("run", "fedavg", "--config", "none.yaml")
    assert "Cannot read --config none.yaml: No such file" in refused("run", "--config", "none.yaml")


def test_refuses_a_file_without_method(refused):
    Path("some.yaml").write_text("clients: 4")
    assert "names no method; write `fedloom run METHOD --config some.yaml`" in refused("run", "--config", "some.yaml")
    Path("some.yaml").write_text("title: a table\nrows: []")
    assert "recipe of a table; run it with `fedloom table some.yaml`" in refused("run", "--config", "some.yaml")
    Path("some.yaml").write_text("method: fedavgg")
    assert "Unknown method in some.yaml 'fedavgg'" in refused("run", "--config", "some.yaml")


def test_refuses_an_out_that_holds_a_run(refused, trained):
    assert f"already holds a run; give another --out, or go on with it: `fedloom resume {trained}`" in refused(
        "run", "local", *TINY, "--out", trained
    )


def test_ctrl_c_saves_and_says_how_to_go_on(cli, tmp_path):
    out = tmp_path / "stopped"
    words = ["run", "fedavg", *TINY, "--rounds", 100_000, "--eval-every", 1, "--out", out]
    program = f"from fedloom.cli.main import main; main({list(map(str, words))})"
    # absolute, as the fixture has changed the folder
    env = {**os.environ, "PYTHONPATH": str(Path(fedloom.__file__).absolute().parents[1])}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while not process.stderr.readline().startswith("round 1/"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert told.splitlines()[-1] == f"fedloom: stopped; saved in {out}. Go on with `fedloom resume {out}`."
    assert "Traceback" not in told
    done = json.loads((out / "summary.json").read_text())["rounds"]
    assert cli("resume", out, "--rounds", done + 1, "--quiet").code == 0
    assert json.loads((out / "summary.json").read_text())["rounds"] == done + 1


def test_ctrl_c_before_anything_is_saved(cli, monkeypatch):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedloom.api.run", interrupt)
    outcome = cli("run", "fedavg", *TINY)
    assert (outcome.code, outcome.err) == (130, "fedloom: stopped before the first round; nothing was saved.\n")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.slow
def test_ctrl_c_five_times_in_a_row_is_one(cli, tmp_path):
    """They come while workers end, while the run is saved, and while the process ends."""
    out = tmp_path / "stopped"
    words = ["run", "fedavg", *TINY, "--engine", "parallel", "--rounds", 100_000, "--eval-every", 1, "--out", out]
    program = f"from fedloom.cli.main import main; main({list(map(str, words))})"
    env = {**os.environ, "PYTHONPATH": str(Path(fedloom.__file__).absolute().parents[1])}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while not process.stderr.readline().startswith("round 1/"):
            assert process.poll() is None
        for pause in (0.001, 0.01, 0.1, 0.3, 0):
            process.send_signal(signal.SIGINT)
            time.sleep(pause)
        told = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert told.splitlines()[-1] == f"fedloom: stopped; saved in {out}. Go on with `fedloom resume {out}`."
    assert "Traceback" not in told
    done = json.loads((out / "summary.json").read_text())["rounds"]
    assert cli("resume", out, "--rounds", done + 1, "--quiet").code == 0


def test_a_network_that_memory_has_no_room_for(refused, monkeypatch):
    sentence = refused("run", "fedavg", *TINY[:-1], "mlp:hidden=100000000000000")
    assert sentence.startswith("This machine has too little memory (25,600,000.0 GB are wanted at once); take a ")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.slow
def test_what_is_no_file_is_refused_and_not_waited_for(kind, cli, refused, trained, tmp_path):
    """Every file of a run in turn, and every option that names a file."""
    place = tmp_path / "place"

    def put(path: Path) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path) if kind == "pipe" else path.mkdir()

    put(place)
    put(place.with_suffix(".npz"))
    for words in (
        ["run", "--config"],
        ["run", "fedavg", "--config"],
        *([["run", "fedavg", "--out"]] * (kind == "pipe")),
    ):
        assert str(place) in refused(*words, place)
    for words in (["run", "fedavg", "--dataset"], ["admit", trained, "--data"], ["data", "show", "--dataset"]):
        assert str(place) in refused(*words, place.with_suffix(".npz"))
    for file in [file for file in trained.rglob("*") if file.is_file()]:
        run = tmp_path / "run"
        shutil.copytree(trained, run)
        put(run / file.relative_to(trained))
        for words in (["evaluate", run], ["export", run, "--all"], ["resume", run, "--rounds", 9, "--quiet"]):
            outcome = cli(*words)
            assert "Traceback" not in outcome.err
            assert outcome.code == 0 or (outcome.code == 2 and str(run) in outcome.err)
            if file.name in ("config.yaml", "roster.json"):
                assert outcome.code == 2
        shutil.rmtree(run)


def test_a_folder_without_permission_is_named(refused, monkeypatch, trained):
    real = Path.is_file

    def is_file(self: Path) -> bool:
        if trained in self.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self)

    monkeypatch.setattr(Path, "is_file", is_file)
    for words in (["resume", trained], ["evaluate", trained], ["export", trained, "--all"]):
        assert refused(*words).startswith(f"Cannot use {trained}/config.yaml: Permission denied; give another")
