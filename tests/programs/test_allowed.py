# SPDX-License-Identifier: Apache-2.0
"""What a client answers, and to whom: its method's programs, and evaluations as far as it wants them."""

from __future__ import annotations

import pytest

from conftest import setup_of, small_federation
from fedloom import algorithms
from fedloom.adaptation.prior import with_prior
from fedloom.core.contract import Algorithm
from fedloom.programs.allowed import Evaluation, allowed
from fedloom.programs.evaluation import evaluation_program

TRIED = {"evaluate.val", "evaluate.test"}


def programs(algorithm: Algorithm, *, newcomer: bool, kind: str = "exact"):
    setup = setup_of(small_federation(), algorithm.config())
    return allowed(algorithm, setup.config, setup.models["0"], newcomer, Evaluation(kind))


@pytest.mark.parametrize(
    ("method", "newcomer", "own"),
    [
        ("fedavg", False, {"train"}),
        ("fedavg", True, {"statistics"}),
        ("pfedhn", True, {"train", "statistics"}),
        ("it_pfl_hn", True, {"encoder.describe", "statistics"}),
        ("hyperfedzero", True, {"statistics"}),
    ],
)
def test_a_client_runs_the_programs_of_its_method_and_its_role(method: str, newcomer: bool, own: set[str]) -> None:
    found = programs(algorithms.get(method), newcomer=newcomer)
    assert found.keys() == own | TRIED
    assert all(program.name == name for name, program in found.items())


def test_an_adapted_client_is_also_tried_without_the_adaptation() -> None:
    adapted, plain = with_prior(algorithms.get("fedavg")), {"evaluate_plain.val", "evaluate_plain.test"}
    assert programs(adapted, newcomer=True).keys() == {"statistics", "estimate_prior"} | TRIED | plain
    settling = {"label_shares", "calibrate", "try_correction", "reference"}
    assert programs(adapted, newcomer=False).keys() == {"train"} | settling | TRIED | plain


def test_a_client_may_refuse_evaluation_or_answer_with_noise() -> None:
    fedavg = algorithms.get("fedavg")
    assert programs(fedavg, newcomer=False, kind="none").keys() == {"train"}
    exact, noised = (programs(fedavg, newcomer=False, kind=kind) for kind in ("exact", "noised"))
    assert exact.keys() == noised.keys() and exact["evaluate.val"] == evaluation_program(fedavg, "val")
    assert all(exact[name] != noised[name] for name in TRIED) and exact["train"] == noised["train"]
