# SPDX-License-Identifier: Apache-2.0
"""Whether ``--dp-noise`` keeps its promise: clients that reply with a direction of their own must not be found again.

Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar: One-shot empirical privacy estimation for federated learning.
ICLR 2024 (arXiv:2302.03098). The run's rounds are trained again with canaries among the clients, whose replies are
random directions. The cosine of each with the change of the model, in units of its deviation for a direction that
nobody sent, says how well it is found. Where the paper fits a normal distribution to the cosines, canaries over a
threshold are counted here, so that the bound on epsilon has a level of confidence (Clopper and Pearson 1934).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.audit.finding import Finding, Measure, Side
from fedloom.core.contract import Algorithm, Ask, Cohort, Program, Setup, sent_params
from fedloom.core.errors import NeedsError
from fedloom.core.random import fold, key, normal, stream
from fedloom.core.trees import ClientId, PerClient, Tree, leaves, unflatten
from fedloom.engines.memories import Memories
from fedloom.privacy.client_level import ClientPrivacy
from fedloom.privacy.ledger import Release, Sampling, epsilon
from fedloom.reports.statistics import LEVEL, Floats
from fedloom.training import cohorts
from fedloom.training.config import algorithm_of, client_privacy
from fedloom.training.simulation import Simulation

FEWEST, MOST, NUMBERS = 20, 1000, 100
"""Canaries: one for so many numbers of the model, so that they do not hide one another."""
TOO_LONG = 10.0
"""A canary's reply is so many times as long as the bound, to which the server must cut it."""
THRESHOLDS = tuple(range(1, 21))
"""At which canaries count as found, in deviations; fixed beforehand, and paid for in the level of confidence."""
LITTLE = 1e-3
"""The noise of the control, as a share of the run's."""


class Canaries:
    """Clients that reply with a direction of their own, in as many rounds as any other client."""

    def __init__(self, number: int, seed: int, sent: Tree) -> None:
        """``sent``: the parameters whose change replies are; a reply may leave some out."""
        self.shapes = {path: tuple(leaf.shape) for path, leaf in leaves(sent)}
        like = flat(sent)
        found = [normal(fold(key(seed, "canaries"), i).to(like.device), like.shape, like.dtype) for i in range(number)]
        self.directions = torch.stack([one / one.norm() for one in found])

    def replies(self, drawn: Sequence[int], like: Tree, length: Tensor) -> PerClient:
        """The replies of some of them, in the form that replies have here."""
        vectors = self.directions[list(drawn)] * (TOO_LONG * length)
        parts = torch.split(vectors, [math.prod(shape) for shape in self.shapes.values()], dim=1)
        whole = {path: part.reshape(-1, *shape) for (path, shape), part in zip(self.shapes.items(), parts)}
        delta = {path: whole[path] for path, _ in leaves(like)}
        return PerClient([([f"canary {i}" for i in drawn], {"delta": unflatten(delta)})])

    def found(self, change: Tensor) -> Floats:
        """The cosine of each with the change, in deviations of the cosine of a direction that nobody sent."""
        cosines = self.directions @ change / change.norm()
        scaled: Floats = (cosines * len(change) ** 0.5).double().cpu().numpy()
        return scaled


