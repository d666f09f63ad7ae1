# SPDX-License-Identifier: Apache-2.0
"""Any method whose models do not know their client's classes, told the client's label shares: ``--adapt prior``.

``with_prior(algorithm)`` is a method like any other. Its training is that of the one it wraps. Before it is evaluated
or deployed it *settles*: participants tell their label shares, from which the server fits a Dirichlet, and calibrate
the scores together, tell what scores of each class look like, and try the correction on themselves. A participant then
predicts with its counted shares. A newcomer estimates its own from its samples, labelled or not or some of each (label
-1: unknown), checks whether they fit, and uses the correction as far as it served the participants; it only downloads,
and answers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.adaptation import calibration
from fedloom.adaptation.calibration import Privacy, calibrating, fit
from fedloom.adaptation.checks import Reference, gather, judge, log_ratio, no_reference, referring, statistics
from fedloom.adaptation.dirichlet import STEPS, Votes, fit_dirichlet, no_votes, shares, vote
from fedloom.adaptation.trial import Trial, trusted, try_out, trying, untried
from fedloom.core.contract import (
    Algorithm,
    Ask,
    Batch,
    Batches,
    Cohort,
    Diagnostics,
    Home,
    Model,
    Program,
    Seeds,
    Sent,
    Setup,
)  # fmt: skip
from fedloom.core.errors import NeedsError
from fedloom.core.trees import ClientId, Tree
from fedloom.models.load import Shifted
from fedloom.programs.allowed import programs_of
from fedloom.programs.labels import ask_label_shares, label_shares

OPEN = Privacy()
"""No clipping and no noise."""

NOISED_ASKS = calibration.NOISED_ASKS + 3
"""So often participants answer with noise in one settling, at most: the calibration, and the others of ``telling``."""

BEHIND = 100.0
"""Samples that noised shares are taken to be of."""

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
    trial: Mapping[str, Tensor]
    """What the correction was worth to participants: ``trial.Trial``."""


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
        base=algorithm,
        state=State,
        init=partial(_init, algorithm),
        round=partial(_round, algorithm),
        settle=partial(_settle, algorithm, privacy),
        send=partial(_send, algorithm),
        first_memory=partial(_first_memory, algorithm),
        client_deploy=partial(client_deploy, algorithm),
        predict=partial(predict, algorithm),
        module=partial(_module, algorithm),
        programs=partial(_programs, algorithm, privacy),
        restored=partial(_restored, algorithm),
        admit=partial(_admit, algorithm) if algorithm.admit else None,
        admit_labels=False,
        handover=replace(
            algorithm.handover,
            participants=partial(_handed_on, algorithm, algorithm.handover.participants),
            newcomers=partial(_handed_on, algorithm, algorithm.handover.newcomers),
        ),
        needs=replace(algorithm.needs, class_labels=True),
    )


def _init(algorithm: Algorithm, setup: Setup[Any]) -> State:
    classes = setup.models[setup.clients[0]].num_outputs
    even = torch.ones(classes, dtype=setup.dtype, device=setup.device)
    # until it has settled: the wrapped method as it is
    unknown, nobody = no_reference(even)._asdict(), untried(even)._asdict()
    base = algorithm.init(setup)._asdict()
    return State(base, even * 1e4, even.new_ones(()), torch.zeros_like(even), unknown, nobody)


def _base(algorithm: Algorithm, state: State) -> Any:
    return algorithm.state(**state.base)


def _round(
    algorithm: Algorithm, setup: Setup[Any], state: State, cohort: Cohort, ask: Ask
) -> tuple[State, Diagnostics]:
    after, diagnostics = algorithm.round(setup, _base(algorithm, state), cohort, ask)
    return state._replace(base=after._asdict()), diagnostics


def _handed_on(algorithm: Algorithm, part: Callable[..., Any], setup: Setup[Any], state: State) -> State:
    """Part of the wrapped method's state, and all that settling found: sums over the participants."""
    return state._replace(base=part(setup, _base(algorithm, state))._asdict())


def _first_memory(algorithm: Algorithm, model: Model, config: Any, seeds: Seeds) -> Tree:
    nothing = torch.zeros(model.num_outputs, dtype=model.dtype, device=model.device)
    return {**algorithm.first_memory(model, config, seeds), "label_counts": nothing, "trust": nothing.new_ones(())}


