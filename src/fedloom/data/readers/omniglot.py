# SPDX-License-Identifier: Apache-2.0
"""Omniglot (Lake, Salakhutdinov and Tenenbaum 2015): 1,623 characters of 50 alphabets, 20 people each.

The drawings of 105x105 are inverted (ink is 1, paper 0) and resized to 28x28 with a Lanczos filter, as is
common since MAML; no mean or std. The two archives, "background" and "evaluation", are one dataset here
without a split: federated papers give alphabets to clients and split each client's drawings. The groupings
are "alphabet" and "drawer"; people are only known within an alphabet, so a drawer is named "Alphabet/07".
"""

import re
from pathlib import Path

import numpy as np

from fedloom.data.arrays import Arrays
from fedloom.data.files import Dataset, File
from fedloom.data.formats import Zip, corrupt

_URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
_FILES = tuple(
    File(f"omniglot-py/{name}", f"{_URL}/{name}", md5)
    for name, md5 in (
        ("images_background.zip", "68d2efa1b9178cc56df9314c21c6e718"),
        ("images_evaluation.zip", "6b91aef0f799c5bb55b94e3f2daec811"),
    )
)
_DRAWERS = 20
_SIDE = 28

# images_background/Greek/character07/0401_12.png: the 401st character of all, by the alphabet's 12th drawer
_MEMBER = re.compile(r"[^/]+/(?P<alphabet>[^/]+)/(?P<character>character\d+)/(?P<number>\d{4})_(?P<drawer>\d\d)\.png")


def _read(root: Path) -> Arrays:
    from PIL.Image import Resampling

    images, numbers, alphabets, drawers = [], [], [], []
    names: dict[int, str] = {}
    for file in _FILES:
        with Zip(file.at(root)) as archive:
            found = [match for match in map(_MEMBER.fullmatch, archive.names()) if match]
            _check_drawers(archive.path, [match["number"] for match in found])
            for match in found:
                image = archive.image(match.string, "L").resize((_SIDE, _SIDE), Resampling.LANCZOS)
                images.append(np.asarray(image))
                numbers.append(int(match["number"]))
                alphabets.append(match["alphabet"])
                drawers.append(f"{match['alphabet']}/{match['drawer']}")
                names[numbers[-1]] = f"{match['alphabet']}/{match['character']}"
    classes, y = np.unique(numbers, return_inverse=True)
    return Arrays(
        name="omniglot",
        x=1 - np.stack(images)[:, None].astype(np.float32) / 255,
        y=y.astype(np.int64),
        num_classes=len(classes),
        groups={"alphabet": np.array(alphabets), "drawer": np.array(drawers)},
        class_names=tuple(names[number] for number in classes.tolist()),
    )


def _check_drawers(path: Path, numbers: list[str]) -> None:
    _, counts = np.unique(numbers, return_counts=True)
    if len(counts) == 0 or (counts != _DRAWERS).any():
        raise corrupt(path, f"expected characters with {_DRAWERS} drawings each")


OMNIGLOT = Dataset(
    name="omniglot",
    about="32,460 drawings of characters, resized to 28x28 grey, 1,623 classes in 50 alphabets",
    licence="MIT",
    files=_FILES,
    read=_read,
)
