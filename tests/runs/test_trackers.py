# SPDX-License-Identifier: Apache-2.0
"""Trackers get the numbers, and nothing is imported that was not asked for."""

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import ConfigError
from fedloom.runs.directory import RunDirectory
from fedloom.runs.trackers import TRACKERS, tracker

RECORD = {
    "round": 3,
    "test/accuracy": 0.5,
    "numpy": np.float32(0.25),
    "bad": math.nan,
    "text": "a",
    "none": None,
    "yes": True,
    "nested": {"a": 1.0},
    "list": [1.0],
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "my run", {"method": "fedavg", "lr": 0.1})


class Calls(list[tuple[str, Any]]):
    """Functions that write down how they were called."""

    def function(self, name: str, result: Any = None) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.append((name, args or options if not (args and options) else (args, options)))
            return result

        return call


def numbers_are_right(logged: dict[str, float]) -> None:
    assert math.isnan(logged.pop("bad"))
    assert logged == {"round": 3.0, "test/accuracy": 0.5, "numpy": 0.25}


def test_tensorboard_writes_event_files(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = tracker("tensorboard", run)
    log.log(RECORD, 3)
    log.log({"test/accuracy": 0.75}, 4)
    log.close()
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"round", "test/accuracy", "numpy", "bad"}
    assert [(e.step, e.value) for e in events.Scalars("test/accuracy")] == [(3, 0.5), (4, 0.75)]


def test_mlflow(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, fake = Calls(), ModuleType("mlflow")
    for name in ("set_experiment", "start_run", "log_params", "log_metrics", "end_run"):
        setattr(fake, name, calls.function(name))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    log = tracker("mlflow", run)
    log.log(RECORD, 3)
    log.close()
    assert [name for name, _ in calls] == [
        "set_experiment",
        "start_run",
        "log_params",
        "log_metrics",
        "end_run",
    ]
    assert calls[1][1] == {"run_name": "my run"} and calls[2][1] == (run.config,)
    (logged,), options = calls[3][1]
    assert options == {"step": 3}
    numbers_are_right(logged)


def test_wandb(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, fake = Calls(), ModuleType("wandb")
    started = SimpleNamespace(log=calls.function("log"), finish=calls.function("finish"))
    fake.init = calls.function("init", started)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = tracker("wandb", run)
    log.log(RECORD, 3)
    log.close()
    assert [name for name, _ in calls] == ["init", "log", "finish"]
    start = calls[0][1]
    assert start["name"] == "my run" and start["config"] == run.config and start["dir"] == str(run.path)
    (logged,), options = calls[1][1]
    assert options == {"step": 3}
    numbers_are_right(logged)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in ("mlflow", "wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        tracker(name, run)
    message = str(caught.value)
    assert message.startswith(f"The tracker {name!r} needs a package that cannot be imported (")
    assert message.endswith(f"); run `pip install fedloom[{name}]`, or leave the tracker out.")


def test_an_unknown_tracker(run: RunDirectory) -> None:
    with pytest.raises(ConfigError) as caught:
        tracker("tensorbord", run)
    assert str(caught.value) == (
        "Unknown tracker 'tensorbord'; did you mean 'tensorboard'? Choose from: mlflow, tensorboard, wandb."
    )
