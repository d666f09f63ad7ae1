# SPDX-License-Identifier: Apache-2.0
"""Tensors that are elsewhere: what is done with them is done there, and they are forgotten there too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fedloom.core.optim import Optimiser
from fedloom.core.sharded import Sharded, as_in, dealt, gathered, is_sharded, ranges, through
from fedloom.core.trees import num_bytes, squared_norm
from fedloom.core.wire import decode, encode
from inside import Inside

CPU = torch.device("cpu")
WHOLE = torch.arange(35, dtype=torch.float64).reshape(7, 5).sin()


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.T + bias


def test_rows_are_dealt_evenly_and_come_back() -> None:
    assert ranges(7, 3) == [range(2), range(2, 4), range(4, 7)]
    for number in (1, 2, 3, 9):  # more shards than rows: some have none
        shards = Inside(number)
        there = dealt(shards, WHOLE, CPU)
        assert there.sizes == [len(rows) for rows in ranges(7, number)]
        assert torch.equal(there.whole(), WHOLE)
        assert (there.shape, there.dtype, there.device) == (WHOLE.shape, WHOLE.dtype, CPU)
        assert num_bytes({"w": there}) == 280


def test_optimisers_step_where_the_numbers_are() -> None:
    for optimiser in (Optimiser("adam", 0.1), Optimiser("sgd", 0.1, 0.9, 1e-3, clip=0.5)):
        shards, here = Inside(3), {"w": WHOLE}
        there = {"w": dealt(shards, WHOLE, CPU)}
        states = optimiser.init(here), optimiser.init(there)
        for number in range(3):
            grads = {"w": (WHOLE * number).cos()}
            here, first = optimiser.update(here, grads, states[0])
            there, second = optimiser.update(there, {"w": dealt(shards, grads["w"], CPU)}, states[1])
            states = first, second
        assert is_sharded(states[1])
        assert_close(gathered(there), here, rtol=1e-14, atol=0)
        assert_close(gathered(states[1]), states[0], rtol=1e-14, atol=0)


def test_shards_forget_what_nobody_has() -> None:
    shards = Inside(2)
    there = dealt(shards, WHOLE, CPU)
    alias = there.detach()
    for _ in range(5):
        there = there * 2 + 1
    assert torch.equal(alias.whole(), WHOLE)  # a value: what was made of it is another
    del alias
    there.whole()
    assert [len(shard._parts) for shard in shards.shards] == [1, 1]


def test_gradients_of_a_layer_stay_with_it() -> None:
    weight, bias, x = WHOLE, WHOLE[:, 0].clone(), torch.arange(15, dtype=torch.float64).reshape(3, 5).cos()
    slope = torch.arange(21, dtype=torch.float64).reshape(3, 7).sin()
    wanted = [part.clone().requires_grad_() for part in (x, weight, bias)]
    answer = layer(*wanted)
    expected = torch.autograd.grad(answer, wanted, slope)
    shards = Inside(2)
    own = [x.clone().requires_grad_(), *(dealt(shards, part, CPU).requires_grad_() for part in (weight, bias))]
    with torch.no_grad():
        assert_close(through(layer, *own, cut=False), answer.detach(), rtol=1e-14, atol=0)
    got = through(layer, *own, cut=False)
    assert got.shape == answer.shape and got.isnan().all()  # only gradients are asked for
    grads = torch.autograd.grad(got, own, slope)
    assert [isinstance(grad, Sharded) for grad in grads] == [False, True, True]
    assert_close([grad.whole() if isinstance(grad, Sharded) else grad for grad in grads], list(expected))
    frozen = torch.autograd.grad(through(layer, own[0], own[1].detach(), own[2].detach(), cut=False), own[0], slope)
    assert torch.equal(frozen[0], grads[0])


def test_sums_and_norms_are_of_all() -> None:
    there = dealt(Inside(9), WHOLE, CPU)  # two of the shards have no row
    assert_close(squared_norm({"w": there}), WHOLE.square().sum())
    assert_close(torch._foreach_norm([there, WHOLE], torch.inf), [WHOLE.abs().max()] * 2)
    assert not torch._foreach_norm([there / 0], torch.inf)[0].isfinite()


@pytest.mark.parametrize(
    "wrong",
    [lambda w: w.T, lambda w: w.flatten(), lambda w: w + torch.ones(5), lambda w: w.add_(1), lambda w: w @ w],
    ids=["transposed", "flat", "broadcast", "changed", "product"],
)
def test_nothing_else_is_done(wrong) -> None:
    with pytest.raises(NotImplementedError, match="divided over 2 shards"):
        wrong(dealt(Inside(2), WHOLE, CPU))


def test_a_tree_is_written_as_if_it_were_here_and_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.core.sharded.AT_ONCE", 80)  # two rows
    here = {"a": WHOLE, "b": {"n": torch.tensor(3)}}
    there = {"a": dealt(Inside(2), WHOLE, CPU), "b": here["b"]}
    assert len(list(there["a"].parts())) == 4
    assert encode(there) == encode(here)
    back = as_in(there, decode(encode(there)), CPU)
    assert isinstance(back["a"], Sharded) and not isinstance(back["b"]["n"], Sharded)
    assert torch.equal(back["a"].whole(), WHOLE)
