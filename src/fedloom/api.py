# SPDX-License-Identifier: Apache-2.0
"""What users call and the command line calls: run, resume, load; and what a run can do when it is there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedloom import algorithms
from fedloom.adaptation.report import Report, report
from fedloom.clients.federation import SPLITS
from fedloom.core.config import build
from fedloom.core.contract import Algorithm, predict_with_target
from fedloom.core.errors import ConfigError, DataError, NeedsError, RoundError, RunError, unknown
from fedloom.core.trees import ClientId, Tree
from fedloom.data.arrays import Arrays
from fedloom.data.own import from_arrays, from_torch_dataset
from fedloom.data.registry import load as load_data
from fedloom.models.load import Shifted
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.progress import Display, display
from fedloom.runs.directory import RunDirectory
from fedloom.runs.environment import environment
from fedloom.runs.export import export
from fedloom.runs.files import to_json, write_file
from fedloom.runs.machine import device_of
from fedloom.runs.options import RunOptions
from fedloom.runs.simulation import Simulation, flat_config, resolve, split
from fedloom.runs.trackers import TRACKERS, tracker
from fedloom.runs.trainer import Trainer

SAVE_SECONDS = 60.0
"""A checkpoint is also written when this much time has passed since the last one."""


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
        options: The other options of ``fedloom run``, with underscores, and the method's own.

    >>> run = fedloom.run("fedavg", dataset="digits", clients=4, rounds=2, progress="quiet")  # doctest: +SKIP
    """
    given = {"dataset": dataset, "model": model, **options}
    arrays = None
    if not isinstance(dataset, str | Path):
        arrays = as_arrays(dataset)
        given["dataset"] = PYTHON_DATA
    if not isinstance(model, str):
        given["model"] = _path_of(model)
    shared, config = parse_options(method, {k: str(v) if isinstance(v, Path) else v for k, v in given.items()})
    shown = display(progress) if isinstance(progress, str) else progress
    if shared.tracker and shared.tracker not in TRACKERS:
        raise unknown("tracker", shared.tracker, TRACKERS)
    simulation = Simulation(method, shared, config, arrays or load_data(shared.dataset, shared.data_root))
    resolved = flat_config(method, simulation.options, config)
    # those that are kept, the best one, and the one that is being written
    need = (simulation.options.keep + 2) * simulation.checkpoint_bytes()
    directory = RunDirectory.create(Path(out) if out else new_path(method, resolved), resolved, need_bytes=need)
    with directory.lock():
        directory.write_environment(environment(shared.seed, _device_name(simulation)))
        train(simulation, directory, shown)
        return Run(directory, None, simulation.arrays)


def resume(
    path: str | Path,
    *,
    dataset: Any = None,
    rounds: int | None = None,
    device: str | None = None,
    progress: str | Display = "auto",
) -> Run:
    """Go on with a run that was stopped, from its last checkpoint; with ``rounds``, further than it was to go.

    ``device`` is for a machine that has another one than the run began on.
    """
    directory = RunDirectory.open(Path(path))
    shown = display(progress) if isinstance(progress, str) else progress
    with directory.lock():
        simulation = _rebuild(directory, dataset, rounds=rounds, device=device)
        if directory.checkpoints():
            last = directory.load("last")
            simulation.restore(last.round, last.state, last.memory)
        if simulation.round > simulation.options.rounds:
            raise ConfigError(
                f"--rounds is {simulation.options.rounds}, but {directory.path} has done {simulation.round} rounds; "
                "give a greater number, or leave it out."
            )
        directory.update_config(rounds=simulation.options.rounds)
        if directory.environment() is None:  # killed between writing the one and the other
            directory.write_environment(environment(simulation.options.seed, _device_name(simulation)))
        directory.rewind(simulation.round)
        train(simulation, directory, shown)
        return Run(directory, None, simulation.arrays)


