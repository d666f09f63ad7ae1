# SPDX-License-Identifier: Apache-2.0
"""A federation in this process, built from options and data.

What is decided here, in this order, each by options and data alone, so that a config repeats a run:

1. who holds which samples: what the server keeps, then the partition of the rest (``split``);
2. how raw samples are prepared, by participants' training data (``fitted``);
3. cameras, shifts and lies, which change samples, and the networks of the clients (``federation_of``);
4. the engine, and how many threads operators have.

A ``Simulation`` is then a ``Trainer`` with a ``Server`` and this federation. The server gets the roster and, with
``--server-data``, samples of its own, and nothing of the clients' data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedloom.clients.batching import steps_of
from fedloom.clients.federation import SPLITS, Federation, federate
from fedloom.clients.partition import POOLS, Partition, apart_groups, partition
from fedloom.clients.shift import apply_shift, with_cameras
from fedloom.clients.windows import leak
from fedloom.core.contract import Needs, Sent, Setup, call
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.core.random import stream
from fedloom.core.sharded import is_sharded
from fedloom.core.task import MULTILABEL, REGRESSION, TASKS, Task
from fedloom.core.trees import ClientId, num_bytes
from fedloom.data.arrays import Arrays
from fedloom.data.preparation import Preparation
from fedloom.engines.auto import ENGINES, choose, heavy
from fedloom.engines.machine import Machine
from fedloom.engines.memories import Memories
from fedloom.engines.parallel import AbstractParallel
from fedloom.engines.ray import Ray
from fedloom.engines.shards import RayShards
from fedloom.engines.workers import cores
from fedloom.models.model import Model
from fedloom.models.spec import parse, usual_network
from fedloom.robust import TRIGGERED
from fedloom.robust.attacks import liars
from fedloom.robust.poison import BACKDOOR, poisoned
from fedloom.runs.directory import DATA
from fedloom.runs.options import RunOptions
from fedloom.runs.records import PANEL
from fedloom.runs.roster import Member, Roster
from fedloom.training.asynchronous import check as check_asynchronous
from fedloom.training.asynchronous import rehearsed
from fedloom.training.availability import ALWAYS, Availability
from fedloom.training.clock import AbstractClock, Asynchronous, Synchronous
from fedloom.training.config import algorithm_of
from fedloom.training.machine import THREADS, device_of, task_named
from fedloom.training.server import Server
from fedloom.training.server_data import Form, ServerSamples, read
from fedloom.training.trainer import Trainer

MOST_THREADS = 8
"""More threads than this wait for each other: operators of small models are short."""

HEAVY_SERVER = 16 << 20
"""Bytes of server state from which its operators gain by several threads."""


def resolve(options: RunOptions, arrays: Arrays) -> RunOptions:
    """Partition and number of clients, where they are left to the data: clients that the data name stay as they are.

    Data without clients are dealt by two classes each, those without classes at random, to 20 clients.
    """
    scheme = options.partition
    if scheme == "auto":
        classes = min(2, arrays.sample_classes)
        scheme = "group:client" if "client" in arrays.groups else f"classes:{classes}" if classes else "iid"
    clients = options.clients
    if clients is None:
        clients = 20
        named = arrays.groups.get(scheme.removeprefix("group:")) if scheme.startswith("group:") else None
        if named is not None:
            clients = _all_but_unseen(options, named, arrays.split)
    # what a run directory has does not say which of two tasks without classes it was
    task = arrays.task if options.task == "auto" and arrays.multilabel else options.task
    return replace(options, partition=scheme, clients=clients, task=task)


def _all_but_unseen(options: RunOptions, group: np.ndarray, published: np.ndarray | None) -> int:
    """The number of groups that take part where all do but those that are held out."""
    names, numbers = np.unique(group, return_inverse=True)
    apart = apart_groups(numbers, None if published is None else np.array([POOLS.index(s) for s in published]))
    everybody = len(names)
    if options.unseen_groups:
        held_out = len(options.named_unseen)
    elif apart.any():
        held_out = int(apart.sum())
    else:
        held_out = int(options.unseen if options.unseen >= 1 else round(options.unseen * everybody))
    return max(1, everybody - held_out)


def split(options: RunOptions, arrays: Arrays) -> Partition:
    """Who holds which samples; those that the server keeps (``server_rows``) are nobody's."""
    options = resolve(options, arrays)
    assert options.clients is not None
    rows = np.setdiff1d(np.arange(len(arrays)), server_rows(options, arrays))
    dealt = partition(
        arrays.labels[rows],
        options.partition,
        options.clients,
        options.seed,
        split=None if arrays.split is None else arrays.split[rows],
        groups={name: members[rows] for name, members in arrays.groups.items()},
        unseen=options.unseen,
        unseen_scheme=options.unseen_partition,
        unseen_groups=options.named_unseen,
        split_by=options.split_by,
        val_share=options.val_share,
        test_share=options.test_share,
    )
    if len(rows) == len(arrays):
        return dealt
    held = [replace(c, train=rows[c.train], val=rows[c.val], test=rows[c.test]) for c in dealt.clients]
    return replace(dealt, clients=tuple(held), unused=rows[dealt.unused])


