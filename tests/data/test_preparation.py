# SPDX-License-Identifier: Apache-2.0
"""How raw samples are prepared: by hand, by scikit-learn, as JSON, and as a part of a network."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import nn

from fedloom.core.errors import DataError
from fedloom.data.preparation import Column, Preparation, images
from fedloom.models.load import Prepared

NAN = np.nan
TABLE = Preparation(
    "table", (Column("age"), Column("ward", categories=("east", "north", "west")), Column("size")), ("ill",), ("id",)
)


def test_a_table_is_prepared_by_hand() -> None:
    """Ages 20, 40, none: mean 30, deviation 10. Wards west, none, west: west is the commonest; east is not there."""
    raw = np.array([[20, 2, 7], [40, NAN, 7], [NAN, 2, 7]])
    fitted = TABLE.fit(raw)
    assert fitted.features == ("age", "ward=west", "size")
    assert (fitted.columns[0].mean, fitted.columns[0].scale, fitted.columns[2].scale) == (30, 10, 1)
    prepared = fitted.apply(TABLE.translated(np.vstack([raw, [50, 1, 8]]), fitted))
    assert prepared.dtype == np.float32
    assert prepared.tolist() == [[-1, 1, 0], [1, 1, 0], [0, 1, 0], [2, 0, 1]]  # north was not in training data


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(2, 40))
def test_it_does_what_scikit_learn_does(seed: int, samples: int) -> None:
    rng = np.random.default_rng(seed)
    raw = np.stack([rng.normal(5, 3, samples), rng.integers(0, 3, samples).astype(float), rng.normal(0, 1, samples)], 1)
    raw[rng.random(raw.shape) < 0.2] = NAN
    raw[0] = [1.0, 0, 2.0]
    fitted = TABLE.fit(raw)
    found = fitted.apply(TABLE.translated(raw, fitted))
    numbers = StandardScaler().fit(raw[:, [0, 2]]).transform(SimpleImputer().fit_transform(raw[:, [0, 2]]))
    wards = SimpleImputer(strategy="most_frequent").fit_transform(raw[:, [1]])
    hot = OneHotEncoder(sparse_output=False).fit(wards[~np.isnan(wards)][:, None]).transform(wards)
    np.testing.assert_allclose(found[:, [0, -1]], numbers, atol=1e-4)
    np.testing.assert_array_equal(found[:, 1:-1], hot)


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -36.6])
def test_a_column_of_one_number_is_not_scaled_by_its_rounding(value: float) -> None:
    one = Preparation("table", (Column("a"),)).fit(np.full((100, 1), value))
    assert one.columns[0].scale == 1.0
    np.testing.assert_allclose(one.apply(np.array([[value + 1]])), [[1.0]], atol=1e-5)


def test_images_are_centred_and_scaled_by_channel() -> None:
    """Channel 0 has 0 and 200: mean 100, deviation 100. Channel 1 does not vary."""
    raw = np.zeros((2, 2, 1, 1), np.uint8)
    raw[1, 0], raw[:, 1] = 200, 9
    fitted = images(2).fit(raw)
    assert fitted.apply(raw)[:, :, 0, 0].tolist() == [[-1, 0], [1, 0]]
    black, white = fitted.ends
    np.testing.assert_allclose([black[0], white[0]], [-1, 1.55])


def test_columns_go_by_name() -> None:
    columns = {"size": np.array(["1", ""]), "ward": np.array(["west", "south"]), "age": np.array([3, 4])}
    raw = TABLE.encoded({**columns, "ill": np.array([0, 1]), "id": np.array(["a", "b"])}, "The table")
    np.testing.assert_array_equal(raw, [[3, 2, 1], [4, -1, NAN]])
    del columns["age"]
    with pytest.raises(DataError, match="The table has no column 'age'; expected the columns age, ward, size, in any"):
        TABLE.encoded(columns, "The table")
    with pytest.raises(DataError, match="The table has the unknown column 'Age'"):
        TABLE.encoded({**columns, "age": columns["size"], "Age": columns["size"]}, "The table")
    with pytest.raises(DataError, match="has in the column 'age' the text 'west'; expected numbers"):
        TABLE.encoded({**columns, "age": columns["ward"]}, "The table")


def test_it_is_json() -> None:
    fitted = TABLE.fit(np.array([[20, 2, 7], [40, NAN, 7.5]]))
    assert Preparation.of_text(fitted.as_text()) == fitted
    assert json.loads(fitted.as_text())["columns"][1] == {"name": "ward", "categories": ["west"], "fill": 0}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"kind": "pickle", "columns": [{"name": "a"}]}',
        '{"kind": "table", "columns": []}',
        '{"kind": "table", "columns": [{"name": "a"}, {"name": "a"}]}',
        '{"kind": "table", "columns": [{"name": "a", "scale": 0}]}',
        '{"kind": "table", "columns": [{"name": "a", "mean": NaN}]}',
        '{"kind": "table", "columns": [{"name": "a", "categories": ["x"], "fill": 3}]}',
        '{"kind": "table", "columns": [{"name": "a", "categories": ["x", "x"]}]}',
    ],
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"not how samples are prepared|needs columns"):
        Preparation.of_text(text)


def test_a_network_can_have_it_inside() -> None:
    """In float64 until the end: seconds since 1970 differ in what float32 cannot hold."""
    raw = np.array([[1.7e9, 2, 7], [1.7e9 + 9, NAN, 9], [NAN, 0, 5]])
    fitted = TABLE.fit(raw)
    ours = Prepared(nn.Flatten(), fitted)
    raw = TABLE.translated(raw, fitted)
    np.testing.assert_allclose(ours(torch.from_numpy(raw)), fitted.apply(raw), atol=1e-6)
    pictures = np.random.default_rng(0).integers(0, 256, (3, 2, 4, 4)).astype(np.uint8)
    fitted = images(2).fit(pictures)
    found = Prepared(nn.Identity(), fitted)(torch.from_numpy(pictures))
    np.testing.assert_allclose(found, fitted.apply(pictures), atol=1e-6)