def _settle(algorithm: Algorithm, privacy: Privacy, setup: Setup[Any], state: State, ask: Ask) -> State:
    """Label shares, the Dirichlet that fits them, calibration, the reference for newcomers' checks, and the trial."""
    plain = _base(algorithm, state)
    if algorithm.settle:
        plain = algorithm.settle(setup, plain, ask)
    told = ask_label_shares(setup, setup.clients, ask, privacy.noise)
    # how many samples a client has would tell of it, and matters little beside noise
    rows = [tree["shares"].clamp(min=0) * (BEHIND if privacy.noise else tree["num_samples"][:, None])
            for _, tree in told.groups]  # fmt: skip
    alpha = torch.as_tensor(fit_dirichlet(torch.cat(rows).double().cpu().numpy())).to(state.alpha)
    base = algorithm.send(setup, plain, setup.clients)
    sent = Sent({"base": base.shared, "alpha": alpha}, base.mine)
    fitted = fit(setup, algorithm, sent, setup.clients, ask, privacy)
    line = {name: value.to(alpha) for name, value in fitted.line.items()}
    calibrated = Sent({"base": base.shared, **line}, base.mine)
    reference = gather(algorithm, calibrated, ask, privacy)
    trial = try_out(algorithm, base, alpha, fitted, reference, ask, privacy)
    return State(plain._asdict(), alpha, line["slope"], line["bias"], reference._asdict(), trial._asdict())


def _wrapped(state: State, base: Sent) -> Sent:
    return Sent({"base": base.shared, "alpha": state.alpha, "slope": state.slope, "bias": state.bias}, base.mine)


def _send(algorithm: Algorithm, setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    return _wrapped(state, algorithm.send(setup, _base(algorithm, state), clients))


def client_deploy(algorithm: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """What the wrapped method deploys, and the line through its scores."""
    offset = shared["bias"] + torch.log(shares(memory["label_counts"], shared["alpha"]))
    return {
        "base": algorithm.client_deploy(home, shared["base"], mine, memory),
        "slope": torch.where(memory["trust"] > 0, shared["slope"], 1),
        "offset": memory["trust"] * offset,
    }


def predict(algorithm: Algorithm, home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """Calibrated scores plus the log prior."""
    scores: Tensor = deployed["slope"] * algorithm.predict(home, deployed["base"], x) + deployed["offset"]
    return scores


def _module(algorithm: Algorithm, home: Home, deployed: Tree) -> nn.Module:
    """The wrapped method's module, its scores on a line."""
    plain = algorithm.module(home, deployed["base"])
    return Shifted(plain, deployed["slope"], deployed["offset"]).eval()


def _programs(algorithm: Algorithm, privacy: Privacy, config: Any, model: Model, newcomer: bool) -> list[Program]:
    """The wrapped method's, what settling asks of participants, and what a newcomer finds out at home."""
    own = programs_of(algorithm, config, model, newcomer)
    if newcomer:
        return [*own, _estimate_program(algorithm)]
    return [*own, *telling(algorithm, privacy)]


def telling(algorithm: Algorithm, privacy: Privacy) -> list[Program]:
    """What participants are asked when the state settles, and answer with noise if there is to be any."""
    asked = [calibrating(algorithm, privacy), referring(algorithm, privacy), trying(algorithm, privacy)]
    return [label_shares(privacy.noise), *asked]


def _restored(algorithm: Algorithm, fresh: Tree, saved: Tree) -> Tree:
    return {**saved, "base": algorithm.restored(fresh["base"], saved["base"])}


def _admit(algorithm: Algorithm, setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """The newcomer finds its shares at home; its answer is empty."""
    assert algorithm.admit is not None
    sent = _wrapped(state, algorithm.admit(setup, _base(algorithm, state), newcomers, ask))
    ask(_estimate_program(algorithm), {**sent.shared, "reference": state.reference, "trial": state.trial}, sent.mine)
    return sent


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
    """What is kept: the counts, weighted by how well they fit, how far to trust them, and the checks for the report."""
    votes, number = carry.votes, home.num_samples
    mean = carry.statistics / number.clamp(min=1)
    found = judge(votes.known, votes.expected, mean, number, shared["alpha"], Reference(**shared["reference"]))
    labelled, trial = votes.known.sum(), Trial(**shared["trial"])
    use = trusted(trial, number, labelled)
    weight = found.weight * use.weight
    report = {
        "labelled": labelled,
        "evidence": labelled + weight * (votes.evidence - labelled),
        "weight": weight,
        "most": use.weight,
        "misfit": found.misfit,
        "ratio": 2 * carry.log_ratio,
        **{name: value[use.row] for name, value in trial._asdict().items()},
    }
    counts = votes.known + use.weight * (found.counts - votes.known)
    trust = torch.where(found.keep_plain, 0, use.part)
    return {}, {**memory, "label_counts": counts, "trust": trust, "admission": report}


def _estimate_expects(shared: Tree, mine: Tree) -> Tree:
    return {}
