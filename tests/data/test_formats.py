# SPDX-License-Identifier: Apache-2.0
"""The published formats, sound and damaged; above all that no pickle is executed."""

import contextlib
import gzip
import io
import os
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import DataError
from fedloom.data import formats

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("name", ["a", "a.gz"])
@pytest.mark.parametrize("values", [IMAGES, np.array([[-1, 70000]], np.int32)])
def test_idx_files_are_read(tmp_path, write_idx, name, values):
    write_idx(tmp_path / name, values)
    np.testing.assert_array_equal(formats.read_idx(tmp_path / name), values)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: b"", "its first bytes  are not an idx header"),
        (lambda raw: b"PK\3\4" + raw, "its first bytes 504b0304 are not an idx header"),
        (lambda raw: raw[:2] + b"\x7f" + raw[3:], "are not an idx header"),
        (lambda raw: raw[:9], "its idx header breaks off"),
        (lambda raw: raw[:-1], "it holds 39 bytes where its header promises 40"),
        (lambda raw: raw + b"!", "it holds 41 bytes where its header promises 40"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path, write_idx, damage, message):
    path = tmp_path / "images"
    write_idx(path, IMAGES)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        formats.read_idx(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith("delete it and fetch it again.")


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: b"no gzip", lambda raw: raw[:14] + raw[20:]])
def test_a_damaged_gzip_file_is_named(tmp_path, write_idx, damage):
    path = tmp_path / "images.gz"
    write_idx(path, IMAGES)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"images\.gz is damaged"):
        formats.read_idx(path)


def test_images_and_labels_must_agree(tmp_path, write_idx):
    images, labels = tmp_path / "images", tmp_path / "labels"
    write_idx(images, IMAGES)
    write_idx(labels, np.zeros(3, np.uint8))
    with pytest.raises(DataError, match=r"labels is damaged .*it has 3 labels for the 2 images of images"):
        formats.read_idx_pair(images, labels)
    with pytest.raises(DataError, match=r"expected labels on 1 axis, got shape \(2, 3, 4\)"):
        formats.read_idx_pair(images, images)
    with pytest.raises(DataError, match=r"expected images on 3 axes, got shape \(3,\)"):
        formats.read_idx_pair(labels, labels)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickles_of_arrays_are_read(tmp_path, protocol):
    path = tmp_path / "batch"
    content = {"data": IMAGES, "labels": [1, 2], "name": "x", "raw": b"\xff"}
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    read = formats.read_pickle(path)
    np.testing.assert_array_equal(read.pop("data"), IMAGES)
    assert read == {"labels": [1, 2], "name": "x", "raw": b"\xff"}


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_arrays_are_rebuilt_under_either_name_that_numpy_gave_its_helper(tmp_path, module):
    raw = pickle.dumps({"data": IMAGES}, protocol=2)
    here = next(name for name in (b"numpy._core.multiarray", b"numpy.core.multiarray") if name in raw)
    (tmp_path / "batch").write_bytes(raw.replace(here, module))
    np.testing.assert_array_equal(formats.read_pickle(tmp_path / "batch")["data"], IMAGES)


class Evil:
    def __init__(self, call, *arguments):
        self.reduced = call, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        (os.mkdir, ("{}/harm",), "mkdir"),
        (eval, ("1 + 1",), "eval"),
        (getattr, (np, "load"), "getattr"),
        (np.load, ("{}",), "numpy"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_calls_anything_else_is_refused(tmp_path, call, arguments, name, protocol):
    path = tmp_path / "batch"
    arguments = tuple(a.format(tmp_path) if isinstance(a, str) else "numpy" for a in arguments)
    path.write_bytes(pickle.dumps({"data": Evil(call, *arguments)}, protocol=protocol))
    with pytest.raises(DataError, match=f"batch is damaged .*its pickle asks for .*{name}.*, which is refused"):
        formats.read_pickle(path)
    assert not (tmp_path / "harm").exists()


def test_a_pickle_of_something_else_is_refused(tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps([1]))
    with pytest.raises(DataError, match="expected a dictionary, got list"):
        formats.read_pickle(path)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_pickle_raise_only_a_data_error(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "noise"
    path.write_bytes(raw)
    with contextlib.suppress(DataError):
        assert isinstance(formats.read_pickle(path), dict)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_idx_raise_only_a_data_error(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "noise.gz"
    path.write_bytes(gzip.compress(raw))
    with contextlib.suppress(DataError):
        assert isinstance(formats.read_idx(path), np.ndarray)


@pytest.fixture
def archive(tmp_path):
    from PIL import Image

    path = tmp_path / "a.zip"
    png = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(png, "PNG")
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("b/image.png", png.getvalue())
        out.writestr("b/", "")
        out.writestr("a.txt", "hello " * 50)
    return path


def test_members_of_a_zip_are_read_in_memory(archive):
    with formats.Zip(archive) as content:
        assert content.names() == ["a.txt", "b/image.png"]
        assert content.read("a.txt").startswith(b"hello")
        np.testing.assert_array_equal(content.image("b/image.png", "L"), IMAGES[0])
        assert content.image("b/image.png", "RGB").mode == "RGB"


def test_a_damaged_zip_is_named(archive):
    with formats.Zip(archive) as content:
        with pytest.raises(DataError, match=r"a\.zip is damaged .*nowhere.*fetch it again"):
            content.read("nowhere")
        with pytest.raises(DataError, match=r"a\.zip is damaged .*a\.txt: cannot identify image"):
            content.image("a.txt", "L")
    raw = archive.read_bytes()
    archive.write_bytes(raw.replace(b"hello hello", b"hullo hello"))
    with formats.Zip(archive) as content, pytest.raises(DataError, match=r"a\.txt: Bad CRC-32"):
        content.read("a.txt")
    archive.write_bytes(raw[:-30])
    with pytest.raises(DataError, match=r"a\.zip is damaged .*not a zip file"):
        formats.Zip(archive)


def test_scaling_is_per_channel():
    images = np.zeros((2, 3, 1, 1), np.uint8)
    images[1] = 255
    x = formats.scaled(images, (0.5, 0.25, 0.0), (0.5, 1.0, 2.0))
    assert x.dtype == np.float32
    np.testing.assert_allclose(x[:, :, 0, 0], [[-1, -0.25, 0], [1, 0.75, 0.5]])
