# SPDX-License-Identifier: Apache-2.0
"""Tables as datasets: which columns are what, and the sentence for each thing that can be wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data.registry import load
from fedloom.data.tables import Roles, from_table

CSV = """age,ward,ill,client,pressure
61,north,yes,a,140
35,south,no,a,
,north,no,b,131.5
48,NA,yes,b,150
"""


def written(folder: Path, text: str = CSV, name: str = "patients.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_csv_is_a_dataset(tmp_path: Path) -> None:
    data = load(written(tmp_path), roles=Roles.of("ill", None))
    assert (data.name, data.class_names, data.y.tolist()) == ("patients", ("no", "yes"), [1, 0, 0, 1])
    assert data.groups["client"].tolist() == list("aabb")
    names = [(column.name, column.categories) for column in data.preparation.columns]
    assert names == [("age", None), ("ward", ("north", "south")), ("pressure", None)]
    np.testing.assert_array_equal(data.x, [[61, 0, 140], [35, 1, np.nan], [np.nan, 0, 131.5], [48, np.nan, 150]])


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_are_seen(tmp_path: Path, separator: str) -> None:
    data = load(written(tmp_path, CSV.replace(",", separator)), roles=Roles.of("ill", "ward"))
    assert [column.name for column in data.preparation.columns] == ["age", "pressure"]
    assert data.groups["ward"].tolist() == ["north", "south", "north", ""]


@pytest.mark.parametrize(
    ("target", "task", "kind", "y"),
    [
        ("n", "auto", "classification", [2, 0, 1, 0]),
        ("n", "regression", "regression", [2, 0, 1, 0]),
        ("r", "auto", "regression", [0.5, 1, 2, 3]),
        ("b,c", "auto", "multilabel", [[1, 0], [0, 0], [1, 1], [0, 1]]),
        ("b,r", "auto", "regression", [[1, 0.5], [0, 1], [1, 2], [0, 3]]),
    ],
)
def test_the_target_says_what_the_task_is(target: str, task: str, kind: str, y: Any) -> None:
    columns = {"n": [2, 0, 1, 0], "r": [0.5, 1, 2, 3], "b": [1, 0, 1, 0], "c": [0, 0, 1, 1], "x": [1, 2, 3, 4]}
    data = from_table(
        {k: v for k, v in columns.items() if k in (*target.split(","), "x")}, Roles.of(target, None, task)
    )
    assert data.task == kind
    np.testing.assert_array_equal(data.y, y)
    assert data.class_names == (tuple(target.split(",")) if "," in target else ())


def test_files_of_clients_have_their_columns_in_any_order(tmp_path: Path) -> None:
    written(tmp_path, "age,ward,y\n1,north,0\n2,7,1\n", "a.csv")
    written(tmp_path, "ward,y,age\n7,1,3\n8,0,4\n", "b.csv")
    data = load(tmp_path)
    assert data.groups["client"].tolist() == ["a", "a", "b", "b"]
    np.testing.assert_array_equal(data.x, [[1, 2], [2, 0], [3, 0], [4, 1]])
    assert data.preparation.columns[1].categories == ("7", "8", "north")
    written(tmp_path, "ward,y,old\n7,1,3\n", "b.csv")
    with pytest.raises(DataError, match=r"b\.csv has no column 'age', unlike .*a\.csv"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; expected a line with the columns' names"),
        ("a,y\n", "has no rows"),
        ("a,a\n1,2\n", "has the column 'a' twice"),
        ("a,y\n1,2\n3\n", "has 1 entries in row 3 for 2 columns"),
        ("a,b\n1,2\n", "has no column 'y'; name one of a, b as --target"),
        ("a,y\n1,0\n2,\n", "has nothing in the column 'y' of sample 2, which is to be predicted"),
        ("y\n1\n", "has no columns left to predict y from"),
        ("a,y\ninf,1\n", "has in the column 'a' infinite values"),
        ("a,y\n1e300,1\n", "has in the column 'a' infinite values, or such beyond 1e\\+100"),
        ("a,y\n" + "".join(f"name {i},{i % 2}\n" for i in range(30)), "30 different texts in the column 'a' for 30"),
    ],
)
def test_tables_that_cannot_be_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(written(tmp_path, text))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (lambda row: f"{row},5", r"numbers with a decimal comma in the column 'b', such as '0,5'; write a point"),
        (
            lambda row: "?" if row == 7 else str(row),
            r"has '\?' among the numbers of the column 'b'; leave the entry em",
        ),
    ],
)
def test_numbers_are_not_taken_for_categories(tmp_path: Path, entry: Any, message: str) -> None:
    lines = [f"{row};{entry(row % 50)};{'ny'[row % 2]}" for row in range(400)]
    with pytest.raises(DataError, match=message):
        load(written(tmp_path, "\n".join(["a;b;ill", *lines])), roles=Roles.of("ill", None))


def test_codes_with_letters_among_them_are_categories(tmp_path: Path) -> None:
    lines = [f"{row};{'12AB'[row % 4]};{'ny'[row % 2]}" for row in range(40)]
    data = load(written(tmp_path, "\n".join(["a;b;ill", *lines])), roles=Roles.of("ill", None))
    assert data.preparation.columns[1].categories == ("1", "2", "A", "B")
    (note,) = data.notes
    assert note.startswith("the column 'b' has 'A' among numbers, so all of it is categories")


def test_whole_numbers_that_are_classes_are_told_of(tmp_path: Path) -> None:
    lines = [f"{row},{row % 7}" for row in range(70)]
    path = written(tmp_path, "\n".join(["age,stars", *lines]))
    (note,) = load(path, roles=Roles.of("stars", None)).notes
    assert note == "whole numbers in 'stars' are classes; else give --task regression"
    assert load(path, roles=Roles.of("stars", None, "regression")).notes == ()
    assert load(written(tmp_path), roles=Roles.of("ill", None)).notes == ()


def test_columns_of_a_table_are_of_no_other_data() -> None:
    with pytest.raises(DataError, match="--target and --groups are for tables"):
        load("digits", roles=Roles.of("ill", None))


class PandasNothing:
    """pandas.NA, as it is in columns of nullable types."""

    def __str__(self) -> str:
        return "<NA>"


def test_columns_from_python_may_have_nothing(tmp_path: Path) -> None:
    data = from_table({"a": np.array(["x", None, np.nan, "y"], object), "b": [1.5, np.nan, 0, 1], "y": [0, 1, 0, 1]})
    np.testing.assert_array_equal(data.x, [[0, 1.5], [np.nan, np.nan], [np.nan, 0], [1, 1]])
    data = from_table({"a": np.array([1, PandasNothing()], object), "y": [0, 1]})
    np.testing.assert_array_equal(data.x, [[1], [np.nan]])
    with pytest.raises(DataError, match="of several lengths"):
        from_table({"a": [1, 2], "y": [1]})
    with pytest.raises(DataError, match=r"'a' has the shape \(1, 1\)"):
        from_table({"a": [[1]], "y": [1]})


def test_parquet_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'fedloom[parquet]'")
    import pyarrow.parquet as parquet

    columns = {
        "age": pyarrow.array([61, None, 35], pyarrow.int64()),
        "old": pyarrow.array([True, False, None]),
        "ward": pyarrow.array(["north", None, "south"]).dictionary_encode(),
        "y": pyarrow.array(["sick", "well", "sick"]),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    data = load(tmp_path / "p.parquet")
    np.testing.assert_array_equal(data.x, [[61, 1, 0], [np.nan, 0, np.nan], [35, np.nan, 1]])
    assert data.class_names == ("sick", "well")
    columns["when"] = pyarrow.array([1, 2, 3], pyarrow.timestamp("s"))
    parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"column 'when' of type timestamp\[ms\]; expected numbers or text"):
        load(tmp_path / "p.parquet")
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read as a Parquet file"):
        load(tmp_path / "p.parquet")
