# SPDX-License-Identifier: Apache-2.0
"""The report on an admission: what it says, and that what it says was done."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.adaptation.report import report
from fedloom.core.task import CLASSIFICATION
from fedloom.data.registry import load as load_data
from fedloom.training.loop import better

DIGITS = load_data("digits")
SKEWED = {"clients": 16, "rounds": 30, "cohort": 10, "local_steps": 10, "local_lr": 0.05, "model": "mlp:hidden=32"}


def memory_of(
    counts,
    weight: float = 1.0,
    misfit: float = 1.0,
    trust: float = 1.0,
    labelled: int = 0,
    gain=(0.2, 0.1, 9),
    most: float = 1.0,
):
    tensors = {
        "gain": gain[0],
        "spread": gain[1],
        "clients": float(gain[2]),
        "evidence": torch.tensor(counts),
        "weight": weight * most,
        "most": most,
        "misfit": misfit,
        "ratio": 30.0,
        "labelled": labelled,
    }
    found = {name: torch.as_tensor(value) for name, value in tensors.items()}
    return {"label_counts": torch.tensor(counts), "trust": torch.tensor(trust), "admission": found}


def told(memory, samples: int = 20, known: float = 100.0):
    return report(memory, torch.tensor([0.5, 0.5]), {"samples": torch.tensor(known)}, samples, ("cat", "dog"))


@pytest.mark.parametrize(
    ("memory", "decision", "words"),
    [
        (memory_of([18.0, 2.0]), "corrected", "found in 20 unlabelled samples, which differ from the federation's"),
        (memory_of([18.0, 2.0], labelled=5), "corrected", "in 5 labelled and 15 unlabelled samples"),
        (memory_of([4.5, 0.5], 0.25, 12.0), "shrunk", "as if from 5.0 of 20 unlabelled samples: the scores"),
        (memory_of([18.0, 2.0], 0.25, 12.0, labelled=20), "corrected", "in 20 labelled samples, which differ from"),
        (memory_of([18.0, 2.0], 0.25, 12.0, labelled=20), "corrected", "though the scores do not fit them"),
        (memory_of([0.0, 0.0], 0.0, 900.0, 0.0), "plain", "The plain predictor is kept: the scores of 20 unlabelled"),
        (memory_of([18.0, 2.0], trust=0.5), "shrunk", "Corrected by 50% with the label shares"),
        (memory_of([18.0, 2.0], trust=0.5, labelled=20), "corrected", "Corrected with the label shares"),
        (memory_of([4.5, 0.5], most=0.25), "corrected", "They count as 5 samples, as many as participants could try"),
        (memory_of([4.5, 0.5], 0.5, 8.5, most=0.5), "shrunk", "as if from 5.0 of 20 unlabelled samples: the scores"),
        (memory_of([18.0, 2.0]), "corrected", "by +20.0% on average; expect +0.4% to +39.6%."),
        (memory_of([18.0, 2.0], trust=0.0, gain=(-0.01, 0.1, 9)), "plain", "it was -1.0% on average"),
        (memory_of([18.0, 2.0], trust=0.0, gain=(0, 0, 0)), "plain", "too few participants have validation data"),
    ],
)
def test_one_sentence_says_what_was_done_and_why(memory, decision: str, words: str) -> None:
    found = told(memory)
    assert found.decision == decision and words in found.sentence
    assert found.sentence.endswith(".") and "\n" not in found.sentence


def test_without_a_reference_it_says_that_nothing_was_checked() -> None:
    found = told(memory_of([18.0, 2.0]), known=0.0)
    assert found.fit is None and "could not be checked, for want of participants' validation data" in found.sentence
    assert json.loads(json.dumps(found.as_dict()))["fit"] is None


def test_one_sample_is_not_samples() -> None:
    assert "found in 1 unlabelled sample, which" in told(memory_of([0.9, 0.1]), samples=1).sentence


def test_shares_tests_and_text() -> None:
    found = told(memory_of([18.0, 2.0]))
    assert [share.name for share in found.shares] == ["cat", "dog"]
    assert abs(found.shares[0].share - 18.5 / 21) < 1e-6
    assert found.shift.degrees == 1 and found.shift.p < 1e-7 and found.fit.degrees == 2
    assert "cat   88.1%" in str(found) and found.sentence in str(found)
    many = report(
        {**memory_of([1.0] * 30), "label_counts": torch.ones(30)},
        torch.ones(30),
        {"samples": torch.tensor(9.0)},
        30,
        [str(k) for k in range(30)],
    )
    assert "20 other classes: 66.7% together" in str(many)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "fedavg"
    return fedloom.run("fedavg", out=out, progress="quiet", adapt="prior", **SKEWED).path


def test_samples_of_another_kind_are_told_from_skewed_ones(trained: Path) -> None:
    run = fedloom.load(trained)
    threes = DIGITS.x[DIGITS.y == 3][:40]
    noise = 3 * np.random.default_rng(0).standard_normal(threes.shape).astype(np.float32)
    good, bad = run.admit(threes).report, run.admit(noise).report
    assert good.decision == "corrected" and max(good.shares, key=lambda s: s.share).name == "3"
    assert bad.decision in ("shrunk", "plain") and bad.fit.p < 0.01 and bad.weight < 0.1


def test_the_plain_predictor_is_the_plain_one(trained: Path) -> None:
    """Samples beyond all measure: nothing of them is trusted, and the scores are those of the model as it is."""
    newcomer = fedloom.load(trained).admit(1e6 * DIGITS.x[:5])
    assert newcomer.report.decision == "plain"
    plain = fedloom.load(trained, adapt="none")
    x = torch.as_tensor(DIGITS.x[:7])
    torch.testing.assert_close(newcomer.predict(x), plain.predict("0", x))
    assert plain.admit(DIGITS.x[:5]).report is None


def test_an_adapted_run_is_not_adapted_twice(trained: Path) -> None:
    x = torch.as_tensor(DIGITS.x[:7])
    once, again = (fedloom.load(trained, adapt=adapt).admit(DIGITS.x[:20]) for adapt in (None, "prior"))
    assert torch.equal(once.predict(x), again.predict(x))


def test_an_adapted_run_is_best_where_the_plain_one_is(trained: Path, tmp_path: Path) -> None:
    """Participants who are told their classes fare well long before newcomers' classes can be told apart."""
    plain = fedloom.run("fedavg", out=tmp_path / "plain", progress="quiet", **SKEWED).summary["best"]
    adapted = fedloom.load(trained).summary["best"]
    name = "participants/val/accuracy"
    assert adapted["round"] == plain["round"] and adapted[f"plain/{name}"] == plain[f"deployed/{name}"]
    assert adapted[f"deployed/{name}"] > plain[f"deployed/{name}"]


def test_adapted_participants_do_not_choose_the_round() -> None:
    early = {"plain/participants/val/accuracy": 0.4, "deployed/participants/val/accuracy": 0.9}
    late = {"plain/participants/val/accuracy": 0.6, "deployed/participants/val/accuracy": 0.8}
    assert better(late, CLASSIFICATION, early) and not better(early, CLASSIFICATION, late)


@pytest.mark.parametrize("options", [{"val_share": 0.0}, {"adapt_clip": 1.0}, {"adapt_clip": 10.0, "adapt_noise": 1.0}])
def test_with_little_to_compare_with_it_is_not_checked_but_works(options, tmp_path: Path) -> None:
    run = fedloom.run(
        "fedavg", out=tmp_path / "run", progress="quiet", adapt="prior", **{**SKEWED, "rounds": 2}, **options
    )
    found = run.admit(DIGITS.x[:10])
    assert found.report.fit is None and found.report.decision == "plain"  # nobody could show that it gains
    assert found.predict(DIGITS.x[:10]).isfinite().all()
