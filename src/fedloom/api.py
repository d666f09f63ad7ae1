# SPDX-License-Identifier: Apache-2.0
"""What users call and the command line calls: run, resume, load; and what a run can do when it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedloom import algorithms
from fedloom.adaptation.report import Report, report_of
from fedloom.clients.federation import SPLITS
from fedloom.core.errors import ConfigError, NeedsError, RunError, unknown
from fedloom.core.trees import ClientId, Tree
from fedloom.data.arrays import Arrays
from fedloom.data.registry import load as load_data
from fedloom.data.samples import as_arrays
from fedloom.models.load import is_one_network, with_preparation
from fedloom.models.spec import ModelSpec
from fedloom.progress import Display, display
from fedloom.reports.facts import facts_of
from fedloom.reports.report import ON_DEMAND, figure, snippet
from fedloom.reports.report import write as write_report
from fedloom.robust import TRIGGERED
from fedloom.robust.poison import BACKDOOR
from fedloom.runs.directory import RunDirectory
from fedloom.runs.environment import environment
from fedloom.runs.export import export
from fedloom.runs.files import to_json, write_file
from fedloom.runs.options import PYTHON_DATA, RunOptions
from fedloom.runs.portable import SAFETENSORS
from fedloom.runs.records import ADMISSION, MIX, short
from fedloom.runs.trackers import TRACKERS
from fedloom.training.admission import Newcomer, admitted, checked_for, samples_for
from fedloom.training.again import simulated
from fedloom.training.config import flat_config, parse_options
from fedloom.training.loop import train
from fedloom.training.rates import AUTO
from fedloom.training.rates import found as found_rate
from fedloom.training.server import Server, method_of
from fedloom.training.simulation import Simulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(
    method: str,
    *,
    dataset: Any = "digits",
    model: Any = "auto",
    out: str | Path | None = None,
    progress: str | Display = "auto",
    **options: Any,
) -> Run:
    """Train ``method`` and give the finished run.

    torch's number of threads and its precision are set for this process, to what the run needs, and left so.

    Args:
        method: A name from ``fedloom methods``.
        dataset: A dataset's name, a path, ``(x, y)`` arrays, or any torch Dataset of such pairs.
        model: A network's name or import path, or an ``nn.Module`` class.
        out: The run directory; without it, a new one under ``runs/``.
        progress: ``auto``, ``rich``, ``plain``, ``json`` or ``quiet``.
        options: The other options of ``fedloom run``, with underscores, and the method's own; ``local_lr="auto"`` finds
            the rate by short trials.

    >>> run = fedloom.run("fedavg", dataset="digits", clients=4, rounds=2, progress="quiet")  # doctest: +SKIP
    """
    given = as_options(dataset, model, options)
    automatic = given.get("local_lr") == AUTO
    shared, config = parse_options(method, {n: v for n, v in given.items() if not (automatic and n == "local_lr")})
    arrays = None if isinstance(dataset, str | Path) else as_arrays(dataset, shared.roles)
    shown = display(progress) if isinstance(progress, str) else progress
    if shared.tracker and shared.tracker not in TRACKERS:
        raise unknown("tracker", shared.tracker, TRACKERS)
    path = Path(out) if out else new_path(method, asdict(shared))
    if shared.engine == "flower-sim":
        if automatic:
            raise ConfigError(f"--local-lr {AUTO} tries rates in this process; --engine flower-sim does not. Give one.")
        return _run_on_ray(method, shared, config, path, arrays, shown)
    arrays = arrays or load_data(shared.dataset, shared.data_root, shared.roles)
    if not automatic:
        return begin(method, shared, config, arrays, path, shown)
    config, note = found_rate(method, shared, config, arrays)
    return begin(method, shared, config, arrays, path, shown, notes=(note,))


def as_options(dataset: Any, model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """What was given from Python as the options of a config file; the file cannot hold data."""
    given = {"dataset": dataset, "model": model, **options}
    if not isinstance(dataset, str | Path):
        given["dataset"] = PYTHON_DATA
    if not isinstance(model, str):
        given["model"] = _path_of(model)
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def begin(
    method: str,
    shared: RunOptions,
    config: Any,
    arrays: Arrays,
    path: Path,
    shown: Display,
    until: int | None = None,
    notes: Sequence[str] = (),
) -> Run:
    """Train in a new run directory to the end, or until a round after which it can be resumed.

    ``notes`` are for the run's own.
    """
    simulation = Simulation(method, shared, config, arrays)
    simulation.notes = [*simulation.notes, *notes]
    server, _ = simulation.server, simulation.clock  # refuses before there is a directory
    resolved = flat_config(method, server.options, config)
    # those that are kept, the best one, and the one that is being written
    need = (server.options.keep + 2) * server.checkpoint_bytes()
    directory = RunDirectory.create(path, resolved, need_bytes=need)
    with directory.lock():
        directory.write_roster(server.roster)
        directory.write_environment(environment(shared.seed, _device_name(simulation)))
        train(simulation, directory, shown, until)
        return Run(directory, simulation.arrays, trust=True)


def _run_on_ray(method: str, options: RunOptions, config: Any, out: Path, arrays: Arrays | None, shown: Display) -> Run:
    if arrays is not None:
        raise ConfigError(
            "--engine flower-sim starts clients in processes of their own, which load the data themselves; data given "
            "from Python cannot be had there. Save them as an .npz file and give its path."
        )
    try:
        from fedloom.deploy.ray import run_on_ray
    except ImportError as error:
        raise NeedsError(
            f"--engine flower-sim needs Flower, which is not installed ({error}); pip install 'fedloom[flower]'."
        ) from error
    return Run(run_on_ray(method, options, config, out, shown), trust=True)


def resume(
    path: str | Path,
    *,
    dataset: Any = None,
    data_root: str | Path | None = None,
    rounds: int | None = None,
    device: str | None = None,
    progress: str | Display = "auto",
    force: bool = False,
    trust: bool = False,
    until: int | None = None,
) -> Run:
    """Go on with a run that was stopped, from its last checkpoint; with ``rounds``, further than it was to go.

    ``dataset`` and ``data_root`` are for data that have moved, and for those given from Python; other data than the
    run's own are refused without ``force``. ``device`` is for a machine that has another one than the run began on.
    ``force``: go on although the config, the roster, the data or the records are not those of the checkpoint. ``trust``
    is as in ``load``. ``until``: pause after that round, to be resumed again.
    """
    directory = RunDirectory.open(Path(path))
    shown = display(progress) if isinstance(progress, str) else progress
    with directory.lock():
        root = None if data_root is None else str(data_root)
        simulation = simulated(directory, dataset, trust, rounds=rounds, device=device, data_root=root)
        server = simulation.server
        if directory.checkpoints():
            last = directory.load("last")
            directory.check(last.meta, force=force, **simulation.data_digests, **simulation.clock_digests)
            directory.check_records(last.round, force=force)
            server.restore(last)
            del last  # of a loom that is divided, nothing is to stay here
        if server.round > server.options.rounds:
            raise ConfigError(
                f"--rounds is {server.options.rounds}, but {directory.path} has done {server.round} rounds; "
                "give a greater number, or leave it out."
            )
        directory.update_config(rounds=server.options.rounds)
        if not directory.has_roster():  # killed between writing the one and the other
            directory.write_roster(server.roster)
        if directory.environment() is None:
            directory.write_environment(environment(server.options.seed, _device_name(simulation)))
        directory.rewind(server.round)
        train(simulation, directory, shown, until)
        return Run(directory, simulation.arrays, trust=True)


def load(
    path: str | Path,
    *,
    dataset: Any = None,
    which: Literal["best", "last"] | int | None = None,
    adapt: str | None = None,
    force: bool = False,
    trust: bool = False,
    **options: Any,
) -> Run:
    """A run from its directory, at its best (by validation) or last checkpoint, or at a round that was kept.

    Without ``which`` it is the best; for newcomers, the last if the method serves them from there. Models, predictions,
    exports and admissions need the run directory alone; evaluations load the data, or take ``dataset``: the same data
    from another place or from Python, or with ``force`` others.
    With ``adapt="prior"`` the run is adapted now, whether it was when it was trained or not: participants calibrate,
    which takes the data. ``options`` are options that matter after training, with other values than the run was trained
    with: ``unseen_shift="blur"``. ``force``: load although config, roster or data are not those of the checkpoint.
    ``trust`` lets the run name code outside of fedloom, such as a network of your own, which is then imported.
    """
    directory = RunDirectory.open(Path(path))
    method_of(directory)
    return Run(directory, dataset, which, adapt, options, force, trust)


class Run:
    """A finished or stopped run."""

    def __init__(
        self,
        directory: RunDirectory,
        dataset: Any = None,
        which: Literal["best", "last"] | int | None = None,
        adapt: str | None = None,
        options: Mapping[str, Any] | None = None,
        force: bool = False,
        trust: bool = False,
    ) -> None:
        self.directory = directory
        self._dataset, self._which, self._adapt = dataset, which, adapt
        self._force, self._trust = force, trust
        self._options = dict(options or {})

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config."""
        return self.directory.config

    @property
    def summary(self) -> dict[str, Any]:
        """The run in numbers: at the best round by validation, and at the last one."""
        found = self.directory.summary()
        if found is None:
            raise RunError(f"{self.path} has no summary yet: the run was stopped. Use `fedloom resume {self.path}`.")
        return found

    @property
    def records(self) -> list[dict[str, Any]]:
        """One record per round."""
        return self.directory.records()

    @cached_property
    def server(self) -> Server:
        """The run's server at the checkpoint: all that models and admissions need. It has no data."""
        readapted = self._adapt is not None and self._adapt != self.config.get("adapt", "none")
        if readapted or self._options:  # participants have to be asked, or something else than at training is meant
            return self.simulation.server
        server = Server.open(self.directory, self._checkpoint, trust=self._trust)
        self.directory.check(self.directory.meta(server.round), force=self._force)
        return server

    @cached_property
    def simulation(self) -> Simulation:
        """The federation with its data, and the checkpoint's state in it: for evaluations."""
        changes = {**self._options, "adapt": self._adapt, "device": "auto"}
        simulation = simulated(self.directory, self._dataset, self._trust, **changes)
        checkpoint = self.directory.load(self._checkpoint)
        digests = simulation.data_digests if not self._options else {}
        self.directory.check(checkpoint.meta, force=self._force, **digests)
        simulation.server.restore(checkpoint)
        simulation.settle()
        return simulation

    @property
    def _checkpoint(self) -> Literal["best", "last"] | int:
        which = "best" if self._which is None else self._which
        return "last" if which == "best" and self.directory.best_round() is None else which

    @cached_property
    def for_newcomers(self) -> Run:
        """This run at the checkpoint that newcomers are served from, unless one was chosen: the method says which."""
        at = algorithms.get(method_of(self.directory)).newcomers_at
        if self._which is not None or at == "best":
            return self
        return Run(self.directory, self._dataset, at, self._adapt, self._options, self._force, self._trust)

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The clients that took part."""
        return self.server.setup.clients

    def model(self, client: ClientId | int) -> nn.Module:
        """A client's predictor as a module, with its parameters, in evaluation mode.

        Where the federation's samples are raw it takes raw ones, of a table as numbers (``Preparation.encoded``).
        """
        return with_preparation(self.server.module(self._id(client)), self.server.roster.preparation)

    def parameters(self, client: ClientId | int) -> Tree:
        """What a client deploys, as a tree of tensors."""
        return self.server.deployed(self._id(client))

    def predict(self, client: ClientId | int, x: np.ndarray | Tensor) -> Tensor:
        """A client's outputs for samples prepared as the federation's are."""
        return self.server.predict(self._id(client), samples_for(self.server, x))

    def classify(self, client: ClientId | int, x: np.ndarray | Tensor) -> list[str] | list[list[str]]:
        """A client's predictions by name: the class of each sample, or the labels that hold."""
        return self.server.named(self.predict(client, x))

    def evaluate(self, split: str = "test") -> dict[ClientId, Any]:
        """Every participant's score on a split of its own data: train, val, test or all."""
        return self.simulation.evaluate(_checked(split, self.directory))

    def evaluate_global(self, split: str = "test", *, unseen: bool = False) -> dict[ClientId, Any]:
        """The score of the method's global model, if it has one, on every participant's own data.

        ``unseen``: on the data of each client that was held out instead. Nothing is trained on them.
        """
        return self.simulation.evaluate_global(_checked(split, self.directory), unseen=unseen)

    def evaluate_unseen(self, split: str = "test", mode: str = "admit", samples: int = 0) -> dict[str, float]:
        """Metrics of the clients that were held out, on a split of their own data; ``all``: on their whole data.

        They are admitted with their own training data, at most ``samples`` of each client (0: all of them); or, by the
        mode, get participants' models: sampled, ensemble or nearest.
        """
        simulation = self.for_newcomers.simulation
        return simulation.evaluation_of_unseen(_checked(split, self.directory), mode, samples).metrics

    def mix(self, split: str = "test") -> dict[str, Any]:
        """Every participant's output layer on every participant's body, tried on its own data (pFedHN, Fig. 3).

        ``metric[i][j]`` is the output layer of ``client[i]`` on the body of ``client[j]``. Kept in the run directory.
        """
        scores = self.simulation.mixed(_checked(split, self.directory))
        if not scores:
            raise RunError(f"No client of {self.path} has {split} data; choose another split.")
        clients = list(scores)
        found = {
            "round": self.server.round,
            "split": split,
            "client": clients,
            "samples": [scores[client][client].samples for client in clients],
            "metric": [[short(scores[head][body].metric) for body in clients] for head in clients],
        }
        self.directory.write_extra(MIX, found)
        return found

    def admission_curve(self, split: str = "test") -> dict[str, Any]:
        """How unseen clients fare while they are admitted, round by round. Kept in the run directory."""
        run = self.for_newcomers
        points = run.simulation.admission_curve(_checked(split, self.directory))
        if not points:
            raise RunError(f"{self.path} held no clients out of training; run with --unseen to hold some out.")
        found = {"round": run.server.round, "split": split, "points": points}
        self.directory.write_extra(ADMISSION, found)
        return found

    def report(self, out: str | Path | None = None) -> Path:
        """Write the run as a page: one HTML file that loads nothing. Without ``out``, ``report.html`` in the run."""
        return write_report([self.path], None if out is None else Path(out))

    def plot(self, name: str = "curves", *choices: str) -> Figure:
        """A figure of the report, for a paper; ``choices`` as its switches have them: ``plot("curves", "seconds")``."""
        if name in ON_DEMAND and self.directory.extra(ON_DEMAND[name]) is None:
            self.mix() if name == "mix" else self.admission_curve()
        return figure(self.directory, name, choices)

    def _repr_html_(self) -> str:
        return snippet(facts_of(self.directory))

    def admit(
        self, x: np.ndarray | Tensor, y: np.ndarray | Tensor | None = None, model: str | None = None
    ) -> Admission:
        """A model for a newcomer, from its samples, prepared as the federation's are, and their labels if any.

        ``model`` is its network; without it, that of the first participant. Nobody else is asked anything.
        """
        server = self.for_newcomers.server
        return Admission(server, admitted(server, *checked_for(server, x, y), model))

    def export(self, client: ClientId | int, folder: str | Path, format: str = SAFETENSORS) -> Path:
        """Write a client's parameters as safetensors, with a loader beside them; or its model as onnx or pt2."""
        name = self._id(client)
        module = self.server.module(name)
        return _export(self.server, self.server.setup.models[name], module, Path(folder), name, format)

    def export_global(self, folder: str | Path, format: str = SAFETENSORS) -> Path:
        """Write the method's global model, if it has one, as ``global.safetensors``, with a loader beside it."""
        network, params = self.server.global_model(for_others=True)
        module, spec = network.module(params, network.fresh_buffers()), cast(ModelSpec, network.spec)
        roster = self.server.roster
        return export(
            Path(folder), "global", module, spec, self.server.base.name, "global", format,
            classes=roster.class_names, preparation=roster.preparation,
        )  # fmt: skip

    def _id(self, client: ClientId | int) -> ClientId:
        name = str(client)
        if name in self.server.unseen:
            raise NeedsError(
                f"Client {name!r} took no part in training, so that nothing is kept for it; give its samples to admit, "
                "or try it by `fedloom evaluate --unseen` (in Python, evaluate_unseen)."
            )
        if name not in self.server.setup:
            raise unknown("client", name, self.clients)
        return name


