# SPDX-License-Identifier: Apache-2.0
"""Participants' models handed to clients that took no part, who have no labels: what IT-PFL-HN is compared with.

A newcomer gets the model of a participant drawn at random (``sampled``), of the one whose samples are hardest to tell
from its own (``nearest``), or all of them, whose outputs it averages (``ensemble``); always among the participants
that have its architecture (IT-PFL-HN, sec. 6.2). As in the paper, nothing is drawn for ``sampled``: every participant's
model is tried in turn, and the mean is what a draw is worth. All modes need a method whose participants get a whole
model each, woven on the server, where it can be handed on.

The A-distance (Ben-David et al. 2007) of two clients is 2 (1 - 2 err), err being the error of a linear classifier that
tells their samples apart. No sample moves: the server holds one classifier per pair and sends it to both, and each
replies with the gradient of the logistic loss over its own samples, which all have one label. Ours: half of a client's
samples, every other one, train; the error is that of the other half, with both clients counting the same; inputs are
divided by the root of their number; the steps and their rate. Equal distances go to the first in the roster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.contract import Algorithm, Ask, Batch, Batches, Home, Program, Sent, Setup
from fedloom.core.errors import NeedsError, unknown
from fedloom.core.optim import Optimiser
from fedloom.core.trees import ClientId, PerClient, Tree
from fedloom.programs.evaluation import Score, evaluate
from fedloom.programs.statistics import settle_statistics

MODES = ("sampled", "ensemble", "nearest")


def evaluate_handed_on(
    algorithm: Algorithm,
    setup: Setup[Any],
    state: Any,
    newcomers: Sequence[ClientId],
    split: str,
    mode: str,
    ask: Ask,
) -> dict[ClientId, Score]:
    """The scores of newcomers with participants' models."""
    if mode not in MODES:
        raise unknown("mode", mode, ["admit", *MODES])
    sent = algorithm.send(setup, state, setup.clients)
    first = setup.clients[0]
    if set(sent.mine[first].get("params", ())) != set(setup.models[first].shapes):
        raise NeedsError(
            f"The mode {mode} hands the participants' models to newcomers, and the server of {algorithm.name} has no "
            "whole model for each participant. Use a run of pfedhn, or the mode admit."
        )
    models = sent.mine

    def tried(sent: Sent, algorithm: Algorithm = algorithm) -> dict[ClientId, Score]:
        return evaluate(
            algorithm,
            lambda _: sent,
            list(sent.mine),
            split,
            ask,
            at_once=len(newcomers),
            higher_is_better=setup.task.higher_is_better,
        )

    if mode == "ensemble":
        return tried(ensemble(setup, models, newcomers), replace(algorithm, predict=ensemble_predict))
    if mode == "nearest":
        if setup.models[first].tokens:
            raise NeedsError(
                "The mode nearest tells clients apart by their samples as numbers, and these are tokens. Choose "
                "sampled or ensemble."
            )
        return tried(settle_statistics(setup, nearest(setup, models, newcomers, ask), ask))
    each = [tried(settle_statistics(setup, sent, ask)) for sent in sampled(setup, models, newcomers)]
    return {client: _mean([scores[client] for scores in each if client in scores]) for client in newcomers}


def _mean(scores: Sequence[Score]) -> Score:
    return Score(fmean(s.loss for s in scores), fmean(s.metric for s in scores), scores[0].samples)


def sampled(setup: Setup[Any], models: PerClient, newcomers: Sequence[ClientId]) -> Iterator[Sent]:
    """One participant's model after another, for every newcomer of its architecture."""
    alike = {client: _alike(setup, models, client) for client in newcomers}
    for turn in range(max(map(len, alike.values()), default=0)):
        yield Sent({}, PerClient.of({client: models[own[turn]] for client, own in alike.items() if turn < len(own)}))


def nearest(
    setup: Setup[Any], models: PerClient, newcomers: Sequence[ClientId], ask: Ask, steps: int = 50, lr: float = 1.0
) -> Sent:
    """The model of the participant at the smallest A-distance from each newcomer."""
    clients = list(models)
    distances = a_distances(setup, clients, newcomers, ask, steps, lr)
    row = {client: i for i, client in enumerate(clients)}
    chosen = {}
    for newcomer, own in zip(newcomers, distances):
        alike = _alike(setup, models, newcomer)
        chosen[newcomer] = models[alike[int(own[[row[c] for c in alike]].argmin())]]
    return Sent({}, PerClient.of(chosen))


def ensemble(setup: Setup[Any], models: PerClient, newcomers: Sequence[ClientId]) -> Sent:
    """All participants' models for each newcomer; to be used with ``ensemble_predict``."""
    everything = {}
    for client in newcomers:
        if setup.models[client].fresh_buffers():
            raise NeedsError(
                f"An ensemble needs models without running statistics; {setup.models[client].spec} has some, which "
                "stay with the participants. Choose sampled or nearest, or a --model without BatchNorm."
            )
        everything[client] = models.pick(_alike(setup, models, client))
    return Sent({}, PerClient.of(everything))


