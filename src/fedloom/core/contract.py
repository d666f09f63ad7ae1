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
``send(setup, state, clients) -> Sent``
    What the server sends these clients, to train and to use.
``round(setup, state, cohort, ask) -> (State, diagnostics)``
    The paper's algorithm box: send, ``ask`` (as often as needed), combine, step. It must accept any non-empty subset of
    replies. ``diagnostics`` is a flat dict for the run's records: numbers, as tensors where they are on a device, since
    reading one there would make the host wait; and tables (``Table``) of numbers by client. The forward pass of a loom
    is recomputed when the replies are there: no autograd graph outlives an ``ask``.
``ALGORITHM = Algorithm(...)``
    All of this by name, the citation, and the *declared needs*, which are checked before round 1.

The client's half is a program. Most methods use ``programs.local.local_training``, whose one rule is: **what a client
trains, and what it deploys, is what was sent, together with what is its own** (``params`` of the message and
``memory["own"]``). A method with another client half writes three functions for ONE client; the engine makes it many::

    client_init(home, shared, mine, memory)  -> carry       any NamedTuple or dict of tensors
    client_step(home, shared, carry, batch)  -> carry       once per batch
    client_final(home, shared, carry, memory) -> (reply, memory)

They are pure: no module is changed, nothing is read back from a tensor, no branch depends on a tensor's value.
``home`` is what the client has of its own (``Home``). ``memory`` is what it keeps from ask to ask: always
``memory["buffers"]``, its model's running statistics, and whatever ``first_memory`` started and ``client_final`` gave
back. The server never sees memory. ``delta`` is after minus before, ``pseudo_grad`` before minus after.
``docs/how-to-write-a-method.md`` writes the loop of FedAvg's clients out by hand.

A few methods have more: ``admit`` (clients that took no part), ``settle`` (asks between training and use, such as
calibration), ``client_deploy`` and ``predict`` (another predictor than the client's target network), ``programs`` (what
else a client may be asked). ``Algorithm`` says what each of them is.

``algorithms/fedavg.py`` is the example to start from; ``fedloom new NAME`` copies it. Every file in the folder is a
method, with its command-line name, its flags and its conformance tests; there is no list to add it to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedloom.core.random import Key, seed_of
from fedloom.core.sharded import Shards
from fedloom.core.structure import Structural
from fedloom.core.task import Task
from fedloom.core.tokens import Tokens
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
    def norm(self) -> frozenset[str]:
        """The names of the parameters of normalisation layers."""

    @property
    def feature_shape(self) -> tuple[int, ...] | None:
        """The shape of a sample's features: what the head gets. None for a network that cannot be cut there."""

    @property
    def has_linear_head(self) -> bool:
        """The head is one dense layer, and the last thing that is computed."""

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
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a sample."""

    @property
    def tokens(self) -> Tokens | None:
        """What samples of tokens are like; None: samples are numbers."""

    @property
    def input_dtype(self) -> torch.dtype:
        """The type of samples: that of parameters, or int64 for tokens."""

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

    def features(self, params: Params, buffers: Tree, x: Tensor) -> Tensor:
        """What the head gets, in evaluation mode."""

    def train_features(
        self, params: Params, buffers: Tree, x: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What the head gets, in training mode, and the new buffers."""

    def classify(self, params: Params, z: Tensor) -> Tensor:
        """Outputs from features: the head, and whatever the network computes after it."""

    def module(self, params: Params, buffers: Tree) -> nn.Module:
        """The module itself with these parameters, in evaluation mode."""


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
    name: str = ""
    """Asks of a round that share a name see the same batches; without one, each ask has its own."""
    least: int = 1
    """What is left at the end of a pass goes to the batch before it if it is less than this."""


class Noise(NamedTuple):
    """Noise that a program puts on its reply, for the account of what a run makes public."""

    mechanism: Literal["gaussian", "laplace"]
    scale: float
    """The deviation of Gaussian noise in units of what one sample can change; the scale of Laplace noise."""
    unit: Literal["client", "sample"] = "client"
    """What it is to hide."""
    what: str = ""
    """What the reply tells; empty: whatever the stage is for."""


@dataclass(frozen=True, eq=False)
class Program(Structural):
    """What a client runs when asked. It travels by its name alone: a client knows the programs of its method.

    Programs made from equal parts are equal, so that engines can keep what they compiled for one.
    """

    name: str
    init: Callable[[Home, Tree, Tree, Tree], Any]
    step: Callable[[Home, Tree, Any, Batch], Any]
    final: Callable[[Home, Tree, Any, Tree], tuple[Tree, Tree]]
    batches: Batches | None
    expects: Callable[[Tree, Tree], Tree]
    """(shared, mine) -> a tree with the shapes that a proper reply has: others are refused."""
    guest: Model | None = None
    """A network for all clients asked, whatever their own: a teacher, an encoder. Its parameters travel too."""
    noise: Noise | None = None
    """Noise that it adds to its reply besides ``--sample-dp-noise``; it is written down before clients are asked."""
    of_data_alone: bool = False
    """The reply follows from the client's data, not from its memory or the round: noise on it is drawn only once."""


