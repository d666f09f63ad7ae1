# SPDX-License-Identifier: Apache-2.0
"""A federation in this process: built from options, trained round by round, brought back from a checkpoint."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fedloom import algorithms
from fedloom.adaptation.calibration import Privacy
from fedloom.adaptation.prior import with_prior
from fedloom.clients.federation import Federation, federate
from fedloom.clients.partition import Partition, partition
from fedloom.clients.shift import apply_shift
from fedloom.core import contract
from fedloom.core.contract import Algorithm, Cohort, Sent, Setup
from fedloom.core.errors import ConfigError, NeedsError, RunError, unknown
from fedloom.core.random import stream
from fedloom.core.task import CLASSIFICATION, REGRESSION, Task
from fedloom.core.trees import ClientId, Tree, flatten, num_bytes
from fedloom.data.arrays import Arrays
from fedloom.engines.auto import ENGINES, choose
from fedloom.engines.engine import AbstractEngine
from fedloom.engines.parallel import AbstractParallel
from fedloom.engines.workers import cores
from fedloom.metrics.evaluation import Score, evaluate
from fedloom.metrics.summary import summarise
from fedloom.metrics.unseen import evaluate_handed_on
from fedloom.models.model import Model
from fedloom.models.spec import import_path, parse
from fedloom.runs.options import RunOptions

MOST_THREADS = 8
"""More threads than this wait for each other: operators of small models are short."""

HEAVY_SERVER = 16 << 20
"""Bytes of server state from which operators with several threads pay beside workers; below, one thread is enough."""


def resolve(options: RunOptions, arrays: Arrays) -> RunOptions:
    """Partition and number of clients, where they are left to the data: clients that the data name stay as they are."""
    scheme = options.partition
    if scheme == "auto":
        classes = min(2, arrays.num_classes)
        scheme = "group:client" if "client" in arrays.groups else f"classes:{classes}" if classes else "iid"
    clients = options.clients
    if clients is None:
        named = arrays.groups.get(scheme.removeprefix("group:")) if scheme.startswith("group:") else None
        everybody = 20 if named is None else len(np.unique(named))
        held_out = options.unseen if options.unseen >= 1 else round(options.unseen * everybody)
        clients = everybody if named is None else max(1, everybody - int(held_out))
    return replace(options, partition=scheme, clients=clients)


def split(options: RunOptions, arrays: Arrays) -> Partition:
    """Who holds which samples."""
    options = resolve(options, arrays)
    assert options.clients is not None
    return partition(
        arrays.y,
        options.partition,
        options.clients,
        options.seed,
        split=arrays.split,
        groups=arrays.groups,
        unseen=options.unseen,
        unseen_scheme=options.unseen_partition,
        val_share=options.val_share,
        test_share=options.test_share,
    )


class Mark(NamedTuple):
    """A simulation at a moment: all that changes."""

    round: int
    state: Any
    memory: Mapping[ClientId, Tree]


class Simulation:
    """Everything of a run that lives in memory. ``state`` and the engine's memory are all that changes."""

    def __init__(self, method: str, options: RunOptions, config: Any, arrays: Arrays) -> None:
        self.method, self.config, self.arrays = method, config, arrays
        self.base = algorithms.get(method)
        self.algorithm: Algorithm = self.base
        if options.adapt == "prior":
            self.algorithm = with_prior(self.base, Privacy(options.adapt_clip, options.adapt_noise))
        options = resolve(options, arrays)
        torch.set_num_threads(options.threads or min(torch.get_num_threads(), cores(), MOST_THREADS))
        set_precision(options.precision)
        self.partition = split(options, arrays)
        self.federation = _federation(options, arrays, self.partition)
        participants = self.federation.participants
        cohort = min(options.cohort or self.algorithm.cohort, len(participants))
        models = self.federation.models.values()
        workers = options.workers or cores()
        engine, self.engine_reason = choose(options.engine, self.federation.device, models, cohort, workers)
        device = str(self.federation.device)
        self.options = replace(
            options,
            clients=len(participants),
            cohort=cohort,
            engine=engine,
            device=device,
            threads=torch.get_num_threads(),
        )
        self.setup: Setup[Any] = Setup(
            config,
            participants,
            self.federation.models,
            self.federation.task,
            options.seed,
            self.federation.device,
            self.federation.dtype,
        )
        violations = self.algorithm.needs.violations(self.setup, self.algorithm.name)
        if violations:
            raise NeedsError(" ".join(violations))
        self.engine = self._engine(self.federation)
        self.state = self.algorithm.init(self.setup)
        light = num_bytes(self.state._asdict()) < HEAVY_SERVER
        if not options.threads and light and isinstance(self.engine, AbstractParallel):
            torch.set_num_threads(1)
            self.options = replace(self.options, threads=1)
        self.round = 0
        self._memories: dict[Any, dict[str, torch.Tensor]] = {}

    @property
    def eval_every(self) -> int:
        """Rounds between evaluations."""
        return self.options.eval_every or max(1, self.options.rounds // 20)

    def train_round(self) -> dict[str, Any]:
        """One round; its record. The state is as it was if the round fails."""
        number = self.round + 1
        draw = stream(self.options.seed, number, "cohort")
        rows = np.sort(draw.choice(len(self.setup.clients), self.options.cohort, replace=False))
        cohort = Cohort(number, tuple(self.setup.clients[row] for row in rows))
        self.engine.begin(number)
        self.engine.rounds_left = self.options.rounds - self.round
        noted = len(self.engine.notes)
        start = time.perf_counter()
        state, diagnostics = self.algorithm.round(self.setup, self.state, cohort, self.engine.ask)
        self.state, self.round = state, number
        end, books = time.perf_counter(), self.engine.books
        return {
            "round": number,
            "clients": len(cohort.clients),
            "dropped": [d._asdict() for d in books.dropped],
            "notes": self.engine.notes[noted:],
            "bytes": {"down": books.bytes_down, "up": books.bytes_up},
            "seconds": {
                "round": end - start,
                "generate": books.first_ask - start,
                "local_training": books.asking,
                "server_step": end - books.last_answer,
            },
            "diagnostics": dict(diagnostics),
        }

    def evaluate(self, split: str, clients: Sequence[ClientId] | None = None) -> dict[ClientId, Score]:
        """The scores of participants on a split of their own data."""
        chosen = self.federation.having(split, self.setup.clients if clients is None else clients)
        self.engine.begin(f"evaluation after round {self.round}")
        return evaluate(
            self.algorithm,
            self._personal,
            chosen,
            split,
            self.engine.ask,
            higher_is_better=self.setup.task.higher_is_better,
        )

    def settle(self) -> None:
        """Bring the state into the form in which it is evaluated and deployed."""
        if self.algorithm.settle:
            self.engine.begin(f"settling after round {self.round}")
            self.state = self.algorithm.settle(self.setup, self.state, self.engine.ask)

    def metrics(self) -> dict[str, float]:
        """The named numbers of an evaluation on validation and test data."""
        self.settle()
        clients = self.setup.clients
        if 0 < self.options.eval_clients < len(clients):
            draw = stream(self.options.seed, "evaluation")
            rows = np.sort(draw.choice(len(clients), self.options.eval_clients, replace=False))
            clients = tuple(clients[row] for row in rows)
        found: dict[str, float] = {}
        for part in ("val", "test"):
            found |= summarise(self.evaluate(part, clients), self.setup.task, "participants", part)
        return found

    def admit(self, newcomers: Sequence[ClientId]) -> Sent:
        """What the method sends to clients that took no part."""
        if self.algorithm.admit is None:
            raise NeedsError(
                f"{self.algorithm.name} cannot serve clients that took no part in training: it has no model for them. "
                "Methods that can are listed by `fedloom methods`."
            )
        self.engine.begin("admission")
        return self.algorithm.admit(self.setup, self.state, Cohort(self.round, tuple(newcomers)), self.engine.ask)

    def evaluate_unseen(self, split: str = "test", mode: str = "admit", samples: int = 0) -> dict[str, float]:
        """Unseen clients are admitted with their training data and tried on a split of their own data.

        ``all`` is their whole data, as zACC has it. ``samples``: at most so many samples of each are there to admit it;
        0: all. Modes other than ``admit`` hand participants' models on (``metrics.unseen``).
        """
        newcomers = self.federation.having(split, self.federation.having("train", self.federation.unseen))
        if not newcomers:
            return {}
        if mode != "admit":
            if samples:
                raise ConfigError(f"A number of samples is for admission, not for the mode {mode}. Leave one out.")
            self.engine.begin("evaluation of unseen clients")
            scores = evaluate_handed_on(self.algorithm, self.setup, self.state, newcomers, split, mode, self.engine.ask)
            return summarise(scores, self.setup.task, "unseen", split)
        if self.algorithm.admit and self.algorithm.admit_labels and split in ("train", "all"):
            raise NeedsError(
                f"{self.algorithm.name} admits newcomers by training on their labelled samples, and on {split} data it "
                "would be tried on the same samples. Use the split test."
            )
        sent = self._admit_with(newcomers, samples)
        self.engine.begin("evaluation of unseen clients")
        scores = evaluate(
            self.algorithm,
            lambda _: sent,
            newcomers,
            split,
            self.engine.ask,
            at_once=len(newcomers),
            higher_is_better=self.setup.task.higher_is_better,
        )
        return summarise(scores, self.setup.task, "unseen", split)

    def _admit_with(self, newcomers: Sequence[ClientId], samples: int) -> Sent:
        """Admission with at most ``samples`` of each newcomer's training data and, if it needs none, without labels."""
        shown, roster = self.federation, dict(self.federation.roster)
        if not self.algorithm.admit_labels:
            rows = np.concatenate([roster[client].rows["train"] for client in newcomers])
            hidden = shown.y.clone()
            hidden[torch.as_tensor(rows, device=hidden.device)] = -1  # out of reach
            shown = replace(shown, y=hidden)
        for client in newcomers if samples else ():
            own = roster[client].rows
            kept = stream(self.options.seed, client, "samples of a newcomer").permutation(own["train"])[:samples]
            roster[client] = replace(roster[client], rows={**own, "train": np.sort(kept)})
        seen = self.engine.federation
        self.engine.federation = replace(shown, roster=roster)
        try:
            return self.admit(newcomers)
        finally:
            self.engine.federation = seen

    def deployed(self, client: ClientId, sent: Sent | None = None) -> Tree:
        """What a client deploys, composed with its own memory, as it would on its own machine."""
        shared, mine = sent or self._personal([client])
        home = self.engine.home(client, self.engine.num_samples([client])[0], torch.zeros((), dtype=torch.int64))
        return self.algorithm.client_deploy(home, shared, mine[client], self.engine.recall(client))

    def joined_by(self, newcomer: ClientId, model: Any, x: torch.Tensor, y: torch.Tensor) -> Simulation:
        """This simulation, in its present state, with one unseen client more."""
        joined = copy.copy(self)
        joined.federation = self.federation.joined_by(newcomer, model, x, y)
        joined.setup = replace(self.setup, models=joined.federation.models)
        joined.engine = self._engine(joined.federation)
        joined.engine.memory = dict(self.engine.memory)
        return joined

    def trees(self) -> tuple[Tree, Mapping[ClientId, Tree]]:
        """All that a checkpoint needs: the server's state and the clients' memory."""
        return self.state._asdict(), self.engine.memory

    def checkpoint_bytes(self) -> int:
        """About the size of a checkpoint when every client has been asked."""
        models = (self.setup.models[client] for client in self.setup.clients)
        return num_bytes(self.state._asdict()) + sum(num_bytes(self._first_memory(model)) for model in models)

    def mark(self) -> Mark:
        """This moment, to go back to. Trees are values, so it is no copy of them."""
        return Mark(self.round, self.state, dict(self.engine.memory))

    def go_back(self, mark: Mark) -> None:
        """As it was at ``mark``, whatever has begun since."""
        self.round, self.state, self.engine.memory = mark.round, mark.state, dict(mark.memory)

    def restore(self, round: int, state: Tree, memory: Mapping[ClientId, Tree]) -> None:
        """Go back to a checkpoint; refuses one that is not of this method and federation.

        A checkpoint of the plain method fits its adapted form too: what settling finds is found anew.
        """
        if self.algorithm is not self.base and "base" not in state:
            state = {**self.state._asdict(), "base": state}
            memory = {client: {**self.engine.recall(client), **tree} for client, tree in memory.items()}
        expected = flatten(self.state._asdict())
        self._check_fit(expected, flatten(state), [*expected, *flatten(state)])
        foreign = [client for client in memory if client not in self.federation.roster]
        if foreign:
            raise RunError(
                f"The checkpoint remembers client {foreign[0]!r}, which this federation does not have. "
                "Use the config and data it was made with."
            )
        for client, tree in memory.items():
            first = self._first_memory(self.federation.roster[client].model)
            self._check_fit(first, flatten(tree), list(first))  # training may have added to it
        device = self.federation.device
        self.state = self.algorithm.state(**_to(state, device))
        self.engine.memory = {client: _to(tree, device) for client, tree in memory.items()}
        self.round = round

    def _engine(self, federation: Federation) -> AbstractEngine:
        engine = ENGINES[self.options.engine](federation, self.algorithm, self.config, self.options.seed)
        if isinstance(engine, AbstractParallel) and self.options.workers:
            engine.processes = self.options.workers
        return engine

    def _first_memory(self, model: contract.Model) -> dict[str, torch.Tensor]:
        """What a client with this model begins with: for its shapes."""
        if model.spec not in self._memories:
            first = {"buffers": model.fresh_buffers(), **self.algorithm.first_memory(model, self.config, 0)}
            self._memories[model.spec] = flatten(first)
        return self._memories[model.spec]

    def _check_fit(
        self, expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], paths: Sequence[str]
    ) -> None:
        for path in paths:
            here, there = expected.get(path), got.get(path)
            if here is None or there is None or here.shape != there.shape:
                raise RunError(
                    f"The checkpoint does not fit {self.method} on this federation: {path} is "
                    f"{'missing' if there is None else tuple(there.shape)}, expected "
                    f"{'nothing' if here is None else tuple(here.shape)}. Use the config it was made with."
                )

    def _personal(self, clients: Sequence[ClientId]) -> Sent:
        return self.algorithm.personalise(self.setup, self.state, clients)