def server_rows(options: RunOptions, arrays: Arrays) -> np.ndarray:
    """The training samples that the server keeps for itself (``--server-data``), cut before any are dealt."""
    share = options.server_share
    if not share:
        return np.arange(0)
    train = np.arange(len(arrays)) if arrays.split is None else np.flatnonzero(arrays.split == "train")
    number = round(share * len(train))
    if not 0 < number < len(train):
        raise ConfigError(
            f"--server-data {share:g} of {len(train)} training samples is {number}; give a share that "
            "leaves some for the server and some for clients."
        )
    return np.sort(stream(options.seed, "server data").permutation(train)[:number])


class Simulation(Trainer):
    """A federation whose clients live in this process, built from options and data.

    Its options are resolved: what was left to the data, the machine or the method's paper has a value afterwards, and
    the run's ``config.yaml`` holds these.
    """

    def __init__(
        self, method: str, options: RunOptions, config: Any, arrays: Arrays, preparation: Preparation | None = None
    ) -> None:
        """``preparation`` is the run's own; without it, raw samples are prepared by what their training data say."""
        algorithm, self.arrays = algorithm_of(method, options), arrays
        options = resolve(options, arrays)
        given = options.threads
        THREADS.set(given or min(THREADS.usual(), cores(), MOST_THREADS))
        self.partition = split(options, arrays)
        self.preparation = preparation or fitted(arrays, self.partition)
        federation = federation_of(options, arrays, self.partition, self.preparation)
        participants = federation.participants
        cohort = options.cohort_of(len(participants), algorithm.cohort)
        workers = options.workers or cores()
        name, reason = choose(options.engine, federation.device, federation.models.values(), cohort, workers)
        machine = Machine(
            options.workers, options.precision, options.convolutions == "own", options.ray_address, options.gpus
        )
        engine = ENGINES[name](federation, algorithm, config, options.seed, machine)
        options = replace(
            options,
            clients=len(participants),
            cohort=cohort,
            engine=name,
            device=str(federation.device),
            threads=torch.get_num_threads(),
        )
        self.server_samples = self._server_samples(options, algorithm.needs, federation)
        own = self.server_samples and self.server_samples.on(federation.device, federation.dtype)
        setup: Setup[Any] = Setup(
            config, participants, federation.models, federation.task, options.seed, federation.device, federation.dtype,
            options.rounds, own, engine.replay,
        )  # fmt: skip
        if options.loom_shards:  # no recording can hold what is not on this device
            shards = RayShards(machine, federation.device, options.loom_shards)
            setup = replace(setup, shards=shards, replay=call)
        engine.machine.take_over(federation.device)
        server = Server(method, algorithm, options, roster_of(federation, arrays, self.preparation), setup)
        if options.loom_shards and not is_sharded(server.state._asdict()):
            raise NeedsError(
                f"{algorithm.name} has no heads here that {options.loom_shards} processes could hold. Leave out "
                "--loom-shards, or take pfedhn, or mh_pfedhn with --heads by_count."
            )
        # elsewhere than on a GPU nobody would work while the checks are read
        super().__init__(server, engine, reason, looks_ahead=federation.device.type == "cuda")
        self.also_tried = (TRIGGERED,) if options.attack == BACKDOOR else ()
        light = num_bytes(server.state._asdict()) < HEAVY_SERVER
        small = isinstance(engine, AbstractParallel | Ray) or not any(map(heavy, set(federation.models.values())))
        if not given and light and small and federation.device.type == "cpu":
            THREADS.set(1)
            server.options = replace(options, threads=1)
        self.notes = [
            *notes_of(arrays, self.partition),
            *([server.weight.note] if server.weight else []),
            *([self.server_samples.note] if self.server_samples else []),
            *self.notes,
            *_of_clock(options),
        ]
        # what is evaluated with everybody else costs no training, and means something before the last round
        self.tries_newcomers = (
            bool(federation.unseen)
            and algorithm.admit is not None
            and not algorithm.needs_labels(config)
            and algorithm.newcomers_at == "best"
        )

    def _server_samples(self, options: RunOptions, needs: Needs, federation: Federation) -> ServerSamples | None:
        """What the server has of its own, with labels only if the method needs them."""
        labelled = needs.server_data == "labelled"
        if isinstance(options.server_data, str):
            model, targets = next(iter(federation.models.values())), tuple(self.arrays.y.shape[1:])
            form = Form.of(model, federation.task, targets, self.arrays.class_names, self.preparation)
            return read(options.server_data, options.data_root, form, labelled=labelled)
        rows = server_rows(options, self.arrays)
        if not len(rows):
            return None
        source = f"{options.server_share:g} of the training data"
        x = self.arrays.prepared(self.preparation).x[rows]
        return ServerSamples(x, self.arrays.y[rows] if labelled else None, source)

    @cached_property
    def clock(self) -> AbstractClock | None:
        """As ``Trainer.clock``; who asks for it first has the file of ``--availability`` read."""
        server, options = self.server, self.server.options
        if not options.async_ and not options.availability:
            return None
        setup, roster = server.setup, self.federation.roster
        if options.async_:
            check_asynchronous(server.algorithm, setup, server.state)
        asks = rehearsed(server.algorithm, setup, server.state)
        plans = [ask.program.batches for ask in asks if setup.clients[0] in ask.clients and ask.program.batches]
        steps = [sum(steps_of(len(roster[c].of(plan.split)), plan) for plan in plans) for c in setup.clients]
        there = Availability.of(options.availability or ALWAYS, setup.clients, self.federation.unseen, options.seed)
        given = setup.clients, there, steps, options.seed, int(options.cohort)
        return Asynchronous(*given, options.async_) if options.async_ else Synchronous(*given)

    @cached_property
    def data_digests(self) -> dict[str, str]:
        """Fingerprints of the data: the clients', and the server's if they are of another source."""
        own = self.server_samples if isinstance(self.server.options.server_data, str) else None
        return {DATA: self.arrays.digest(), **({"server's data": own.digest()} if own else {})}

    @property
    def clock_digests(self) -> dict[str, str]:
        """The fingerprint of the file of ``--availability``, if there is one."""
        found = self.clock.availability.digest if self.clock else ""
        return {"times of --availability": found} if found else {}

    def meta(self) -> dict[str, Any]:
        """As ``Trainer.meta``, and which data these are."""
        return {**super().meta(), "digests": {**self.data_digests, **self.clock_digests}}

    def admission(self, newcomers: Sequence[ClientId], memory: Memories, samples: int = 0) -> tuple[Sent, Memories]:
        """Admission with at most ``samples`` of each newcomer's training data and, if it needs none, without labels.

        Labels that are not needed are -1 for the session, so that a method cannot use them by mistake.
        """
        shown, roster = self.federation, dict(self.federation.roster)
        if not self.server.algorithm.needs_labels(self.server.config):
            rows = np.concatenate([roster[client].rows["train"] for client in newcomers])
            hidden = shown.y.clone()
            hidden[torch.as_tensor(rows, device=hidden.device)] = -1  # out of reach
            shown = replace(shown, y=hidden)
        for client in newcomers if samples else ():
            own = roster[client].rows
            draw = stream(self.server.options.seed, client, "samples of a newcomer")
            kept = draw.permutation(own["train"])[:samples]
            roster[client] = replace(roster[client], rows={**own, "train": np.sort(kept)})
        session = self.session("admission", memory, federation=replace(shown, roster=roster))
        return self.server.admit(session, newcomers), session.memory


