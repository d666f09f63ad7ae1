# SPDX-License-Identifier: Apache-2.0
"""Run directories and config files by others run no code, unless the user trusts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import yaml

import fedloom
from cli.conftest import Cli
from fedloom import algorithms
from fedloom.core.errors import FedloomError
from fedloom.data.registry import load as load_data
from fedloom.runs.directory import RunDirectory
from fedloom.runs.options import RunOptions

Refused = Callable[..., str]

TINY = {"clients": 4, "rounds": 1, "local_steps": 1, "model": "mlp:hidden=4"}
COMMANDS = {
    "resume": ["resume", "run"],
    "evaluate": ["evaluate", "run"],
    "evaluate unseen": ["evaluate", "run", "--unseen"],
    "export": ["export", "run", "--all"],
    "admit": ["admit", "run", "--data", "new.npz"],
    "run": ["run", "--config", "run/config.yaml", "--out", "again"],
    "run by name": ["run", "fedavg", "--config", "run/config.yaml", "--out", "again"],
}

TRAP = """
from pathlib import Path
Path("ran").touch()  # on import

from torch import nn
from fedloom.core.task import CLASSIFICATION as TASK

class Net(nn.Module):
    def __init__(self, input_shape, num_outputs):
        super().__init__()
        self.flat, self.out = nn.Flatten(), nn.Linear(64, num_outputs)

    def forward(self, x):
        return self.out(self.flat(x))
"""


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedAvg with unseen clients. Not to be changed."""
    return fedloom.run("fedavg", out=tmp_path_factory.mktemp("plain") / "run", unseen=1, progress="quiet", **TINY).path


def name_in_roster(network: str) -> None:
    """Give all clients of the roster in ./run that network."""
    file = Path("run/roster.json")
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "models": [{**one, "name": network} for one in content["models"]]}))


@pytest.fixture
def of_others(cli: Cli, plain: Path, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """``of_others(model=...)``: the run in ./run, its config changed; beside it trap.py, which tells when imported.

    Its author would have changed roster and digests to go with it.
    """
    shutil.copytree(plain, tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=load_data("digits").x[:5])
    (tmp_path / "trap.py").write_text(TRAP)

    def change(**changes: str) -> None:
        file = tmp_path / "run" / "config.yaml"
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **changes}))
        if "model" in changes:
            name_in_roster(changes["model"].rpartition(",")[2])
        for meta in (tmp_path / "run").glob("checkpoints/*/meta.json"):
            kept = json.loads(meta.read_text())
            kept["digests"] |= RunDirectory.open(tmp_path / "run").digests()
            meta.write_text(json.dumps(kept))

    yield change
    sys.modules.pop("trap", None)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    "named",
    [
        {"model": "os:system:command=touch ran"},
        {"model": "mlp:hidden=4,os:system:command=touch ran"},
        {"unseen_model": "os:system:command=touch ran"},
        {"model": "trap:Net"},
        {"task": "trap:TASK"},
    ],
    ids=str,
)
def test_a_command_runs_no_code_that_a_file_names(
    refused: Refused, of_others: Callable[..., None], words: list[str], named: dict[str, str]
) -> None:
    of_others(**named)
    (option, value), *_ = named.items()
    told = refused(*words)
    path = value.rpartition(",")[2].partition(":command")[0]
    assert f"run/config.yaml names code outside of fedloom, --{option.replace('_', '-')} {path}, which can" in told
    assert told.endswith("give --trust (in Python, trust=True).")
    assert not Path("ran").exists() and "trap" not in sys.modules
    assert not Path("again").exists()


@pytest.mark.parametrize("words", [COMMANDS["export"], COMMANDS["admit"]], ids=["export", "admit"])
@pytest.mark.parametrize("value", ["os:system:command=touch ran", "trap:Net"])
def test_nor_code_that_the_roster_names(
    refused: Refused, of_others: Callable[..., None], words: list[str], value: str
) -> None:
    of_others()
    name_in_roster(value)
    path = value.partition(":command")[0]
    assert f"run/roster.json names code outside of fedloom, --model {path}, which can" in refused(*words)
    assert not Path("ran").exists() and "trap" not in sys.modules


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("value", ["fedloom.api:run:method=fedavg", "fedloom.cli.output:tell:message=ran"])
def test_nor_a_function_of_fedloom(
    refused: Refused, of_others: Callable[..., None], words: list[str], value: str
) -> None:
    of_others(model=value)
    assert "is a function; expected a subclass of torch.nn.Module" in refused(*words)
    assert not Path("runs").exists()


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_with_trust_it_runs(cli: Cli, of_others: Callable[..., None], words: list[str]) -> None:
    of_others(task="trap:TASK")
    outcome = cli(*words, "--trust")
    assert outcome.code == 0, outcome.err
    assert Path("ran").exists()


