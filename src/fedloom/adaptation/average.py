# SPDX-License-Identifier: Apache-2.0
"""Any method with a model that is averaged over rounds before it is used: ``--average D``.

Training goes on from the last state, as ever. What is evaluated, deployed and exported, and what newcomers are served
from, is the exponential mean of the server's states: mean <- d mean + (1 - d) state after every round. It is iterate
averaging (Polyak and Juditsky 1992). d grows from 2/11 to D as (1 + t) / (10 + t), so that in short runs the first
states do not count for long.

With BatchNorm the running statistics of the mean are averaged like parameters where the method averages them; else each
participant settles its own, which are kept apart from those that training goes on with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Home, Model, Program, Sent, Setup
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.core.trees import ClientId, Params, Tree, tree_map
from fedloom.programs.allowed import programs_of
from fedloom.programs.statistics import settling

SETTLED = "average_buffers"
"""Where a client keeps the mean's running statistics."""


class State(NamedTuple):
    """The method's last state, and the mean of what it declares as ``averaged``."""

    last: Mapping[str, Any]
    mean: Mapping[str, Any]
    rounds: Tensor  # ()


def with_average(algorithm: Algorithm, decay: float) -> Algorithm:
    """``algorithm``, used at the mean of its states."""
    if not algorithm.averaged:
        raise NeedsError(f"{algorithm.name} has no model on the server that could be averaged. Leave out --average.")
    return replace(
        algorithm,
        name=f"{algorithm.name}, averaged",
        state=State,
        init=partial(_init, algorithm),
        send=partial(_send, algorithm),
        round=partial(_round, algorithm, decay),
        settle=partial(_settle, algorithm),
        client_deploy=partial(_client_deploy, algorithm),
        programs=partial(_programs, algorithm),
        restored=partial(_restored, algorithm),
        admit=partial(_admit, algorithm) if algorithm.admit else None,
        global_model=partial(_global_model, algorithm) if algorithm.global_model else None,
        embeddings=partial(_embeddings, algorithm) if algorithm.embeddings else None,
        handover=replace(
            algorithm.handover,
            participants=partial(_handed_on, algorithm, algorithm.handover.participants),
            newcomers=partial(_handed_on, algorithm, algorithm.handover.newcomers),
        ),
    )


def used(algorithm: Algorithm, state: State) -> Any:
    """The state that the method is used at."""
    return algorithm.state(**state.last)._replace(**state.mean)


def _init(algorithm: Algorithm, setup: Setup[Any]) -> State:
    last = algorithm.init(setup)._asdict()
    if missing := sorted(set(algorithm.averaged) - set(last)):
        raise ConfigError(
            f"{algorithm.name} declares {', '.join(missing)} as averaged, which its State does not have; it has "
            f"{', '.join(last) or 'nothing'}. Set averaged in its ALGORITHM to some of these, or to ()."
        )
    rounds = torch.zeros((), dtype=setup.dtype, device=setup.device)
    return State(last, {name: last[name] for name in algorithm.averaged}, rounds)


def _round(
    algorithm: Algorithm, decay: float, setup: Setup[Any], state: State, cohort: Cohort, ask: Ask
) -> tuple[State, Diagnostics]:
    after, diagnostics = algorithm.round(setup, algorithm.state(**state.last), cohort, ask)
    last, rounds = after._asdict(), state.rounds + 1
    keep = kept_of_past(rounds, decay)

    def moved(mean: Tensor, new: Tensor) -> Tensor:  # counters are whole numbers, and go along
        return torch.lerp(new, mean, keep.to(new.dtype)) if new.is_floating_point() else new

    mean = {name: tree_map(moved, state.mean[name], last[name]) for name in algorithm.averaged}
    return State(last, mean, rounds), diagnostics


def kept_of_past(rounds: Tensor, decay: float) -> Tensor:
    """What the past counts in the mean after so many rounds: from 2/11 up to ``decay``."""
    return ((1 + rounds) / (10 + rounds)).clamp(max=decay)


def _send(algorithm: Algorithm, setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    return algorithm.send(setup, used(algorithm, state), clients)


def _settle(algorithm: Algorithm, setup: Setup[Any], state: State, ask: Ask) -> State:
    """As the method settles; where running statistics stay with the clients, they find those of the mean."""
    if algorithm.settle:
        settled = algorithm.settle(setup, used(algorithm, state), ask)._asdict()
        mean = {name: settled[name] for name in algorithm.averaged}
        state = State({**settled, **{name: state.last[name] for name in mean}}, mean, state.rounds)
    sent = _send(algorithm, setup, state, setup.clients)
    if "buffers" not in sent.shared and any(model.fresh_buffers() for model in setup.architectures.values()):
        ask(settling(SETTLED), sent.shared, sent.mine)
    return state


def _client_deploy(algorithm: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """A participant has settled the mean's statistics beside its own; a newcomer has no others."""
    settled = memory.get(SETTLED, memory["buffers"])
    return algorithm.client_deploy(home, shared, mine, {**memory, "buffers": settled})


def _programs(algorithm: Algorithm, config: Any, model: Model, newcomer: bool) -> list[Program]:
    own = programs_of(algorithm, config, model, newcomer)
    return own if newcomer or not model.fresh_buffers() else [*own, settling(SETTLED)]


def _restored(algorithm: Algorithm, fresh: Tree, saved: Tree) -> Tree:
    return {**saved, "last": algorithm.restored(fresh["last"], saved["last"])}


def _admit(algorithm: Algorithm, setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    assert algorithm.admit is not None
    return algorithm.admit(setup, used(algorithm, state), newcomers, ask)


def _global_model(algorithm: Algorithm, setup: Setup[Any], state: State) -> tuple[Model, Params]:
    assert algorithm.global_model is not None
    return algorithm.global_model(setup, used(algorithm, state))


def _embeddings(algorithm: Algorithm, setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Tensor:
    assert algorithm.embeddings is not None
    return algorithm.embeddings(setup, used(algorithm, state), clients)


def _handed_on(algorithm: Algorithm, hand_on: Callable[[Any, Any], Any], setup: Setup[Any], state: State) -> Any:
    """A bundle knows nothing of averages: it has the method's own state, at the mean."""
    return hand_on(setup, used(algorithm, state))
