# SPDX-License-Identifier: Apache-2.0
"""FedDF: one step of distillation on paper, the ensemble, early stopping, several architectures, and FedAvg without."""

from __future__ import annotations

import pytest
import torch

from conftest import play, server_data_like, setup_of, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.feddf import ALGORITHM, State, distilled, ensemble
from fedloom.core.contract import Cohort, ServerData
from fedloom.core.errors import NeedsError
from fedloom.core.trees import PerClient, leaves
from fedloom.models.model import Model
from fedloom.models.spec import parse
from tiny import HAND, Ears, labels

TWO = [[(1, 0)], [(3, 0), (5, 1)]]
ONES = ServerData(torch.ones(4, 1, dtype=torch.float64), None)


def test_one_step_on_paper() -> None:
    """Both classes are as likely, so that bodies stay at 1 and heads move by 0.1 (e_y - p) z: that of the first client
    to (2.05, 1.95); of the second the mean of (1.5, -1.5) and (-2.5, 2.5) is (-0.5, 0.5), to (1.95, 2.05).

    Together they say (2, 2). The average by 1:2 has (2 - 0.05 / 3, 2 + 0.05 / 3): the first score must rise, the second
    fall, and b too, as it takes the second's side. Adam's first step is its rate, 0.001, whatever the slope.
    """
    played = play(ALGORITHM, labels(TWO), rounds=1, server=ONES, server_steps=1, **HAND)
    ((name, params),) = played.state.params.items()
    assert name == "tiny:BodyAndHead"
    wanted = [2 - 0.05 / 3 + 0.001, 2 + 0.05 / 3 - 0.001]
    assert params["top.weight"].flatten().tolist() == pytest.approx(wanted, abs=1e-7)
    assert float(params["body.weight"]) == pytest.approx(0.999, abs=1e-7)
    assert played.diagnostics[0]["steps"] == 1


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed"])
def test_without_steps_it_is_fedavg_with_averaged_statistics(model: str) -> None:
    federation = small_federation((model,))
    ours = play(ALGORITHM, federation, server_steps=0).state
    avg = play(fedavg.ALGORITHM, federation, batchnorm="averaged").state
    for name, value in avg.params.items():
        torch.testing.assert_close(ours.params[model][name], value, rtol=0, atol=1e-14)
    for name, value in avg.buffers.items():
        torch.testing.assert_close(ours.buffers[model][name], value, rtol=0, atol=1e-14)


def test_clients_that_agree_teach_nothing() -> None:
    federation = small_federation()
    start, played = (play(ALGORITHM, federation, rounds=n, local_lr=0.0, server_steps=50) for n in (0, 2))
    for (_, one), (_, other) in zip(leaves(start.state.params), leaves(played.state.params), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_ensemble_is_the_mean_of_the_scores_of_models_with_their_own_statistics() -> None:
    federation, ears = small_federation(("testnets:Normed",)), Ears()
    start = play(ALGORITHM, federation, rounds=0)
    play(ALGORITHM, federation, rounds=1, wrap=ears, server_steps=0)
    (replies,) = ears.replies
    x = start.setup.server_data.x
    found = ensemble(start.setup, start.state, PerClient.of(replies), x)
    model, params = federation.roster["0"].model, start.state.params["testnets:Normed"]
    scores = [
        model({name: params[name] + moved for name, moved in reply["delta"].items()}, reply["buffers"], x)
        for reply in replies.values()
    ]
    torch.testing.assert_close(found, torch.stack(scores).mean(0), rtol=0, atol=1e-12)
    assert not torch.equal(replies["0"]["buffers"]["norm.running_mean"], replies["1"]["buffers"]["norm.running_mean"])


def test_every_client_teaches_the_student_of_every_architecture() -> None:
    """One client a round, of the first architecture; the student of the other learns from it all the same."""
    federation = small_federation(("lenet:kernels=2", "mlp:hidden=5"))
    start, played = (play(ALGORITHM, federation, rounds=n, cohorts=[["0"]], server_steps=20) for n in (0, 1))
    for name in ("lenet:kernels=2", "mlp:hidden=5"):
        assert set(start.state.params) == set(played.state.params)
        before, after = (torch.cat([leaf.flatten() for _, leaf in leaves(one.state.params[name])])
                         for one in (start, played))  # fmt: skip
        assert float((before - after).abs().max()) > 1e-4
    sent = ALGORITHM.send(played.setup, played.state, ["1", "0"])
    assert torch.equal(sent.mine["1"]["params"]["output.bias"], played.state.params["mlp:hidden=5"]["output.bias"])
    assert set(sent.mine["0"]["params"]) == set(played.state.params["lenet:kernels=2"])


def test_the_student_that_is_nearest_on_samples_held_out_is_kept_and_steps_end_without_gain() -> None:
    """A rate at which the student flies away: no look finds it nearer, and the start is given back."""
    federation = small_federation()
    config = ALGORITHM.config(server_steps=1000, server_patience=200, server_lr=50.0)
    setup = setup_of(federation, config)
    model = federation.roster["0"].model
    start = model.init(1), {}
    x = setup.server_data.x
    target = model(start[0], {}, x).softmax(-1)
    calls: list[str] = []

    def counted(name, function, *arguments):
        calls.append(name)
        return function(*arguments)

    object.__setattr__(setup, "replay", counted)
    params, _, when = distilled(setup, model, start, x, target, 1)
    assert when == 0 and params is start[0] and len(calls) == 200


def test_distillation_comes_near_the_ensemble() -> None:
    federation = small_federation()
    setup = setup_of(
        federation, ALGORITHM.config(server_steps=600, server_lr=0.01), server=server_data_like(federation)
    )
    model = federation.roster["0"].model
    x, start, teacher = setup.server_data.x, (model.init(1), {}), model.init(2)
    target = model(teacher, {}, x).softmax(-1)
    params, _, when = distilled(setup, model, start, x, target, 1)
    before, after = ((model(p, {}, x).softmax(-1) - target).abs().max() for p in (start[0], params))
    assert when > 0 and after < before / 3


def test_one_sample_is_too_few_to_hold_any_out() -> None:
    with pytest.raises(NeedsError, match=r"there is 1\. Give --server-data more"):
        play(ALGORITHM, labels(TWO), rounds=1, server=ServerData(ONES.x[:1], None), server_steps=1)


def test_newcomers_get_the_model_of_their_architecture_or_are_told_which_there_are() -> None:
    federation = small_federation(("lenet:kernels=2",), unseen=1)
    played = play(ALGORITHM, federation, rounds=1)
    setup = played.setup.joined_by(federation.models)
    sent = ALGORITHM.admit(setup, played.state, Cohort(1, ("4",)), played.session("admission").ask)
    assert torch.equal(sent.mine["4"]["params"]["fc3.bias"], played.state.params["lenet:kernels=2"]["fc3.bias"])
    other = Model(parse("mlp:hidden=5", (1, 6, 6), 3), dtype=torch.float64)
    with pytest.raises(NeedsError, match="FedDF has models for lenet:kernels=2; client 4 has mlp:hidden=5"):
        ALGORITHM.send(setup.joined_by({"4": other}), played.state, ["4"])


def test_the_state_holds_one_model_per_architecture() -> None:
    played = play(ALGORITHM, small_federation(("lenet:kernels=2", "mlp:hidden=5")), rounds=0)
    assert isinstance(played.state, State) and set(played.state.params) == {"lenet:kernels=2", "mlp:hidden=5"}
