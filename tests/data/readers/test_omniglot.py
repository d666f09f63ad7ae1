# SPDX-License-Identifier: Apache-2.0
"""Omniglot: the published archives, and small ones in their format."""

import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from fedloom.core.errors import DataError
from fedloom.data import load


def drawing(row: int) -> bytes:
    pixels = np.full((105, 105), 255, np.uint8)
    pixels[row : row + 15] = 0  # ink is black
    out = io.BytesIO()
    Image.fromarray(pixels).convert("1").save(out, "PNG")
    return out.getvalue()


def write(root, part, characters, drawers=20):
    (root / "omniglot-py").mkdir(exist_ok=True)
    with zipfile.ZipFile(root / f"omniglot-py/images_{part}.zip", "w") as archive:
        archive.writestr(f"images_{part}/", "")
        for number, alphabet, character in characters:
            for drawer in range(1, drawers + 1):
                member = f"images_{part}/{alphabet}/character{character:02}/{number:04}_{drawer:02}.png"
                archive.writestr(member, drawing(0 if number == 1 else 90))


def test_archives_are_one_dataset_with_ink_as_one(tmp_path):
    write(tmp_path, "background", [(1, "Greek", 1), (2, "Greek", 2)])
    write(tmp_path, "evaluation", [(3, "Angelic", 1)])
    data = load("omniglot", tmp_path)
    assert data.x.shape == (60, 1, 28, 28)
    assert data.y.tolist() == [0] * 20 + [1] * 20 + [2] * 20
    assert data.class_names == ("Greek/character01", "Greek/character02", "Angelic/character01")
    assert data.split is None
    assert sorted(set(data.groups["alphabet"])) == ["Angelic", "Greek"]
    assert len(set(data.groups["drawer"])) == 40
    assert data.groups["drawer"][:2].tolist() == ["Greek/01", "Greek/02"]
    assert data.x[0, 0, 0].tolist() == [1] * 28
    assert data.x[0, 0, 27].tolist() == [0] * 28
    assert data.x[59, 0, 27].tolist() == [1] * 28


def test_a_character_with_too_few_drawings_is_refused(tmp_path):
    write(tmp_path, "background", [(1, "Greek", 1)])
    write(tmp_path, "evaluation", [(2, "Angelic", 1)], drawers=19)
    with pytest.raises(DataError, match=r"images_evaluation\.zip .*expected characters with 20 drawings each"):
        load("omniglot", tmp_path)
    write(tmp_path, "evaluation", [])
    with pytest.raises(DataError, match="expected characters with 20 drawings each"):
        load("omniglot", tmp_path)


@pytest.mark.slow
def test_the_published_omniglot(real):
    data = real("omniglot")
    assert data.x.shape == (32460, 1, 28, 28)
    assert np.bincount(data.y).tolist() == [20] * 1623
    assert len(set(data.groups["alphabet"])) == 50
    assert len(set(data.groups["drawer"])) == 1000
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert 0.05 < data.x.mean() < 0.12  # mostly paper
