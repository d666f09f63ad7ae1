# SPDX-License-Identifier: Apache-2.0
"""FedAvg: the weighted mean on paper, and what becomes of running statistics."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms.fedavg import ALGORITHM
from fedloom.core.contract import Cohort
from tiny import HAND, Ears, lines

APART = (((0, 0), (2, 1)), ((0, 1), (3, 0), (6, 1)))
"""Two clients whose x have the means 1 and 3 and the unbiased variances 2 and 9."""


def test_one_round_on_paper() -> None:
    """Gradients -4 and 2 at rate 0.1: changes 0.4 and -0.2, weights 1/4 and 3/4: 1 + 0.1 - 0.15 = 0.95."""
    played = play(ALGORITHM, lines(), rounds=1, **HAND)
    assert float(played.state.params["line.weight"]) == pytest.approx(0.95, abs=1e-12)


def test_only_the_cohort_has_weight() -> None:
    """The second client alone, though it has 3 of 4 samples, has the weight 1: 1 - 0.2 = 0.8."""
    played = play(ALGORITHM, lines(), rounds=1, cohorts=[["1"]], **HAND)
    assert float(played.state.params["line.weight"]) == pytest.approx(0.8, abs=1e-12)


def test_with_one_client_it_is_plain_sgd() -> None:
    """w <- w - 0.1 * 2 (w - 3): 1, 1.4, 1.72, 1.976."""
    played = play(ALGORITHM, lines([[(1, 3)]]), rounds=3, **HAND)
    assert float(played.state.params["line.weight"]) == pytest.approx(1.976, abs=1e-12)


def test_averaged_running_statistics_are_weighted_by_samples_and_deployed() -> None:
    """Momentum 0.1 from mean 0 and variance 1: means 0.1 and 0.3, variances 0.9 + 0.2 = 1.1 and 0.9 + 0.9 = 1.8.

    Weights 2/5 and 3/5: mean 0.04 + 0.18 = 0.22, variance 0.44 + 1.08 = 1.52. The second round, with the first client
    alone, starts from these and not from its own: mean 0.198 + 0.1 = 0.298, variance 1.368 + 0.2 = 1.568.
    """
    federation = lines(APART, "tiny:NormedLine")
    first, second = (
        play(ALGORITHM, federation, rounds=n, cohorts=[["0", "1"], ["0"]], batchnorm="averaged", **HAND) for n in (1, 2)
    )
    assert float(first.state.buffers["norm.running_mean"]) == pytest.approx(0.22, abs=1e-12)
    assert float(first.state.buffers["norm.running_var"]) == pytest.approx(1.52, abs=1e-12)
    assert float(second.state.buffers["norm.running_mean"]) == pytest.approx(0.298, abs=1e-12)
    assert float(second.state.buffers["norm.running_var"]) == pytest.approx(1.568, abs=1e-12)
    sent = ALGORITHM.send(first.setup, first.state, ("0",))
    deployed = ALGORITHM.client_deploy(None, sent.shared, sent.mine["0"], first.recall("0"))
    assert deployed == {"params": first.state.params, "buffers": first.state.buffers}


def test_local_running_statistics_stay_with_the_client() -> None:
    """As above without the mean: 0.1 and 0.3 after one round, 0.09 + 0.1 = 0.19 and 0.27 + 0.3 = 0.57 after two."""
    federation, ears = lines(APART, "tiny:NormedLine"), Ears()
    played = play(ALGORITHM, federation, rounds=2, wrap=ears, **HAND)
    own = [float(played.memory[client]["buffers"]["norm.running_mean"]) for client in ("0", "1")]
    assert own == pytest.approx([0.19, 0.57], abs=1e-12)
    assert not [path for path in ears.down | ears.up if "running" in path or "tracked" in path]
    sent = ALGORITHM.send(played.setup, played.state, ("1",))
    deployed = ALGORITHM.client_deploy(None, sent.shared, sent.mine["1"], played.recall("1"))
    assert float(deployed["buffers"]["norm.running_mean"]) == pytest.approx(0.57, abs=1e-12)


@pytest.mark.parametrize("sizes", [(3, 7), (2, 2, 10), (2, 9, 10), (9, 4, 13, 7, 5)])
def test_averaged_counters_lose_nothing_to_rounding(sizes: tuple[int, ...]) -> None:
    """Everybody has counted 3 batches: the mean is 3, in whole numbers, though 0.3 * 3 + 0.7 * 3 < 3 in floats."""
    federation = small_federation(("testnets:Normed",), sizes=sizes)
    played = play(ALGORITHM, federation, rounds=3, batchnorm="averaged", local_epochs=1, batch_size=99)
    counter = played.state.buffers["norm.num_batches_tracked"]
    assert counter.dtype == torch.int64 and int(counter) == 3


def test_a_newcomer_gets_the_global_model_without_being_asked() -> None:
    federation = small_federation(unseen=2)
    played = play(ALGORITHM, federation, rounds=1)
    session = played.session("admission")
    sent = ALGORITHM.admit(played.setup, played.state, Cohort(1, federation.unseen), session.ask)
    assert sent.shared["params"] is played.state.params and list(sent.mine) == ["3", "4"]
    assert session.stats.asked == 0