def _to(tree: Any, device: torch.device) -> Any:
    return {k: _to(v, device) for k, v in tree.items()} if isinstance(tree, Mapping) else tree.to(device)


def _federation(options: RunOptions, arrays: Arrays, parts: Partition) -> Federation:
    device, dtype = device_of(options.device), getattr(torch, options.dtype)
    task = task_of(options.task, arrays)
    outputs = arrays.num_classes or (arrays.y.shape[1] if arrays.y.ndim > 1 else 1)
    shape = tuple(arrays.x.shape[1:])
    names = options.model if options.model != "auto" else "lenet" if len(shape) == 3 else "mlp"
    narrow = torch.bfloat16 if options.precision == "bf16" else dtype
    models = [Model(parse(name, shape, outputs), device, dtype, training_dtype=narrow) for name in names.split(",")]
    x = arrays.x
    if options.unseen_shift:
        held = [rows for c in parts.clients if c.unseen for rows in (c.train, c.val, c.test)]
        rows = np.concatenate([np.empty(0, dtype=np.int64), *held])
        x = x.copy()
        low, high = x.min(), x.max()
        x[rows] = apply_shift(
            x[rows], options.unseen_shift, options.unseen_shift_strength, options.seed, low=low, high=high
        )
    return federate(x, arrays.y, parts, models, task, device, dtype)


