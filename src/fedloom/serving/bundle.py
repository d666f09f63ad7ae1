# SPDX-License-Identifier: Apache-2.0
"""All that is needed to hand a run's models on, as one file: ``fedloom bundle RUN``::

    manifest.json              method, options, form of the samples, architectures, ways to join, digests of the parts
    card.json                  what it is, how well it does, what to mind
    model.safetensors          what every newcomer needs: a global model, an encoder, a calibration
    loom.safetensors           the loom that weaves newcomers' models, where the method has one
    participants.safetensors   what participants' models need besides: their embeddings
    clients.safetensors        the participants' names, and which architecture each has

The first four may be given to anybody; the last two stay with whoever serves. There is no data in it, nor anything
that clients remember: of a model that a client keeps a part of, the client has to bring that part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fedloom
from fedloom import algorithms
from fedloom.core.contract import Algorithm, Home, Seeds, Sent, Setup
from fedloom.core.contract import Model as AnyModel
from fedloom.core.errors import FedloomError, NeedsError, RunError
from fedloom.core.memory import is_full, total
from fedloom.core.random import seed_of
from fedloom.core.tensors import read_tensors, write_tensors
from fedloom.core.trees import ClientId, Tree, flatten, unflatten
from fedloom.core.trust import check as check_trust
from fedloom.core.trust import path_in
from fedloom.engines.memories import Memories
from fedloom.models.size_only import SizeOnly
from fedloom.models.spec import parse
from fedloom.runs.files import to_json
from fedloom.runs.options import RunOptions
from fedloom.runs.roster import Member, Roster
from fedloom.serving.archive import CARD, Archive, write_archive
from fedloom.serving.card import architectures, as_markdown, card_of
from fedloom.training.admission import name_of_newcomer
from fedloom.training.config import algorithm_of, parse_options
from fedloom.training.machine import device_of
from fedloom.training.server import Mark, Server, models_of, task_of

if TYPE_CHECKING:
    from fedloom.api import Run

MODEL, LOOM, PARTICIPANTS, CLIENTS = (f"{part}.safetensors" for part in ("model", "loom", "participants", "clients"))
PUBLIC = (MODEL, LOOM)
KEPT = ("task", "adapt", "adapt_clip", "adapt_noise", "dtype", "seed", "rounds")
"""Options of a run that its models depend on; the others are about its data and its machine."""
SHARE = 8
"""Of this machine's memory, the part that networks or downloads may claim: copies and activations come on top."""
LARGE = 1 << 20
"""Numbers in a table of participants from which it is used where it lies in the file."""


def make_bundle(run: Run, path: str | Path | None = None) -> Path:
    """Write the bundle of a run; without a path, as ``RUN/bundle.fedloom``."""
    path = Path(path) if path else run.path / "bundle.fedloom"
    server, others = run.server, run.for_newcomers.server
    joins = others.algorithm.admit is not None
    trees = {"participants": _state(server, server.algorithm.handover.participants)}
    trees |= {"newcomers": newcomers_state(others)} if joins else {}
    parts, layout = _parted(trees, others.algorithm.handover.loom)
    parts[CLIENTS] = write_tensors(_named(server))
    manifest = {
        "fedloom": fedloom.__version__,
        "method": server.method,
        "name": server.algorithm.name,
        "round": {"participants": server.round, **({"newcomers": others.round} if joins else {})},
        "options": {name: getattr(server.options, name) for name in KEPT},
        "config": asdict(_config(server)),
        "form": server.roster.form_as_json(),
        "architectures": architectures(server),
        "clients": len(server.setup.clients),
        "newcomer": name_of_newcomer(others.roster) if joins else None,
        "ways": _ways(others) if joins else {},
        "layout": layout,
    }
    words = _in_words(others) if joins else None
    card = to_json(card_of(server, run.directory, words), indent=1)
    write_archive(path, manifest, {CARD: card, **parts})
    return path


def check_room(claimed: int, what: str) -> None:
    """Refuse what would fill this machine: a file, or a service, may claim anything."""
    if not 0 <= claimed <= total() // SHARE:
        raise NeedsError(
            f"{what} have {claimed:,} bytes; this machine takes at most an {SHARE}th of its memory, "
            f"{total() // SHARE:,}. If that is right, take a larger one."
        )


