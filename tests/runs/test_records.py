# SPDX-License-Identifier: Apache-2.0
import io
import json
import subprocess
import sys

import numpy as np

from fedloom.runs.records import (
    FEW,
    PANEL,
    by_client,
    embeddings_line,
    panel,
    scores_line,
    seconds_by_client,
    short,
    table_record,
)

TASK = {"name": "accuracy", "higher_is_better": True}


def test_a_panel_is_everybody_or_evenly_spaced_and_the_same_each_time():
    assert panel(range(PANEL)) == range(PANEL)
    some = list(panel(range(PANEL + 1)))
    assert len(some) <= PANEL and some[:3] == [0, 2, 4]
    assert list(panel([], 3)) == []
    assert list(panel("abcde", 2)) == ["a", "d"]


def test_who_was_asked_and_what_travelled():
    assert by_client(("a", "b"), {"a": 7, "b": 8}, {"a": 1}) == {"client": ["a", "b"], "down": [7, 8], "up": [1, 0]}
    assert seconds_by_client(("a", "b"), {"b": 0.123456789}) == {"clients": [None, 0.12346]}
    assert seconds_by_client(("a",), {}) == {}


def test_large_federations_have_quantiles_of_everybody():
    """Of 0, 1, ... 20000 the quantile at p percent is 200 p."""
    clients = [str(i) for i in range(20_001)]
    columns = {"metric": list(map(float, range(20_001))), "loss": [0.0] * 20_001, "samples": [1] * 20_001}
    line = scores_line(3, ("deployed", "participants", "test"), TASK, clients, columns)
    assert line["clients"] == 20_001 and len(line["client"]) == len(line["metric"]) <= PANEL
    np.testing.assert_allclose(line["quantiles"]["metric"], 200.0 * np.arange(101))
    small = scores_line(
        3, ("deployed", "participants", "test"), TASK, clients[:3], {n: c[:3] for n, c in columns.items()}
    )
    assert "quantiles" not in small and small["client"] == ["0", "1", "2"]


def test_tables_and_embeddings_are_rows_in_the_order_of_clients():
    found = table_record(("a", "b"), ("body", "head"), np.array([[0.25, 0.5], [0.75, 0.5]]))
    assert found == {"client": ["a", "b"], "columns": ["body", "head"], "values": [[0.25, 0.5], [0.75, 0.5]]}
    many = [str(i) for i in range(FEW + 1)]
    assert len(table_record(many, ("x",), np.zeros((FEW + 1, 1)))["client"]) <= FEW
    assert embeddings_line(2, "unseen", {"a": [1 / 3, 2.0]})["embedding"] == [[0.33333, 2.0]]
    assert short(None) is None


def test_records_need_no_torch():
    program = "import sys, fedloom.runs.records; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_lines_are_tables_for_whoever_reads_them():
    """What pandas does with ``lines=True``: an object a line, the same names in each."""
    columns = {"metric": [0.5], "loss": [1.0], "samples": [3]}
    lines = [json.dumps(scores_line(n, ("deployed", "participants", "val"), TASK, ["a"], columns)) for n in (1, 2)]
    read = [json.loads(line) for line in io.StringIO("\n".join(lines))]
    assert {tuple(line) for line in read} == {tuple(read[0])}
