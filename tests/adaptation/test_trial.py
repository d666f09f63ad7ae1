# SPDX-License-Identifier: Apache-2.0
"""The trial: what participants answer, what follows from it, and that newcomers are held to it."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from adaptation.test_prior import PRIOR, admit, settled
from conftest import play, small_federation
from fedloom.adaptation.checks import Reference, judge, statistics
from fedloom.adaptation.dirichlet import estimate, shares
from fedloom.adaptation.trial import MOST, PARTS, SIZES, Trial, judged, trusted
from fedloom.engines.auto import ENGINES


def answers(gains: list[list[float]], plain: float = 0.5, tried: float = 1.0) -> Trial:
    """Clients whose accuracy changes by ``gains`` (clients, parts), alike for all sizes."""
    change = torch.tensor(gains, dtype=torch.float64)[:, None, :].expand(-1, len(SIZES), -1)
    number = len(gains)
    return judged(
        torch.full((number, len(SIZES)), tried), torch.full((number,), plain, dtype=torch.float64), plain + change
    )


def test_the_largest_part_that_is_as_good_as_the_best_is_trusted() -> None:
    """Gains of 3 clients by part: .1 each; .2, .2, .3; 0, .3, .6; -.1, .4, .9.

    Means .1, .233, .3, .4; deviations 0, .0577, .3, .5; less t(.95, 2) = 2.92 times deviation / sqrt 3: .1, .136,
    -.206, -.443. Of the first two, which are clear, the second is better by more than its standard error of .033.
    """
    found = answers([[0.1, 0.2, 0.0, -0.1], [0.1, 0.2, 0.3, 0.4], [0.1, 0.3, 0.6, 0.9]])
    assert found.trust.tolist() == [PARTS[1]] * len(SIZES)
    assert torch.allclose(found.gain, torch.full_like(found.gain, 0.7 / 3))
    assert abs(float(found.spread[0]) - 0.0577350) < 1e-6 and found.clients.tolist() == [3.0] * len(SIZES)


@pytest.mark.parametrize(
    "gains",
    [
        [[0.0] * 4, [0.0] * 4],  # nothing
        [[-0.1] * 4, [-0.1] * 4, [-0.2] * 4],  # harm
        [[0.3] * 4, [-0.2] * 4, [0.1] * 4],  # for some, and costs others as much
    ],
)
def test_without_a_clear_gain_nothing_is_trusted(gains: list[list[float]]) -> None:
    found = answers(gains)
    assert not found.trust.any()
    assert abs(float(found.gain[0]) - sum(row[-1] for row in gains) / len(gains)) < 1e-12


def test_chance_is_taken_for_a_gain_once_in_twenty() -> None:
    """Of 400 federations of 20 clients whose gains are noise, about 5% trust any one part."""
    draw = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(400, 20, 1, generator=draw, dtype=torch.float64).expand(-1, -1, len(PARTS))
    wrong = sum(bool(answers(one.tolist()).trust[0]) for one in noise)
    assert stats.binom.ppf(0.001, 400, 0.05) <= wrong <= stats.binom.ppf(0.999, 400, 0.05)


def test_sizes_that_nobody_has_go_by_the_one_below() -> None:
    right = torch.full((2, len(SIZES), len(PARTS)), 0.9, dtype=torch.float64)
    found = judged(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([0.5, 0.6]), right)
    assert found.clients.tolist() == [2.0, 2.0, 2.0] and found.trust.tolist() == [1.0] * 3
    nobody = judged(torch.zeros(2, 3), torch.tensor([0.5, 0.6]), right)
    assert not nobody.trust.any() and not nobody.clients.any()


def test_newcomers_go_by_the_number_of_their_samples_and_labels_need_no_trust() -> None:
    trial = Trial(torch.tensor([0.0, 0.5, 1.0]), *torch.zeros(3, 3))
    numbers = torch.tensor([1.0, 9.0, 10.0, 99.0, 100.0, 500.0])
    assert [float(trusted(trial, n, 0 * n)[0]) for n in numbers] == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert float(trusted(trial, torch.tensor(8.0), torch.tensor(2.0))[0]) == 0.25
    assert float(trusted(trial, torch.tensor(8.0), torch.tensor(8.0))[0]) == 1.0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_participant_answers_what_a_newcomer_would_find(engine: str) -> None:
    """By hand, from the scores of its validation samples: 3 each, so that one size is tried and part of them used."""
    federation, played = settled(engine)
    heard = {}

    def listening(program, shared, mine):
        replies = ask(program, shared, mine)
        heard[program.name] = (shared, mine, replies)
        return replies

    ask = played.session("settling").ask
    PRIOR.settle(played.setup, played.state, listening)
    shared, mine, replies = heard["try_correction"]
    for client in federation.roster.values():
        rows = torch.as_tensor(client.rows["val"])
        x, y = federation.x[rows], federation.y[rows]
        plain = client.model(played.state.base["params"], {}, x)
        line, alpha, reply = mine[client.id], shared["alpha"], replies[client.id]
        scores = line["slope"] * plain + line["bias"]
        assert reply["tried"].tolist() == [float(size <= len(rows)) for size in SIZES] and len(rows) <= MOST
        assert float(reply["plain"]) == float((plain.argmax(-1) == y).double().mean())
        found = estimate(scores, alpha)  # by all three, as the sizes from 10 on have it
        number = torch.tensor(float(len(rows)), dtype=torch.float64)
        nothing = torch.zeros_like(found.counts)
        verdict = judge(
            nothing, found.counts, statistics(scores).mean(0), number, alpha, Reference(**shared["reference"])
        )
        offset = (line["bias"] + shares(verdict.counts, alpha).log()) * ~verdict.keep_plain
        for part, right in zip(PARTS, reply["right"][1].tolist()):
            fitted = (line["slope"] * plain + part * offset).argmax(-1)
            assert abs(right - float((fitted == y).double().mean())) < 1e-12


def test_a_newcomer_keeps_the_plain_predictor_where_the_correction_did_not_serve_the_participants() -> None:
    federation = small_federation(unseen=1, sizes=(9, 4, 13, 7, 5, 8))
    played = play(PRIOR, federation, rounds=1)
    for trust in (0.0, 0.5, 1.0):
        even = torch.full((len(SIZES),), trust, dtype=torch.float64)
        trial = Trial(even, even, even, even)
        played.state = played.state._replace(trial=trial._asdict(), bias=torch.tensor([1.0, 0.0, -1.0]).double())
        federation.y[torch.as_tensor(federation.roster["5"].rows["train"])] = -1
        admit(played, "5")
        memory = played.recall("5")
        sent = PRIOR.send(played.setup, played.state, ["5"])
        made = PRIOR.client_deploy(played.home("5"), sent.shared, sent.mine["5"], memory)
        assert float(memory["trust"]) == trust
        whole = played.state.bias + shares(memory["label_counts"], played.state.alpha).log()
        assert torch.equal(made["offset"], trust * whole)
