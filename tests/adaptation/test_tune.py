# SPDX-License-Identifier: Apache-2.0
"""Tuned clients: what is trained, what is chosen, who is left as it was, and that nothing is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fedloom
from conftest import play, small_federation
from fedloom import algorithms
from fedloom.adaptation.tune import EARLY, FEW, HALF, LATE, with_tuning
from fedloom.core.contract import Cohort
from fedloom.core.errors import NeedsError
from fedloom.core.trees import flatten
from fedloom.data.registry import load as load_data
from fedloom.engines.auto import ENGINES
from fedloom.models.load import mixture

FEDAVG = algorithms.get("fedavg")
TUNED = with_tuning(FEDAVG)
DIGITS = load_data("digits")


def settled(engine: str = "sequential", unseen: int = 0, model: str = "mlp:hidden=5"):
    federation = small_federation((model,), unseen=unseen)
    played = play(TUNED, federation, engine, rounds=2)
    heard, session = [], played.session("settling")

    def listening(program, shared, mine):
        replies = session.ask(program, shared, mine)
        heard.append((program, {client: replies[client] for client in replies}))
        return replies

    played.state = TUNED.settle(played.setup, played.state, listening)
    played.memory = session.memory
    return federation, played, heard


def test_the_mixture_is_of_probabilities() -> None:
    one, other = torch.randn(2, 4, 3, dtype=torch.float64)
    for part in (0.0, 0.3, 0.5):
        found = mixture(one, other, torch.tensor(part, dtype=torch.float64)).exp()
        torch.testing.assert_close(found, (1 - part) * one.softmax(-1) + part * other.softmax(-1))
    assert torch.equal(mixture(one, other, torch.zeros((), dtype=torch.float64)), one.log_softmax(-1))


@pytest.mark.parametrize("model", ["mlp:hidden=5", "testnets:Normed", "testnets:Dropping"])
def test_engines_agree(model: str) -> None:
    _, expected, _ = settled(model=model)
    for engine in set(ENGINES) - {"sequential", "ray"}:  # the latter takes seconds to start
        _, played, _ = settled(engine, model=model)
        for client in played.setup.clients:
            one, other = (flatten(p.recall(client)["tuned"]) for p in (expected, played))
            for path in one:
                torch.testing.assert_close(one[path], other[path], atol=1e-8, rtol=0)


def test_nothing_of_it_leaves_the_client() -> None:
    _, _, heard = settled()
    told = {program.name: replies for program, replies in heard}
    assert all(reply == {} for name in ("tune", "choose_tuned") for reply in told[name].values())
    assert [program.name for program, _ in heard][-2:] == ["tune", "choose_tuned"]


def test_the_corrected_model_is_trained_with_the_correction_in_its_loss() -> None:
    """By torch: SGD with momentum on the cross-entropy of slope f(x) + offset, over the batches that the client had."""
    federation, played, heard = settled()
    program = next(p for p, _ in heard if p.name == "tune")
    client = federation.roster["2"]
    sent = FEDAVG.send(played.setup, FEDAVG.state(**played.state.base), ["2"])
    session = played.session("settling")
    session.asks = next(n for n, (p, _) in enumerate(heard, 1) if p.name == "tune") - 1
    prior_sent = TUNED.send(played.setup, played.state, ["2"])
    job = session.job(program, *prior_sent)
    deployed = TUNED.client_deploy(played.home("2"), *prior_sent[:1], prior_sent.mine["2"], played.recall("2"))
    config = played.setup.config
    module = client.model.module(sent.shared["params"], {}).train()
    optimiser = torch.optim.SGD(
        module.parameters(), config.local_lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    kept = {}
    for number, rows in enumerate(played_batches(session, program, prior_sent, "2"), 1):
        optimiser.zero_grad()
        index = torch.as_tensor(rows)
        scores = deployed["slope"] * module(federation.x[index]) + deployed["offset"]
        F.cross_entropy(scores, federation.y[index]).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip)
        optimiser.step()
        kept[number] = {name: value.detach().clone() for name, value in module.named_parameters()}
    assert number == LATE and job.clients == ("2",)
    tuned = played.recall("2")["tuned"]
    at = EARLY if all(torch.allclose(v, tuned["model"]["params"][n]) for n, v in kept[EARLY].items()) else LATE
    for name, value in kept[at].items():
        torch.testing.assert_close(tuned["model"]["params"][name], value, atol=1e-7, rtol=0)


def played_batches(session, program, sent, client):
    """The rows of the batches that a client has in the next ask of the session."""
    session.asks += 1
    return session.job(program, sent.shared, sent.mine).schedule(client).rows


def test_a_client_uses_no_tuned_model_that_its_validation_data_like_less() -> None:
    """With labels there that contradict those of training, some keep the corrected model, and nobody is worse off."""
    federation = small_federation()
    for client in federation.roster.values():
        train, val = (torch.as_tensor(client.rows[split]) for split in ("train", "val"))
        federation.x[val] = federation.x[train[: len(val)]]
        federation.y[val] = (federation.y[train[: len(val)]] + 1) % 3
    played = play(TUNED, federation, rounds=1, local_lr=0.2, clip=0.0)
    session = played.session("settling")
    state = TUNED.settle(played.setup, played.state, session.ask)
    parts = []
    for client in federation.participants:
        memory, home = session.memory[client], played.home(client)
        sent = TUNED.send(played.setup, state, [client])
        made = TUNED.client_deploy(home, sent.shared, sent.mine[client], memory)
        rows = torch.as_tensor(federation.roster[client].rows["val"])
        mixed, alone = (
            F.cross_entropy(TUNED.predict(home, {**made, "part": part}, federation.x[rows]), federation.y[rows])
            for part in (made["part"], torch.zeros_like(made["part"]))
        )
        parts.append(float(made["part"]))
        assert mixed <= alone
    assert set(parts) == {0.0, HALF}


@pytest.mark.parametrize(("labels", "part"), [(0, 0.0), (4, HALF * 4 / (4 + FEW)), (8, HALF * 8 / (8 + FEW))])
def test_a_newcomer_s_tuned_model_counts_by_its_labels(labels: int, part: float) -> None:
    federation = small_federation(unseen=1, sizes=(9, 4, 13, 7, 5, 8))
    played = play(TUNED, federation, rounds=1)
    rows = torch.as_tensor(federation.roster["5"].rows["train"])
    federation.y[rows[labels:]] = -1
    session = played.session("admission")
    sent = TUNED.admit(played.setup, played.state, Cohort(1, ("5",)), session.ask)
    memory = session.recall("5")
    assert abs(float(memory["tuned"]["part"]) - part) < 1e-12
    made = TUNED.client_deploy(played.home("5"), sent.shared, sent.mine["5"], memory)
    outputs = TUNED.predict(played.home("5"), made, federation.x[rows])
    assert outputs.isfinite().all()
    if not labels:
        prior = with_prior_of(played, sent, memory, federation.x[rows])
        assert torch.equal(outputs.argmax(-1), prior.argmax(-1))
        torch.testing.assert_close(outputs, prior.log_softmax(-1))


def with_prior_of(played, sent, memory, x):
    """What ``--adapt prior`` would predict."""
    from fedloom.adaptation.prior import with_prior

    prior = with_prior(FEDAVG)
    made = prior.client_deploy(played.home("5"), sent.shared, sent.mine["5"], memory)
    return prior.predict(played.home("5"), made, x)


def test_other_predictors_than_the_target_network_are_refused() -> None:
    with pytest.raises(NeedsError, match="predicts with more than the client's target network"):
        with_tuning(algorithms.get("hyperfedzero"))


def test_a_run_is_tuned_exported_and_loaded_again(tmp_path: Path) -> None:
    run = fedloom.run(
        "fedavg", clients=6, unseen=1, rounds=4, local_steps=5, local_lr=0.05, model="mlp:hidden=16", adapt="tune",
        out=tmp_path / "run", progress="quiet",
    )  # fmt: skip
    x = torch.as_tensor(DIGITS.x[:9])
    from fedloom.models.load import load_model

    loaded = load_model(run.export("0", folder=tmp_path / "out"), "mlp:hidden=16", tuple(x.shape[1:]), 10)
    torch.testing.assert_close(loaded(x), run.predict("0", x))
    again = fedloom.load(tmp_path / "run")
    assert torch.equal(again.predict("0", x), run.predict("0", x))
    newcomer = again.admit(DIGITS.x[:40], DIGITS.y[:40])
    torch.testing.assert_close(newcomer.model(x), newcomer.predict(x))
