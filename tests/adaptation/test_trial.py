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
from fedloom.adaptation.trial import PARTS, SIZES, Trial, judged, trusted
from fedloom.engines.auto import ENGINES


def answers(gains: list[list[float]], plain: float = 0.5, tried: float = 1.0) -> Trial:
    """Clients whose accuracy changes by ``gains`` (clients, parts), alike for all sizes."""
    change = torch.tensor(gains, dtype=torch.float64)[:, None, :].expand(-1, len(SIZES), -1)
    number = len(gains)
    before = torch.full((number, len(SIZES)), plain, dtype=torch.float64)
    return judged(torch.full((number, len(SIZES)), tried), before, plain + change)


def test_the_largest_part_that_is_as_good_as_the_best_is_trusted() -> None:
    """Gains of 3 clients by part: .1 each; .2, .2, .3; 0, .3, .6; -.1, .4, .9.

    Means .1, .233, .3, .4; deviations 0, .0577, .3, .5; less t(.975, 2) = 4.30 times deviation / sqrt 3: .1, .09,
    -.445, -.842. Of the first two, which are clear, the second is better by more than its standard error of .033.
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


def test_chance_is_taken_for_a_gain_once_in_forty() -> None:
    """Of 400 federations of 20 clients whose gains are noise, about 2.5% trust any one part."""
    draw = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(400, 20, 1, generator=draw, dtype=torch.float64).expand(-1, -1, len(PARTS))
    wrong = sum(bool(answers(one.tolist()).trust[0]) for one in noise)
    assert stats.binom.ppf(0.001, 400, 0.025) <= wrong <= stats.binom.ppf(0.999, 400, 0.025)


def test_sizes_that_nobody_has_go_by_the_one_below() -> None:
    right = torch.full((2, len(SIZES), len(PARTS)), 0.9, dtype=torch.float64)
    plain = torch.tensor([[0.5], [0.51]]).expand(-1, len(SIZES))
    some = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0]])  # one alone has enough for the third
    found = judged(some, plain, right)
    assert found.clients.tolist() == [2.0] * 5 and found.trust.tolist() == [1.0] * 5
    assert found.samples.tolist() == [1.0, 5.0, 5.0, 5.0, 5.0]
    nobody = judged(0 * some, plain, right)
    assert not nobody.trust.any() and not nobody.clients.any() and not nobody.samples.any()


def test_newcomers_go_by_the_number_of_their_samples_and_labels_need_no_trust() -> None:
    """Between two sizes by the one that is trusted less."""
    trust = torch.tensor([0.0, 0.5, 1.0, 0.25, 0.75])
    trial = Trial(trust, *torch.zeros(3, 5), torch.tensor(SIZES).float())
    numbers = torch.tensor([1.0, 2.0, 5.0, 6.0, 20.0, 21.0, 80.0, 81.0, 320.0, 500.0])
    found = [trusted(trial, n, 0 * n) for n in numbers]
    assert [float(one.part) for one in found] == [0.0, 0.0, 0.5, 0.5, 1.0, 0.25, 0.25, 0.25, 0.75, 0.75]
    assert [int(one.row) for one in found] == [0, 0, 1, 1, 2, 3, 3, 3, 4, 4]
    assert float(trusted(trial, torch.tensor(4.0), torch.tensor(1.0)).part) == 0.25
    assert float(trusted(trial, torch.tensor(4.0), torch.tensor(4.0)).part) == 1.0


def test_samples_count_no_more_than_participants_could_try() -> None:
    """Estimated from 40 and believed like 5: whether believing 40 is safe nobody has seen."""
    even = torch.ones(len(SIZES))
    trial = Trial(even, even, even, even, torch.tensor([1.0, 5.0, 5.0, 5.0, 5.0]))
    weights = [float(trusted(trial, torch.tensor(n), torch.tensor(0.0)).weight) for n in (1.0, 4.0, 5.0, 40.0, 500.0)]
    assert weights == [1.0, 1.0, 1.0, 0.125, pytest.approx(0.01)]
    assert float(trusted(trial, torch.tensor(40.0), torch.tensor(30.0)).weight) == 0.5


@pytest.mark.parametrize("engine", ENGINES)
def test_a_participant_answers_what_a_newcomer_would_find(engine: str) -> None:
    """By hand, for each rotation and size: estimated from some validation samples, tested on the others."""
    federation, played = settled(engine)
    heard = {}

    def listening(program, shared, mine):
        replies = ask(program, shared, mine)
        heard[program.name] = (shared, mine, replies)
        return replies

    ask = played.session("settling").ask
    PRIOR.settle(played.setup, played.state, listening)
    shared, mine, replies = heard["try_correction"]
    alpha, reference = shared["alpha"], Reference(**shared["reference"])
    one, nothing = torch.tensor(1.0, dtype=torch.float64), torch.zeros_like(alpha)
    for client in federation.roster.values():
        rows, line, reply = torch.as_tensor(client.rows["val"]), mine[client.id], replies[client.id]
        plain = client.model(played.state.base["params"], {}, federation.x[rows])
        scores = line["slope"] * plain + line["bias"]
        assert reply["tried"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]  # of three samples one can be estimated from
        shown = []
        for at in range(3):  # estimated from one, how many of the other two are right?
            found = estimate(scores[at : at + 1], alpha)
            verdict = judge(nothing, found.counts, statistics(scores[at]), one, alpha, reference)
            offset = (line["bias"] + shares(verdict.counts, alpha).log()) * ~verdict.keep_plain
            others = torch.arange(3) != at
            shown.append([
                float(((line["slope"] * plain + part * offset).argmax(-1) == federation.y[rows])[others].double().sum())
                for part in (0.0, *PARTS)
            ])  # fmt: skip
        # four rotations of three samples: the batch's first is twice the one, and which is first is drawn
        each = torch.tensor(shown, dtype=torch.float64)
        answer = torch.cat([reply["plain"][:1], reply["right"][0]])
        assert any(torch.allclose(answer, (each.sum(0) + first) / 8) for first in each)


def test_a_newcomer_keeps_the_plain_predictor_where_the_correction_did_not_serve_the_participants() -> None:
    federation = small_federation(unseen=1, sizes=(9, 4, 13, 7, 5, 8))
    played = play(PRIOR, federation, rounds=1)
    for trust in (0.0, 0.5, 1.0):
        even = torch.full((len(SIZES),), trust, dtype=torch.float64)
        trial = Trial(even, even, even, even, torch.tensor(SIZES).double())
        played.state = played.state._replace(trial=trial._asdict(), bias=torch.tensor([1.0, 0.0, -1.0]).double())
        federation.y[torch.as_tensor(federation.roster["5"].rows["train"])] = -1
        admit(played, "5")
        memory = played.recall("5")
        sent = PRIOR.send(played.setup, played.state, ["5"])
        made = PRIOR.client_deploy(played.home("5"), sent.shared, sent.mine["5"], memory)
        assert float(memory["trust"]) == trust
        whole = played.state.bias + shares(memory["label_counts"], played.state.alpha).log()
        assert torch.equal(made["offset"], trust * whole)
