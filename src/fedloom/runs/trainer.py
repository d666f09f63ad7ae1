# SPDX-License-Identifier: Apache-2.0
"""A federation in training: round by round, evaluated, admitting newcomers, brought back from a checkpoint.

It knows clients only through the engine's ``ask``: the same for clients in this process and on other machines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fedloom import algorithms
from fedloom.adaptation.calibration import Privacy
from fedloom.adaptation.prior import with_prior
from fedloom.clients.federation import Federation
from fedloom.core import contract
from fedloom.core.contract import Algorithm, Cohort, Sent, Setup
from fedloom.core.errors import ConfigError, NeedsError, RoundError, RunError
from fedloom.core.random import stream
from fedloom.core.recording import Reading
from fedloom.core.trees import ClientId, Params, PerClient, Tree, flatten, num_bytes
from fedloom.engines.engine import AbstractEngine
from fedloom.engines.memories import Memories
from fedloom.hypernets.outer import rows_as_in
from fedloom.metrics.evaluation import Score, evaluate, with_network
from fedloom.metrics.summary import summarise
from fedloom.metrics.unseen import evaluate_handed_on
from fedloom.runs.options import RunOptions
from fedloom.runs.rounds import Begun, Mark


def algorithm_of(method: str, options: RunOptions) -> Algorithm:
    """The method, adapted as the options say."""
    plain = algorithms.get(method)
    return with_prior(plain, Privacy(options.adapt_clip, options.adapt_noise)) if options.adapt == "prior" else plain


class Trainer:
    """Everything of a run that lives in memory. ``state`` and the engine's memory are all that changes."""

    saves_every_round = False
    """A checkpoint after every round, not only when there is an evaluation."""

    looks_ahead = False
    """A round is begun before the checks of the one before are read."""

    def __init__(
        self,
        method: str,
        algorithm: Algorithm,
        options: RunOptions,
        config: Any,
        federation: Federation,
        engine: AbstractEngine,
        engine_reason: str,
    ) -> None:
        self.method, self.algorithm, self.options, self.config = method, algorithm, options, config
        self.base = algorithms.get(method)
        self.federation, self.engine, self.engine_reason = federation, engine, engine_reason
        self.notes: Sequence[str] = ()
        self.setup: Setup[Any] = Setup(
            config,
            federation.participants,
            federation.models,
            federation.task,
            options.seed,
            federation.device,
            federation.dtype,
        )
        self.setup.replay.notes = engine.notes
        engine.replays.append(self.setup.replay)
        violations = algorithm.needs.violations(self.setup, algorithm.name)
        if violations:
            raise NeedsError(" ".join(violations))
        self.state = algorithm.init(self.setup)
        self.round = 0
        self._memories: dict[Any, dict[str, torch.Tensor]] = {}
        self._ahead: Begun | None = None
        self.evaluation_notes: Sequence[str] = ()
        """What the engine noted in the last ``metrics``."""
        self._noted: dict[int, list[str]] = {}  # by the engine in a round to come, whether that was given up or not
        self._read = 0.0  # when the last round's numbers were there (``time.perf_counter``)

    @property
    def present(self) -> tuple[ClientId, ...]:
        """The participants that can be asked now."""
        return self.setup.clients

    @property
    def eval_every(self) -> int:
        """Rounds between evaluations."""
        return self.options.eval_every or max(1, self.options.rounds // 20)

    def train_round(self) -> dict[str, Any]:
        """One round; its record. The state is as it was if the round fails.

        On a GPU the next round is begun before this one's checks are read, so that the device never waits. If they
        turn out badly both are forgotten, this one is done again with every reply looked at, and so are all to come.
        """
        now = Mark(self.round, self.state, self.engine.memory)
        begun, self._ahead = self._ahead, None
        if begun and begun.books is not self.engine.books:
            begun = None  # others have been asked since, and what clients remember may have changed
        if begun is None or begun.start.state is not now.state or begun.start.memory is not now.memory:
            begun = self._attempt(now) if self.looks_ahead else None
        if begun:
            if begun.end.round % self.eval_every and begun.end.round < self.options.rounds:
                self._ahead = self._attempt(begun.end)
            if not begun.is_sound():
                begun = self._ahead = None
        if begun is None:
            self.looks_ahead = False
            begun = self._do(now)
        self.round, self.state, self.engine.memory = begun.end
        self._noted.pop(self.round, None)
        since, self._read = max(begun.since, self._read), time.perf_counter()
        return begun.record(self._read - since)

    def _do(self, start: Mark, *, freed: bool = False) -> Begun:
        """The round after ``start``; where the server's own steps want memory, that of what was kept for speed.

        ``freed``: they have had it already.
        """
        memory = start.memory.copy()
        try:
            return self._run(start, trusting=False)
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". ")[0]
        # outside of the handler, so that the error no longer holds on to tensors
        self.setup.replay.kept.clear()
        if not freed and self.engine.free_memory():
            self.engine.memory = memory
            return self._do(start._replace(memory=memory), freed=True)
        raise RoundError(
            f"Round {start.round + 1} does not fit into memory: {reason}. The last checkpoint is intact: "
            "take a smaller loom or cohort, or a device with more memory."
        )

    def _attempt(self, start: Mark) -> Begun | None:
        """The round after ``start``, its checks unread; None where it fails already. Now stays as it is."""
        memory = self.engine.memory
        self.engine.memory = start.memory.copy()
        try:
            return self._run(start, trusting=True)
        except Exception:
            return None
        finally:
            self.engine.memory, self.engine.trusting = memory, False

    def _run(self, start: Mark, *, trusting: bool) -> Begun:
        """The round after ``start``; whether it is any good need not be known yet when it is ``trusting``."""
        number = start.round + 1
        draw = stream(self.options.seed, number, "cohort")
        present = self.present
        rows = np.sort(draw.choice(len(present), min(int(self.options.cohort), len(present)), replace=False))
        cohort = Cohort(number, tuple(present[row] for row in rows))
        self.engine.begin(number)
        self.engine.rounds_left, self.engine.trusting = self.options.rounds - start.round, trusting
        before, noted = len(self.engine.notes), self._noted.setdefault(number, [])
        since = time.perf_counter()
        try:
            state, diagnostics = self.algorithm.round(self.setup, start.state, cohort, self.engine.ask)
            changed = _changed(start.state._asdict(), state._asdict())
            finite = self.setup.replay("finite state", partial(_finite, self.setup.device), dict(enumerate(changed)))
        finally:
            noted += self.engine.notes[before:]  # which it notes but once, whatever becomes of this round
        if not trusting and not bool(finite):
            raise RoundError(
                f"Round {number} would leave the server with NaN or Inf: training diverged, or a client's reply was "
                "absurd. The last checkpoint is intact: lower the rates or see to the clients, then resume."
            )
        books = self.engine.books
        told: dict[str, Any] = {
            "round": number,
            "clients": len(cohort.clients),
            "dropped": [d._asdict() for d in books.dropped],
            "notes": noted,
            "bytes": {"down": books.bytes_down, "up": books.bytes_up},
        }
        parts = {
            "generate": books.first_ask - since,
            "local_training": books.asking,
            "server_step": time.perf_counter() - books.last_answer,
        }
        doubts = [finite, *self.engine.doubts]
        reading = Reading([*doubts, *(n for n in diagnostics.values() if isinstance(n, torch.Tensor))])
        end = Mark(number, state, self.engine.memory)
        return Begun(start, end, since, told, {} if trusting else parts, diagnostics, reading, len(doubts), books)

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

    def global_model(self, *, for_others: bool = False) -> tuple[contract.Model, Params]:
        """The network that the method has besides its clients' own; ``for_others`` than those who took part."""
        if self.base.global_model is None:
            raise NeedsError(
                f"{self.base.name} has no global model apart from what its clients deploy. Leave it out; "
                "a method that has one is mh_pfedhn_gd."
            )
        state = self.state if self.algorithm is self.base else self.base.state(**self.state.base)
        network, params = self.base.global_model(self.setup, state)
        if for_others and network.fresh_buffers():
            raise NeedsError(
                f"The global model {network.spec} has running statistics (BatchNorm), which stay with the "
                "participants; without them it is of no use to others. Choose a --global-model without BatchNorm."
            )
        return network, params

    def evaluate_global(self, split: str, *, unseen: bool = False) -> dict[ClientId, Score]:
        """The scores of the global model on a split of every participant's own data, or of every unseen client's.

        One with BatchNorm is tried by the participants that have trained it.
        """
        network, params = self.global_model(for_others=unseen)
        clients = self.federation.having(split, self.federation.unseen if unseen else self.setup.clients)
        if network.fresh_buffers():  # who has not trained it has no running statistics for it
            clients = tuple(client for client in clients if "global_buffers" in self.engine.memory.get(client, {}))
        self.engine.begin(f"evaluation after round {self.round}")
        return evaluate(
            with_network(self.base, network),
            lambda some: Sent({"params": params}, PerClient.empty(some)),
            clients,
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
        before = len(self.engine.notes)
        self.settle()
        clients = self.setup.clients
        if 0 < self.options.eval_clients < len(clients):
            draw = stream(self.options.seed, "evaluation")
            rows = np.sort(draw.choice(len(clients), self.options.eval_clients, replace=False))
            clients = tuple(clients[row] for row in rows)
        found: dict[str, float] = {}
        for part in ("val", "test"):
            found |= summarise(self.evaluate(part, clients), self.setup.task, "participants", part)
        if self.options.adapt != "none":
            found |= summarise(self._evaluate_plain("val", clients), self.setup.task, "participants", "val", "plain")
        self.evaluation_notes = self.engine.notes[before:]
        return found

    def _evaluate_plain(self, split: str, clients: Sequence[ClientId]) -> dict[ClientId, Score]:
        """The scores of an adapted method as it is without its adaptation."""
        state = self.base.state(**self.state.base)
        self.engine.begin(f"evaluation after round {self.round}")
        return evaluate(
            self.base,
            lambda some: self.base.personalise(self.setup, state, some),
            self.federation.having(split, clients),
            split,
            self.engine.ask,
            higher_is_better=self.setup.task.higher_is_better,
        )

    def admit(self, newcomers: Sequence[ClientId]) -> Sent:
        """What the method sends to clients that took no part."""
        if self.algorithm.admit is None:
            raise NeedsError(
                f"{self.algorithm.name} cannot serve clients that took no part in training: it has no model for them. "
                "Methods that can are listed by `fedloom methods`."
            )
        if self.algorithm.needs.same_model:
            common = self.setup.models[self.setup.clients[0]].spec
            for client in newcomers:
                if self.setup.models[client].spec != common:
                    raise NeedsError(
                        f"{self.algorithm.name} has one model for all clients, {common}; client {client} has "
                        f"{self.setup.models[client].spec}. Give it the common one."
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
        sent = self.admit_with(newcomers, samples)
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

    def admit_with(self, newcomers: Sequence[ClientId], samples: int) -> Sent:
        """Admission of clients of the roster that took no part; only a simulation can say with how many samples."""
        return self.admit(newcomers)

    def deployed(self, client: ClientId, sent: Sent | None = None) -> Tree:
        """What a client deploys, composed with its own memory, as it would on its own machine."""
        shared, mine = sent or self._personal([client])
        home = self.engine.home(client, self.engine.num_samples([client])[0], torch.zeros((), dtype=torch.int64))
        return self.algorithm.client_deploy(home, shared, mine[client], self.engine.recall(client))

    def trees(self) -> tuple[Tree, Mapping[ClientId, Tree]]:
        """All that a checkpoint needs: the server's state and the clients' memory."""
        return self.state._asdict(), self.engine.memory

    def meta(self) -> dict[str, Any]:
        """What a checkpoint says besides."""
        return {}

    def saved(self) -> None:
        """A checkpoint of this moment is written."""

    def checkpoint_bytes(self) -> int:
        """About the size of a checkpoint when every client has been asked."""
        models = (self.setup.models[client] for client in self.setup.clients)
        return num_bytes(self.state._asdict()) + sum(num_bytes(self._first_memory(model)) for model in models)

    def mark(self) -> Mark:
        """This moment, to go back to. Trees are values, so it is no copy of them."""
        return Mark(self.round, self.state, self.engine.memory.copy())

    def go_back(self, mark: Mark) -> None:
        """As it was at ``mark``, whatever has begun since."""
        self.round, self.state, self.engine.memory = mark.round, mark.state, mark.memory.copy()

    def restore(self, round: int, state: Tree, memory: Mapping[ClientId, Tree]) -> None:
        """Go back to a checkpoint; refuses one that is not of this method and federation.

        A checkpoint of the plain method fits its adapted form too: what settling finds is found anew. And one of the
        adapted form fits the plain method: what settling found is left out. A large table comes from any device.
        """
        if self.algorithm is self.base and "base" in state and "base" not in self.state._asdict():
            state = state["base"]
        if self.algorithm is not self.base and "base" not in state:
            state = {**self.state._asdict(), "base": state}
            memory = {client: {**self.engine.recall(client), **tree} for client, tree in memory.items()}
        state = rows_as_in(self.state._asdict(), state)
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
        self.engine.memory = Memories({client: _to(tree, device) for client, tree in memory.items()})
        self.round = round

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


def _changed(before: Any, after: Any) -> Iterator[torch.Tensor]:
    """The leaves of a tree that are others than before: in a large federation most are the same."""
    if after is before:
        return
    if isinstance(after, Mapping):
        known = before if isinstance(before, Mapping) else {}
        for name, branch in after.items():
            yield from _changed(known.get(name), branch)
    else:
        yield after


LARGE = 1 << 24
"""Numbers of a tensor that is not looked through: a table of a million clients, which is stepped on with the rest."""


def _finite(device: torch.device, leaves: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Whether all numbers are finite: the largest of a tensor is not where one of them is not."""
    numbers = [leaf for leaf in leaves.values() if leaf.is_floating_point() and 0 < leaf.numel() < LARGE]
    largest = torch._foreach_norm(numbers, math.inf) if numbers else [torch.zeros((), device=device)]
    return torch.stack([norm.double() for norm in largest]).isfinite().all()
