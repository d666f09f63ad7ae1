# SPDX-License-Identifier: Apache-2.0
"""Local training: every client is an ordinary torch loop, and nothing of a model travels."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms.local import ALGORITHM
from tiny import HAND, Ears, lines, torch_steps


def test_two_rounds_on_paper() -> None:
    """From w = 1 at rate 0.1. First client: 1 + 0.1 * 4 = 1.4, then the gradient 2 (1.4 - 3) = -3.2 gives 1.72.

    Second: 1 - 0.1 * 2 = 0.8, then residuals -0.2, 0.8, 0.6 times 2 x are -0.4, 1.6, 2.4, their mean 1.2: 0.68.
    """
    played = play(ALGORITHM, lines(), rounds=2, **HAND)
    ends = [float(played.memory[client]["own"]["line.weight"]) for client in ("0", "1")]
    assert ends == pytest.approx([1.72, 0.68], abs=1e-12)


def test_no_parameter_is_ever_sent() -> None:
    ears = Ears()
    played = play(ALGORITHM, small_federation(("lenet:kernels=2", "mlp:hidden=5")), wrap=ears)
    assert ears.down == set() and ears.up == {"num_samples", "loss"}
    sent = ALGORITHM.send(played.setup, played.state, played.setup.clients)
    assert sent.shared == {} and all(sent.mine[client] == {} for client in played.setup.clients)
    assert played.state == ()


@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_a_client_does_what_a_plain_torch_loop_does_on_the_same_batches(keep: bool, clip: float) -> None:
    federation, ears = small_federation(("lenet:kernels=2", "mlp:hidden=5")), Ears()
    played = play(ALGORITHM, federation, rounds=3, wrap=ears, keep_optimiser=keep, clip=clip, weight_decay=0.01)
    untouched = play(ALGORITHM, federation, rounds=0)
    for client in federation.participants:
        model = federation.roster[client].model
        module = model.module(untouched.recall(client)["own"], {}).train()
        optimiser = None
        for number in range(3):
            if not (keep and optimiser):
                optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
            loss = torch_steps(module, [optimiser], federation, ears.plans[number][client], clip)
            assert float(ears.replies[number][client]["loss"]) == pytest.approx(loss, abs=1e-12)
        for name, value in module.named_parameters():
            torch.testing.assert_close(played.memory[client]["own"][name], value.detach(), rtol=0, atol=1e-12)


def test_clients_start_apart_and_one_that_is_not_asked_stays_where_it_is() -> None:
    federation = small_federation()
    untouched = play(ALGORITHM, federation, rounds=0)
    played = play(ALGORITHM, federation, rounds=1, cohorts=[["0", "1"]])
    first, second, third = (untouched.recall(client)["own"]["output.weight"] for client in ("0", "1", "2"))
    assert not torch.equal(first, second)
    assert not torch.equal(played.memory["0"]["own"]["output.weight"], first)
    assert torch.equal(played.recall("2")["own"]["output.weight"], third)


def test_the_deployed_model_is_the_clients_own() -> None:
    played = play(ALGORITHM, small_federation(("testnets:Normed",)), rounds=1)
    memory = played.memory["3"]
    deployed = ALGORITHM.client_deploy(played.home("3"), {}, {}, memory)
    assert deployed == {"params": memory["own"], "buffers": memory["buffers"]}
    assert int(deployed["buffers"]["norm.num_batches_tracked"]) == 4  # 7 samples: 2 batches in each of 2 passes
