# SPDX-License-Identifier: Apache-2.0
"""The corrected global model, trained further by each client and mixed with what it was: ``--adapt tune``.

A client starts from the global model with the calibrated scale, the biases and its log prior in place
(``adaptation.prior``), trains it 200 steps on its own data with them in the loss, and predicts with the mean of the
tuned and the untuned probabilities. Tuned without the prior in place, the model spends its steps on learning the
client's label shares. Whether to use the model after 60 steps, after 200 or not at all is chosen by the loss on the
client's own validation data; without any, it is the one after 60.

Newcomers do the same with whatever labels they have. With few the tuned model counts less, labels / (labels + 32) of a
half, and without any it is ``--adapt prior``. Nothing of it leaves the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.adaptation.calibration import Privacy
from fedloom.adaptation.prior import OPEN, with_prior
from fedloom.core.contract import (
    Algorithm,
    Ask,
    Batch,
    Batches,
    Cohort,
    Home,
    Model,
    Program,
    Sent,
    Setup,
    predict_with_target,
)
from fedloom.core.errors import NeedsError
from fedloom.core.training import Training, begin, train_step
from fedloom.core.trees import Params, Tree, tree_map
from fedloom.models.load import Mixed, mixture
from fedloom.programs.allowed import programs_of

EARLY, LATE = 60, 200
"""Steps after which a client looks at its model."""
HALF = 0.5
"""What the tuned model counts in the mixture."""
FEW = 32.0
"""With so many labels a newcomer's tuned model counts half of that."""


def with_tuning(algorithm: Algorithm, privacy: Privacy = OPEN) -> Algorithm:
    """``algorithm`` corrected by each client's label shares, then tuned by it."""
    prior = with_prior(algorithm, privacy)
    if algorithm.predict is not predict_with_target:
        raise NeedsError(
            f"{algorithm.name} predicts with more than the client's target network, which is what --adapt tune trains "
            "further. Use --adapt prior."
        )
    return replace(
        prior,
        name=f"{algorithm.name} + tune",
        settle=partial(_settle, prior),
        client_deploy=partial(client_deploy, prior),
        predict=partial(predict, prior),
        module=partial(_module, prior),
        programs=partial(_programs, prior),
        admit=partial(_admit, prior) if prior.admit else None,
    )


def _settle(prior: Algorithm, setup: Setup[Any], state: Any, ask: Ask) -> Any:
    assert prior.settle is not None
    settled = prior.settle(setup, state, ask)
    sent = prior.send(setup, settled, setup.clients)
    ask(tuning(prior, setup.config), *sent)
    ask(choosing(prior), *sent)
    return settled


def _admit(prior: Algorithm, setup: Setup[Any], state: Any, newcomers: Cohort, ask: Ask) -> Sent:
    assert prior.admit is not None
    sent = prior.admit(setup, state, newcomers, ask)
    ask(tuning(prior, setup.config), *sent)
    return sent


def _programs(prior: Algorithm, config: Any, model: Model, newcomer: bool) -> list[Program]:
    """The prior's; a participant also chooses by its validation data."""
    own = [*programs_of(prior, config, model, newcomer), tuning(prior, config)]
    return own if newcomer else [*own, choosing(prior)]