def attack(simulation: Simulation) -> Finding:
    """Train the run again with canaries, and bound its epsilon from below by how well they are found."""
    server, options = simulation.server, simulation.server.options
    how = client_privacy(options)
    if how is None:
        raise NeedsError(
            "Canaries test the promise of --dp-noise, and this run makes none. Audit one that was run with it."
        )
    if not server.algorithm.means:
        raise NeedsError(
            f"Canaries reply with directions that a mean of replies would show, and {server.base.name} has noise on "
            "gradients of its loom instead. Audit a run of a method that needs only means."
        )
    setup, rounds = server.setup, server.round
    memory = [Memories()]

    def ask_in(number: int) -> Ask:
        session = simulation.engine.session(number, memory[0], rounds_left=rounds - number)

        def ask(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
            replies = session.ask(program, shared, mine)
            memory[0] = session.memory
            return replies

        return ask

    plain = replace(options, adapt="none")
    little = replace(plain, dp_noise=options.dp_noise * LITTLE, dp_quantile=0.0)
    drawn: dict[str, Any] = {"rounds": rounds, "sampling": options.sampling, "cohort": float(options.cohort)}
    audited = with_canaries(algorithm_of(server.method, plain), setup, how, ask_in=ask_in, **drawn)
    alone = with_canaries(algorithm_of(server.method, little), setup, how, ask_in=None, **drawn)
    sides = [judge(found, releases, options.dp_delta) for found, releases in (audited, alone)]
    run = sides[0]
    return Finding(
        "canary",
        rounds,
        sees=f"the server's model before round 1 and after round {rounds} of a run like this one, with "
        f"{len(audited[0])} canaries among its clients",
        knows="the canaries' directions; chance is the epsilon that the ledger names, and a bound above it breaks the "
        "promise",
        control=f"the canaries alone, with {LITTLE:g} of the noise that is accounted for",
        measures=[Measure(f"epsilon is at least (delta {options.dp_delta:g})", run, sides[1])],
        verdict=_verdict(run, sides[1]),
    )


def with_canaries(
    algorithm: Algorithm,
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

    A canary is drawn as any client is. Without ``ask_in`` only canaries reply. ``number`` of them; 0: as many as fit.
    """
    if algorithm.means != ("delta",):
        raise NeedsError(
            f"Clients of {algorithm.name} reply with more than the change of the model; canaries are for methods that "
            "ask for nothing else, such as fedavg."
        )
    state: Any = algorithm.init(setup)
    before = _sent(algorithm, setup, state)
    number = number or min(MOST, max(FEWEST, len(flat(before)) // NUMBERS))
    canaries = Canaries(number, setup.seed, before)
    clients = len(setup.clients)
    everybody, share = clients + number, min(1.0, cohort / clients)
    size = share * everybody if sampling == "poisson" else round(share * everybody)
    releases = []
    for at in range(1, rounds + 1):
        rows = cohorts.drawn(stream(setup.seed, at, "cohort with canaries"), everybody, size, sampling)
        chosen = [int(row) - clients for row in rows if row >= clients]
        real = tuple(setup.clients[row] for row in rows if row < clients)
        planted = partial(_planted, canaries, chosen, ask_in(at) if ask_in and real else None, real, state.clip)
        state, _ = algorithm.round(setup, state, Cohort(at, real or setup.clients[:1], size), planted)
        releases.append(Release(at, "training", how.noise, sampling, everybody, size))
    return canaries.found(flat(_sent(algorithm, setup, state)) - flat(before)), releases


def _planted(
    canaries: Canaries, chosen: Sequence[int], ask: Ask | None, real: Sequence[ClientId], clip: Tensor,
    program: Program, shared: Tree, mine: Mapping[ClientId, Tree],
) -> PerClient:  # fmt: skip
    """The change that each real client replies with, and each chosen canary."""
    mine = PerClient.of(mine)
    replies = ask(program, shared, {client: mine[client] for client in real}) if ask else PerClient(())
    told = [(clients, {"delta": tree["delta"]}) for clients, tree in replies.groups]
    like = program.expects(shared, mine[next(iter(mine))])["delta"]
    return PerClient([*told, *(canaries.replies(chosen, like, clip).groups if chosen else ())])


def judge(found: Floats, releases: Sequence[Release], delta: float) -> Side:
    """The bound on epsilon from below, beside the one that is promised."""
    claimed, bound = epsilon(releases, delta), at_least(found, delta)
    return Side(bound, None, None, claimed, bound > claimed)


def at_least(found: Floats, delta: float) -> float:
    """Epsilon is at least this, with a confidence of 95%, where canaries are found so well."""
    from scipy import stats

    level = (1 - LEVEL) / len(THRESHOLDS)
    best = 0.0
    for threshold in THRESHOLDS:
        hits = int((found > threshold).sum())
        if hits:
            right = float(stats.beta.ppf(level, hits, len(found) - hits + 1))
            if right > delta:
                best = max(best, float(np.log(right - delta) - stats.norm.logsf(threshold)))
    return best


def _sent(algorithm: Algorithm, setup: Setup[Any], state: Any) -> Tree:
    """The parameters that every client is sent."""
    client = setup.clients[0]
    shared, mine = algorithm.send(setup, state, [client])
    return sent_params(shared, mine[client])


def flat(tree: Tree) -> Tensor:
    """All numbers of a tree as one vector."""
    return torch.cat([leaf.flatten() for _, leaf in leaves(tree)])


def _verdict(run: Side, control: Side) -> str:
    if run.beats:
        return (
            f"The promise is broken: epsilon is at least {run.value:.3g}, and the ledger names {run.chance:.3g}. "
            "Noise, bound or sampling are not what was accounted for."
        )
    if not control.beats:
        return (
            "The control failed: canaries are not found even with next to no noise, so that nothing follows. They need "
            "a larger model or fewer rounds."
        )
    return (
        f"Canaries say no more than that epsilon is at least {run.value:.3g}; the ledger's {run.chance:.3g} is above, "
        "as it must be. That does not prove that the promise is kept."
    )
