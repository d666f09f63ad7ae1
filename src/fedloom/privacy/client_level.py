# SPDX-License-Identifier: Apache-2.0
"""Differential privacy for whole clients, ``--dp-noise``: of methods whose server needs only a mean, and of looms.

McMahan, Ramage, Talwar, Zhang: Learning differentially private recurrent language models. ICLR 2018 (arXiv:1710.06963).
The bound that follows a quantile: Andrew, Thakkar, McMahan, Ramaswamy: Differentially private learning with adaptive
clipping. NeurIPS 2021 (arXiv:1905.03871).

The server, which is trusted, shortens each reply to norm C at most, adds them up, adds Gaussian noise of deviation
z C, and divides by the number of clients that a round has on average. The method gets this one mean as if one client
had replied: neither numbers of samples, nor losses, nor how many answered reach its state. What is made public is the
server's state, round by round; what z amounts to is worked out by ``privacy.ledger``.

A method that steps a loom once a round on the mean of what it pulls back through it (``Algorithm.one_step``) has all of
this done to the clients' gradients of the loom, and only to those: a client's embedding takes exact steps along its own
reply. What others learn of a client, whether they see the loom or the models woven for them, is then private (joint
differential privacy; Kearns, Pai, Roth, Ullman, ITCS 2014, arXiv:1207.4084; its billboard lemma: Hsu, Huang, Roth,
Roughgarden, Wu, STOC 2014, arXiv:1311.2828). Its own model need not be hidden from the client itself.

Symbols: z: ``noise``, C: ``State.clip``, gamma: ``quantile``; with it, sigma_b: ``SHARE_NOISE`` of a round's clients.

In a simulation the noise follows from the seed: it shows what the guarantee costs, and gives it to nobody who knows the
seed. Between machines it comes from the operating system.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Program, Setup
from fedloom.core.errors import NeedsError
from fedloom.core.random import Fresh, Key, fold, key, normal
from fedloom.core.trees import ClientId, PerClient, Tree, leaves, tree_map

SHARE_NOISE = 0.05
"""Deviation of the noise on how many replies were shorter than the bound, in clients of a round (Andrew et al.)."""
BOUND_RATE = 0.2
"""How fast the bound follows its quantile (Andrew et al.)."""
TOLD = {"num_samples", "loss"}
"""What replies say besides, which goes no further."""


@dataclass(frozen=True)
class ClientPrivacy:
    """How much is hidden, and from whom."""

    clip: float
    """The largest norm of a reply, C; where it follows a quantile, the first."""
    noise: float
    """The deviation of the noise on a sum of replies, in units of the bound, z."""
    quantile: float = 0.0
    """The share of replies that the bound is to be above, gamma; 0: the bound stays."""
    secret: bool = False
    """Noise comes from the operating system, not from the seed."""


def with_client_privacy(algorithm: Algorithm, how: ClientPrivacy) -> Algorithm:
    """``algorithm``, whose rounds make public nothing but noised sums over clients."""
    if not algorithm.means and not algorithm.one_step:
        raise NeedsError(
            f"{algorithm.name} uses what single clients reply, and --dp-noise hides that: it is for methods that need "
            'only a mean over clients. `fedloom methods "only means"` lists them.'
        )
    handover = algorithm.handover
    return replace(
        algorithm,
        name=f"{algorithm.name}, private clients",
        state=namedtuple("State", (*_fields(algorithm), "clip")),
        init=partial(_init, algorithm, how),
        round=partial(_round if algorithm.means else _round_of_loom, algorithm, how),
        settle=partial(_settle, algorithm) if algorithm.settle else None,
        handover=replace(
            handover,
            participants=partial(_handed_on, algorithm, handover.participants),
            newcomers=partial(_handed_on, algorithm, handover.newcomers),
        ),
    )


def noise_on_replies(how: ClientPrivacy, clients: float) -> float:
    """z, less what the noise on the quantile hides already: both together are as one of z (Andrew et al., thm 1)."""
    if not how.quantile:
        return how.noise
    rest = how.noise**-2 - (2 * SHARE_NOISE * clients) ** -2
    if rest <= 0:
        raise NeedsError(
            f"A bound that follows a quantile needs more than {how.noise / (2 * SHARE_NOISE):.0f} clients in a round "
            f"with --dp-noise {how.noise:g}; there are {clients:g}. Leave out --dp-quantile, or give a larger --cohort."
        )
    return float(rest**-0.5)


def _fields(algorithm: Algorithm) -> tuple[str, ...]:
    return algorithm.state._fields  # type: ignore[attr-defined,no-any-return]


def _init(algorithm: Algorithm, how: ClientPrivacy, setup: Setup[Any]) -> Any:
    if algorithm.one_step and not algorithm.one_step(setup.config):
        raise NeedsError(
            f"{algorithm.name} makes a step of its own for each reply here, and a step along a single reply hides "
            "nothing of it. Give --server-step cohort_mean and a --cohort as large as can be."
        )
    clip = torch.tensor(how.clip, dtype=setup.dtype, device=setup.device)
    return _with(algorithm.init(setup), clip)


def _with(state: Any, clip: Tensor) -> Any:
    """The method's state, which may have a bound already, with this one."""
    fields = {**state._asdict(), "clip": clip}
    return namedtuple("State", list(fields))(**fields)


