# SPDX-License-Identifier: Apache-2.0
"""Rows kept beside a large table are read as if they were in it, and no state is changed by those that follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import Played, play, small_federation
from fedloom import algorithms
from fedloom.algorithms.pfedhn import embeddings_of
from fedloom.core.contract import Cohort
from fedloom.core.optim import Optimiser
from fedloom.core.trees import flatten, signature
from fedloom.core.wire import decode, encode
from fedloom.looms import outer

PFEDHN = algorithms.get("pfedhn")
CLIENTS = 200
COHORTS = [["7", "150", "3"], ["150"], ["9"], ["3", "10", "11"], ["7", "199"], ["0", "1", "2", "3", "4"], ["7", "0"]]


@pytest.fixture(autouse=True)
def room_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "ROOM", 4)


def played(**options: Any) -> Played:
    federation = small_federation(sizes=(2,) * CLIENTS)
    return play(PFEDHN, federation, cohorts=COHORTS, rounds=len(COHORTS), embed_dim=3, **options)


def copied(state: Any) -> dict[str, torch.Tensor]:
    return {path: leaf.clone() for path, leaf in flatten(state._asdict()).items()}


@pytest.mark.parametrize("options", [{}, {"server_step": "cohort_mean"}, {"server_momentum": 0.0}], ids=str)
def test_rows_beside_the_table_give_the_bits_of_rows_in_it(options: dict[str, Any], monkeypatch) -> None:
    expected = played(**options)
    assert "recent" not in expected.state.optimiser
    monkeypatch.setattr(outer, "LARGE", 0)
    found = played(**options)
    assert all(torch.equal(found.state.loom[name], value) for name, value in expected.state.loom.items())
    one, other = (embeddings_of(p.setup, p.state, p.setup.clients) for p in (expected, found))
    assert torch.equal(one, other)
    assert not torch.equal(found.state.embeddings, expected.state.embeddings)  # the last rows are not in it yet


@pytest.mark.parametrize("method", ["pfedhn", "pfedhn_pc", "it_pfl_hn"])
@pytest.mark.parametrize("step", ["per_client", "cohort_mean"])
@pytest.mark.parametrize("options", [{}, {"server_momentum": 0.0, "server_weight_decay": 0.0}, {"server_clip": 0.01}])
def test_steps_in_place_as_on_a_gpu_give_the_same_and_leave_the_state_before(
    method: str, step: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, federation = algorithms.get(method), small_federation(("lenet:kernels=2", "mlp:hidden=5"))
    cohorts = [["0", "1", "2"], ["1", "3", "4"], ["2", "0"]]
    plain = play(algorithm, federation, rounds=3, cohorts=cohorts, server_step=step, **options)
    monkeypatch.setattr(outer, "IN_PLACE", ("cpu",))
    scene = play(algorithm, federation, rounds=0, server_step=step, **options)
    state = scene.state
    for number, cohort in enumerate(cohorts, start=1):
        before, kept = state, copied(state)
        session = scene.session(number)
        state, _ = algorithm.round(plain.setup, state, Cohort(number, tuple(cohort)), session.ask)
        scene.memory = session.memory
        assert all(torch.equal(leaf, kept[path]) for path, leaf in flatten(before._asdict()).items())
    for path, leaf in flatten(plain.state._asdict()).items():
        torch.testing.assert_close(flatten(state._asdict())[path], leaf, rtol=0, atol=1e-12)


def test_the_table_is_copied_only_when_there_is_no_room_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "LARGE", 0)
    scene = played()
    state, waiting, copies = PFEDHN.init(scene.setup), [], []
    for number, cohort in enumerate(COHORTS, start=1):
        before, kept = state, copied(state)
        session = scene.session(number)
        state, _ = PFEDHN.round(scene.setup, state, Cohort(number, tuple(cohort)), session.ask)
        assert all(torch.equal(leaf, kept[path]) for path, leaf in flatten(before._asdict()).items())
        assert signature(state._asdict()) == signature(before._asdict())
        rows = state.optimiser["recent"]["at"]
        waiting.append(rows[rows < CLIENTS].tolist())
        copies.append(state.embeddings is not before.embeddings)
    assert waiting == [[3, 7, 150], [3, 7, 150], [3, 7, 9, 150], [], [7, 199], [], [0, 7]]
    assert copies == [False, False, False, True, False, True, False]


def test_a_run_resumed_from_bytes_goes_on_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "LARGE", 0)
    scene = played()
    states = [scene.state, PFEDHN.state(**decode(encode(scene.state._asdict())))]
    after = []
    for state in states:
        session = scene.session(8)
        after.append(flatten(PFEDHN.round(scene.setup, state, Cohort(8, ("7", "8")), session.ask)[0]._asdict()))
    assert all(torch.equal(leaf, after[1][path]) for path, leaf in after[0].items())


def test_tables_that_are_not_learned_or_not_large_have_nothing_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    small = PFEDHN.init(played().setup).optimiser
    monkeypatch.setattr(outer, "LARGE", 0)
    given = play(PFEDHN, small_federation(sizes=(2,) * 8), rounds=2, descriptor="class_shares").state
    assert "recent" not in small and "recent" not in given.optimiser
    assert torch.allclose(given.embeddings.sum(1), torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_a_gradient_laid_out_otherwise_moves_the_right_numbers_in_place_and_stays_as_it_was(clip: float) -> None:
    optimiser = Optimiser("sgd", 0.1, momentum=0.9, weight_decay=0.01, clip=clip)
    draw = torch.Generator().manual_seed(0)
    params = {name: torch.randn(3, 4, generator=draw, dtype=torch.float64) for name in ("weight", "other")}
    wanted, wanted_state = params, optimiser.init(params)
    own, state = ({k: v.clone() for k, v in params.items()}, optimiser.init(params))
    places = dict(own)
    for _ in range(3):
        grads = {name: torch.randn(3, 4, generator=draw, dtype=torch.float64) for name in ("other", "weight")}
        grads["weight"] = grads["weight"].T.contiguous().T
        before = {name: value.clone() for name, value in grads.items()}
        own, state = outer._step_in_place(optimiser, own, grads, state)
        wanted, wanted_state = optimiser.update(wanted, grads, wanted_state)
        assert all(torch.equal(grads[name], before[name]) for name in grads)
    for name in wanted:
        assert own[name] is places[name]
        torch.testing.assert_close(own[name], wanted[name], rtol=1e-10, atol=1e-12)
