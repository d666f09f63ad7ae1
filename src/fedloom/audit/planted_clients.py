# SPDX-License-Identifier: Apache-2.0
"""Clients that are canaries, for ``--dp-noise``: drawn as any other, in as many rounds.

Where the server needs a mean of changes, they reply with their direction. Where noise is on gradients of a loom, their
direction is what their reply would be as such a gradient: it comes in where those of other clients do, before any is
shortened.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom import algorithms
from fedloom.audit.planted import LITTLE, TOO_LONG, Canaries, Trial, flat, number_for
from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Program, Setup, sent_params
from fedloom.core.errors import NeedsError
from fedloom.core.random import stream
from fedloom.core.trees import ClientId, PerClient, Tree, leaves, unflatten
from fedloom.engines.memories import Memories
from fedloom.privacy.client_level import ClientPrivacy
from fedloom.privacy.ledger import Release, Sampling
from fedloom.reports.statistics import Floats
from fedloom.runs.options import RunOptions
from fedloom.training import cohorts
from fedloom.training.config import algorithm_of, client_privacy
from fedloom.training.simulation import Simulation

Build = Callable[[Algorithm], Algorithm]
"""Makes a method private."""


def trial(simulation: Simulation) -> Trial | None:
    """Clients planted in a run like this one, and in one with next to no noise; None if it does not hide clients."""
    server, options = simulation.server, simulation.server.options
    how = client_privacy(options)
    if how is None:
        return None
    rounds, method, plain = server.round, algorithms.get(server.method), replace(options, adapt="none")
    memory = [Memories()]

    def ask_in(number: int) -> Ask:
        session = simulation.engine.session(number, memory[0], rounds_left=rounds - number)

        def ask(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
            replies = session.ask(program, shared, mine)
            memory[0] = session.memory
            return replies

        return ask

    def played(built: RunOptions, asks: Callable[[int], Ask] | None) -> tuple[Floats, list[Release]]:
        return with_canaries(
            lambda base: algorithm_of(server.method, built, base=base), method, server.setup, how, ask_in=asks,
            rounds=rounds, sampling=options.sampling, cohort=float(options.cohort),
        )  # fmt: skip

    run = played(plain, ask_in)
    control = played(replace(plain, dp_noise=options.dp_noise * LITTLE, dp_quantile=0.0), None)
    what = "the server's model" if method.means else "the server's loom"
    sees = (
        f"{what} before round 1 and after round {rounds} of a run like this one, with {len(run[0])} canaries among its "
        "clients (in the control, alone)"
    )
    return Trial("client", sees, run, control)


def with_canaries(
    build: Build,
    method: Algorithm,
    setup: Setup[Any],
    how: ClientPrivacy,
    *,
    ask_in: Callable[[int], Ask] | None,
    rounds: int,
    sampling: Sampling,
    cohort: float,
    number: int = 0,
) -> tuple[Floats, list[Release]]:
    """How well each canary is found after so many rounds, and the releases as ``how`` has them accounted for.

    Without ``ask_in`` only canaries reply. ``number`` of them; 0: as many as fit.
    """
    planted = _InReplies(build, method, setup) if method.means else _InGradients(build, method, setup)
    before = planted.told()
    canaries = Canaries(number or number_for(len(before)), setup.seed, before)
    clients = len(setup.clients)
    everybody, share = clients + len(canaries), min(1.0, cohort / clients)
    size = share * everybody if sampling == "poisson" else round(share * everybody)
    releases = []
    for at in range(1, rounds + 1):
        rows = cohorts.drawn(stream(setup.seed, at, "cohort with canaries"), everybody, size, sampling)
        chosen = [int(row) - clients for row in rows if row >= clients]
        real = tuple(setup.clients[row] for row in rows if row < clients) if ask_in else ()
        planted.play(Cohort(at, real, size), ask_in(at) if ask_in else None, canaries.directions[chosen])
        releases.append(Release(at, "training", how.noise, sampling, everybody, size))
    return canaries.found(planted.told() - before), releases


class _Planted(abc.ABC):
    """A run with canaries among its clients."""

    algorithm: Algorithm

    def __init__(self, setup: Setup[Any]) -> None:
        self.setup = setup
        self.state: Any = self.algorithm.init(setup)

    @abc.abstractmethod
    def told(self) -> Tensor:
        """What the server makes public, as one vector."""

    @abc.abstractmethod
    def play(self, cohort: Cohort, ask: Ask | None, directions: Tensor) -> None:
        """A round of these clients, of whom none is asked without ``ask``, and of canaries with these directions."""


class _InReplies(_Planted):
    """Canaries reply with their direction."""

    def __init__(self, build: Build, method: Algorithm, setup: Setup[Any]) -> None:
        if method.means != ("delta",):
            raise NeedsError(
                f"Clients of {method.name} reply with more than the change of the model; canaries are for methods that "
                "ask for nothing else, such as fedavg."
            )
        self.algorithm = build(method)
        super().__init__(setup)

    def _sent(self) -> Tree:
        client = self.setup.clients[0]
        shared, mine = self.algorithm.send(self.setup, self.state, [client])
        return sent_params(shared, mine[client])

    def told(self) -> Tensor:
        return flat(leaf for _, leaf in leaves(self._sent()))

    def play(self, cohort: Cohort, ask: Ask | None, directions: Tensor) -> None:
        shapes = {path: tuple(leaf.shape) for path, leaf in leaves(self._sent())}
        parts = torch.split(directions, [math.prod(shape) for shape in shapes.values()], dim=1)
        whole = {path: part.reshape(-1, *shape) for (path, shape), part in zip(shapes.items(), parts)}
        planted = partial(_answer, ask if cohort.clients else None, cohort.clients, whole, self.state.clip)
        clients = cohort.clients or self.setup.clients[:1]
        self.state, _ = self.algorithm.round(self.setup, self.state, cohort._replace(clients=clients), planted)


def _answer(
    ask: Ask | None, real: Sequence[ClientId], whole: Mapping[str, Tensor], clip: Tensor,
    program: Program, shared: Tree, mine: Mapping[ClientId, Tree],
) -> PerClient:  # fmt: skip
    """The change that each real client replies with, and each canary."""
    mine = PerClient.of(mine)
    replies = ask(program, shared, {client: mine[client] for client in real}) if ask else PerClient(())
    told = [(clients, {"delta": tree["delta"]}) for clients, tree in replies.groups]
    like = program.expects(shared, mine[next(iter(mine))])["delta"]
    delta = {path: whole[path] * (TOO_LONG * clip) for path, _ in leaves(like)}  # a reply may leave some out
    return PerClient([*told, (_names(len(next(iter(whole.values())))), {"delta": unflatten(delta)})])


class _InGradients(_Planted):
    """Canaries' gradients of the loom are their directions."""

    def __init__(self, build: Build, method: Algorithm, setup: Setup[Any]) -> None:
        self.method = method
        self.algorithm = build(replace(method, round=self._round))
        self._gradients = torch.empty(0)
        self._loom = getattr(method.init(setup), method.handover.loom)
        super().__init__(setup)

    def told(self) -> Tensor:
        return flat(self._loom.values())

    def play(self, cohort: Cohort, ask: Ask | None, directions: Tensor) -> None:
        # steps go against a gradient
        self._gradients = -directions * (TOO_LONG * self.state.clip)
        self.state, _ = self.algorithm.round(self.setup, self.state, cohort, ask or _nobody)

    def _round(self, setup: Setup[Any], state: Any, cohort: Cohort, ask: Ask) -> tuple[Any, Diagnostics]:
        """The method's round, as it is when it has been made private."""
        combine = setup.combine
        assert combine is not None

        def with_planted(some: Sequence[ClientId], gradients: Tensor) -> Tensor:
            return combine([*some, *_names(len(self._gradients))], torch.cat([gradients, self._gradients]))

        after, diagnostics = self.method.round(replace(setup, combine=with_planted), state, cohort, ask)
        self._loom = getattr(after, self.method.handover.loom)
        return after, diagnostics


def _names(number: int) -> tuple[ClientId, ...]:
    return tuple(f"canary {i}" for i in range(number))


def _nobody(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
    raise AssertionError("where there are canaries alone, nobody else is asked")