class Table(NamedTuple):
    """Numbers of a round for each of some clients."""

    clients: tuple[ClientId, ...]
    columns: tuple[str, ...]
    values: Tensor  # (clients, columns)


Diagnostics = Mapping[str, float | Tensor | Table]
"""Named numbers and tables of a round, for its record."""


class Cohort(NamedTuple):
    """Who takes part in a round, in the roster's order."""

    round: int
    clients: tuple[ClientId, ...]
    size: float = 0
    """How many a round has on average, where each client is drawn by itself; 0: as many as these."""


class Sent(NamedTuple):
    """What goes down to clients, as in an ask."""

    shared: Tree
    mine: PerClient


class Woven(Sent):
    """What newcomers are sent, made by a loom. ``embeddings`` stay with the server, for its records."""

    embeddings: Mapping[ClientId, Tensor]

    @classmethod
    def of(cls, sent: Sent, clients: Sequence[ClientId], embeddings: Tensor) -> Woven:
        """``embeddings`` has a row for each of the clients."""
        woven = cls(*sent)
        woven.embeddings = dict(zip(clients, embeddings, strict=True))
        return woven


class Ask(Protocol):
    """The door to the clients."""

    def __call__(self, program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        """Have the clients in ``mine`` run ``program``; give the usable replies."""


class ServerData(NamedTuple):
    """Samples that the server itself has, for methods that need some (``Needs.server_data``)."""

    x: Tensor  # (samples, ...)
    y: Tensor | None  # None: without labels


class Seeds(NamedTuple):
    """What a client's first memory is drawn from."""

    own: int
    """Another one for every client."""
    common: int
    """The seed of the global model, the same for all: a personal model can start there."""


def call(name: Hashable, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``: the ``replay`` of a server that has no engine to speed it up."""
    return function(*arguments)


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
    rounds: int = 0
    """How many the run is to have."""
    server_data: ServerData | None = None
    replay: Callable[..., Any] = call
    """``replay(name, function, *trees)`` is ``function(*trees)``, perhaps by a faster way that an engine knows.

    ``name`` must fix whatever the function uses besides its arguments."""
    elsewhere: Callable[[Any], Any] | None = None
    """``elsewhere(loom)`` is a loom of the same structure whose parameters are on another machine, which weaves."""
    shards: Shards | None = None
    """Where the heads of a loom live, if not here: a method that knows of it makes them ``core.sharded.Sharded``."""
    combine: Callable[[Sequence[ClientId], Tensor], Tensor] | None = None
    """``combine(clients, gradients)`` stands for the mean of clients' gradients of the loom, (clients, numbers)."""

    @property
    def common_seed(self) -> int:
        """The seed of the global model's first parameters: ``Seeds.common`` of every client."""
        return seed_of(self.seed, "global model")

    def joined_by(self, models: Mapping[ClientId, Model]) -> Setup[C]:
        """This setup with the models of newcomers in it, who are not of the roster."""
        return replace(self, models={**self.models, **models})

    def rows(self, clients: Sequence[ClientId]) -> list[int]:
        """Where the roster has these clients: the rows of embeddings and the like."""
        return [self._row[client] for client in clients]

    def __contains__(self, client: ClientId) -> bool:
        """Whether the client is of the roster; others are newcomers."""
        return client in self._row

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
    features: Literal["none", "any", "same"] = "none"
    """Networks can be cut before their output layer; ``same``: features have one shape in all of them."""
    linear_head: bool = False
    """The output layer is one dense layer."""
    no_batchnorm: bool = False
    """Models have no BatchNorm."""
    server_data: Literal["none", "unlabelled", "labelled"] = "none"
    """Samples on the server (``--server-data``)."""
    numbers: bool = False
    """Samples are numbers, not tokens: the method computes with them outside of the clients' networks."""

    @property
    def of_clients(self) -> Needs:
        """What is asked of clients; the server may be without what it trains with."""
        return replace(self, server_data="none")

    def violations(self, setup: Setup[Any], name: str) -> list[str]:
        """Everything that the federation lacks, one sentence each."""
        models = list(setup.architectures.values())
        found = self._of_features(models, name) if self.features != "none" else []
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
        if self.linear_head:
            found += [
                f"{name} needs a dense output layer; that of {m.spec} is another. Choose a --model that ends in one."
                for m in models
                if not m.has_linear_head
            ]
        if self.no_batchnorm:
            found += [
                f"{name} cannot train BatchNorm; {m.spec} has it. Choose a --model without it."
                for m in models
                if any(buffer.rpartition(".")[2] == "running_mean" for buffer in m.fresh_buffers())
            ]
        if self.class_labels and not setup.task.class_scores:
            found.append(f"{name} needs class labels; the task is {setup.task.name}. Choose another method.")
        if self.numbers and any(m.tokens for m in models):
            found.append(
                f"{name} computes with the samples themselves, as numbers; these are tokens. Choose another method, "
                "such as pfedhn, or give each sample as numbers, e.g. shares of its words."
            )
        if self.server_data != "none" and setup.server_data is None:
            found.append(f"{name} needs {self.server_data} data on the server; there are none. Give --server-data.")
        return found

    def _of_features(self, models: Sequence[Model], name: str) -> list[str]:
        found = [
            f"{name} needs the features before the output layer; {m.spec} does not call its output layer once with "
            "one tensor. Choose another --model."
            for m in models
            if m.feature_shape is None
        ]
        shapes = {m.feature_shape: str(m.spec) for m in models}
        if self.features == "same" and len(shapes) > 1:
            has = ", ".join(f"{spec} has {shape}" for shape, spec in shapes.items())
            found.append(f"{name} compares features, which must have one shape in all models; {has}. Choose others.")
        return found


def no_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """Nothing is remembered but the buffers, which are always there."""
    return {}


def sent_params(shared: Tree, mine: Tree) -> dict[str, Tensor]:
    """The parameters of a message."""
    return {**shared.get("params", {}), **mine.get("params", {})}


def composed(home: Home, shared: Tree, mine: Tree, memory: Tree) -> dict[str, Any]:
    """The model that a client makes of what was sent and of what is its own."""
    statistics = next(tree for tree in (mine, shared, memory) if "buffers" in tree)
    return {"params": {**sent_params(shared, mine), **memory.get("own", {})}, "buffers": statistics["buffers"]}


def predict_with_target(home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """The client's target network with the deployed parameters."""
    return home.model(deployed["params"], deployed["buffers"], x)


def target_module(home: Home, deployed: Tree) -> nn.Module:
    """The client's target network as a module."""
    return home.model.module(deployed["params"], deployed["buffers"])


def as_saved(fresh: Tree, saved: Tree) -> Tree:
    """A checkpoint's state as it is."""
    return saved


def all_of_it(setup: Setup[Any], state: Any) -> Any:
    """The state as it is."""
    return state


def as_configured(setup: Setup[Any]) -> Any:
    """The method's config as it is."""
    return setup.config


def no_notes(setup: Setup[Any]) -> Sequence[str]:
    """There is nothing to say."""
    return ()


def no_steps(config: Any) -> int:
    """The vector takes no steps."""
    return 0


def without_rows(names: tuple[str, ...], setup: Setup[Any], state: Any) -> Any:
    """The state without the rows of participants in these of its tensors: ``partial`` of it is for ``Handover``."""
    return state._replace(**{name: getattr(state, name)[:0] for name in names})


@dataclass(frozen=True, eq=False)
class Handover(Structural):
    """How a trained state is handed on, in a bundle: less than training needs, and to newcomers nothing personal.

    By default the whole state is: right for a method whose state has nothing of any one client. A bundle refuses a
    state for newcomers whose shapes depend on how many clients took part.
    """

    participants: Callable[[Setup[Any], Any], Any] = all_of_it
    """The state with which ``send`` gives participants the same as before."""
    newcomers: Callable[[Setup[Any], Any], Any] = all_of_it
    """The state with which ``admit`` does the same, and in which nothing is of any participant's own."""
    config: Callable[[Setup[Any]], Any] = as_configured
    """The config, with a value in the place of each option that follows from the number of clients."""
    loom: str = ""
    """The branch of the newcomers' state that weaves models, if there is one."""
    vector: Callable[[Any], Literal["embedding", "descriptor", "class shares"]] | None = None
    """By config, what the loom weaves a newcomer's model from, if that is one vector."""
    structure: Callable[[Setup[Any]], Any] | None = None
    """The structure of that loom: ``looms.weaving.Loom`` with ``embed_dim``, the vector's size."""
    steps: Callable[[Any], int] = no_steps
    """By config, how often ``admit`` pulls a change back through the loom to that vector."""


Family = Literal[
    "global",  # one model for all, with another local loss or step
    "aggregation",  # one model for all, combined in another way
    "split",  # a common body and own heads, or the other way round
    "personal",  # a personal model beside or instead of a common one
    "prototypes",  # clients share representations of classes
    "ensemble",  # several models, or their answers, combined
    "similarity",  # clients learn from those that are like them
    "loom",  # a hypernetwork makes models, or what combines them
]
"""Methods that are alike: how ``fedloom methods`` lists them."""


@dataclass(frozen=True, eq=False)
class Algorithm(Structural):
    """A method: the functions that the module docstring describes, and what it declares of itself."""

    name: str
    """As the paper spells it."""
    family: Family
    citation: str
    config: type
    state: Callable[..., Any]
    """The State type: ``state(**trees)`` brings a checkpoint back."""
    init: Callable[[Setup[Any]], Any]
    send: Callable[[Setup[Any], Any, Sequence[ClientId]], Sent]
    round: Callable[[Setup[Any], Any, Cohort, Ask], tuple[Any, Diagnostics]]
    first_memory: Callable[[Model, Any, Seeds], Tree] = no_memory
    """(model, config, seeds) -> what a client remembers before its first ask, besides its model's buffers."""
    client_deploy: Callable[[Home, Tree, Tree, Tree], Tree] = composed
    """(home, shared, mine, memory) -> what the client deploys, from what ``send`` or ``admit`` sent it."""
    predict: Callable[[Home, Tree, Tensor], Tensor] = predict_with_target
    """(home, deployed, x) -> outputs: all that evaluation and serving know of a method."""
    module: Callable[[Home, Tree], nn.Module] = target_module
    """(home, deployed) -> the predictor as a module to hand on."""
    programs: Callable[[Any, Model, bool], Sequence[Program]] | None = None
    """(config, the client's model, whether it is a newcomer) -> what it may be asked besides evaluation.

    None: local training, for newcomers only if they need labels; and running statistics for newcomers. A client on a
    machine of its own runs these programs, made from its own config, and nothing else."""
    admit: Callable[[Setup[Any], Any, Cohort, Ask], Sent] | None = None
    """What newcomers are sent, if the method can serve clients that took no part. ``ask`` reaches newcomers alone."""
    admit_labels: bool | Callable[[Any], bool] = True
    """Whether newcomers need labels to be admitted; by config, where it is a function."""
    newcomers_at: Literal["best", "last"] = "best"
    """The checkpoint that newcomers are served from; last where later rounds are for them and leave participants be."""
    global_model: Callable[[Setup[Any], Any], tuple[Model, Params]] | None = None
    """A network besides the clients' own, with its parameters; clients keep its statistics as ``global_buffers``."""
    means: tuple[str, ...] = ()
    """The branches of replies of which the server uses the weighted mean over clients and nothing else; empty: it needs
    single replies. Such a method asks once a round (``--dp-noise``)."""
    mean_weight: str | None = "num_samples"
    """The number in a reply by which its client counts in these means; None: all count the same."""
    one_step: Callable[[Any], bool] | None = None
    """By config, whether a round is one step of the loom on the mean of the clients' gradients of it, for which
    ``Setup.combine`` can stand (``--aggregate``), and nothing else of their replies goes into what clients share."""
    averaged: tuple[str, ...] = ()
    """The fields of the state that can be averaged over rounds (``--average``): a global model, a loom."""
    settle: Callable[[Setup[Any], Any, Ask], Any] | None = None
    """Brings a state into the form in which it is evaluated and deployed, where that takes further asks."""
    embeddings: Callable[[Setup[Any], Any, Sequence[ClientId]], Tensor] | None = None
    """(setup, state, clients) -> (clients, size): their embeddings as they are now, where a method has some."""
    restored: Callable[[Tree, Tree], Tree] = as_saved
    """(a fresh state, a saved one) -> the saved one in the form that states have on this machine."""
    base: Algorithm | None = None
    """The method that this one adapts; its state is the branch ``base`` of this one's."""
    carries_prior: bool = True
    """Models know which classes their client has; False for a global model, which can be told (``--adapt prior``)."""
    cohort: int = 10
    """The paper's number of clients a round: the default of ``--cohort``."""
    needs: Needs = Needs()
    handover: Handover = Handover()
    """How the state is handed on when it is trained."""
    notes: Callable[[Setup[Any]], Sequence[str]] = no_notes
    """What to say before round 1: where, with this config or these models, the method comes to a simpler one."""
    told: Literal["spec", "size"] = "spec"
    """What the server is told of a client's model: its architecture, or only its number of parameters."""

    def needs_labels(self, config: Any) -> bool:
        """Whether newcomers need labels to be admitted, with this config."""
        return self.admit_labels(config) if callable(self.admit_labels) else self.admit_labels
