# SPDX-License-Identifier: Apache-2.0
"""Any method whose models do not know their client's classes, told the client's label shares: ``--adapt prior``.

``with_prior(algorithm)`` is a method like any other. Its training is that of the one it wraps. Before it is evaluated
or deployed it *settles*: participants tell their label shares, from which the server fits a Dirichlet, and calibrate
the scores together. A participant then predicts with its counted shares. A newcomer estimates its own from its samples,
labelled or not or some of each (label -1: unknown); it only downloads, and answers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.adaptation.calibration import Privacy, fit
from fedloom.adaptation.dirichlet import fit_dirichlet, log_weights, responsibilities, shares
from fedloom.core.contract import Algorithm, Ask, Batch, Batches, Cohort, Home, Model, Program, Sent, Setup
from fedloom.core.errors import NeedsError
from fedloom.core.random import fold, normal
from fedloom.core.trees import ClientId, PerClient, Tree

OPEN = Privacy()
"""No clipping and no noise."""

PASSES = 50
"""Steps of variational EM on a newcomer; each is a pass over its samples."""


class State(NamedTuple):
    """The wrapped method's state, and what settling found."""

    base: Mapping[str, Any]
    alpha: Tensor  # (classes,) the Dirichlet of label shares
    slope: Tensor  # () 1/T
    bias: Tensor  # (classes,)


@cache
def with_prior(algorithm: Algorithm, privacy: Privacy = OPEN) -> Algorithm:
    """``algorithm`` with each client's label shares added to its scores."""
    if algorithm.carries_prior:
        raise NeedsError(
            f"{algorithm.name}'s models are trained on their client's own classes and know its prior already; "
            "--adapt prior would count it twice. Leave it out, or use it with a method of one global model."
        )
    return replace(
        algorithm,
        name=f"{algorithm.name} + prior",
        state=State,
        init=partial(_init, algorithm),
        round=partial(_round, algorithm),
        settle=partial(_settle, algorithm, privacy),
        personalise=partial(_personalise, algorithm),
        first_memory=partial(_first_memory, algorithm),
        client_deploy=partial(client_deploy, algorithm),
        predict=partial(predict, algorithm),
        admit=partial(_admit, algorithm) if algorithm.admit else None,
        admit_labels=False,
        needs=replace(algorithm.needs, class_labels=True),
    )


def _init(algorithm: Algorithm, setup: Setup[Any]) -> State:
    classes = setup.models[setup.clients[0]].num_outputs
    even = torch.ones(classes, dtype=setup.dtype, device=setup.device)
    # until it has settled: the wrapped method as it is
    return State(algorithm.init(setup)._asdict(), even * 1e4, even.new_ones(()), torch.zeros_like(even))


def _base(algorithm: Algorithm, state: State) -> Any:
    return algorithm.state(**state.base)


def _round(
    algorithm: Algorithm, setup: Setup[Any], state: State, cohort: Cohort, ask: Ask
) -> tuple[State, Mapping[str, float]]:
    after, diagnostics = algorithm.round(setup, _base(algorithm, state), cohort, ask)
    return state._replace(base=after._asdict()), diagnostics


def _first_memory(algorithm: Algorithm, model: Model, config: Any, seed: int) -> Tree:
    nothing = torch.zeros(model.num_outputs, dtype=model.dtype, device=model.device)
    return {**algorithm.first_memory(model, config, seed), "label_counts": nothing}


def _settle(algorithm: Algorithm, privacy: Privacy, setup: Setup[Any], state: State, ask: Ask) -> State:
    """Label shares, the Dirichlet that fits them, and calibration."""
    classes = {"classes": torch.zeros_like(state.bias)}
    told = ask(_count_program(privacy), classes, PerClient.empty(setup.clients))
    rows = [tree["shares"].clamp(min=0) * tree["num_samples"][:, None] for _, tree in told.groups]
    alpha = torch.as_tensor(fit_dirichlet(torch.cat(rows).double().cpu().numpy())).to(state.alpha)
    base = algorithm.personalise(setup, _base(algorithm, state), setup.clients)
    sent = Sent({"base": base.shared, "alpha": alpha}, base.mine)
    found = fit(setup, algorithm, sent, setup.clients, ask, privacy)
    return state._replace(alpha=alpha, slope=found["slope"], bias=found["bias"])


