# SPDX-License-Identifier: Apache-2.0
"""The contract between methods, which know no engine, and engines, which know no method.

A **method** is one file in ``algorithms/``. Its server half drives the round and asks clients to run a *client
program*; an **engine** is an implementation of ``ask`` and nothing else::

    replies = ask(program, shared, mine)

    program   what one client runs: pure functions ``init``, ``step`` and ``final`` (see ``Program``)
    shared    a tree, the same for every client asked       (one copy under vmap, a broadcast on a network)
    mine      {client: tree}, who is asked and what is only for them    (stacked under vmap, a unicast on a network)
    replies   {client: tree}; a client that is missing did not answer, or not usably, and the round goes on

Trees are nested dicts of tensors (``core.trees``). Both ``mine`` and ``replies`` may be ``PerClient``: a mapping that
also offers its trees in stacks, one per architecture.

What a method file holds, in this order
---------------------------------------
``Config``
    A frozen dataclass of ``option(default, help)`` fields, which are the command-line flags; those of local training
    come from ``training.LocalConfig``.
``State``
    A NamedTuple of trees and tensors: all that the server keeps. It is a value: ``round`` gives back a new one and
    leaves the old one as it was. Whatever is in it is checkpointed; whatever is not does not survive.
``init(setup) -> State``
    Before round 1, from the roster (``Setup``) alone. Random values come from ``core.random`` with ``setup.seed``.
``round(setup, state, cohort, ask) -> (State, diagnostics)``
    The paper's algorithm box: prepare what goes down, ``ask`` (as often as needed), combine, step. It must accept
    any non-empty subset of replies. ``diagnostics`` is a flat dict of numbers for the run's records, as tensors where
    they are on a device: reading one there would make the host wait.
    The forward pass of a loom is recomputed when the replies are there: no autograd graph outlives an ``ask``.
``client_init``, ``client_step``, ``client_final``
    The client program, written for ONE client; the engine makes it many. It sees what is in its arguments, never the
    server. Pure: no module is changed, nothing is read back from a tensor, no branch depends on a tensor's value.

        client_init(home, shared, mine, memory)  -> carry       any NamedTuple or dict of tensors
        client_step(home, shared, carry, batch)  -> carry       once per batch
        client_final(home, shared, carry, memory) -> (reply, memory)

    ``home`` is what the client has of its own (``Home``), and the *guest* network if the program brings one. ``memory``
    is what it keeps from ask to ask: always ``memory["buffers"]``, its model's running statistics, and whatever
    ``first_memory`` started and ``client_final`` gave back. The server never sees memory. ``delta`` is after minus
    before, ``pseudo_grad`` before minus after.
``personalise(setup, state, clients) -> Sent``
    What the server sends for use, in the form of an ask. With ``client_deploy(home, shared, mine, memory) -> tree``,
    which the client runs, and ``predict(home, deployed, x) -> outputs``, a pure function, it makes a *predictor*: the
    only thing that evaluation, export and serving know of a method.
``admit(setup, state, newcomers, ask) -> Sent``, if the method can serve clients that took no part
    The same for newcomers: clients that ``ask`` can reach and ``state`` knows nothing of.
``settle(setup, state, ask) -> State``, rarely
    What has to be asked between training and use: calibration, for example.
``ALGORITHM = Algorithm(...)``
    All of this by name, the citation, and the *declared needs*, which are checked before round 1.

``algorithms/fedavg.py`` is the example to start from; ``fedloom new NAME`` writes the skeleton. Every file in the
folder is a method, with its command-line name, its flags and its conformance tests; there is no list to add it to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedloom.core.random import Key
from fedloom.core.recording import Replayer
from fedloom.core.task import Task
from fedloom.core.trees import ClientId, Params, PerClient, Tree

C = TypeVar("C")


class Model(Protocol):
    """A target network as functions of its parameters; ``models.Model`` wraps any ``nn.Module``."""

    @property
    def spec(self) -> Hashable:
        """Equal for clients whose models can be trained as one stack."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The parameters by name."""

    @property
    def head(self) -> frozenset[str]:
        """The names of the parameters of the output layer; the rest is the body."""

    @property
    def device(self) -> torch.device:
        """Where parameters live."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters."""

    @property
    def size(self) -> int:
        """The number of parameters: all that some servers are told of a model."""

    @property
    def num_outputs(self) -> int:
        """The size of the output: the number of classes, or of target values."""

    def init(self, seed: int) -> dict[str, Tensor]:
        """Parameters as the module initialises them."""

    def fresh_buffers(self) -> dict[str, Tensor]:
        """Running statistics before any training; empty for a model without."""

    def train(
        self, params: Params, buffers: Tree, x: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs in training mode and the new buffers. Masked samples do not enter batch statistics."""

    def __call__(self, params: Params, buffers: Tree, x: Tensor) -> Tensor:
        """Outputs in evaluation mode."""


class Batch(NamedTuple):
    """Samples of one client. ``mask`` is False for padding, which must not count: use ``mean`` and ``sum``."""

    x: Tensor  # (batch, ...)
    y: Tensor  # (batch,) or (batch, targets)
    mask: Tensor  # (batch,) bool
    step: Tensor  # () which step of this ask, from 0
    epoch: Tensor  # () which pass over the data, from 0
    key: Tensor  # () for draws in this step (core.random)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of per-sample values over the real samples."""
        return torch.where(self.mask, values, 0).sum()

    def mean(self, values: Tensor) -> Tensor:
        """The mean of per-sample values over the real samples."""
        return self.sum(values) / self.mask.sum().clamp(min=1)


@dataclass(frozen=True)
class Home:
    """What a client has of its own: its model, the task, the method's config, the size of its training data."""

    model: Model
    task: Task
    config: Any
    num_samples: Tensor  # () training samples
    key: Key  # () for noise in this ask (core.random)
    guest: Model | None = None
    """A network that the program runs besides the client's own: ``Program.guest``."""


@dataclass(frozen=True)
class Batches:
    """Which data a program goes through: ``steps`` batches, or ``epochs`` passes, of a split.

    Shuffled anew in every pass; a pass ends with the batch that is left, full or not, so that no sample is dropped
    or counted twice.
    """

    split: str = "train"
    size: int = 64
    steps: int = 0
    epochs: int = 0
    shuffle: bool = True


@dataclass(frozen=True)
class Program:
    """What a client runs when asked. All functions are module-level: they travel by name, not by value."""

    name: str
    init: Callable[[Home, Tree, Tree, Tree], Any]
    step: Callable[[Home, Tree, Any, Batch], Any]
    final: Callable[[Home, Tree, Any, Tree], tuple[Tree, Tree]]
    batches: Batches | None
    expects: Callable[[Tree, Tree], Tree]
    """(shared, mine) -> a tree with the shapes that a proper reply has: others are refused."""
    guest: Model | None = None
    """A network for all clients asked, whatever their own: a teacher, an encoder. Its parameters travel too."""


Diagnostics = Mapping[str, float | Tensor]
"""Named numbers of a round, for its record."""


class Cohort(NamedTuple):
    """Who takes part in a round, in the roster's order."""

    round: int
    clients: tuple[ClientId, ...]


class Sent(NamedTuple):
    """What goes down to clients, as in an ask."""

    shared: Tree
    mine: PerClient


class Ask(Protocol):
    """The door to the clients."""

    def __call__(self, program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        """Have the clients in ``mine`` run ``program``; give the usable replies."""


@dataclass(frozen=True)
class Setup(Generic[C]):
    """What the server knows before it asks anybody."""

    config: C
    clients: tuple[ClientId, ...]
    models: Mapping[ClientId, Model]
    task: Task
    seed: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32

    def rows(self, clients: Sequence[ClientId]) -> list[int]:
        """Where the roster has these clients: the rows of embeddings and the like."""
        return [self._row[client] for client in clients]

    def __contains__(self, client: ClientId) -> bool:
        """Whether the client is of the roster; others are newcomers."""
        return client in self._row

    @cached_property
    def replay(self) -> Replayer:
        """``setup.replay(name, function, *trees)``: the function's result, on a GPU by way of a recorded graph."""
        return Replayer()

    @cached_property
    def _row(self) -> dict[ClientId, int]:
        return {client: row for row, client in enumerate(self.clients)}

    def by_model(self, clients: Sequence[ClientId]) -> dict[Hashable, list[ClientId]]:
        """The clients of each architecture."""
        alike: dict[Hashable, list[ClientId]] = {}
        for client in clients:
            alike.setdefault(self.models[client].spec, []).append(client)
        return alike

    @cached_property
    def architectures(self) -> dict[Hashable, Model]:
        """The distinct models of those who take part, in order of first appearance."""
        found: dict[Hashable, Model] = {}
        for client in self.clients:
            found.setdefault(self.models[client].spec, self.models[client])
        return found


@dataclass(frozen=True)
class Needs:
    """What a method asks of a federation, checked before round 1."""

    same_model: bool = False
    """All clients have one architecture."""
    head: bool = False
    """Models have an output layer apart from their body."""
    class_labels: bool = False
    """The task is classification by scores."""

    def violations(self, setup: Setup[Any], name: str) -> list[str]:
        """Everything that the federation lacks, one sentence each."""
        models = list(setup.architectures.values())
        found = []
        if self.same_model and len(models) > 1:
            found.append(
                f"{name} needs one architecture for all clients; got {len(models)} "
                f"({', '.join(str(m.spec) for m in models)}). Give one --model."
            )
        if self.head:
            found += [
                f"{name} keeps the output layer apart from the body; {m.spec} has nothing but its output layer. "
                "Choose a --model with a body."
                for m in models
                if len(m.head) == len(m.shapes)
            ]
        if self.class_labels and not setup.task.class_scores:
            found.append(f"{name} needs class labels; the task is {setup.task.name}. Choose another method.")
        return found


def no_memory(model: Model, config: Any, seed: int) -> Tree:
    """Nothing is remembered but the buffers, which are always there."""
    return {}


def send_to_all(setup: Setup[Any], state: Any, clients: Sequence[ClientId]) -> Sent:
    """The server sends ``state.params`` to everybody."""
    return Sent({"params": state.params}, PerClient.empty(clients))


def deploy_shared(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """A client deploys the parameters that all clients get."""
    return {"params": shared["params"], "buffers": memory["buffers"]}


def deploy_mine(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """A client deploys the parameters made for it."""
    return {"params": mine["params"], "buffers": memory["buffers"]}


def predict_with_target(home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """The client's target network with the deployed parameters."""
    return home.model(deployed["params"], deployed["buffers"], x)


@dataclass(frozen=True)
class Algorithm:
    """A method: the functions that the module docstring describes, and what it declares of itself."""

    name: str
    """As the paper spells it."""
    citation: str
    config: type
    init: Callable[[Setup[Any]], Any]
    round: Callable[[Setup[Any], Any, Cohort, Ask], tuple[Any, Diagnostics]]
    personalise: Callable[[Setup[Any], Any, Sequence[ClientId]], Sent]
    state: Callable[..., Any]
    """The State type: ``state(**trees)`` brings a checkpoint back."""
    first_memory: Callable[[Model, Any, int], Tree] = no_memory
    client_deploy: Callable[[Home, Tree, Tree, Tree], Tree] = deploy_mine
    predict: Callable[[Home, Tree, Tensor], Tensor] = predict_with_target
    admit: Callable[[Setup[Any], Any, Cohort, Ask], Sent] | None = None
    admit_labels: bool = True
    """Newcomers need labels to be admitted."""
    newcomers_at: Literal["best", "last"] = "best"
    """The checkpoint that newcomers are served from; last where later rounds are for them and leave participants be."""
    global_model: Callable[[Setup[Any], Any], tuple[Model, Params]] | None = None
    """A network besides the clients' own, with its parameters; clients keep its statistics as ``global_buffers``."""
    settle: Callable[[Setup[Any], Any, Ask], Any] | None = None
    """Brings a state into the form in which it is evaluated and deployed, where that takes further asks."""
    carries_prior: bool = True
    """Models know which classes their client has; False for a global model, which can be told (``--adapt prior``)."""
    cohort: int = 10
    """The paper's number of clients a round: the default of ``--cohort``."""
    needs: Needs = Needs()
    told: Literal["spec", "size"] = "spec"
    """What the server is told of a client's model: its architecture, or only its number of parameters."""