def fitted(arrays: Arrays, parts: Partition) -> Preparation | None:
    """How raw samples are prepared, by participants' training data; None for samples that are not raw."""
    if arrays.preparation is None:
        return None
    return arrays.preparation.fit(arrays.x[np.concatenate([client.train for client in parts.participants])])


def _of_clock(options: RunOptions) -> list[str]:
    """What users should know of rounds that are not over when a computer says so."""
    if options.async_:
        return [f"asynchronous: {options.cohort:g} clients train at any time, the server steps with every "
                f"{options.async_} replies"]  # fmt: skip
    return ["a round lasts as long as its slowest client, on a clock that is only counted"] * bool(options.availability)


def notes_of(arrays: Arrays, parts: Partition) -> list[str]:
    """What users should know of their data and of how these are split."""
    tokens = (
        f"samples are whole numbers, taken for sequences of {arrays.vocabulary:,} different tokens; give features as "
        "floating-point numbers"
    )
    leaks = leak(arrays.x, parts)
    return [
        *arrays.notes,
        *parts.notes,
        *([leaks] if leaks else []),
        *([tokens] if arrays.vocabulary and not arrays.alphabet else []),
    ]


def roster_of(federation: Federation, arrays: Arrays, preparation: Preparation | None = None) -> Roster:
    """The roster of a simulated federation."""
    model = next(iter(federation.models.values()))
    classes = arrays.sample_classes if len(federation.roster) <= PANEL else 0
    members = [
        Member(
            client.id,
            client.unseen,
            str(client.model.spec),
            client.model.size,
            {split: len(client.rows[split]) for split in SPLITS},
            tuple(np.bincount(arrays.y[client.of("all")], minlength=classes).tolist()) if classes else (),
        )
        for client in federation.roster.values()
    ]
    names, targets = tuple(arrays.class_names or ()), tuple(federation.y.shape[1:])
    return Roster(
        model.input_shape, model.num_outputs, arrays.num_classes, names, targets, members, preparation, arrays.tokens,
        arrays.alphabet,
    )  # fmt: skip