def client_deploy(prior: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """The corrected model, and the tuned one with its part in the mixture: none, until there is one."""
    corrected = prior.client_deploy(home, shared, mine, memory)
    tuned = memory.get("tuned", {"model": corrected["base"], "part": torch.zeros_like(home.num_samples)})
    return {**corrected, "tuned": tuned["model"], "part": tuned["part"]}


def predict(prior: Algorithm, home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """Log probabilities of the mixture."""
    one, other = (prior.predict(home, {**deployed, "base": deployed[model]}, x) for model in ("base", "tuned"))
    return mixture(one, other, deployed["part"])


def _module(prior: Algorithm, home: Home, deployed: Tree) -> nn.Module:
    one, other = (prior.module(home, {**deployed, "base": deployed[model]}) for model in ("base", "tuned"))
    return Mixed(one, other, deployed["part"]).eval()


class _Tuning(NamedTuple):
    training: Training
    slope: Tensor
    offset: Tensor
    early: Mapping[str, Any]  # params and buffers after ``EARLY`` steps


def tuning(prior: Algorithm, config: Any) -> Program:
    """Train the corrected model further; the reply is empty."""
    batches = Batches("train", config.batch_size, steps=LATE)
    return Program("tune", partial(_tune_init, prior), _tune_step, _tune_final, batches, _expects)


def _tune_init(prior: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Tuning:
    corrected = prior.client_deploy(home, shared, mine, memory)
    model = corrected["base"]
    training = begin(home, model["params"], {"buffers": model["buffers"]})
    return _Tuning(training, corrected["slope"], corrected["offset"], dict(model))


def _tune_step(home: Home, shared: Tree, carry: _Tuning, batch: Batch) -> _Tuning:
    def objective(params: Params, buffers: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
        outputs, after = home.model.train(params, buffers, batch.x, batch.mask, batch.key)
        losses = home.task.loss(carry.slope * outputs + carry.offset, batch.y.clamp(min=0))
        loss = batch._replace(mask=batch.mask & (batch.y >= 0)).mean(losses)
        return loss, (loss, after)

    training = train_step(home, carry.training, batch, objective=objective)
    now = {"params": training.params, "buffers": training.buffers}
    early = tree_map(lambda new, old: torch.where(batch.step < EARLY, new, old), now, carry.early)
    return carry._replace(training=training, early=early)


def _tune_final(home: Home, shared: Tree, carry: _Tuning, memory: Tree) -> tuple[Tree, Tree]:
    """Until it is chosen, the early model; the late one stands beside it."""
    labels = memory["admission"]["labelled"] if "admission" in memory else home.num_samples
    few = labels / (labels + FEW) if "admission" in memory else torch.ones_like(labels)
    late = {"params": carry.training.params, "buffers": carry.training.buffers}
    tuned = {"model": carry.early, "part": HALF * few}
    return {}, {**memory, "tuned": tuned, "tuned_late": late}


class _Choice(NamedTuple):
    corrected: Mapping[str, Any]
    models: Mapping[str, Any]
    losses: Tensor  # (3,) of the corrected model alone, mixed with the early one, mixed with the late one


def choosing(prior: Algorithm) -> Program:
    """Choose among the models by validation data, and forget the others; the reply is empty."""
    init, step = partial(_choose_init, prior), partial(_choose_step, prior)
    return Program("choose_tuned", init, step, _choose_final, Batches("val", 256, epochs=1, shuffle=False), _expects)


def _choose_init(prior: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Choice:
    corrected = prior.client_deploy(home, shared, mine, memory)
    models = {"early": memory["tuned"]["model"], "late": memory["tuned_late"]}
    return _Choice(corrected, models, torch.zeros_like(corrected["offset"][:1]).expand(3).clone())


def _choose_step(prior: Algorithm, home: Home, shared: Tree, carry: _Choice, batch: Batch) -> _Choice:
    alone = prior.predict(home, carry.corrected, batch.x)
    tuned = [prior.predict(home, {**carry.corrected, "base": model}, batch.x) for model in carry.models.values()]
    half = torch.full_like(carry.losses[0], HALF)
    scores = [alone, *(mixture(alone, one, half) for one in tuned)]
    losses = torch.stack([batch.sum(home.task.loss(one, batch.y.clamp(min=0))) for one in scores])
    return carry._replace(losses=carry.losses + losses)


def _choose_final(home: Home, shared: Tree, carry: _Choice, memory: Tree) -> tuple[Tree, Tree]:
    best = torch.where(carry.losses.sum() > 0, carry.losses.argmin(), 1)  # without validation data, the early one
    models = carry.models
    model = tree_map(lambda early, late: torch.where(best == 2, late, early), models["early"], models["late"])
    part = torch.where(best == 0, 0, memory["tuned"]["part"])
    kept = {name: value for name, value in memory.items() if name != "tuned_late"}
    return {}, {**kept, "tuned": {"model": model, "part": part}}


def _expects(shared: Tree, mine: Tree) -> Tree:
    return {}
