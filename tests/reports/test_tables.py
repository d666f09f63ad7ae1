# SPDX-License-Identifier: Apache-2.0
import csv
import io

from fedloom.reports.tables import Cells, as_csv, as_latex, as_markdown

TABLE = Cells(["method", "score, %"], [["a_b & 50%\n{x}", "1.0 ± 0.2"], ["<b>|`*", "–"]], "Over seeds.")


def test_latex_is_escaped_and_numbers_go_to_the_right():
    text = as_latex(TABLE)
    assert r"\begin{tabular}{lr}" in text
    assert r"a\_b \& 50\% \{x\} & 1.0 $\pm$ 0.2 \\" in text
    assert (
        r"\textless{}b\textgreater{}\textbar{}`* & -- \\" in text
    )  # text fonts of old have other signs in their place


def test_markdown_is_escaped():
    lines = as_markdown(TABLE).splitlines()
    assert lines[1] == "|---|---:|"
    assert lines[3] == r"| \<b\>\|\`\* | – |"
    assert lines[-1] == "Over seeds."


def test_csv_comes_back_as_it_was():
    assert list(csv.reader(io.StringIO(as_csv(TABLE)))) == [TABLE.columns, *TABLE.rows]


def test_a_csv_has_no_formulas_for_a_spreadsheet() -> None:
    names = ["=cmd|' /C calc'!A0", "@SUM(1)", "+cmd", "-1+cmd|' /C calc'!A0", "\t=1", "pFedHN", "-0.4 ± 0.2", "+1.5"]
    read = list(csv.reader(io.StringIO(as_csv(Cells(["method"], [[name] for name in names], "")))))
    assert [row[0] for row in read[1:]] == [*(f"'{name}" for name in names[:5]), *names[5:]]
