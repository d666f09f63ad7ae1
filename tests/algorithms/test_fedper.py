# SPDX-License-Identifier: Apache-2.0
"""FedPer: body and head on paper; the head stays at home."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedper import ALGORITHM
from fedloom.core.trees import flatten
from tiny import HAND, Ears, headless, lines

TWO = (((1, 3),), ((1, 0), (1, 1), (1, 2)))


def test_one_round_on_paper() -> None:
    """y = h b x from b = 1, h = 2. First client: residual -1, slopes 2 (-1) h = -4 for b and 2 (-1) b = -2 for h.

    Second: residuals 2, 1, 0, their mean 1, slopes 4 and 2. At rate 0.1 the bodies are 1.4 and 0.6, the heads 2.2 and
    1.8; the common body is 1 + 0.4 / 4 - 0.4 * 3 / 4 = 0.8, and the first client predicts 0.8 * 2.2 = 1.76 at x = 1.
    """
    federation = lines(TWO, "tiny:BodyAndHead")
    played = play(ALGORITHM, federation, rounds=1, **HAND)
    assert float(played.state.body["body.weight"]) == pytest.approx(0.8, abs=1e-12)
    heads = [float(played.memory[client]["own"]["top.weight"]) for client in ("0", "1")]
    assert heads == pytest.approx([2.2, 1.8], abs=1e-12)
    sent = ALGORITHM.send(played.setup, played.state, ("0",))
    deployed = ALGORITHM.client_deploy(None, sent.shared, sent.mine["0"], played.recall("0"))
    home = played.home("0")
    outputs = ALGORITHM.predict(home, deployed, torch.ones(1, 1, dtype=torch.float64))
    assert float(outputs) == pytest.approx(1.76, abs=1e-12)


def test_the_second_round_puts_the_kept_head_on_the_common_body() -> None:
    """First client, alone: b = 0.8, h = 2.2, residual -1.24, slopes -5.456 and -1.984: b = 1.3456, h = 2.3984."""
    federation = lines(TWO, "tiny:BodyAndHead")
    played = play(ALGORITHM, federation, rounds=2, cohorts=[["0", "1"], ["0"]], **HAND)
    assert float(played.state.body["body.weight"]) == pytest.approx(1.3456, abs=1e-12)
    assert float(played.memory["0"]["own"]["top.weight"]) == pytest.approx(2.3984, abs=1e-12)
    assert float(played.memory["1"]["own"]["top.weight"]) == pytest.approx(1.8, abs=1e-12)


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed"])
def test_with_an_empty_head_it_is_fedavg(model: str) -> None:
    federation = headless(small_federation((model,)))
    per, avg = (play(method, federation, rounds=3) for method in (ALGORITHM, fedavg.ALGORITHM))
    assert per.state.body.keys() == avg.state.params.keys()
    assert all(torch.equal(per.state.body[name], value) for name, value in avg.state.params.items())
    for client in federation.participants:
        own = flatten(per.memory[client]["buffers"])
        assert all(torch.equal(own[name], value) for name, value in avg.memory[client]["buffers"].items())


def test_the_head_is_in_nothing_that_is_sent() -> None:
    federation, ears = small_federation(("lenet:kernels=2",)), Ears()
    played = play(ALGORITHM, federation, wrap=ears)
    model = federation.roster["0"].model
    body = {name for name in model.shapes if not name.startswith("fc3.")}
    assert len(body) == len(model.shapes) - 2
    assert ears.down == {f"params/{name}" for name in body}
    assert ears.up == {f"delta/{name}" for name in body} | {"num_samples", "loss"}
    sent = ALGORITHM.send(played.setup, played.state, federation.participants)
    assert set(flatten(sent.shared)) == ears.down and all(sent.mine[c] == {} for c in federation.participants)


def test_heads_start_apart_and_the_body_starts_where_fedavgs_does() -> None:
    federation = small_federation()
    played, avg = (play(method, federation, rounds=0) for method in (ALGORITHM, fedavg.ALGORITHM))
    heads = [played.recall(client)["own"]["output.weight"] for client in ("0", "1")]
    assert not torch.equal(*heads)
    assert all(torch.equal(value, avg.state.params[name]) for name, value in played.state.body.items())
