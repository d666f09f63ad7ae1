# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers: optional mirrors of a run's numbers. Their packages are imported only when used.

The run directory stays what counts: a tracker gets each round's numbers after they are written there, and nothing is
ever read back from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Protocol

from fedloom.core.errors import ConfigError, unknown
from fedloom.runs.directory import RunDirectory


class Tracker(Protocol):
    """Takes the numbers of a round; everything else in a record is left out."""

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Write down the numbers of ``record``."""

    def close(self) -> None:
        """Nothing more comes."""


def tracker(name: str, run: RunDirectory) -> Tracker:
    """The tracker of that name, ready for ``run``."""
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    try:
        return TRACKERS[name](run)
    except ImportError as error:
        raise ConfigError(
            f"The tracker {name!r} needs a package that cannot be imported ({error}); "
            f"run `pip install fedloom[{name}]`, or leave the tracker out."
        ) from error


class TensorBoard:
    """Event files in ``RUN/tensorboard``."""

    def __init__(self, run: RunDirectory) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.path / "tensorboard"))

    def log(self, record: Mapping[str, Any], step: int) -> None:
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run of the experiment "fedloom", where ``MLFLOW_TRACKING_URI`` says."""

    def __init__(self, run: RunDirectory) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.set_experiment("fedloom")
        mlflow.start_run(run_name=run.path.name)
        mlflow.log_params(run.config)

    def log(self, record: Mapping[str, Any], step: int) -> None:
        self._mlflow.log_metrics(_numbers(record), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class WandB:
    """A run of the project "fedloom"; the parts of a resumed run are in one group."""

    def __init__(self, run: RunDirectory) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="fedloom", name=run.path.name, group=run.path.name, dir=str(run.path), config=run.config
        )

    def log(self, record: Mapping[str, Any], step: int) -> None:
        self._run.log(_numbers(record), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[RunDirectory], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value) for name, value in record.items() if isinstance(value, Real) and not isinstance(value, bool)
    }
