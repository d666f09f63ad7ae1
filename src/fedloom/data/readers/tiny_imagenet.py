# SPDX-License-Identifier: Apache-2.0
"""Tiny ImageNet: 110,000 colour pictures of 64x64 in 200 classes, JPEGs in one zip archive.

The published test part has no labels, so it is left out and the published validation part is "test" here, as
papers do. Classes are WordNet numbers in sorted order. Values become (value / 255 - mean) / std with the
training part's (0.4802, 0.4481, 0.3975) and (0.2770, 0.2691, 0.2821). In memory the dataset takes 5.4 GB.
"""

from pathlib import Path

import numpy as np

from fedloom.data.arrays import Arrays
from fedloom.data.files import Dataset, File
from fedloom.data.formats import Zip, corrupt, scaled

_FOLDER = "tiny-imagenet-200"
_FILES = (File(f"{_FOLDER}.zip", f"http://cs231n.stanford.edu/{_FOLDER}.zip", "90528d7ca1a48142e341f4ef8d21d0de"),)
_SIDE = 64


def _read(root: Path) -> Arrays:
    with Zip(_FILES[0].at(root)) as archive:
        classes = sorted(archive.read(f"{_FOLDER}/wnids.txt").decode("utf-8", "replace").split())
        train = _train(archive)
        test = _test(archive)
        members = train + test  # (member, class)
        if {wnid for _, wnid in train} != set(classes) or not {wnid for _, wnid in test} <= set(classes):
            raise corrupt(archive.path, "its pictures are not of the classes that its wnids.txt lists")
        images = np.empty((len(members), _SIDE, _SIDE, 3), np.uint8)
        for row, (member, _) in zip(images, members):
            image = archive.image(member, "RGB")
            if image.size != (_SIDE, _SIDE):
                raise corrupt(archive.path, f"{member} is {image.size[0]}x{image.size[1]}, expected {_SIDE}x{_SIDE}")
            row[:] = image
    number = {wnid: index for index, wnid in enumerate(classes)}
    return Arrays(
        name="tiny_imagenet",
        x=scaled(images.transpose(0, 3, 1, 2), (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
        y=np.array([number[wnid] for _, wnid in members], np.int64),
        num_classes=len(classes),
        split=np.repeat(["train", "test"], [len(train), len(test)]),
        class_names=tuple(classes),
    )


def _train(archive: Zip) -> list[tuple[str, str]]:
    prefix = f"{_FOLDER}/train/"
    names = [name for name in archive.names() if name.startswith(prefix) and name.endswith(".JPEG")]
    return [(name, name.removeprefix(prefix).partition("/")[0]) for name in names]


def _test(archive: Zip) -> list[tuple[str, str]]:
    # a line per picture, tabs between: file name, WordNet number, four numbers of a bounding box
    rows = [line.split("\t") for line in archive.read(f"{_FOLDER}/val/val_annotations.txt").decode().splitlines()]
    if any(len(row) < 2 for row in rows):
        raise corrupt(archive.path, "its val_annotations.txt has lines without a class")
    return [(f"{_FOLDER}/val/images/{row[0]}", row[1]) for row in rows]


TINY_IMAGENET = Dataset(
    name="tiny_imagenet",
    about="110,000 colour pictures, 64x64, 200 classes",
    licence="ImageNet's terms: non-commercial research and education",
    files=_FILES,
    read=_read,
)
