# SPDX-License-Identifier: Apache-2.0
"""Tiny ImageNet on a small archive in the published format."""

import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from fedloom.core.errors import DataError
from fedloom.data import load

TOP = "tiny-imagenet-200"


def picture(colour=(255, 0, 0), mode="RGB", side=64) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (side, side), colour).save(out, "JPEG", quality=100)
    return out.getvalue()


@pytest.fixture
def write(tmp_path):
    def put(**changes):
        members = {
            "wnids.txt": "n02\nn01\n",
            "train/n01/images/n01_0.JPEG": picture(),
            "train/n01/n01_boxes.txt": "n01_0.JPEG\t0\t0\t62\t62\n",
            "train/n02/images/n02_0.JPEG": picture(128, "L"),
            "train/n02/images/n02_1.JPEG": picture(),
            "val/val_annotations.txt": "val_0.JPEG\tn02\t0\t0\t62\t62\nval_1.JPEG\tn01\t0\t0\t62\t62\n",
            "val/images/val_0.JPEG": picture(),
            "val/images/val_1.JPEG": picture(),
            "test/images/test_0.JPEG": picture(),
        } | changes
        with zipfile.ZipFile(tmp_path / f"{TOP}.zip", "w") as archive:
            for name, content in members.items():
                if content is not None:
                    archive.writestr(f"{TOP}/{name}", content)
        return tmp_path

    return put


def test_the_archive_is_read_in_memory(write):
    root = write()
    data = load("tiny_imagenet", root)
    assert data.x.shape == (5, 3, 64, 64)
    assert data.class_names == ("n01", "n02")
    assert data.y.tolist() == [0, 1, 1, 1, 0]
    assert data.split.tolist() == ["train"] * 3 + ["test"] * 2
    red = np.array([(1 - 0.4802) / 0.2770, -0.4481 / 0.2691, -0.3975 / 0.2821])
    np.testing.assert_allclose(data.x[0, :, 30, 30], red, atol=0.05)
    assert [path.name for path in root.iterdir()] == [f"{TOP}.zip"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wnids.txt": None}, "wnids.txt"),
        ({"wnids.txt": "n01\nn02\nn03\n"}, "its pictures are not of the classes that its wnids.txt lists"),
        ({"val/val_annotations.txt": "val_0.JPEG\tn09\n"}, "its pictures are not of the classes"),
        (
            {"val/val_annotations.txt": "val_0.JPEG n01\n"},
            "its val_annotations.txt has lines without a class",
        ),
        ({"val/images/val_1.JPEG": None}, r"val_1\.JPEG"),
        ({"val/images/val_1.JPEG": b"no picture"}, r"val_1\.JPEG: cannot identify image"),
        ({"val/images/val_1.JPEG": picture()[:300]}, r"val_1\.JPEG"),
        ({"val/images/val_1.JPEG": picture(side=32)}, r"val_1\.JPEG is 32x32, expected 64x64"),
    ],
)
def test_a_damaged_archive_is_named(write, changes, message):
    root = write(**changes)
    with pytest.raises(DataError, match=message) as caught:
        load("tiny_imagenet", root)
    assert str(caught.value).startswith(str(root / f"{TOP}.zip is damaged"))