def newcomers_state(server: Server) -> Tree:
    """The state with nothing of any participant's own; refuses one that would tell how many there were."""
    tree = _state(server, server.algorithm.handover.newcomers)
    expected = [_shapes(_state(_smaller(server, more), server.algorithm.handover.newcomers)) for more in (1, 2)]
    if expected[0] != expected[1] or _shapes(tree) != expected[0]:
        wrong = sorted({path for path, _ in set(_shapes(tree).items()) ^ set(expected[0].items())})
        raise NeedsError(
            f"{server.algorithm.name} keeps something of each participant in what newcomers would be given "
            f"({', '.join(wrong[:1]) or 'a part that grows with them'}), so that it cannot be bundled. Its method file "
            "can say what may be handed on: Algorithm.handover."
        )
    return tree


def _smaller(server: Server, more: int) -> Server:
    """The method before round 1 with a client for each architecture, and ``more`` besides."""
    setup = server.setup
    some = {f"client {number}": model for number, model in enumerate(setup.architectures.values())}
    some |= {f"another {number}": setup.models[setup.clients[0]] for number in range(more)}
    small = replace(setup, clients=tuple(some), models=some, config=_config(server))
    return Server(server.method, server.algorithm, server.options, server.roster, small, trains=False)


def _shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in flatten(tree).items()}


def _state(server: Server, part: Callable[..., Any]) -> Tree:
    found: Tree = part(server.setup, server.state)._asdict()
    return found


def _config(server: Server) -> Any:
    return server.algorithm.handover.config(server.setup)


def _parted(trees: Mapping[str, Tree], loom: str) -> tuple[dict[str, bytes], dict[str, list[list[str]]]]:
    """The files, and for each tree its paths in their order, with the file that each is in: equal leaves lie in one."""
    files: dict[str, dict[str, Tensor]] = {}
    layout: dict[str, list[list[str]]] = {}
    public: dict[str, tuple[str, Tensor]] = {}
    for who in sorted(trees):  # newcomers first: what is theirs is participants' too
        layout[who] = []
        for path, leaf in flatten(trees[who]).items():
            file = PARTICIPANTS if who == "participants" else LOOM if loom and path.startswith(f"{loom}/") else MODEL
            there = public.get(path)
            if there and _same(there[1], leaf):
                file = there[0]
            else:
                files.setdefault(file, {})[path] = leaf
            if who == "newcomers":
                public[path] = (file, leaf)
            layout[who].append([path, file])
    return {file: write_tensors(tensors) for file, tensors in files.items()}, layout


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _named(server: Server) -> dict[str, Tensor]:
    """The participants' names, one after another in the roster's order, and the numbers of their architectures."""
    names = [client.encode() for client in server.setup.clients]
    numbers = {(one["name"], one["parameters"]): row for row, one in enumerate(architectures(server))}
    members = [numbers[member.model, member.size] for member in server.roster.members if not member.unseen]
    return {
        "names": torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8),
        "ends": torch.tensor(np.cumsum([len(name) for name in names])),
        "sorted": torch.tensor(sorted(range(len(names)), key=names.__getitem__)),
        "architecture": torch.tensor(members, dtype=torch.int16),
    }


def _ways(server: Server) -> dict[str, Any]:
    """How a newcomer gets a model: whether it needs labels, and what a loom weaves from, in how many steps."""
    handover, config = server.algorithm.handover, _config(server)
    vector = handover.vector(config) if handover.vector else None
    return {
        "labels": server.algorithm.needs_labels(config),
        "loom": handover.loom,
        "vector": vector,
        "size": handover.structure(server.setup).embed_dim if vector and handover.structure else 0,
        "steps": handover.steps(config) if vector else 0,
        "report": server.algorithm.base is not None,
    }


def _in_words(server: Server) -> str:
    ways, name = _ways(server), server.algorithm.name
    if ways["report"]:
        return f"A newcomer downloads the model of {name} and estimates its label shares at home; it sends nothing."
    if ways["vector"] and not ways["steps"]:
        return (
            f"A newcomer tells its {ways['vector']}, {ways['size']} numbers, and gets its model; or it downloads the "
            "loom and tells nothing."
        )
    if ways["loom"]:
        return (
            "A newcomer with labels downloads the loom and fits its model at home, sending nothing; or it trains in "
            "rounds, sending changes of its model."
        )
    return f"A newcomer downloads the model of {name}; it sends nothing."


