# SPDX-License-Identifier: Apache-2.0
"""The server of a run: its method, its roster, its state and, in a simulation, the clients' memory.

It has no data but what ``--server-data`` gives it.

Training, deployment, export and admission share it. ``Server.open`` makes it from a run directory alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedloom import algorithms
from fedloom.core import contract
from fedloom.core.contract import Algorithm, Ask, Cohort, Home, Seeds, Sent, Setup
from fedloom.core.errors import NeedsError, RunError
from fedloom.core.random import seed_of
from fedloom.core.sharded import as_in
from fedloom.core.task import CLASSIFICATION, MULTILABEL, REGRESSION, SEQUENCE, Task
from fedloom.core.trees import ClientId, Params, Tree, flatten, num_bytes
from fedloom.core.trust import check as check_trust
from fedloom.engines.engine import Session
from fedloom.engines.job import Means
from fedloom.engines.memories import Memories
from fedloom.models.model import Model
from fedloom.models.size_only import SizeOnly, SizeSpec
from fedloom.models.spec import parse
from fedloom.runs.checkpoint import Checkpoint
from fedloom.runs.directory import RunDirectory
from fedloom.runs.options import RunOptions
from fedloom.runs.roster import Roster
from fedloom.training.config import algorithm_of, parse_options
from fedloom.training.machine import device_of, task_named
from fedloom.training.weight import weigh


class Mark(NamedTuple):
    """A run between two rounds: all that changes."""

    round: int
    state: Any
    memory: Memories


class Server:
    """A method with a roster and a state. ``now`` is all that changes.

    It asks nobody: whoever calls ``settle`` or ``admit`` gives a session that reaches clients. What it makes for a
    participant is composed here only where the participant's memory is here (``memories_here``).
    """

    def __init__(
        self,
        method: str,
        algorithm: Algorithm,
        options: RunOptions,
        roster: Roster,
        setup: Setup[Any],
        *,
        memories_here: bool = True,
        trains: bool = True,
        now: Mark | None = None,
    ) -> None:
        self.method, self.algorithm, self.options, self.roster, self.setup = method, algorithm, options, roster, setup
        self.base = algorithm.base or algorithm
        self.memories_here = memories_here
        """Whether ``now.memory`` is what clients remember; else they keep it on their own machines."""
        needs = algorithm.needs if trains else algorithm.needs.of_clients
        violations = needs.violations(setup, algorithm.name)
        if violations:
            raise NeedsError(" ".join(violations))
        self.weight = weigh(algorithm, setup) if trains and now is None else None
        """What the loom weighs; None without one."""
        self.now = now or Mark(0, algorithm.init(setup), Memories())
        self.settled = -1
        """The round at which the state was last settled."""

    @classmethod
    def open(
        cls, directory: RunDirectory, which: Literal["best", "last"] | int, device: str = "auto", *, trust: bool = False
    ) -> Server:
        """The server of a run at one of its checkpoints, from the run directory and nothing else.

        ``trust``: the directory may name code outside of fedloom, which is then imported.
        """
        given = dict(directory.config)
        method = method_of(directory)
        given.pop("method")
        check_trust(directory.path / "config.yaml", given, RunOptions, algorithms.get(method).config, trust=trust)
        for name in {member.model for member in directory.roster().members if member.model}:
            check_trust(directory.path / "roster.json", {"model": name}, RunOptions, trust=trust)
        options, config = parse_options(method, {**given, "device": device})
        nothing_best = which == "best" and directory.best_round() is None
        checkpoint = directory.load("last" if nothing_best else which)
        roster, networked = directory.roster(), checkpoint.meta.get("deployment")
        if networked:  # whose roster grows: clients that came later are not in this checkpoint
            try:
                roles = {one["client"]: one["role"] for one in networked["roster"]}
            except (KeyError, TypeError) as error:
                raise RunError(
                    f"The last checkpoint of {directory.path} does not say who its clients are; restore it."
                ) from error
            members = [m._replace(unseen=roles[m.id] == "newcomer") for m in roster.members if m.id in roles]
            roster = roster._replace(members=members)
        chosen, dtype = device_of(options.device), getattr(torch, options.dtype)
        models = models_of(roster, chosen, dtype)
        setup = Setup(
            config, roster.participants, models, task_of(options.task, roster), options.seed, chosen, dtype,
            options.rounds,
        )  # fmt: skip
        algorithm = algorithm_of(method, options)
        server = cls(method, algorithm, options, roster, setup, memories_here=not networked, trains=False)
        server.restore(checkpoint)
        return server

    @property
    def config(self) -> Any:
        """The method's config."""
        return self.setup.config

    @property
    def state(self) -> Any:
        """The method's state."""
        return self.now.state

    @property
    def means(self) -> Means | None:
        """What the method uses of replies, where that is a mean, and nothing stands between it and its clients.

        What adapts a method leaves its rounds to it.
        """
        own = algorithms.get(self.method)
        return Means(own.means, own.mean_weight) if own.means and self.base.round is own.round else None

    @property
    def round(self) -> int:
        """Rounds done."""
        return self.now.round

    @cached_property
    def unseen(self) -> tuple[ClientId, ...]:
        """The clients of the roster that took no part."""
        return tuple(member.id for member in self.roster.members if member.unseen)

    def send(self, clients: Sequence[ClientId]) -> Sent:
        """What the method sends these clients, to use."""
        return self.algorithm.send(self.setup, self.state, clients)

    def plain(self, state: Any) -> Any:
        """The state of the method without its adaptation."""
        return state if self.algorithm.base is None else self.base.state(**state.base)

    def settle(self, session: Session) -> None:
        """Bring the state into the form in which it is evaluated and deployed, where that takes asks."""
        if self.algorithm.settle and self.settled != self.round:
            state = self.algorithm.settle(self.setup, self.state, session.ask)
            self.now = Mark(self.round, state, session.memory)
            self.settled = self.round

    def admit(self, session: Session, newcomers: Sequence[ClientId], ask: Ask | None = None) -> Sent:
        """What the method sends clients that took no part; ``session`` reaches them, by ``ask`` or by its own."""
        if self.algorithm.admit is None:
            raise NeedsError(
                f"{self.algorithm.name} cannot serve clients that took no part in training: it has no model for them. "
                "Methods that can are listed by `fedloom methods`."
            )
        models = {client: session.federation.roster[client].model for client in newcomers}
        if self.algorithm.needs.same_model:
            common = self.setup.models[self.setup.clients[0]].spec
            for client, model in models.items():
                if model.spec != common:
                    raise NeedsError(
                        f"{self.algorithm.name} has one model for all clients, {common}; client {client} has "
                        f"{model.spec}. Give it the common one."
                    )
        setup = self.setup.joined_by(models)
        return self.algorithm.admit(setup, self.state, Cohort(self.round, tuple(newcomers)), ask or session.ask)

    def deployed(self, client: ClientId) -> Tree:
        """What a participant deploys, composed with its own memory, as it would on its own machine."""
        shared, mine = self.send([client])
        return self.algorithm.client_deploy(self.home(client), shared, mine[client], self.recall(client))

    def home(self, client: ClientId) -> Home:
        """The surroundings of a participant, for its predictor."""
        member = next(member for member in self.roster.members if member.id == client)
        if member.model is None and not self.memories_here:
            raise NeedsError(
                f"The server of {self.algorithm.name} was told the size of client {client}'s network and nothing else; "
                "the whole model was delivered to the client's own machine. Ask the client for it."
            )
        return self.home_of(self.setup.models[client], member.samples["train"])

    def home_of(self, model: contract.Model, samples: int) -> Home:
        """The surroundings of a client with this model and so many training samples."""
        number = torch.tensor(samples, dtype=self.setup.dtype, device=self.setup.device)
        key = torch.zeros((), dtype=torch.int64, device=self.setup.device)
        return Home(model, self.setup.task, self.config, number, key)

    def module(self, client: ClientId) -> nn.Module:
        """A participant's predictor as a module."""
        return self.algorithm.module(self.home(client), self.deployed(client))

    def predict(self, client: ClientId, x: Tensor) -> Tensor:
        """A participant's outputs."""
        with torch.no_grad():
            return self.algorithm.predict(self.home(client), self.deployed(client), x)

    def named(self, outputs: Tensor) -> list[str] | list[list[str]]:
        """Predictions by name: each sample's class; where several labels may hold, those that do."""
        roster, task = self.roster, self.setup.task
        if task.class_scores:
            return [roster.classes[number] for number in outputs.argmax(-1).tolist()]
        if task is not MULTILABEL:
            raise NeedsError(f"The task is {task.name}, whose predictions have no names; use predict.")
        names = roster.class_names or tuple(f"label {number}" for number in range(roster.num_outputs))
        return [[name for name, said in zip(names, row) if said] for row in (outputs > 0).tolist()]

    def recall(self, client: ClientId) -> Tree:
        """What a participant remembers; of one on another machine, what it began with, which only it has changed."""
        model = self.setup.models[client]
        if self.memories_here and client in self.now.memory:
            return self.now.memory[client]
        seeds = Seeds(seed_of(self.options.seed, client, "memory"), self.setup.common_seed)
        first = {"buffers": model.fresh_buffers(), **self.algorithm.first_memory(model, self.config, seeds)}
        return first if self.memories_here else _Elsewhere(client, first)

    def global_model(self, *, for_others: bool = False) -> tuple[contract.Model, Params]:
        """The network that the method has besides its clients' own; ``for_others`` than those who took part."""
        if self.base.global_model is None:
            raise NeedsError(
                f"{self.base.name} has no global model apart from what its clients deploy. Leave it out; "
                "a method that has one is mh_pfedhn_gd."
            )
        network, params = self.base.global_model(self.setup, self.plain(self.state))
        if for_others and network.fresh_buffers():
            raise NeedsError(
                f"The global model {network.spec} has running statistics (BatchNorm), which stay with the "
                "participants; without them it is of no use to others. Choose a --global-model without BatchNorm."
            )
        return network, params

    def first_memory(self, model: contract.Model) -> dict[str, Tensor]:
        """What a client with this model begins with, flat: for its shapes."""
        if not self.memories_here:
            return {}
        first = {"buffers": model.fresh_buffers(), **self.algorithm.first_memory(model, self.config, Seeds(0, 0))}
        return flatten(first)

    def checkpoint_bytes(self) -> int:
        """About the size of a checkpoint when every client has been asked."""
        by_spec = {spec: num_bytes(self.first_memory(model)) for spec, model in self.setup.architectures.items()}
        memories = sum(by_spec[self.setup.models[client].spec] for client in self.setup.clients)
        return num_bytes(self.state._asdict()) + memories

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint; refuses one that is not of this method and roster.

        A plain checkpoint can be restored into an adapted server, which then settles anew, and the other way round: the
        plain method's state is in the branch ``base`` of the adapted one's. Memory may hold more than clients begin
        with, never less.
        """
        state: Tree = checkpoint.state
        memory: dict[ClientId, Tree] = dict(checkpoint.memory)
        fresh = self.state._asdict()
        was_adapted = checkpoint.meta.get("adapted", False)
        try:
            if self.algorithm.base and not was_adapted:  # what settling finds is found anew
                state = {**fresh, "base": state}
            if was_adapted and not self.algorithm.base:
                state = state["base"]
            state = self.algorithm.restored(fresh, state)
        except (KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"The checkpoint does not fit {self.method}: its parts are others. Use the config it was made with."
            ) from error
        expected = flatten(fresh)
        self._check_fit(expected, flatten(state), [*expected, *flatten(state)])
        known = {member.id for member in self.roster.members}
        foreign = [client for client in memory if client not in known]
        if foreign:
            raise RunError(
                f"The checkpoint remembers client {foreign[0]!r}, which this federation does not have. "
                "Use the config and data it was made with."
            )
        firsts: dict[Any, dict[str, Tensor]] = {}
        for client, tree in memory.items():
            model = self.setup.models[client]
            if model.spec not in firsts:
                firsts[model.spec] = self.first_memory(model)
            first = firsts[model.spec]
            if self.algorithm.base:  # a checkpoint of the plain method has no memory of the adaptation
                memory[client] = {**self.recall(client), **tree} if set(first) - set(flatten(tree)) else tree
            self._check_fit(first, flatten(memory[client]), list(first))  # training may have added to it
        device = self.setup.device
        trees = {client: _to(tree, device) for client, tree in memory.items()}
        self.now = Mark(checkpoint.round, self.algorithm.state(**as_in(fresh, state, device)), Memories(trees))
        # what another method settled says nothing: a plain run that is adapted now, say
        same = checkpoint.meta.get("as") == self.algorithm.name
        self.settled = checkpoint.meta.get("settled", -1) if same else -1

    def _check_fit(self, expected: Mapping[str, Tensor], got: Mapping[str, Tensor], paths: Sequence[str]) -> None:
        """Refuse a checkpoint in which any of these tensors is missing, is one too many, or has another shape."""
        for path in paths:
            here, there = expected.get(path), got.get(path)
            if here is None or there is None or here.shape != there.shape:
                raise RunError(
                    f"The checkpoint does not fit {self.method} on this federation: {path} is "
                    f"{'missing' if there is None else tuple(there.shape)}, expected "
                    f"{'nothing' if here is None else tuple(here.shape)}. Use the config it was made with."
                )


class _Elsewhere(Mapping[str, Any]):
    """The memory of a client on another machine, for a model that needs nothing of it."""

    def __init__(self, client: ClientId, first: Tree) -> None:
        self._client, self._first = client, first

    def __getitem__(self, name: str) -> Any:
        branch = self._first[name]
        if isinstance(branch, Tensor) or branch:
            raise NeedsError(
                f"Client {self._client} keeps part of its model ({name}) on its own machine, to which the whole model "
                "was delivered. Ask the client for it."
            )
        return branch

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)


def method_of(directory: RunDirectory) -> str:
    """The method that a run directory names."""
    method = directory.config.get("method")
    if not isinstance(method, str):
        raise RunError(f"{directory.path / 'config.yaml'} names no method; it is not the config of a run.")
    algorithms.get(method, f"method of {directory.path}")
    return method


def models_of(roster: Roster, device: torch.device, dtype: torch.dtype) -> dict[ClientId, contract.Model]:
    """The network of each member; one object for equal ones."""
    built: dict[tuple[str | None, int], contract.Model] = {}
    form = roster.input_shape, roster.num_outputs
    for member in roster.members:
        kind = (member.model, member.size)
        if kind not in built:
            if member.model is None:
                built[kind] = SizeOnly(SizeSpec(member.size, *form, roster.tokens), device, dtype)
            else:
                built[kind] = Model(parse(member.model, *form, roster.tokens), device, dtype)
    return {member.id: built[member.model, member.size] for member in roster.members}


def task_of(name: str, roster: Roster) -> Task:
    """The task that ``name`` stands for in a run with this roster."""
    per_token = roster.tokens is not None and roster.tokens.per_token
    auto = SEQUENCE if per_token else CLASSIFICATION if roster.num_classes else REGRESSION
    return auto if name == "auto" else task_named(name)


def _to(tree: Any, device: torch.device) -> Any:
    return {k: _to(v, device) for k, v in tree.items()} if isinstance(tree, Mapping) else tree.to(device)