@pytest.mark.parametrize("value", ["os:system:command=touch ran", "trap:TRAP", "trap:Path"])
def test_trust_is_no_leave_to_call_what_is_no_network(
    refused: Refused, of_others: Callable[..., None], value: str
) -> None:
    Path("trap.py").write_text("from pathlib import Path\nTRAP = lambda **given: Path('ran').touch()\n")
    of_others(model=value)
    assert "expected a subclass of torch.nn.Module" in refused("evaluate", "run", "--trust")
    assert not Path("ran").exists()


def test_what_the_user_types_is_trusted_and_what_the_file_says_beside_it_is_not(
    cli: Cli, refused: Refused, of_others: Callable[..., None]
) -> None:
    again = ("run", "--config", "run/config.yaml", "--model", "trap:Net", "--quiet", "--out")
    of_others(model="os:system:command=touch ran")
    assert cli(*again, "typed").code == 0
    Path("ran").unlink()
    of_others(unseen_model="os:system:command=touch ran")
    assert "names code outside of fedloom, --unseen-model os:system, which" in refused(*again, "mixed")
    assert not Path("ran").exists()


def test_a_run_that_is_stopped_says_how_to_go_on_with_a_network_of_ones_own(
    cli: Cli, of_others: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedloom.api.run", interrupt)
    monkeypatch.setattr("fedloom.api.resume", interrupt)
    for words in (("run", "fedavg", "--model", "trap:Net", "--out", "run"), ("resume", "run", "--trust")):
        outcome = cli(*words)
        assert outcome.code == 130 and "Go on with `fedloom resume run --trust`." in outcome.err
    assert "Go on with `fedloom resume run`." in cli("run", "fedavg", "--out", "run").err


def test_from_python(of_others: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    of_others(model="trap:Net")
    for use in (lambda: fedloom.load("run").evaluate(), lambda: fedloom.resume("run", progress="quiet")):
        with pytest.raises(FedloomError, match="names code outside of fedloom, --model trap:Net, which"):
            use()
    assert not Path("ran").exists()
    options = {**TINY, "model": "trap:Net", "progress": "quiet"}
    run = fedloom.run("fedavg", out="mine", **options)  # the user's own words
    assert type(run.model(0)).__name__ == "Net"
    assert type(fedloom.load("mine", trust=True).model(0)).__name__ == "Net"
    further = fedloom.resume("mine", rounds=2, progress="quiet", trust=True)
    assert type(further.model(0)).__name__ == "Net"
    of_others(model="mlp:hidden=4", unseen_model="os:system:command=touch ran")
    Path("ran").unlink()
    assert fedloom.load("run", unseen_model="trap:Net").evaluate()  # the user's word in place of the file's
    assert not Path("ran").exists()


def text_options() -> list[tuple[str, str]]:
    """Every option, of runs and of methods, whose value is a text."""
    shared = [("fedavg", field) for field in fields(RunOptions)]
    own = [(method, field) for method in algorithms.names() for field in fields(algorithms.get(method).config)]
    return [(method, field.name) for method, field in [*shared, *own] if "str" in str(field.type)]


@pytest.mark.parametrize(("method", "option"), text_options())
def test_no_option_imports_what_a_file_says(
    cli: Cli, method: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is refused as code, as no such name, or taken: an option that names a network must say so."""
    small = {**TINY, "rounds": 0, **({"hidden": 4} if hasattr(algorithms.get(method).config, "hidden") else {})}
    run = fedloom.run(method, out=tmp_path / "run", unseen=1, progress="quiet", **small)
    (tmp_path / "trap.py").write_text(TRAP)
    monkeypatch.syspath_prepend(tmp_path)
    file = run.path / "config.yaml"
    file.write_text(yaml.safe_dump({**run.config, option: "trap:Net"}))
    for words in (("evaluate", "run"), ("run", "--config", "run/config.yaml", "--out", "again")):
        cli(*words)
        assert not Path("ran").exists() and "trap" not in sys.modules


def test_a_file_in_the_folder_does_not_stand_in_for_a_package(tmp_path: Path) -> None:
    """`fedloom` as a command, whose own folder Python puts first, in a folder by somebody else."""
    for name in ("yaml", "rich", "torch"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "fedloom").write_text("from fedloom.cli.main import main\nmain()\n")
    env = {**os.environ, "PYTHONPATH": str(Path(fedloom.__file__).absolute().parents[1])}
    command = [sys.executable, "bin/fedloom", "compare", "."]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "is not a run directory" in done.stderr
    assert not (tmp_path / "ran").exists()