def set_precision(name: str) -> None:
    """Whether a GPU may round the factors of float32 products to TF32, which torch allows for convolutions."""
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")


def device_of(name: str) -> torch.device:
    """The device that ``name`` stands for, checked to be there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError):
        here = "cpu and cuda" if torch.cuda.is_available() else "cpu only"
        raise ConfigError(
            f"--device {name} is not available; this machine has {here}. Leave it out for auto."
        ) from None
    return device


def task_of(name: str, arrays: Arrays) -> Task:
    """The task that ``name`` stands for."""
    known = {"classification": CLASSIFICATION, "regression": REGRESSION}
    if name == "auto":
        return CLASSIFICATION if arrays.num_classes else REGRESSION
    if name not in known and ":" not in name:
        raise unknown("task", name, ["auto", *known, "package.module:TASK"])
    task = known[name] if name in known else import_path(name, "--task")
    if not isinstance(task, Task):
        raise ConfigError(f"--task {name} is a {type(task).__name__}; expected a fedloom.core.task.Task object.")
    if task is REGRESSION and arrays.num_classes:
        raise ConfigError(
            f"--task {name} needs real-valued targets; {arrays.name} has class labels. Give floating-point numbers "
            "in y, or use classification."
        )
    if task.class_scores and not arrays.num_classes:
        raise ConfigError(f"--task {name} needs class labels; {arrays.name} has real-valued targets. Use regression.")
    return task


def flat_config(method: str, options: RunOptions, config: Any) -> dict[str, Any]:
    """The run's config as one flat mapping: what the config file holds."""
    return {"method": method, **asdict(options), **asdict(config)}