@dataclass
class Admission:
    """A newcomer's model, and what was found out about the newcomer."""

    server: Server
    newcomer: Newcomer

    @property
    def client(self) -> ClientId:
        """The newcomer's name."""
        return self.newcomer.client

    @property
    def parameters(self) -> Tree:
        """What the newcomer deploys, as a tree of tensors."""
        return self.newcomer.deployed

    @property
    def report(self) -> Report | None:
        """What was found out about the newcomer's label shares; None for a method that is not adapted."""
        classes = self.server.roster.classes
        return report_of(self.server.state, self.newcomer.memory, self.newcomer.samples, classes)

    @property
    def model(self) -> nn.Module:
        """The newcomer's predictor as a module, in evaluation mode."""
        return with_preparation(self._module, self.server.roster.preparation)

    @property
    def _module(self) -> nn.Module:
        return self.server.algorithm.module(self.newcomer.home, self.parameters)

    def predict(self, x: np.ndarray | Tensor) -> Tensor:
        """Outputs for samples such as the newcomer was admitted with."""
        return self.outputs(samples_for(self.server, x))

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs for samples that are prepared already, as the target network takes them."""
        with torch.no_grad():
            return self.server.algorithm.predict(self.newcomer.home, self.parameters, x)

    def classify(self, x: np.ndarray | Tensor) -> list[str] | list[list[str]]:
        """Predictions by name: the class of each sample, or the labels that hold."""
        return self.server.named(self.predict(x))

    def export(self, folder: str | Path, name: str = "newcomer", format: str = SAFETENSORS) -> Path:
        """Write the model as safetensors, with a loader and, if there is one, the report (JSON) beside it.

        Or as one file for other programs: onnx or pt2.
        """
        path = _export(self.server, self.newcomer.home.model, self._module, Path(folder), name, format)
        if self.report:
            write_file(path.with_suffix(".json"), to_json(self.report.as_dict(), indent=1))
        return path


def _checked(split: str, directory: RunDirectory) -> str:
    known = [*SPLITS, "all", *([TRIGGERED] if directory.config.get("attack") == BACKDOOR else [])]
    if split not in known:
        raise unknown("split", split, known)
    return split


def _export(server: Server, model: Any, module: nn.Module, folder: Path, name: str, format: str) -> Path:
    if not is_one_network(module) and format == SAFETENSORS:
        raise NeedsError(
            f"{server.algorithm.name} deploys more than one network, which no network alone can load; give --format "
            "onnx or pt2 (from Python, format=), or use model or predict."
        )
    return export(
        folder, name, module, model.spec, server.algorithm.name, form=format, classes=server.roster.class_names,
        preparation=server.roster.preparation,
    )  # fmt: skip


def _device_name(simulation: Simulation) -> str:
    device = simulation.federation.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _path_of(model: Any) -> str:
    """The import path of a class given as ``model``."""
    if not isinstance(model, type) or "<locals>" in model.__qualname__:
        raise ConfigError(
            f"model is {model!r}; expected a network's name, an import path, or an nn.Module class that is at the top "
            "level of a module."
        )
    return f"{model.__module__}:{model.__qualname__}"


def new_path(method: str, config: Mapping[str, Any]) -> Path:
    """A directory under ``runs/`` that is not there yet."""
    stem = f"{method}-{Path(str(config['dataset'])).stem}-seed{config['seed']}"
    paths = (Path("runs") / (stem if i == 1 else f"{stem}-{i}") for i in range(1, 1_000_000))
    return next(path for path in paths if not path.exists())