class Registry(Sequence[ClientId]):
    """The participants' names in the roster's order, used where they lie in the file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names, self._ends, self._sorted = (tensors[name].numpy() for name in ("names", "ends", "sorted"))
        self.architecture = tensors["architecture"].numpy()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return tuple(self[one] for one in range(*row.indices(len(self))))
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return self._bytes(row % len(self)).decode()

    def find(self, client: object) -> int | None:
        """The row of a client, by halving; None for one that is not here."""
        if not isinstance(client, str):
            return None
        wanted, low, high = client.encode("utf-8", "surrogatepass"), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._bytes(self._sorted[middle]) < wanted:
                low = middle + 1
            else:
                high = middle
        row = int(self._sorted[low]) if low < len(self) else -1
        return row if row >= 0 and self._bytes(row) == wanted else None

    def __contains__(self, client: object) -> bool:
        return self.find(client) is not None

    def _bytes(self, row: int) -> bytes:
        start = self._ends[row - 1] if row else 0
        return self._names[start : self._ends[row]].tobytes()


class _Models(Mapping[ClientId, AnyModel]):
    """The network of each participant."""

    def __init__(self, registry: Registry, models: Sequence[AnyModel]) -> None:
        self._registry, self._models = registry, models

    def __getitem__(self, client: ClientId) -> AnyModel:
        row = self._registry.find(client)
        if row is None:
            raise KeyError(client)
        return self._models[int(self._registry.architecture[row])]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)


@dataclass(frozen=True)
class _Setup(Setup[Any]):
    """A setup that is as quick for a million clients as for ten."""

    def rows(self, clients: Sequence[ClientId]) -> list[int]:
        found = [self._registry.find(client) for client in clients]
        return [row for row in found if row is not None]

    def __contains__(self, client: ClientId) -> bool:
        return client in self._registry

    @property
    def _registry(self) -> Registry:
        assert isinstance(self.clients, Registry)
        return self.clients

    @cached_property
    def architectures(self) -> dict[Any, AnyModel]:
        models = self.models
        assert isinstance(models, _Models)
        return {model.spec: model for model in models._models}


class Given(NamedTuple):
    """What a participant is given, and what of its model is not in it."""

    model: AnyModel
    sent: Tree
    complete: bool
    """The tree is ``{"params", "buffers"}``; else it is what was sent, for the client to put together with its own."""
    missing: tuple[str, ...]
    """What the client brings from its own memory; ``network``, where the server was told the network's size alone."""


@contextmanager
def usable(where: str) -> Iterator[None]:
    """Whatever goes wrong within, of a kind that is no user's error yet, is the fault of what ``where`` holds."""
    try:
        yield
    except FedloomError:
        raise
    except Exception as error:
        if is_full(error):
            raise
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise RunError(f"{where} is not a bundle that this fedloom can use ({why}); make it anew.") from error


class Bundle:
    """A bundle's file, opened, its digests checked. ``trust``: it may name code outside of fedloom, for import."""

    def __init__(self, path: str | Path, *, device: str = "cpu", trust: bool = False) -> None:
        self.archive = Archive(path)
        self.manifest, self.digest = self.archive.manifest, self.archive.digest
        with usable(str(path)):
            self.frame = Frame(self.manifest, str(path), device=device, trust=trust)
            self._files = {name: self.archive.view(name) for name in self.archive.names if name != CARD}
            self.card = self.archive.json(CARD)
            self.registry = Registry(read_tensors(self._files[CLIENTS]))

    @cached_property
    def newcomers(self) -> Server:
        """The server that admits newcomers."""
        if not self.frame.joins:
            raise NeedsError(f"{self.manifest['name']} has no model for clients that took no part in training.")
        return self.frame.server(self._leaves("newcomers"))

    @cached_property
    def _participants(self) -> tuple[Setup[Any], Any]:
        frame, models = self.frame, list(self.frame.models.values())
        registry = _Models(self.registry, models)
        setup = _Setup(
            frame.config, self.registry, registry, frame.setup.task, frame.setup.seed, frame.setup.device,  # type: ignore[arg-type]
            frame.setup.dtype, frame.setup.rounds,
        )  # fmt: skip
        return setup, frame.algorithm.state(**unflatten(self._leaves("participants")))

    def given(self, client: ClientId) -> Given:
        """What a participant gets."""
        setup, state = self._participants
        if client not in setup:
            raise NeedsError(f"There is no client {client!r} in this bundle.")
        algorithm, model = self.frame.algorithm, setup.models[client]
        sent: Sent = algorithm.send(setup, state, [client])
        seeds = Seeds(seed_of(setup.seed, client, "memory"), setup.common_seed)
        first: Tree = {}
        kept: tuple[str, ...] = ("network",)
        if not isinstance(model, SizeOnly):
            first = {"buffers": model.fresh_buffers(), **algorithm.first_memory(model, setup.config, seeds)}
            kept = tuple(name for name, branch in first.items() if isinstance(branch, Tensor) or branch)
        if kept:
            return Given(model, {"shared": sent.shared, "mine": sent.mine[client]}, False, kept)
        deployed = algorithm.client_deploy(self.frame.home(model), sent.shared, sent.mine[client], first)
        return Given(model, deployed, True, ())

    def public(self) -> dict[str, memoryview]:
        """The parts that newcomers may have, by digest."""
        return {self.archive.sha256(name): self._files[name] for name in PUBLIC if name in self._files}

    def check(self) -> None:
        """Have everything made that it is for, so that a fault is found now."""
        with usable(str(self.archive.path)):
            if self.frame.joins:
                _ = self.newcomers
            as_markdown(self.card, self.digest)
            for client in (self.registry[0], self.registry[-1]):
                self.given(client)

    def _leaves(self, who: str) -> dict[str, Tensor]:
        paths = self.manifest["layout"][who]
        files = {file: read_tensors(self._files[file]) for file in dict.fromkeys(file for _, file in paths)}
        found = {}
        for path, file in paths:
            leaf = files[file][path]
            table = who == "participants" and leaf.ndim and leaf.numel() >= LARGE and len(leaf) == len(self.registry)
            found[path] = leaf if table else leaf.clone().to(self.frame.setup.device)
        return found


