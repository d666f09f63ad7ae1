# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from fedloom import algorithms
from fedloom.reports.about import TRAVELS, About, about


@pytest.mark.parametrize("method", algorithms.built_in())
def test_every_method_says_what_travels(method: str) -> None:
    found = about(method)
    assert set(found.travels) == set(TRAVELS) and all(found.travels.values())
    assert found.idea.endswith(".") and found.name


@pytest.mark.parametrize("method", algorithms.built_in())
def test_what_newcomers_tell_with_noise_is_read_and_not_imported(method: str) -> None:
    assert about(method).newcomers_privacy == getattr(algorithms.get(method).config, "NEWCOMERS_PRIVACY", ())


def test_its_citation_is_read_and_not_imported() -> None:
    assert about("pfedhn").citation == algorithms.get("pfedhn").citation
    assert about("hypergenfl").citation == algorithms.get("hypergenfl").citation
    assert about("pfedhn").paper.startswith("Shamsian, Navon, Fetaya, Chechik")


def test_a_method_that_is_not_there_is_its_name() -> None:
    assert about("nobody") == About("nobody", "", "", {}, "")


def test_a_file_that_is_no_python_yet_is_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfway.py").write_text("ALGORITHM = (")
    monkeypatch.setenv(algorithms.VARIABLE, str(tmp_path))
    assert about("halfway").name == "halfway"
