# SPDX-License-Identifier: Apache-2.0
"""Who owns which rows, and who joins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import SHAPE, small_federation
from fedloom.clients.federation import Federation, federate
from fedloom.clients.partition import ClientSplit, Partition
from fedloom.core.errors import DataError
from fedloom.core.task import CLASSIFICATION, REGRESSION
from fedloom.models.model import Model
from fedloom.models.spec import parse


def rows(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


PARTITION = Partition(
    (
        ClientSplit("a", rows(0, 4), rows(1), rows(2)),
        ClientSplit("b", rows(3), rows(), rows(5)),
        ClientSplit("c", rows(6), rows(7), rows(), unseen=True),
    ),
    rows(),
    (),
)
MODELS = [Model(parse(f"mlp:hidden={width}", (2,), 3)) for width in (4, 5)]


def federation_of(y: np.ndarray, dtype: torch.dtype = torch.float32) -> Federation:
    x = np.arange(16, dtype=np.uint8).reshape(8, 2)
    return federate(x, y, PARTITION, MODELS, CLASSIFICATION, dtype=dtype)


def test_clients_take_the_models_in_turn() -> None:
    made = federation_of(np.zeros(8, dtype=np.uint8))
    assert [made.models[c] for c in "abc"] == [MODELS[0], MODELS[1], MODELS[0]]


def test_participants_and_unseen_clients_are_told_apart() -> None:
    made = federation_of(np.zeros(8, dtype=np.uint8))
    assert made.participants == ("a", "b")
    assert made.unseen == ("c",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_get_the_type_of_the_run_and_labels_are_whole_numbers(dtype: torch.dtype) -> None:
    for labels in (np.uint8, np.int32, np.bool_):
        made = federation_of(np.ones(8, dtype=labels), dtype)
        assert made.x.dtype == made.dtype == dtype
        assert made.y.dtype == torch.int64
    assert federation_of(np.ones(8, dtype=np.float32), dtype).y.dtype == dtype
    assert made.x.tolist()[1] == [2, 3]


def test_a_client_has_its_rows_by_split_and_all_together() -> None:
    client = federation_of(np.zeros(8)).roster["a"]
    assert client.of("train").tolist() == [0, 4]
    assert client.of("all").tolist() == [0, 4, 1, 2]


@pytest.mark.parametrize(
    ("split", "wanted"), [("train", ("c", "b", "a")), ("val", ("c", "a")), ("test", ("b", "a")), ("all", tuple("cba"))]
)
def test_those_without_samples_in_a_split_are_left_out(split: str, wanted: tuple[str, ...]) -> None:
    assert federation_of(np.zeros(8)).having(split, "cba") == wanted


def test_a_newcomer_joins_with_its_data_as_training_data() -> None:
    federation = small_federation(unseen=1)
    model = next(iter(federation.models.values()))
    x, y = torch.ones(2, *SHAPE, dtype=torch.float32), torch.tensor([2.0, 1.0])
    joined = federation.joined_by("new", model, x, y)
    client = joined.roster["new"]
    assert client.unseen
    assert joined.participants == federation.participants
    assert joined.unseen == (*federation.unseen, "new")
    own = torch.as_tensor(client.of("train"))
    assert torch.equal(joined.x[own], x.double())
    assert torch.equal(joined.y[own], torch.tensor([2, 1]))
    assert joined.having("test", ["new"]) == ()
    assert joined.x.dtype == torch.float64


def test_joining_changes_nobody_elses_data() -> None:
    federation = small_federation()
    joined = federation.joined_by("new", federation.models["0"], torch.ones(2, *SHAPE), torch.tensor([0, 1]))
    assert "new" not in federation.roster
    assert len(joined.x) == len(federation.x) + 2
    assert torch.equal(joined.x[: len(federation.x)], federation.x)
    assert all(joined.roster[c] is client for c, client in federation.roster.items())


def test_a_newcomer_with_samples_of_another_shape_is_refused() -> None:
    federation = small_federation()
    with pytest.raises(DataError) as caught:
        federation.joined_by("new", federation.models["0"], torch.ones(2, 3), torch.tensor([0, 1]))
    assert str(caught.value) == (
        "The newcomer's samples have shape (3,); this federation's have (1, 6, 6). Give data of the same shape."
    )


def test_a_newcomer_with_a_name_that_is_taken_is_refused() -> None:
    federation = small_federation()
    with pytest.raises(DataError, match="A client '0' is in this federation already"):
        federation.joined_by("0", federation.models["0"], torch.ones(2, *SHAPE), torch.tensor([0, 1]))


def test_several_targets_stay_several() -> None:
    made = federate(np.zeros((8, 2)), np.ones((8, 3)), PARTITION, MODELS[:1], REGRESSION)
    assert made.y.shape == (8, 3)
    assert made.y.dtype == torch.float32