class Frame:
    """What a manifest says of a method, its models and its options: all but the numbers that were trained."""

    def __init__(self, manifest: Mapping[str, Any], where: str, *, device: str = "cpu", trust: bool = False) -> None:
        method = str(manifest["method"])
        names = {f"model {row}": one["name"] for row, one in enumerate(manifest["architectures"])}
        for name in names.values():
            check_trust(where, {"model": name}, RunOptions, trust=trust)
        given = {**manifest["config"], **manifest["options"], "device": device}
        check_trust(where, given, RunOptions, algorithms.get(method).config, trust=trust)
        self.manifest, self.method = manifest, method
        self.options, self.config = parse_options(method, given)
        self.algorithm: Algorithm = algorithm_of(method, self.options)
        members = [
            Member(f"architecture {row}", False, one["name"], one["parameters"], {"train": 0, "val": 0, "test": 0})
            for row, one in enumerate(manifest["architectures"])
        ]
        self.roster = Roster.of_form(manifest["form"], members)
        chosen, dtype = device_of(self.options.device), getattr(torch, self.options.dtype)
        check_room(self._claimed() * dtype.itemsize, f"The networks that {where} names")
        self.models = models_of(self.roster, chosen, dtype)
        self.setup: Setup[Any] = Setup(
            self.config, self.roster.participants, self.models, task_of(self.options.task, self.roster),
            self.options.seed, chosen, dtype, self.options.rounds,
        )  # fmt: skip

    def _claimed(self) -> int:
        """How many numbers the networks and a sample have; of networks of fedloom's own, without making any."""
        shape, outputs = self.roster.input_shape, self.roster.num_outputs
        found = math.prod(shape)
        for name in {member.model for member in self.roster.members if member.model}:
            if path_in(name) is None:  # code that is trusted may take what it likes
                with torch.device("meta"):
                    network = parse(name, shape, outputs, self.roster.tokens).build()
                found += sum(one.numel() for one in [*network.parameters(), *network.buffers()])
        return found

    @property
    def joins(self) -> bool:
        """Whether newcomers are served."""
        return self.manifest["newcomer"] is not None

    def server(self, leaves: Mapping[str, Tensor], elsewhere: Callable[[Any], Any] | None = None) -> Server:
        """The server that admits newcomers, with these numbers; ``elsewhere`` as in ``Setup``."""
        setup = replace(self.setup, elsewhere=elsewhere)
        state = self.algorithm.state(**unflatten(leaves))
        now = Mark(int(self.manifest["round"]["newcomers"]), state, Memories())
        about = self.method, self.algorithm, self.options, self.roster, setup
        return Server(*about, memories_here=False, trains=False, now=now)

    def home(self, model: AnyModel) -> Home:
        """The surroundings of a client of whose samples nothing is known."""
        number, key = (torch.zeros((), dtype=kind) for kind in (self.setup.dtype, torch.int64))
        return Home(model, self.setup.task, self.config, number, key)
