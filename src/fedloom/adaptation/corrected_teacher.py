# SPDX-License-Identifier: Apache-2.0
"""A global model that teaches personal ones, corrected for each client: options of ours for MH-pFedHNGD.

``teacher=corrected``: the teacher is the exponential mean of the global model over rounds, and each client adds the
logarithms of its own class shares to its scores, so that it does not spread its answers over classes that the client
has not. ``deploy=mixture``: clients predict with the mean of the class probabilities of that model and of their own.

Sent down: the mean, as a vector, to learn from; for a mixture, to use as well.
Sent up: nothing more.
Kept by the client: how often it has met each label while it trained the global model, once for each time.
Kept by the server: the mean, ``state.mean``: ``{"vector": (K_g,), "rounds": ()}``, or nothing where none is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.adaptation.average import kept_of_past
from fedloom.core.config import option
from fedloom.core.contract import (
    Algorithm,
    Ask,
    Batch,
    Cohort,
    Home,
    Model,
    Program,
    Seeds,
    Sent,
    Setup,
    Woven,
    predict_with_target,
    target_module,
)
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.core.training import LocalConfig
from fedloom.core.trees import ClientId, Tree
from fedloom.core.vectors import from_vector
from fedloom.looms.places import global_network, named_network
from fedloom.models.load import PredictorModule, mixture
from fedloom.programs.distillation import answers_of, log_shares
from fedloom.programs.labels import add_labels, have_labels_counted, label_counts


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(LocalConfig):
    """The options. The method has two more that they are checked against: ``global_model`` and ``global_share``."""

    teacher: Literal["plain", "corrected"] = option(
        "plain",
        "The global model as it was sent (the paper), or its mean over rounds with the logarithms of the client's "
        "class shares added to its scores (ours).",
    )
    teacher_average: float = option(
        0.95, "Of a corrected teacher: what its past counts in the mean after each round; 0: nothing.", low=0, high=1
    )
    deploy: Literal["own", "mixture"] = option(
        "own",
        "What a client predicts with: its own model (the paper), or the mean of its probabilities and those of the "
        "corrected teacher (ours).",
    )

    @property
    def corrects(self) -> bool:
        """Whether the teacher is corrected."""
        return self.teacher == "corrected"

    @property
    def mixes(self) -> bool:
        """Whether clients use the teacher too."""
        return self.deploy == "mixture"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixes:
            _check_mixture(self)


def _check_mixture(config: Any) -> None:
    if not config.corrects:
        raise ConfigError("--deploy mixture is with the corrected teacher; got a plain one. Give --teacher corrected.")
    if not config.global_model:
        raise ConfigError(
            "--deploy mixture has every client run the global model, whose network they must know; got no name. "
            "Give --global-model."
        )
    if config.global_share < 1:
        raise ConfigError(
            f"--deploy mixture has every client run the global model; got --global-share {config.global_share:g}. "
            "Leave one of them out."
        )


def with_teacher(plain: Algorithm) -> Algorithm:
    """``plain`` with what these options change outside of its rounds; for those it has the functions below."""
    assert plain.admit and plain.programs
    handover = plain.handover
    return replace(
        plain,
        init=partial(_init, plain.init),
        send=partial(_send, plain.send),
        first_memory=partial(_first_memory, plain.first_memory),
        client_deploy=partial(_client_deploy, plain.client_deploy),
        predict=_predict,
        module=_module,
        programs=partial(_programs, plain.programs),
        admit=partial(_admit, plain.admit),
        handover=replace(
            handover,
            participants=partial(_handed_on, handover.participants),
            newcomers=partial(_handed_on, handover.newcomers),
        ),
    )


# in rounds


def first_mean(vector: Tensor) -> dict[str, Tensor]:
    """The mean before round 1, of the global model as it begins."""
    return {"vector": vector, "rounds": vector.new_zeros(())}


def moved_mean(config: TeacherConfig, mean: Mapping[str, Tensor], vector: Tensor) -> dict[str, Tensor]:
    """The mean after a round that left the global model at ``vector``."""
    rounds = mean["rounds"] + 1
    past = kept_of_past(rounds, config.teacher_average)
    return {"vector": torch.lerp(vector, mean["vector"], past), "rounds": rounds}


def counting(train: Program) -> Program:
    """``train``, in which the client counts the labels that it meets, on from those that it remembers."""
    return replace(
        train,
        init=partial(_count_init, train.init),
        step=partial(_count_step, train.step),
        final=partial(_count_final, train.final),
    )


class _Counting(NamedTuple):
    inner: Any
    counts: Tensor  # (classes,)


def _count_init(inner: Callable[..., Any], home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Counting:
    return _Counting(inner(home, shared, mine, memory), memory["label_counts"])


def _count_step(inner: Callable[..., Any], home: Home, shared: Tree, carry: _Counting, batch: Batch) -> _Counting:
    return _Counting(inner(home, shared, carry.inner, batch), add_labels(carry.counts, batch))


def _count_final(
    inner: Callable[..., tuple[Tree, Tree]], home: Home, shared: Tree, carry: _Counting, memory: Tree
) -> tuple[Tree, Tree]:
    reply, after = inner(home, shared, carry.inner, memory)
    return reply, {**after, "label_counts": carry.counts}


# outside of rounds: with ``own``, as the method without these options


def _init(inner: Callable[..., Any], setup: Setup[Any]) -> Any:
    network = global_network(setup)
    if setup.config.mixes and network.fresh_buffers():
        raise NeedsError(
            f"The global model {network.spec} has running statistics (BatchNorm), which newcomers have not and which "
            "would not be those of its mean. For --deploy mixture choose a --global-model without BatchNorm."
        )
    return inner(setup)


def _send(inner: Callable[..., Sent], setup: Setup[Any], state: Any, clients: Sequence[ClientId]) -> Sent:
    return _with_mean(setup, state, inner(setup, state, clients))


def _with_mean(setup: Setup[Any], state: Any, sent: Sent) -> Sent:
    """What is ``sent`` for use, and the mean global model for a mixture."""
    return Sent({**sent.shared, "global": state.mean["vector"]}, sent.mine) if setup.config.mixes else sent


def _first_memory(inner: Callable[..., Tree], model: Model, config: Any, seeds: Seeds) -> Tree:
    """No labels have been met, where they are counted."""
    memory = inner(model, config, seeds)
    if not config.corrects:
        return memory
    return {**memory, "label_counts": torch.zeros(model.num_outputs, dtype=model.dtype, device=model.device)}


def _client_deploy(inner: Callable[..., Tree], home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    deployed = inner(home, shared, mine, memory)
    if not home.config.mixes:
        return deployed
    params = from_vector(shared["global"], _network(home).shapes)
    return {**deployed, "global": {"params": params, "offset": log_shares(memory["label_counts"], home.num_samples)}}


def _predict(home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """The client's own scores; of a mixture, the logarithm of the mean of both models' probabilities."""
    own = predict_with_target(home, deployed, x)
    if not home.config.mixes:
        return own
    return mixture(own, answers_of(_network(home), deployed["global"], x), own.new_full((), 0.5))


def _module(home: Home, deployed: Tree) -> nn.Module:
    """The client's network, or both with their mixture."""
    return PredictorModule.of(_predict, home, deployed) if home.config.mixes else target_module(home, deployed)


def _network(home: Home) -> Model:
    """The network of the global model, which the config names."""
    network = named_network(home.config, home.model)
    assert network is not None
    return network


def _programs(inner: Callable[..., Sequence[Program]], config: Any, model: Model, newcomer: bool) -> list[Program]:
    return [*inner(config, model, newcomer), *([label_counts()] if newcomer and config.mixes else [])]


def _admit(inner: Callable[..., Sent], setup: Setup[Any], state: Any, newcomers: Cohort, ask: Ask) -> Sent:
    """For a mixture newcomers also count their labels, and get the mean global model."""
    sent = inner(setup, state, newcomers, ask)
    if not setup.config.mixes:
        return sent
    assert isinstance(sent, Woven)
    have_labels_counted(setup, newcomers.clients, ask)
    embeddings = torch.stack([sent.embeddings[client] for client in newcomers.clients])
    return Woven.of(_with_mean(setup, state, sent), newcomers.clients, embeddings)


def _handed_on(inner: Callable[..., Any], setup: Setup[Any], state: Any) -> Any:
    """The mean is handed on where it is used for more than training."""
    return state._replace(**inner(setup, state)._asdict(), mean=state.mean if setup.config.mixes else {})