def federation_of(
    options: RunOptions, arrays: Arrays, parts: Partition, preparation: Preparation | None = None
) -> Federation:
    """The clients of a simulation, with their data and models; raw data are prepared by ``preparation``."""
    arrays = arrays.prepared(preparation)
    device, dtype = device_of(options.device), getattr(torch, options.dtype)
    task = task_of(options.task, arrays)
    outputs = arrays.num_outputs
    shape = tuple(arrays.x.shape[1:])
    names = options.model if options.model != "auto" else usual_network(shape, arrays.tokens)
    narrow = torch.bfloat16 if options.precision == "bf16" else dtype

    def networks(names: str) -> list[Model]:
        specs = [parse(name, shape, outputs, arrays.tokens) for name in names.split(",") if name]
        return [Model(spec, device, dtype, training_dtype=narrow) for spec in specs]

    models, others = networks(names), networks(options.unseen_model or "")
    if not models:
        raise ConfigError(f"--model {names!r} names no network. Give one, or leave it out for auto.")
    x = arrays.x
    if (options.client_shift or options.unseen_shift) and arrays.vocabulary:
        flag = "--client-shift" if options.client_shift else "--unseen-shift"
        raise ConfigError(f"{flag} changes images, and these samples are tokens. Leave it out.")
    held = {c.id: np.concatenate([c.train, c.val, c.test]) for c in parts.clients}
    if options.client_shift or options.unseen_shift:
        low, high = (x.min(), x.max()) if preparation is None else preparation.ends
    if options.client_shift:
        x = with_cameras(x, held, options.client_shift, options.seed, low=low, high=high)
    if options.unseen_shift:
        rows = np.concatenate([np.empty(0, dtype=np.int64), *(held[c.id] for c in parts.clients if c.unseen)])
        x = x.copy()
        x[rows] = apply_shift(
            x[rows], options.unseen_shift, options.unseen_shift_strength, options.seed, low=low, high=high
        )
    federation = federate(x, arrays.y, parts, models, task, device, dtype, others)
    lying = liars(federation.participants, options.malicious, options.seed)
    if options.malicious and not lying:
        raise ConfigError(
            f"--malicious {options.malicious:g} of {len(federation.participants)} participants is nobody; give a share "
            "that makes one at least."
        )
    return poisoned(federation, options.attack, lying, options.seed)


def task_of(name: str, arrays: Arrays) -> Task:
    """The task that ``name`` stands for."""
    if name == "auto":
        return TASKS[arrays.task]
    task = task_named(name)
    if task.per_token != arrays.per_token:
        has, wanted = "one label for each sample", "one label for each token"
        has, wanted = (wanted, has) if arrays.per_token else (has, wanted)
        raise ConfigError(f"--task {name} needs {wanted}; {arrays.name} has {has}. Leave it out for auto.")
    if task is REGRESSION and arrays.num_classes:
        raise ConfigError(
            f"--task {name} needs real-valued targets; {arrays.name} has class labels. Give floating-point numbers "
            "in y, or use classification."
        )
    if task is MULTILABEL and (arrays.y.ndim != 2 or not np.isin(arrays.y, (0, 1)).all()):
        raise ConfigError(
            f"--task {name} needs zeros and ones of shape (samples, labels); {arrays.name} has y of shape "
            f"{arrays.y.shape} with others. Give one truth value for each label that may hold."
        )
    if task.class_scores and not arrays.num_classes:
        raise ConfigError(f"--task {name} needs class labels; {arrays.name} has real-valued targets. Use regression.")
    return task
