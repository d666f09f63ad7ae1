# SPDX-License-Identifier: Apache-2.0
"""What methods and engines agree on: masked batches, the setup, declared needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import setup_of, small_federation
from fedloom.core.contract import Batch, Needs, composed
from fedloom.core.task import REGRESSION
from fedloom.core.training import LocalConfig

ZERO = torch.tensor(0)


def batch_of(mask: list[bool]) -> Batch:
    size = len(mask)
    return Batch(torch.zeros(size, 1), torch.zeros(size), torch.tensor(mask), ZERO, ZERO, ZERO)


def test_padding_does_not_count() -> None:
    """Of 1, 2, 4 the last is padding: sum 3, mean 1.5; infinity there changes nothing."""
    batch = batch_of([True, True, False])
    for padding in (4.0, float("inf"), float("nan")):
        values = torch.tensor([1.0, 2.0, padding])
        assert batch.sum(values) == 3
        assert batch.mean(values) == 1.5


def test_the_mean_over_no_samples_is_zero() -> None:
    assert batch_of([False, False]).mean(torch.tensor([1.0, 2.0])) == 0


def test_the_setup_knows_rows_and_architectures() -> None:
    setup = setup_of(small_federation(("mlp:hidden=5", "mlp:hidden=4"), unseen=1), None)
    assert setup.clients == ("0", "1", "2", "3")
    assert setup.rows(["3", "0"]) == [3, 0]
    assert {str(spec): members for spec, members in setup.by_model(["3", "0", "2"]).items()} == {
        "mlp:hidden=4": ["3"],
        "mlp:hidden=5": ["0", "2"],
    }
    assert [str(spec) for spec in setup.architectures] == ["mlp:hidden=5", "mlp:hidden=4"]


def test_equal_names_are_one_architecture() -> None:
    setup = setup_of(small_federation(("mlp:hidden=5", "mlp:hidden=5")), None)
    assert list(map(str, setup.architectures)) == ["mlp:hidden=5"]


@pytest.mark.parametrize(
    ("models", "needs", "sentence"),
    [
        (
            ("mlp:hidden=5", "mlp:hidden=4"),
            Needs(same_model=True),
            "M needs one architecture for all clients; got 2 (mlp:hidden=5, mlp:hidden=4). Give one --model.",
        ),
        (
            ("mlp:hidden=x",),
            Needs(head=True),
            "M keeps the output layer apart from the body; mlp:hidden=x has nothing but its output layer. "
            "Choose a --model with a body.",
        ),
    ],
)
def test_what_a_federation_lacks_is_said(models: tuple[str, ...], needs: Needs, sentence: str) -> None:
    setup = setup_of(small_federation(models), None)
    assert needs.violations(setup, "M") == [sentence]
    assert Needs().violations(setup, "M") == []


def test_a_method_of_class_labels_refuses_regression() -> None:
    federation = small_federation()
    setup = setup_of(federation, None)
    assert Needs(class_labels=True).violations(setup, "M") == []
    object.__setattr__(setup, "task", REGRESSION)
    assert Needs(class_labels=True).violations(setup, "M") == [
        "M needs class labels; the task is regression. Choose another method."
    ]


@pytest.mark.parametrize(
    ("models", "needs", "sentence"),
    [
        (
            ("testnets:Normed", "mlp:hidden=5"),
            Needs(no_batchnorm=True),
            "M cannot train BatchNorm; testnets:Normed has it. Choose a --model without it.",
        ),
        (
            ("testnets:TwiceHeaded",),
            Needs(features="any"),
            "M needs the features before the output layer; testnets:TwiceHeaded does not call its output layer once "
            "with one tensor. Choose another --model.",
        ),
        (
            ("mlp:hidden=5", "mlp:hidden=4"),
            Needs(features="same"),
            "M compares features, which must have one shape in all models; mlp:hidden=5 has (5,), mlp:hidden=4 has "
            "(4,). Choose others.",
        ),
        (
            ("testnets:Pooled",),
            Needs(linear_head=True),
            "M needs a dense output layer; that of testnets:Pooled is another. Choose a --model that ends in one.",
        ),
    ],
)
def test_what_methods_ask_of_features_and_layers(models: tuple[str, ...], needs: Needs, sentence: str) -> None:
    setup = setup_of(small_federation(models), LocalConfig())
    assert needs.violations(setup, "M") == [sentence]
    assert needs.violations(setup_of(small_federation(("mlp:hidden=5",)), LocalConfig()), "M") == []


def test_a_server_without_data_is_refused_and_its_clients_are_not() -> None:
    setup = setup_of(small_federation(), LocalConfig())
    needs = Needs(same_model=True, server_data="labelled")
    assert needs.violations(setup, "M") == []
    object.__setattr__(setup, "server_data", None)
    assert needs.violations(setup, "M") == ["M needs labelled data on the server; there are none. Give --server-data."]
    assert needs.of_clients == Needs(same_model=True) and needs.of_clients.violations(setup, "M") == []


def test_a_message_for_one_client_goes_before_one_for_all_and_that_before_its_own_statistics() -> None:
    memory = {"buffers": {"n": torch.tensor(1)}, "own": {"w": torch.tensor(2)}}
    home: Any = None
    assert composed(home, {}, {}, memory) == {"params": memory["own"], "buffers": memory["buffers"]}
    both = {"buffers": {"n": torch.tensor(3)}}, {"buffers": {"n": torch.tensor(4)}}
    assert composed(home, both[0], {}, memory)["buffers"] == both[0]["buffers"]
    assert composed(home, *both, memory)["buffers"] == both[1]["buffers"]
