# SPDX-License-Identifier: Apache-2.0
"""A federation in this process, built from options and data."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedloom.clients.federation import Federation, federate
from fedloom.clients.partition import Partition, partition
from fedloom.clients.shift import apply_shift
from fedloom.core.contract import Algorithm, Sent
from fedloom.core.errors import ConfigError
from fedloom.core.random import stream
from fedloom.core.task import CLASSIFICATION, REGRESSION, Task
from fedloom.core.trees import ClientId, num_bytes
from fedloom.data.arrays import Arrays
from fedloom.engines.auto import ENGINES, choose, heavy
from fedloom.engines.engine import AbstractEngine
from fedloom.engines.memories import Memories
from fedloom.engines.parallel import AbstractParallel
from fedloom.engines.vectorised import Vectorised
from fedloom.engines.workers import cores
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.runs.machine import THREADS, device_of, take_over, task_named
from fedloom.runs.options import RunOptions
from fedloom.runs.trainer import Trainer, algorithm_of

MOST_THREADS = 8
"""More threads than this wait for each other: operators of small models are short."""

HEAVY_SERVER = 16 << 20
"""Bytes of server state from which its operators gain by several threads."""


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


class Simulation(Trainer):
    """A federation whose clients live in this process, built from options and data."""

    def __init__(self, method: str, options: RunOptions, config: Any, arrays: Arrays) -> None:
        algorithm, self.arrays = algorithm_of(method, options), arrays
        options = resolve(options, arrays)
        given = options.threads
        THREADS.set(given or min(THREADS.usual(), cores(), MOST_THREADS))
        self.partition = split(options, arrays)
        federation = federation_of(options, arrays, self.partition)
        participants = federation.participants
        cohort = options.cohort_of(len(participants), algorithm.cohort)
        workers = options.workers or cores()
        name, reason = choose(options.engine, federation.device, federation.models.values(), cohort, workers)
        options = replace(
            options,
            clients=len(participants),
            cohort=cohort,
            engine=name,
            device=str(federation.device),
            threads=torch.get_num_threads(),
        )
        engine = _engine(name, federation, algorithm, config, options)
        super().__init__(method, algorithm, options, config, federation, engine, reason)
        light = num_bytes(self.state._asdict()) < HEAVY_SERVER
        small = isinstance(engine, AbstractParallel) or not any(map(heavy, set(federation.models.values())))
        if not given and light and small and federation.device.type == "cpu":
            THREADS.set(1)
            self.options = replace(self.options, threads=1)
        self.notes = self.partition.notes
        self.looks_ahead = federation.device.type == "cuda"  # elsewhere nobody would work meanwhile

    def evaluate_unseen(self, split: str = "test", mode: str = "admit", samples: int = 0) -> dict[str, float]:
        """As ``Trainer.evaluate_unseen``; unseen clients come for the first time, each time."""
        remembered, unseen = self.engine.memory, set(self.federation.unseen)
        self.engine.memory = Memories({client: tree for client, tree in remembered.items() if client not in unseen})
        try:
            return super().evaluate_unseen(split, mode, samples)
        finally:
            self.engine.memory = remembered

    def admit_with(self, newcomers: Sequence[ClientId], samples: int) -> Sent:
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
        # an engine of its own: what the other one has recorded reads the data that it was made with
        usual, shown = self.engine, replace(shown, roster=roster)
        self.engine = _engine(self.options.engine, shown, self.algorithm, self.config, self.options)
        self.engine.memory = usual.memory
        try:
            return self.admit(newcomers)
        finally:
            self.engine = usual

    def joined_by(self, newcomer: ClientId, model: Any, x: torch.Tensor, y: torch.Tensor) -> Simulation:
        """This simulation, in its present state, with one unseen client more."""
        joined = copy.copy(self)
        joined.federation = self.federation.joined_by(newcomer, model, x, y)
        joined.setup = replace(self.setup, models=joined.federation.models)
        options = self.options
        if getattr(self.config, "private", False):  # its noise must not follow from what others know
            options = replace(options, seed=secrets.randbits(63))
        joined.engine = _engine(options.engine, joined.federation, self.algorithm, self.config, options)
        joined.engine.memory = self.engine.memory.copy()
        return joined


def _engine(
    name: str, federation: Federation, algorithm: Algorithm, config: Any, options: RunOptions
) -> AbstractEngine:
    engine = ENGINES[name](federation, algorithm, config, options.seed)
    engine.take_over = partial(take_over, federation.x.device, options.precision)
    engine.take_over()
    if isinstance(engine, AbstractParallel) and options.workers:
        engine.processes = options.workers
    if isinstance(engine, Vectorised):
        engine.own_kernels = options.convolutions == "own"
    return engine


def federation_of(options: RunOptions, arrays: Arrays, parts: Partition) -> Federation:
    """The clients of a simulation, with their data and models."""
    device, dtype = device_of(options.device), getattr(torch, options.dtype)
    task = task_of(options.task, arrays)
    outputs = arrays.num_classes or (arrays.y.shape[1] if arrays.y.ndim > 1 else 1)
    shape = tuple(arrays.x.shape[1:])
    names = options.model if options.model != "auto" else "lenet" if len(shape) == 3 else "mlp"
    narrow = torch.bfloat16 if options.precision == "bf16" else dtype

    def networks(names: str) -> list[Model]:
        specs = [parse(name, shape, outputs) for name in names.split(",") if name]
        return [Model(spec, device, dtype, training_dtype=narrow) for spec in specs]

    models, others = networks(names), networks(options.unseen_model or "")
    x = arrays.x
    if options.unseen_shift:
        held = [rows for c in parts.clients if c.unseen for rows in (c.train, c.val, c.test)]
        rows = np.concatenate([np.empty(0, dtype=np.int64), *held])
        x = x.copy()
        low, high = x.min(), x.max()
        x[rows] = apply_shift(
            x[rows], options.unseen_shift, options.unseen_shift_strength, options.seed, low=low, high=high
        )
    return federate(x, arrays.y, parts, models, task, device, dtype, others)


def task_of(name: str, arrays: Arrays) -> Task:
    """The task that ``name`` stands for."""
    if name == "auto":
        return CLASSIFICATION if arrays.num_classes else REGRESSION
    task = task_named(name)
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
