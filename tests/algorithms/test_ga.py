# SPDX-License-Identifier: Apache-2.0
"""GA: gaps and weights on paper, who keeps a weight, and what the clients compare."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import play, setup_of, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.ga import ALGORITHM, adjusted
from fedloom.clients.federation import Federation
from fedloom.core.trees import PerClient
from tiny import HAND, POINTS, Ears, lines

THREE = (*POINTS, ((1, 1),))


def validated(federation: Federation) -> Federation:
    """The federation with its training data to validate on."""
    for client in federation.roster.values():
        client.rows["val"] = client.rows["train"]
    return federation


def told(gaps: dict[str, float], samples: dict[str, float]) -> PerClient:
    own = [torch.tensor([7.0] * len(gaps)), torch.tensor(list(gaps.values())), torch.tensor(list(samples.values()))]
    reply = {"own_loss": own[0], "loss": own[0] + own[1], "samples": own[2]}
    return PerClient([(list(gaps), {name: value.double() for name, value in reply.items()})])


def after(
    gaps: dict[str, float], before: list[float], samples: dict[str, float] | None = None, number: int = 1
) -> list[float]:
    setup = setup_of(lines(THREE), ALGORITHM.config(), rounds=4)
    weights, _ = adjusted(setup, torch.tensor(before).double(), told(gaps, samples or dict.fromkeys(gaps, 1.0)), number)
    return weights.tolist()


EVEN = [1 / 3] * 3


def test_weights_on_paper() -> None:
    """Mean gap 0.2, the others 0.3 off: a third, minus and plus d = 0.2. In round 3 of 4 it is half of that."""
    gaps = {"0": 0.2, "1": -0.1, "2": 0.5}
    assert after(gaps, EVEN) == pytest.approx([1 / 3, 1 / 3 - 0.2, 1 / 3 + 0.2], abs=1e-6)
    assert after(gaps, EVEN, number=3) == pytest.approx([1 / 3, 1 / 3 - 0.1, 1 / 3 + 0.1], abs=1e-6)


def test_a_weight_is_not_negative_and_the_sum_stays() -> None:
    """From 0.1, 0.1, 0.8 with gaps -1, 0, 1: -0.1, 0.1, 1.0 is cut to 0, 0.1, 1.0, and divided by 1.1."""
    found = after({"0": -1.0, "1": 0.0, "2": 1.0}, [0.1, 0.1, 0.8])
    assert found == pytest.approx([0, 0.1 / 1.1, 1 / 1.1], abs=1e-6)


def test_equal_gaps_change_nothing() -> None:
    assert after({"0": 0.3, "1": 0.3, "2": 0.3}, [0.2, 0.3, 0.5]) == pytest.approx([0.2, 0.3, 0.5], abs=1e-6)


def test_those_who_answered_share_what_they_had() -> None:
    """Gaps 0.1 and 0.5 with the weights 0.2 and 0.5: 0 and 0.7, whose sum is theirs. The third keeps its 0.3."""
    found = after({"0": 0.1, "2": 0.5}, [0.2, 0.3, 0.5])
    assert found == pytest.approx([0.0, 0.3, 0.7], abs=1e-6)


def test_a_client_without_validation_samples_keeps_its_weight() -> None:
    found = after({"0": 0.1, "1": 0.0, "2": 0.5}, [0.2, 0.3, 0.5], {"0": 2.0, "1": 0.0, "2": 9.0})
    assert found == pytest.approx([0.0, 0.3, 0.7], abs=1e-6)
    assert after({"0": 0.1, "1": 0.2}, EVEN, {"0": 0.0, "1": 0.0}) == pytest.approx(EVEN, abs=1e-6)


def test_two_rounds_on_paper() -> None:
    """Validated on what they train on. Trained to 1.4 and 0.8, equal weights: 1.1.

    First client: (1.1 - 3)^2 - (1.4 - 3)^2 = 3.61 - 2.56 = 1.05. Second: mean of 0.01, 1.21, 1.44 less mean of 0.04,
    0.64, 0.36: (2.66 - 1.04) / 3 = 0.54. So 0.7 and 0.3. Round 2: 1.48 and 0.86, w = 0.7 * 1.48 + 0.3 * 0.86 = 1.294.
    Gaps 1.706^2 - 1.52^2 = 0.600036 and (4.282616 - 1.2776) / 3 = 1.001672: half of d the other way, 0.6 and 0.4.
    """
    one = play(ALGORITHM, validated(lines()), rounds=1, **HAND)
    assert float(one.state.params["line.weight"]) == pytest.approx(1.1, abs=1e-12)
    assert one.state.weights.tolist() == pytest.approx([0.7, 0.3], abs=1e-12)
    assert float(one.diagnostics[0]["gap"]) == pytest.approx(0.795, abs=1e-12)
    two = play(ALGORITHM, validated(lines()), rounds=2, **HAND)
    assert float(two.state.params["line.weight"]) == pytest.approx(1.294, abs=1e-12)
    assert two.state.weights.tolist() == pytest.approx([0.6, 0.4], abs=1e-12)
    assert float(two.diagnostics[1]["gap"]) == pytest.approx((0.600036 + 3.005016 / 3) / 2, abs=1e-12)


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
def test_without_steps_it_is_fedavg_with_equal_weights(batchnorm: str) -> None:
    federation = small_federation(("testnets:Normed",), sizes=(6, 6, 6))
    one, other = (
        play(method, federation, rounds=3, batchnorm=batchnorm, **extra)
        for method, extra in ((ALGORITHM, {"weight_step": 0.0}), (fedavg.ALGORITHM, {}))
    )
    for branch in ("params", "buffers"):
        for name, value in getattr(other.state, branch).items():
            torch.testing.assert_close(getattr(one.state, branch)[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
def test_both_models_are_tried_with_their_own_statistics(batchnorm: str) -> None:
    federation, ears = small_federation(("testnets:Normed",)), Ears()
    played = play(ALGORITHM, federation, rounds=1, wrap=ears, batchnorm=batchnorm)
    model, start = federation.roster["0"].model, ALGORITHM.init(played.setup).params
    rows = federation.roster["0"].rows["val"]
    x, y, buffers = federation.x[rows], federation.y[rows], played.memory["0"]["buffers"]
    trained = {name: start[name] + change for name, change in ears.replies[0]["0"]["delta"].items()}
    common = played.state.buffers if batchnorm == "averaged" else buffers
    losses = [
        float(torch.nn.functional.cross_entropy(model(params, statistics, x), y))
        for params, statistics in ((trained, buffers), (played.state.params, common))
    ]
    reply = ears.replies[1]["0"]
    assert [float(reply["own_loss"]), float(reply["loss"])] == pytest.approx(losses, abs=1e-12)
    assert int(reply["samples"]) == 3


def test_the_trained_model_is_kept_between_the_two_asks_only() -> None:
    ears = Ears()
    played = play(ALGORITHM, small_federation(), rounds=1, wrap=ears)
    assert ears.programs == ["ga.train", "ga.compare"]
    assert all(set(played.memory[client]) == {"buffers"} for client in played.setup.clients)
    assert {path for path in ears.up if not path.startswith("delta/")} == {
        "num_samples", "loss", "own_loss", "samples"
    }  # fmt: skip


def test_a_client_that_did_not_train_is_not_asked_to_compare() -> None:
    federation, ears = small_federation(), Ears()
    federation.x[federation.roster["1"].rows["train"]] = float("nan")
    played = play(ALGORITHM, federation, rounds=1, wrap=ears)
    assert ears.asked[1] == ["0", "2", "3", "4"]
    assert float(played.state.weights[1]) == pytest.approx(0.2, abs=1e-12)
    assert float(played.state.weights.sum()) == pytest.approx(1.0, abs=1e-12)


def test_where_the_length_of_a_run_is_not_known_its_first_step_is_whole() -> None:
    setup = replace(setup_of(lines(THREE), ALGORITHM.config()), rounds=0)
    gaps = told({"0": 0.2, "1": -0.1, "2": 0.5}, dict.fromkeys("012", 1.0))
    weights, _ = adjusted(setup, torch.tensor(EVEN).double(), gaps, 1)
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 3 - 0.2, 1 / 3 + 0.2], abs=1e-6)