def load(
    path: str | Path,
    *,
    dataset: Any = None,
    which: Literal["best", "last"] | int | None = None,
    adapt: str | None = None,
    **options: Any,
) -> Run:
    """A run from its directory, at its best (by validation) or last checkpoint, or at a round that was kept.

    Without ``which`` it is the best; for newcomers, the last if the method serves them from there.
    With ``adapt="prior"`` the run is adapted now, whether it was when it was trained or not. ``options`` are options
    that matter after training, with other values than the run was trained with: ``unseen_shift="blur"``.
    """
    directory = RunDirectory.open(Path(path))
    return Run(directory, None, dataset, which, adapt, options)


@dataclass
class Admission:
    """A newcomer's model: ``model`` is an ``nn.Module`` where the method deploys its target network."""

    client: ClientId
    simulation: Simulation
    parameters: Tree

    @property
    def report(self) -> Report | None:
        """What was found out about the newcomer's label shares; None for a method that is not adapted."""
        simulation = self.simulation
        memory, classes = simulation.engine.recall(self.client), simulation.arrays.num_classes
        if "admission" not in memory:
            return None
        names = simulation.arrays.class_names or [f"class {number}" for number in range(classes)]
        samples = len(simulation.federation.roster[self.client].rows["train"])
        return report(memory, simulation.state.alpha, simulation.state.reference, samples, names)

    @property
    def model(self) -> nn.Module:
        """The newcomer's own network, in evaluation mode."""
        return _module(self.simulation, self.client, self.parameters)

    def predict(self, x: np.ndarray | Tensor) -> Tensor:
        """Outputs for samples prepared as the federation's are."""
        return _predict(self.simulation, self.client, self.parameters, x)

    def export(self, folder: str | Path, name: str = "newcomer") -> Path:
        """Write the model as safetensors, with a loader and, if there is one, the report (JSON) beside it."""
        path = _export(self.simulation, self.client, self.parameters, Path(folder), name)
        if self.report:
            write_file(path.with_suffix(".json"), to_json(self.report.as_dict(), indent=1))
        return path


