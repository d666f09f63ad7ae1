# SPDX-License-Identifier: Apache-2.0
"""Any method whose models do not know their client's classes, told the client's label shares: ``--adapt prior``.

``with_prior(algorithm)`` is a method like any other. Its training is that of the one it wraps. Before it is evaluated
or deployed it *settles*: participants tell their label shares, from which the server fits a Dirichlet, and calibrate
the scores together, and tell what scores of each class look like. A participant then predicts with its counted shares.
A newcomer estimates its own from its samples, labelled or not or some of each (label -1: unknown), and checks whether
they fit; it only downloads, and answers nothing.
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
from fedloom.adaptation.checks import Reference, gather, judge, log_ratio, no_reference, statistics
from fedloom.adaptation.dirichlet import STEPS, Votes, fit_dirichlet, no_votes, shares, vote
from fedloom.core.contract import Algorithm, Ask, Batch, Batches, Cohort, Diagnostics, Home, Model, Program, Sent, Setup
from fedloom.core.errors import NeedsError
from fedloom.core.random import fold, normal
from fedloom.core.trees import ClientId, PerClient, Tree

OPEN = Privacy()
"""No clipping and no noise."""

PASSES = STEPS + 1
"""Over a newcomer's samples: one for each step of EM, and one that checks the result."""


class State(NamedTuple):
    """The wrapped method's state, and what settling found."""

    base: Mapping[str, Any]
    alpha: Tensor  # (classes,) the Dirichlet of label shares
    slope: Tensor  # () 1/T
    bias: Tensor  # (classes,)
    reference: Mapping[str, Tensor]
    """What a newcomer's scores are checked against: ``checks.Reference``."""


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
    nothing = no_reference(even)._asdict()
    return State(algorithm.init(setup)._asdict(), even * 1e4, even.new_ones(()), torch.zeros_like(even), nothing)


def _base(algorithm: Algorithm, state: State) -> Any:
    return algorithm.state(**state.base)


def _round(
    algorithm: Algorithm, setup: Setup[Any], state: State, cohort: Cohort, ask: Ask
) -> tuple[State, Diagnostics]:
    after, diagnostics = algorithm.round(setup, _base(algorithm, state), cohort, ask)
    return state._replace(base=after._asdict()), diagnostics


def _first_memory(algorithm: Algorithm, model: Model, config: Any, seed: int) -> Tree:
    nothing = torch.zeros(model.num_outputs, dtype=model.dtype, device=model.device)
    return {**algorithm.first_memory(model, config, seed), "label_counts": nothing, "keep_plain": nothing[0] > 0}


def _settle(algorithm: Algorithm, privacy: Privacy, setup: Setup[Any], state: State, ask: Ask) -> State:
    """Label shares, the Dirichlet that fits them, calibration, and the reference for newcomers' checks."""
    classes = {"classes": torch.zeros_like(state.bias)}
    told = ask(_count_program(privacy), classes, PerClient.empty(setup.clients))
    rows = [tree["shares"].clamp(min=0) * tree["num_samples"][:, None] for _, tree in told.groups]
    alpha = torch.as_tensor(fit_dirichlet(torch.cat(rows).double().cpu().numpy())).to(state.alpha)
    base = algorithm.personalise(setup, _base(algorithm, state), setup.clients)
    sent = Sent({"base": base.shared, "alpha": alpha}, base.mine)
    found = fit(setup, algorithm, sent, setup.clients, ask, privacy)
    calibrated = Sent({"base": base.shared, **found}, base.mine)
    reference = gather(algorithm, calibrated, ask, privacy)
    return state._replace(alpha=alpha, slope=found["slope"], bias=found["bias"], reference=reference._asdict())


def _wrapped(state: State, base: Sent) -> Sent:
    return Sent({"base": base.shared, "alpha": state.alpha, "slope": state.slope, "bias": state.bias}, base.mine)


def _personalise(algorithm: Algorithm, setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    return _wrapped(state, algorithm.personalise(setup, _base(algorithm, state), clients))


def client_deploy(algorithm: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """What the wrapped method deploys, and the line through its scores."""
    plain, offset = memory["keep_plain"], shared["bias"] + torch.log(shares(memory["label_counts"], shared["alpha"]))
    return {
        "base": algorithm.client_deploy(home, shared["base"], mine, memory),
        "slope": torch.where(plain, 1, shared["slope"]),
        "offset": torch.where(plain, 0, offset),
    }


def predict(algorithm: Algorithm, home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """Calibrated scores plus the log prior."""
    scores: Tensor = deployed["slope"] * algorithm.predict(home, deployed["base"], x) + deployed["offset"]
    return scores


def _admit(algorithm: Algorithm, setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """The newcomer finds its shares at home; its answer is empty."""
    assert algorithm.admit is not None
    sent = _wrapped(state, algorithm.admit(setup, _base(algorithm, state), newcomers, ask))
    ask(_estimate_program(algorithm), {**sent.shared, "reference": state.reference}, sent.mine)
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
    votes: Votes  # of the last whole pass
    summing: Votes  # of this pass so far
    epoch: Tensor
    statistics: Tensor  # (2,) summed in the last pass
    log_ratio: Tensor  # () likewise


def _estimate_init(algorithm: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Carry:
    nothing, sums = no_votes(shared["alpha"]), torch.zeros_like(shared["reference"]["mean"][0])
    deployed = algorithm.client_deploy(home, shared["base"], mine, memory)
    return _Carry(deployed, nothing, nothing, torch.zeros_like(home.num_samples, dtype=torch.int64), sums, sums[0])


def _estimate_step(algorithm: Algorithm, home: Home, shared: Tree, carry: _Carry, batch: Batch) -> _Carry:
    """One batch of a pass; with a new pass the votes of the last one weigh the classes."""
    next_pass, alpha = batch.epoch > carry.epoch, shared["alpha"]
    votes = Votes(*(torch.where(next_pass, new, old) for new, old in zip(carry.summing, carry.votes)))
    scores = shared["slope"] * algorithm.predict(home, carry.deployed, batch.x) + shared["bias"]
    found = vote(scores, votes.log_weights(alpha), batch.y, batch.mask)
    summing = Votes(*(torch.where(next_pass, new, old + new) for new, old in zip(found, carry.summing)))
    checking = batch.mask & (batch.epoch == PASSES - 1)
    ratio = log_ratio(scores, shares(votes.counts, alpha), alpha / alpha.sum())
    return carry._replace(
        votes=votes,
        summing=summing,
        epoch=batch.epoch,
        statistics=carry.statistics + torch.where(checking[:, None], statistics(scores), 0).sum(0),
        log_ratio=carry.log_ratio + torch.where(checking, ratio, 0).sum(),
    )


def _estimate_final(home: Home, shared: Tree, carry: _Carry, memory: Tree) -> tuple[Tree, Tree]:
    """What is kept: the counts, weighted by how well they fit, and the checks for the report."""
    votes, number = carry.votes, home.num_samples
    mean = carry.statistics / number.clamp(min=1)
    found = judge(votes.known, votes.expected, mean, number, shared["alpha"], Reference(**shared["reference"]))
    labelled = votes.known.sum()
    report = {
        "labelled": labelled,
        "evidence": labelled + found.weight * (votes.evidence - labelled),
        "weight": found.weight,
        "misfit": found.misfit,
        "ratio": 2 * carry.log_ratio,
    }
    kept = {"label_counts": found.counts, "keep_plain": found.keep_plain, "admission": report}
    return {}, {**memory, **kept}


def _estimate_expects(shared: Tree, mine: Tree) -> Tree:
    return {}