def _settle(algorithm: Algorithm, setup: Setup[Any], state: Any, ask: Ask) -> Any:
    assert algorithm.settle is not None

    def silent(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        more = sorted(set(program.expects(shared, mine[next(iter(mine))])) - TOLD)
        if more:
            raise NeedsError(
                f"Clients of {algorithm.name} tell {', '.join(more)} between rounds here, which --dp-noise does not "
                "hide. Choose another method, or a --model without normalisation layers."
            )
        return ask(program, shared, mine)

    return _with(algorithm.settle(setup, state, silent), state.clip)


def _handed_on(algorithm: Algorithm, hand_on: Callable[[Any, Any], Any], setup: Setup[Any], state: Any) -> Any:
    """A bundle knows nothing of bounds: it has the method's own state."""
    own = algorithm.state(**{name: getattr(state, name) for name in _fields(algorithm)})
    return hand_on(setup, own)


def _round(
    algorithm: Algorithm, how: ClientPrivacy, setup: Setup[Any], state: Any, cohort: Cohort, ask: Ask
) -> tuple[Any, Diagnostics]:
    """The method's round, with one noised mean in the place of all replies."""
    clip, moved = state.clip, list[Tensor]()
    # nobody was drawn: the noise alone is what the others could have added nothing to
    clients = cohort.clients or setup.clients[:1]

    def private(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        first = next(iter(mine))
        like = program.expects(shared, mine[first])
        _check(algorithm, program, like, again=bool(moved))
        wanted = {name: like[name] for name in algorithm.means}
        replies = ask(program, shared, mine) if cohort.clients else PerClient(())
        mean, bound = _noised_mean(how, setup, cohort, replies, wanted, clip)
        moved.append(bound)
        number = clip.new_ones(1)
        return PerClient([([first], {**tree_map(lambda leaf: leaf[None], mean), "num_samples": number,
                                     "loss": torch.zeros_like(number)})])  # fmt: skip

    after, _ = algorithm.round(setup, state, cohort._replace(clients=clients), private)
    return _with(after, moved[0]), {"clip": clip}


def _round_of_loom(
    algorithm: Algorithm, how: ClientPrivacy, setup: Setup[Any], state: Any, cohort: Cohort, ask: Ask
) -> tuple[Any, Diagnostics]:
    """The method's round, whose step of the loom is on one noised mean; embeddings take exact steps."""
    clip, moved, asked = state.clip, list[Tensor](), list[float]()
    clients = cohort.clients or setup.clients[:1]

    def heard(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        like = program.expects(shared, mine[clients[0]])
        if asked or "delta" not in like:
            raise NeedsError(
                f"{algorithm.name} asks {program.name} besides one change a round, which --dp-noise does not account "
                "for. Choose another method, or embeddings that are learned."
            )
        if cohort.clients:
            replies = ask(program, shared, mine)
        else:  # nobody was drawn: a client that changes nothing, so that there is noise alone
            replies = PerClient([(clients, tree_map(lambda leaf: torch.zeros_like(leaf)[None], like))])
        # an embedding steps along its share of the mean; how many answered would tell others of each of them
        asked.append(len(replies) / _expected(cohort))
        return PerClient(
            (some, {**tree, "delta": tree_map(lambda leaf: leaf * asked[0], tree["delta"])})
            for some, tree in replies.groups
        )

    def combine(some: Sequence[ClientId], gradients: Tensor) -> Tensor:
        replies = PerClient([(some, {"gradient": gradients / asked[0]})])
        mean, bound = _noised_mean(how, setup, cohort, replies, {"gradient": gradients[0]}, clip)
        moved.append(bound)
        noised: Tensor = mean["gradient"]
        return noised

    after, _ = algorithm.round(replace(setup, combine=combine), state, cohort._replace(clients=clients), heard)
    return _with(after, moved[0]), {"clip": clip}


def _expected(cohort: Cohort) -> float:
    """How many clients a round has on average."""
    return float(cohort.size or len(cohort.clients))


def _noised_mean(
    how: ClientPrivacy, setup: Setup[Any], cohort: Cohort, replies: PerClient, like: Tree, clip: Tensor
) -> tuple[Tree, Tensor]:
    """The noised sum of the replies, none longer than ``clip``, divided by how many there are on average; and the bound
    of the next round."""
    drawn: Key = Fresh(setup.device) if how.secret else key(setup.seed, cohort.round, "privacy").to(setup.device)
    expected = _expected(cohort)
    spread = noise_on_replies(how, expected)
    total, below = _sum(replies, like, clip)
    names = [path for path, _ in leaves(total)]
    noise = iter([fold(drawn, number) for number in range(len(names) + 1)])

    def noised(leaf: Tensor) -> Tensor:
        drawn_for_it = normal(next(noise), tuple(leaf.shape), leaf.dtype)
        return torch.add(leaf, spread * clip * drawn_for_it) / expected

    mean: Tree = tree_map(noised, total)
    share = 0.5 + (below + SHARE_NOISE * expected * normal(next(noise), (), clip.dtype)) / expected
    return mean, clip * torch.exp(-BOUND_RATE * (share - how.quantile)) if how.quantile else clip


def _check(algorithm: Algorithm, program: Program, like: Tree, again: bool) -> None:
    more = sorted(set(like) - {*algorithm.means, *TOLD})
    if more:
        raise NeedsError(
            f"Clients of {algorithm.name} reply with {', '.join(more)} here, which has no bound, so that --dp-noise "
            "cannot hide it. With BatchNorm, leave running statistics with the clients: --batchnorm local."
        )
    if again or not set(algorithm.means) <= set(like):
        raise NeedsError(
            f"{algorithm.name} asks {program.name} besides one mean a round, which --dp-noise does not account for. "
            "Choose another method."
        )


def _sum(replies: PerClient, like: Tree, clip: Tensor) -> tuple[Tree, Tensor]:
    """The sum of the replies, none longer than ``clip``; and how many were shorter, counted from -1/2 each."""
    total: Tree = tree_map(torch.zeros_like, like)
    below = torch.zeros_like(clip)
    for clients, tree in replies.groups:
        kept = {name: tree[name] for name in like}
        norms = _norms(kept, len(clients))
        scale = (clip / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
        total = tree_map(
            lambda so_far, leaf, scale=scale: so_far + torch.tensordot(scale.to(leaf.dtype), leaf, dims=1), total, kept
        )
        below = below + ((norms <= clip).to(clip.dtype) - 0.5).sum()
    return total, below


def _norms(tree: Tree, number: int) -> Tensor:
    """The Euclidean norm of each client's reply: (clients,)."""
    parts: Sequence[Tensor] = [leaf.reshape(number, -1).square().sum(1) for _, leaf in leaves(tree)]
    return torch.stack(list(parts)).sum(0).sqrt()
