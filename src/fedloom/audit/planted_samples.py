# SPDX-License-Identifier: Apache-2.0
"""Samples that are canaries, for ``--sample-dp-noise``: in the place of a client's own, as many as there is room for.

The client's own program runs on its own schedule, with the run's noise and bound. Only the gradient of a canary is not
that of the network: it is the canary's direction, too long, and it comes in where those of other samples do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom import algorithms
from fedloom.audit.planted import LITTLE, TOO_LONG, Canaries, Trial, flat, number_for
from fedloom.audit.replies import named
from fedloom.clients.batching import steps_of
from fedloom.clients.federation import Federation
from fedloom.core.contract import Batch, Cohort, Home, Model, Program, Setup
from fedloom.core.errors import NeedsError
from fedloom.core.noised import hides_samples, with_gradients
from fedloom.core.trees import ClientId, Params, PerClient, Tree
from fedloom.engines.engine import AbstractEngine, Session
from fedloom.engines.job import Job
from fedloom.engines.memories import Memories
from fedloom.engines.sequential import Sequential
from fedloom.privacy.ledger import Release, worst
from fedloom.reports.statistics import Floats
from fedloom.training.account import step_of
from fedloom.training.simulation import Simulation

OfSample = Callable[[Tensor, Tensor, Tensor], Params]
"""(x, y, its number in the batch) -> the gradient of one sample."""


def trial(simulation: Simulation) -> Trial | None:
    """Samples planted with the client that a run like this one hides least, and with next to no noise; None if it hides
    no samples."""
    server, config = simulation.server, simulation.server.config
    if not hides_samples(config):
        return None
    method, setup, engine = algorithms.get(server.method), server.setup, simulation.engine
    drawn = {number: simulation.cohort(number) for number in range(1, server.round + 1)}
    client = _weakest(simulation, drawn)
    rounds = [number for number, cohort in drawn.items() if client in cohort]

    def played(built: Any) -> tuple[Floats, list[Release]]:
        clients = Sequential(engine.federation, method, built, engine.seed)
        return with_canaries(clients, replace(setup, config=built), client, config, rounds)

    run = played(config)
    control = played(replace(config, sample_dp_noise=config.sample_dp_noise * LITTLE))
    sees = (
        f"what client {client} replies in {len(rounds)} rounds with {len(run[0])} canaries in the place of its samples"
    )
    return Trial("sample", sees, run, control)


def with_canaries(
    engine: AbstractEngine, setup: Setup[Any], client: ClientId, claimed: Any, rounds: Sequence[int], number: int = 0
) -> tuple[Floats, list[Release]]:
    """How well each canary is found in the replies of a client in these rounds, and the releases as the config
    ``claimed`` has them accounted for. ``number`` of them; 0: as many as fit."""
    model, rows = setup.models[client], torch.as_tensor(engine.federation.roster[client].rows["train"])
    like = flat(torch.empty(shape, dtype=model.dtype, device=model.device) for shape in model.shapes.values())
    canaries = Canaries(min(number or number_for(len(like)), len(rows)), setup.seed, like)
    marked, planted = _marked(engine.federation, rows[: len(canaries)], model, canaries, claimed.sample_dp_clip)
    memory, told, releases = Memories(), torch.zeros_like(like), list[Release]()

    def heard(job: Job) -> None:
        batches = job.program.batches
        if job.hides_samples and batches:
            times = steps_of(len(rows), batches)
            releases.append(step_of(claimed, len(rows))._replace(round=at, times=times, who=(client,)))

    def ask(session: Session, program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        replies = session.ask(replace(program, step=partial(_step, planted, program.step)), shared, mine)
        change = named(model, claimed, shared, mine[client], replies[client])[1]
        kept = torch.zeros((), dtype=like.dtype, device=like.device)  # what is not told
        told.add_(flat(change.get(name, kept.expand(shape)) for name, shape in model.shapes.items()))
        return replies

    state: Any = engine.algorithm.init(setup)
    for at in rounds:
        session = engine.session(at, memory, federation=marked, before_ask=heard)
        state, _ = engine.algorithm.round(setup, state, Cohort(at, (client,)), partial(ask, session))
        memory = session.memory
    return canaries.found(told), releases


class _Planted:
    """Gradients of samples, of which some are canaries: their labels say which one."""

    def __init__(self, first: Tensor, real: Tensor, gradients: Mapping[str, Tensor]) -> None:
        """``first``: the label of the first canary; ``real``: one that a sample has; ``gradients``: a row for each."""
        self.first, self.real, self.gradients = first, real, gradients

    def __call__(self, of_sample: OfSample) -> OfSample:
        def gradient(x: Tensor, y: Tensor, number: Tensor) -> Params:
            mark = (y.flatten()[0] - self.first).long()
            is_canary, at = mark >= 0, mark.clamp(min=0).reshape(1)
            own = of_sample(x, torch.where(is_canary, self.real, y), number)
            planted = {name: rows.index_select(0, at)[0] for name, rows in self.gradients.items()}
            return {name: torch.where(is_canary, planted[name], leaf) for name, leaf in own.items()}

        return gradient


def _marked(
    federation: Federation, rows: Tensor, model: Model, canaries: Canaries, clip: float
) -> tuple[Federation, _Planted]:
    """The federation with these samples marked as canaries by labels that no other sample has."""
    y, first = federation.y.clone(), federation.y.max().ceil() + 1
    marks = first + torch.arange(len(rows), device=y.device, dtype=y.dtype)
    y[rows.to(y.device)] = marks.reshape(-1, *[1] * (y.dim() - 1)).expand(-1, *y.shape[1:])
    # steps go against a gradient
    parts = torch.split(-TOO_LONG * clip * canaries.directions, [math.prod(s) for s in model.shapes.values()], dim=1)
    gradients = {name: part.reshape(-1, *shape) for (name, shape), part in zip(model.shapes.items(), parts)}
    return replace(federation, y=y), _Planted(first, federation.y[0], gradients)


def _step(
    planted: _Planted, step: Callable[[Home, Tree, Any, Batch], Any], home: Home, shared: Tree, carry: Any, batch: Batch
) -> Any:
    with with_gradients(planted):
        return step(home, shared, carry, batch)


def _weakest(simulation: Simulation, drawn: Mapping[int, Sequence[ClientId]]) -> ClientId:
    """The client whose samples the rounds hid least."""
    config, samples = simulation.server.config, simulation.engine.samples_of
    releases = [
        step_of(config, samples(client))._replace(
            round=number, times=steps_of(samples(client), config.batches()), who=(client,)
        )
        for number, cohort in drawn.items()
        for client in cohort
    ]
    found = worst([one for one in releases if one.times], simulation.server.options.dp_delta)
    if found is None:
        raise NeedsError("Nobody was asked to train in this run yet, so that there is nothing to audit.")
    return found.client