def ensemble_predict(home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """The mean of the outputs (for classes: of the logits) of all models sent."""
    outputs: Tensor = torch.func.vmap(lambda params: home.model(params, deployed["buffers"], x))(deployed["params"])
    return outputs.mean(0)


def a_distances(
    setup: Setup[Any],
    participants: Sequence[ClientId],
    newcomers: Sequence[ClientId],
    ask: Ask,
    steps: int = 50,
    lr: float = 1.0,
) -> Tensor:
    """(newcomers, participants); infinite where one of the two did not answer."""
    inputs = math.prod(setup.models[newcomers[0]].input_shape)
    place: dict[ClientId, Any] = {c: (i, slice(None)) for i, c in enumerate(newcomers)}
    place |= {c: (slice(None), i) for i, c in enumerate(participants)}
    like: dict[str, Any] = {"device": setup.device, "dtype": setup.dtype}
    weights = torch.zeros(len(newcomers), len(participants), inputs + 1, **like)
    sides = [(newcomers, torch.ones(len(newcomers), **like)), (participants, -torch.ones(len(participants), **like))]
    optimiser = Optimiser("sgd", lr, momentum=0.9)
    memory = optimiser.init({"weights": weights})
    for step in range(steps + 1):
        stacks = [weights, weights.transpose(0, 1)]
        mine = PerClient((who, {"weights": w, "side": side}) for (who, side), w in zip(sides, stacks))
        replies = ask(_PROGRAM, {}, mine)
        if step == steps:
            break
        grads = torch.zeros_like(weights)
        for client in replies:
            grads[place[client]] += replies[client]["grad"] / 2
        after, memory = optimiser.update({"weights": weights}, {"weights": grads}, memory)
        weights = after["weights"]
    errors = torch.full((2, len(newcomers), len(participants)), -math.inf, **like)
    for client in replies:
        errors[int(client in participants)][place[client]] = replies[client]["error"]
    # 2 (1 - 2 err) with err = (the newcomer's + the participant's) / 2
    distances: Tensor = 2 - 2 * errors.sum(0)
    return distances


def _alike(setup: Setup[Any], models: PerClient, newcomer: ClientId) -> list[ClientId]:
    """The participants that have the newcomer's architecture."""
    spec = setup.models[newcomer].spec
    alike = [client for client in models if setup.models[client].spec == spec]
    if not alike:
        raise NeedsError(
            f"Client {newcomer} has {spec}, which no participant has. Admit it with an architecture that took part."
        )
    return alike


class _Sums(NamedTuple):
    weights: Tensor  # (pairs, inputs + 1) the bias comes last
    side: Tensor  # () 1 for newcomers, -1 for participants
    grad: Tensor  # (pairs, inputs + 1)
    wrong: Tensor  # (pairs,)
    trained: Tensor  # () samples
    tried: Tensor  # ()


def _init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Sums:
    weights, zero = mine["weights"], torch.zeros_like(home.num_samples)
    return _Sums(weights, mine["side"], torch.zeros_like(weights), torch.zeros_like(weights[:, 0]), zero, zero)


def _step(home: Home, shared: Tree, carry: _Sums, batch: Batch) -> _Sums:
    """Sums over the samples at even places for the gradient, over those at odd places for the error."""
    flat = batch.x.flatten(1)
    points = torch.cat([flat / math.sqrt(flat.shape[1]), torch.ones_like(flat[:, :1])], dim=1)
    margins = carry.side * points @ carry.weights.T  # (batch, pairs), negative where wrong
    even = torch.arange(len(flat), device=flat.device) % 2 == 0
    train, attempt = (batch.mask & even).to(flat.dtype), (batch.mask & ~even).to(flat.dtype)
    # d/dw of softplus(-side w.x); what stands in padding's place is multiplied by zero
    slopes = -carry.side * torch.sigmoid(-margins) * train[:, None]
    return carry._replace(
        grad=carry.grad + slopes.T @ points,
        # a margin of zero says nothing: half an error
        wrong=carry.wrong + attempt @ (0.5 - 0.5 * margins.sign()),
        trained=carry.trained + train.sum(),
        tried=carry.tried + attempt.sum(),
    )


def _final(home: Home, shared: Tree, carry: _Sums, memory: Tree) -> tuple[Tree, Tree]:
    # a client with a single sample has none to try: half an error
    error = torch.where(carry.tried > 0, carry.wrong / carry.tried.clamp(min=1), 0.5)
    return {"grad": carry.grad / carry.trained.clamp(min=1), "error": error}, memory


def _expects(shared: Tree, mine: Tree) -> Tree:
    return {"grad": mine["weights"], "error": mine["weights"][:, 0]}


# an even size and no shuffling, so that a sample's place stays even or odd from ask to ask
_PROGRAM = Program("a_distance", _init, _step, _final, Batches("train", 512, epochs=1, shuffle=False), _expects)
