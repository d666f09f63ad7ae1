# SPDX-License-Identifier: Apache-2.0
"""Shakespeare's plays: speeches by role, in the published files' form."""

import pytest

from fedloom.core.errors import DataError
from fedloom.data import dataset, load
from fedloom.data.readers.shakespeare import LEAST, roles_of
from fedloom.data.text import UNKNOWN

PLAY = """THE TRAGEDY

ACT I.

Scene I. A public place.

[Enter Sampson
and Gregory.]

SAMPSON.
Gregory, [aside] o' my word.
We'll not carry coals.

Gre.
No.

[Exit.]

For then we should be colliers.

Scene II. A street.

Nobody says this.

SAMPSON.

I mean.
"""


def test_a_role_says_what_stands_below_its_name():
    assert roles_of(PLAY) == {
        "Sampson": "Gregory,  o' my word.\nWe'll not carry coals.\nI mean.",
        "Gre": "No.\nFor then we should be colliers.",
    }


def test_clients_are_roles_that_say_enough(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    for file in dataset("shakespeare").files:
        long = "Who's there? " * (LEAST // 12)
        (tmp_path / file.path).write_text(f"Ber.\n{long}\n\nFran.\nNay, answer me.\n", encoding="latin-1")
    data = load("shakespeare", tmp_path)
    assert set(data.groups["client"]) == {
        f"{file.path.removeprefix('shakespeare/').removesuffix('_gut.txt')}/Ber"
        for file in dataset("shakespeare").files
    }
    assert data.alphabet == UNKNOWN + " '?Wehorst"
    assert data.x.shape == data.y.shape and data.x.shape[1] == 80

    (tmp_path / dataset("shakespeare").files[0].path).write_text("no play")
    with pytest.raises(DataError, match="expected the speeches of a play"):
        load("shakespeare", tmp_path)