def _wrapped(state: State, base: Sent) -> Sent:
    return Sent({"base": base.shared, "alpha": state.alpha, "slope": state.slope, "bias": state.bias}, base.mine)


def _personalise(algorithm: Algorithm, setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    return _wrapped(state, algorithm.personalise(setup, _base(algorithm, state), clients))


def client_deploy(algorithm: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """What the wrapped method deploys, and the line through its scores."""
    prior = shares(memory["label_counts"], shared["alpha"])
    return {
        "base": algorithm.client_deploy(home, shared["base"], mine, memory),
        "slope": shared["slope"],
        "offset": shared["bias"] + torch.log(prior),
    }


def predict(algorithm: Algorithm, home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """Calibrated scores plus the log prior."""
    scores: Tensor = deployed["slope"] * algorithm.predict(home, deployed["base"], x) + deployed["offset"]
    return scores


def _admit(algorithm: Algorithm, setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """The newcomer finds its shares at home; its answer is empty."""
    assert algorithm.admit is not None
    sent = _wrapped(state, algorithm.admit(setup, _base(algorithm, state), newcomers, ask))
    ask(_estimate_program(algorithm), sent.shared, sent.mine)
    return sent


@cache
def _count_program(privacy: Privacy) -> Program:
    batches = Batches("train", 512, epochs=1, shuffle=False)
    return Program("label_shares", _count_init, _count_step, partial(_count_final, privacy), batches, _count_expects)


def _count_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tensor:
    return torch.zeros_like(shared["classes"])


def _count_step(home: Home, shared: Tree, carry: Tensor, batch: Batch) -> Tensor:
    seen = F.one_hot(batch.y.clamp(min=0), carry.shape[0]) * batch.mask[:, None]
    return carry + seen.sum(0).to(carry.dtype)


def _count_final(privacy: Privacy, home: Home, shared: Tree, carry: Tensor, memory: Tree) -> tuple[Tree, Tree]:
    told = carry / carry.sum().clamp(min=1)
    if privacy.noise:
        # shares have norm at most 1: the clip of this answer
        told = told + privacy.noise * normal(fold(home.key, 1), tuple(told.shape), told.dtype)
    return {"shares": told, "num_samples": home.num_samples}, {**memory, "label_counts": carry}


def _count_expects(shared: Tree, mine: Tree) -> Tree:
    return {"shares": shared["classes"], "num_samples": torch.empty(())}


@cache
def _estimate_program(algorithm: Algorithm) -> Program:
    batches = Batches("train", 256, epochs=PASSES, shuffle=False)
    init, step = partial(_estimate_init, algorithm), partial(_estimate_step, algorithm)
    return Program("estimate_prior", init, step, _estimate_final, batches, _estimate_expects)


class _Carry(NamedTuple):
    deployed: Tree
    counts: Tensor  # (classes,) expected in the last whole pass
    summing: Tensor  # (classes,) in this pass so far
    epoch: Tensor


def _estimate_init(algorithm: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Carry:
    nothing = torch.zeros_like(shared["alpha"])
    deployed = algorithm.client_deploy(home, shared["base"], mine, memory)
    return _Carry(deployed, nothing, nothing, torch.zeros_like(home.key))


def _estimate_step(algorithm: Algorithm, home: Home, shared: Tree, carry: _Carry, batch: Batch) -> _Carry:
    """One batch of an E-step; with a new pass comes a new M-step."""
    next_pass = batch.epoch > carry.epoch
    counts = torch.where(next_pass, carry.summing, carry.counts)
    summing = torch.where(next_pass, torch.zeros_like(carry.summing), carry.summing)
    weights = log_weights(counts, shared["alpha"], batch.epoch == 0)
    scores = shared["slope"] * algorithm.predict(home, carry.deployed, batch.x) + shared["bias"]
    found = responsibilities(scores, weights, batch.y) * batch.mask[:, None]
    return carry._replace(counts=counts, summing=summing + found.sum(0), epoch=batch.epoch)


def _estimate_final(home: Home, shared: Tree, carry: _Carry, memory: Tree) -> tuple[Tree, Tree]:
    return {}, {**memory, "label_counts": carry.summing}


def _estimate_expects(shared: Tree, mine: Tree) -> Tree:
    return {}