class Run:
    """A finished or stopped run."""

    def __init__(
        self,
        directory: RunDirectory,
        simulation: Simulation | None,
        dataset: Any = None,
        which: Literal["best", "last"] | int | None = None,
        adapt: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = directory
        self._simulation, self._dataset, self._which = simulation, dataset, which
        self._changes = {**(options or {}), "adapt": adapt, "device": "auto"}

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

    @property
    def simulation(self) -> Simulation:
        """The federation with the checkpoint's state in it."""
        if self._simulation is None:
            self._simulation = _rebuild(self.directory, self._dataset, **self._changes)
            which = "best" if self._which is None else self._which
            nothing_best = which == "best" and self.directory.best_round() is None
            checkpoint = self.directory.load("last" if nothing_best else which)
            self._simulation.restore(checkpoint.round, checkpoint.state, checkpoint.memory)
            self._simulation.settle()
        return self._simulation

    @cached_property
    def for_newcomers(self) -> Run:
        """This run at the checkpoint that newcomers are served from, unless one was chosen: the method says which."""
        at = algorithms.get(self.config["method"]).newcomers_at
        if self._which is not None or at == "best":
            return self
        return Run(self.directory, None, self._dataset, at, self._changes["adapt"], self._changes)

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The clients that took part."""
        return self.simulation.setup.clients

    def model(self, client: ClientId | int) -> nn.Module:
        """The network that a client deploys, with its parameters, in evaluation mode."""
        return _module(self.simulation, self._id(client), self.parameters(client))

    def parameters(self, client: ClientId | int) -> Tree:
        """What a client deploys, as a tree of tensors."""
        return self.simulation.deployed(self._id(client))

    def predict(self, client: ClientId | int, x: np.ndarray | Tensor) -> Tensor:
        """A client's outputs for samples prepared as the federation's are."""
        return _predict(self.simulation, self._id(client), self.parameters(client), x)

    def evaluate(self, split: str = "test") -> dict[ClientId, Any]:
        """Every participant's score on a split of its own data: train, val, test or all."""
        if split not in (*SPLITS, "all"):
            raise unknown("split", split, [*SPLITS, "all"])
        return self.simulation.evaluate(split)

    def evaluate_global(self, split: str = "test", *, unseen: bool = False) -> dict[ClientId, Any]:
        """The score of the method's global model, if it has one, on every participant's own data.

        ``unseen``: on the data of each client that was held out instead. Nothing is trained on them.
        """
        if split not in (*SPLITS, "all"):
            raise unknown("split", split, [*SPLITS, "all"])
        return self.simulation.evaluate_global(split, unseen=unseen)

    def evaluate_unseen(self, split: str = "test", mode: str = "admit", samples: int = 0) -> dict[str, float]:
        """Metrics of the clients that were held out, on a split of their own data; ``all``: on their whole data.

        They are admitted with their own training data, at most ``samples`` of each client (0: all of them); or, by the
        mode, get participants' models: sampled, ensemble or nearest.
        """
        if split not in (*SPLITS, "all"):
            raise unknown("split", split, [*SPLITS, "all"])
        return self.for_newcomers.simulation.evaluate_unseen(split, mode, samples)

    def admit(
        self, x: np.ndarray | Tensor, y: np.ndarray | Tensor | None = None, model: str | None = None
    ) -> Admission:
        """A model for a newcomer, from its samples, prepared as the federation's are, and their labels if any.

        ``model`` is its network; without it, that of the first participant.
        """
        simulation, client = self.for_newcomers.simulation, "newcomer"
        algorithm = simulation.algorithm
        if algorithm.admit is None:
            simulation.admit(())
        if y is None and algorithm.admit_labels:
            raise _unlabelled(algorithm)
        while client in simulation.federation.roster:
            client += "'"
        samples = _samples(simulation, x)
        if not len(samples):
            raise DataError("admit got no samples; give the newcomer at least one.")
        # labels that no program may read: any use of them as classes fails
        shape = (len(samples), *simulation.federation.y.shape[1:])
        labels = torch.full(shape, -1) if y is None else _labels(simulation, y, shape)
        network: Any = simulation.federation.roster[simulation.setup.clients[0]].model
        if model is not None:
            spec = parse(model, network.spec.input_shape, network.spec.num_outputs)
            network = Model(spec, network.device, network.dtype)
        joined = simulation.joined_by(client, network, samples, labels)
        sent = joined.admit([client])
        return Admission(client, joined, joined.deployed(client, sent))

    def export(self, client: ClientId | int, folder: str | Path) -> Path:
        """Write a client's parameters as safetensors, with a loader beside them."""
        name = self._id(client)
        return _export(self.simulation, name, self.parameters(name), Path(folder), name)

    def export_global(self, folder: str | Path) -> Path:
        """Write the method's global model, if it has one, as ``global.safetensors``, with a loader beside it."""
        network, params = self.simulation.global_model(for_others=True)
        deployed = {"params": params, "buffers": network.fresh_buffers()}
        spec: Any = network.spec
        return export(Path(folder), "global", deployed, spec, self.simulation.base.name, stem="global")

    def _id(self, client: ClientId | int) -> ClientId:
        name = str(client)
        if name in self.simulation.federation.unseen:
            raise NeedsError(
                f"Client {name!r} took no part in training, so that nothing is kept for it; "
                "use admit with its samples, or evaluate_unseen."
            )
        if name not in self.clients:
            raise unknown("client", name, self.clients)
        return name


PYTHON_DATA = "python"
"""In a config file: the data came as Python objects, and must be given again."""


def as_arrays(dataset: Any) -> Arrays:
    """Arrays, an (x, y) pair or a torch Dataset as checked arrays."""
    if isinstance(dataset, Arrays):
        return dataset
    if isinstance(dataset, tuple) and len(dataset) == 2:
        x, y = (part.detach().cpu() if isinstance(part, Tensor) else part for part in dataset)
        return from_arrays(x, y)
    return from_torch_dataset(dataset)


def parse_options(method: str, given: Mapping[str, Any]) -> tuple[RunOptions, Any]:
    """The shared options and the method's config, from one flat mapping."""
    shared_names = {field.name for field in fields(RunOptions)}
    config_type = algorithms.get(method).config
    own_names = {field.name for field in fields(config_type)}
    for name in given:
        if name not in shared_names | own_names:
            raise unknown(f"option of {method}", name, shared_names | own_names)
    shared = build(RunOptions, {k: v for k, v in given.items() if k in shared_names})
    return shared, build(config_type, {k: v for k, v in given.items() if k in own_names})


def _rebuild(
    directory: RunDirectory,
    dataset: Any,
    **changes: Any,
) -> Simulation:
    given = dict(directory.config)
    method = given.pop("method", None)
    if not isinstance(method, str):
        raise RunError(f"{directory.path / 'config.yaml'} names no method; it is not the config of a run.")
    if given.get("engine") == "flower":
        raise RunError(
            f"{directory.path} was run over a network: its clients have the data and their memories. Go on with "
            "`fedloom deploy resume`, or with resume=true in the app's settings; clients have their models themselves."
        )
    before, trained = str(given.get("device", "auto")), dict(given)
    given |= {name: value for name, value in changes.items() if value is not None}
    if before != "auto" and not before.startswith(device_of(str(given["device"])).type):
        given["engine"] = "auto"  # the one in the config is for another kind of device
    shared, config = parse_options(method, given)
    if dataset is None and shared.dataset == PYTHON_DATA:
        raise RunError(
            f"{directory.path} was run on data given from Python; give them again there: load(run, dataset=(x, y))."
        )
    if dataset is None or isinstance(dataset, str | Path):
        arrays = load_data(dataset or shared.dataset, shared.data_root)
    else:
        arrays = as_arrays(dataset)
    simulation = Simulation(method, shared, config, arrays)
    changed = [name for name, value in changes.items() if value is not None and name not in ("adapt", "device")]
    if changed:
        _check_as_trained(simulation, method, trained, changed)
    return simulation


def _check_as_trained(simulation: Simulation, method: str, trained: Mapping[str, Any], changed: list[str]) -> None:
    """Refuse other values of options with which the run would not be the one that was trained."""
    shared, config = parse_options(method, dict(trained))
    dealt = [split(resolve(shared, simulation.arrays), simulation.arrays), simulation.partition]
    rows = [[(c.id, *map(np.ndarray.tobytes, (c.train, c.val, c.test))) for c in p.participants] for p in dealt]
    names = ", ".join(changed)
    if rows[0] != rows[1]:
        raise ConfigError(
            f"With {names} as given participants would have other data than in training, and some of what they were "
            "trained on would pass for unseen. Leave it out, or train again."
        )
    private = [getattr(one, "private", None) for one in (config, simulation.setup.config)]
    if private[0] != private[1]:
        raise ConfigError(
            f"The run was trained {'with' if private[0] else 'without'} private descriptors, and an encoder made for "
            f"them; got {names}. {'Give an epsilon above 0' if private[0] else 'Leave it out'}, or train again."
        )


def train(simulation: Trainer, directory: RunDirectory, shown: Display) -> None:
    """Rounds, records and checkpoints until the end; what is on disk is always a run that can go on."""
    options, task = simulation.options, simulation.setup.task
    best, is_best = _best(directory), False
    done = simulation.mark(), is_best  # the last round whose record is written
    follow = closing(tracker(options.tracker, directory)) if options.tracker else nullcontext()
    saved = time.monotonic()
    with follow as log, shown as screen:
        try:
            screen.begin(simulation)
            while simulation.round < options.rounds:
                record = simulation.train_round()
                evaluated = simulation.round % simulation.eval_every == 0 or simulation.round == options.rounds
                is_best = False
                if evaluated:
                    start = time.perf_counter()
                    record["metrics"] = simulation.metrics()
                    record["seconds"]["evaluation"] = time.perf_counter() - start
                    record["notes"] = [*record["notes"], *simulation.evaluation_notes]
                    is_best = _better(record["metrics"], task, best)
                    if is_best:
                        best = {"round": simulation.round, **record["metrics"]}
                directory.append(record)
                done = simulation.mark(), is_best
                if evaluated or simulation.saves_every_round or time.monotonic() - saved > SAVE_SECONDS:
                    save(simulation, directory, best=is_best)
                    saved = time.monotonic()
                if log is not None:
                    log.log(_numbers(record), simulation.round)
                screen.update(record)
        except (KeyboardInterrupt, RoundError):
            # wherever it was: in a round, in an evaluation, or between a record and its checkpoint
            mark, is_best = done
            simulation.go_back(mark)
            directory.rewind(simulation.round)
            if simulation.round not in directory.checkpoints():
                save(simulation, directory, best=is_best)
            directory.write_summary(_summary(simulation, directory, _best(directory), finished=False))
            raise
        if options.rounds == 0:
            save(simulation, directory, best=False)
        directory.write_summary(_summary(simulation, directory, best, finished=True))
        screen.end(directory)


def save(simulation: Trainer, directory: RunDirectory, best: bool) -> None:
    """Write a checkpoint of this moment."""
    state, memory = simulation.trees()
    directory.save(simulation.round, state, memory, simulation.meta(), best=best, keep=simulation.options.keep)
    simulation.saved()


def _best(directory: RunDirectory) -> dict[str, Any] | None:
    """The metrics of the best round so far, by validation."""
    number = directory.best_round()
    return next(({"round": number, **r["metrics"]} for r in directory.records() if r["round"] == number), None)


def _better(metrics: Mapping[str, float], task: Any, best: Mapping[str, Any] | None) -> bool:
    """Selection by validation, never by test; the later of two equals is kept out.

    An adapted run's best round is that of the plain method: participants know their classes and hardly gain by a model
    that tells all classes apart; newcomers do.
    """
    names = [f"{model}/participants/val/{task.metric_name}" for model in ("plain", "deployed")]
    name = next((name for name in names if name in metrics), None)
    if name is None:
        return False
    if best is None or name not in best:
        return True
    gain = float(metrics[name] - best[name])
    return gain > 0 if task.higher_is_better else gain < 0


def _summary(
    simulation: Trainer, directory: RunDirectory, best: Mapping[str, Any] | None, finished: bool
) -> dict[str, Any]:
    records, options = directory.records(), simulation.options
    summary: dict[str, Any] = {
        "method": simulation.method,
        "name": simulation.algorithm.name,
        "finished": finished,
        "rounds": simulation.round,
        "seed": options.seed,
        "engine": options.engine,
        "engine_reason": simulation.engine_reason,
        "device": options.device,
        "metric": simulation.setup.task.metric_name,
        "notes": list(simulation.notes),
        "dropped": sum(len(r["dropped"]) for r in records),
        "seconds": sum(r["seconds"]["round"] for r in records),
        "evaluation_seconds": sum(r["seconds"].get("evaluation", 0.0) for r in records),
        "bytes": {way: sum(r["bytes"][way] for r in records) for way in ("down", "up")},
        "best": best,
    }
    if finished:
        scores = simulation.evaluate("test")
        summary["last"] = {"round": simulation.round, **simulation.metrics()}
        summary["clients"] = {client: score._asdict() for client, score in scores.items()}
        if simulation.federation.unseen:
            try:
                summary["unseen"] = simulation.evaluate_unseen()
            except (NeedsError, RoundError) as reason:  # training is done, and its numbers stand
                summary["unseen"] = {"reason": str(reason)}
    return summary


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    found = {**record["diagnostics"], **record.get("metrics", {})}
    found |= {f"seconds/{k}": v for k, v in record["seconds"].items()}
    return found | {f"bytes/{k}": v for k, v in record["bytes"].items()}


def _module(simulation: Simulation, client: ClientId, parameters: Tree) -> nn.Module:
    if simulation.base.predict is not predict_with_target:
        raise NeedsError(
            f"{simulation.algorithm.name} deploys more than one network, so that there is no model to give or to "
            "write. Use predict, from Python."
        )
    model: Any = simulation.federation.roster[client].model
    plain = parameters.get("base", parameters)
    module: nn.Module = model.module(plain["params"], plain["buffers"])
    adapted = "offset" in parameters
    return Shifted(module, parameters["slope"], parameters["offset"]).eval() if adapted else module


def _export(simulation: Simulation, client: ClientId, parameters: Tree, folder: Path, name: str) -> Path:
    _module(simulation, client, parameters)  # refuses methods that deploy more than a network
    spec: Any = simulation.federation.roster[client].model.spec
    return export(folder, name, parameters, spec, simulation.algorithm.name)


def _predict(simulation: Simulation, client: ClientId, parameters: Tree, x: np.ndarray | Tensor) -> Tensor:
    data = _samples(simulation, x)
    home = simulation.engine.home(client, simulation.engine.num_samples([client])[0], torch.zeros(()))
    with torch.no_grad():
        return simulation.algorithm.predict(home, parameters, data)


def _samples(simulation: Simulation, x: Any) -> Tensor:
    """A user's samples on the device of the federation, checked to be like its own."""
    own = simulation.federation.x
    samples = _tensor(x, "samples").to(own)
    if not samples.ndim or samples.shape[1:] != own.shape[1:]:
        raise DataError(
            f"Got samples of shape {tuple(samples.shape)}; expected (samples, {', '.join(map(str, own.shape[1:]))}), "
            "as in this federation."
        )
    if not samples.isfinite().all():
        raise DataError("Got samples with NaN or infinite values; remove or replace them.")
    return samples


def _labels(simulation: Simulation, y: Any, shape: tuple[int, ...]) -> Tensor:
    """A newcomer's labels, checked to be like the federation's."""
    own, classes = simulation.federation.y, simulation.arrays.num_classes
    labels = _tensor(y, "labels")
    if tuple(labels.shape) != shape:
        raise DataError(f"Got labels of shape {tuple(labels.shape)} for {shape[0]} samples; expected {shape}.")
    if not labels.isfinite().all():
        raise DataError("Got labels with NaN or infinite values; remove or replace those samples.")
    whole = labels.to(own)
    lowest = 0 if simulation.algorithm.admit_labels else -1  # -1: a label that is not known
    if classes and lowest == 0 and bool((whole == -1).all()):
        raise _unlabelled(simulation.algorithm)
    if classes and (bool((whole != labels).any()) or int(whole.min()) < lowest or int(whole.max()) >= classes):
        raise DataError(
            f"Got labels from {labels.min()} to {labels.max()}; expected whole numbers from 0 to {classes - 1}, "
            "as in this federation"
            + (", as the method trains on them." if lowest == 0 else ", or -1 where a label is not known.")
        )
    return whole


def _unlabelled(algorithm: Algorithm) -> NeedsError:
    return NeedsError(
        f"{algorithm.name} admits a newcomer by training on its labelled samples; got none. "
        "Give them (admit(x, y), or an array y in the file), or choose a method that needs no labels."
    )


def _tensor(values: Any, what: str) -> Tensor:
    try:
        found = torch.as_tensor(values).detach()
        if found.is_complex():
            raise TypeError
        return found
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"The {what} cannot be made a tensor: got a {type(values).__name__}; expected an array of numbers."
        ) from None


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
