# SPDX-License-Identifier: Apache-2.0
"""A table with a row per client: rows come and go in the order of the clients asked for."""

import torch

from conftest import setup_of, small_federation
from fedloom.core.rows import for_everybody, rows_of, with_rows


def test_rows_are_found_in_the_order_asked_for_and_the_table_stays() -> None:
    setup = setup_of(small_federation(), None)
    table = for_everybody(setup, {"a": {"b": torch.tensor([1.0, 2.0])}})
    assert table["a"]["b"].shape == (5, 2)
    new = with_rows(setup, table, ["3", "1"], {"a": {"b": torch.tensor([[3.0, 3.0], [4.0, 4.0]])}})
    assert rows_of(setup, new, ["1", "0", "3"])["a"]["b"].tolist() == [[4.0, 4.0], [1.0, 2.0], [3.0, 3.0]]
    assert (table["a"]["b"] == torch.tensor([1.0, 2.0])).all()
