# SPDX-License-Identifier: Apache-2.0
"""Users' own arrays, files, folders and torch datasets, and the message for each thing that can be wrong."""

import io
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.own import from_arrays, from_folder, from_npz, from_torch_dataset

X = np.arange(12.0).reshape(4, 3)
Y = np.array([0, 2, 1, 1], np.int32)


def test_arrays_become_a_dataset():
    data = from_arrays(X, Y, client=[7, 7, 8, 8], split=["train", "test", "train", "val"], name="mine")
    assert (data.name, data.num_classes, data.x.dtype, data.y.dtype) == ("mine", 3, np.float32, np.int64)
    assert data.groups["client"].tolist() == ["7", "7", "8", "8"]
    assert data.split.tolist() == ["train", "test", "train", "val"]


def test_lists_and_bytes_will_do():
    data = from_arrays(X.tolist(), Y.tolist(), split=np.array([b"train", b"test", b"test", b"test"]))
    assert data.split[0] == "train"
    assert data.num_classes == 3


def test_float_targets_are_a_regression():
    assert from_arrays(X, Y + 0.5).num_classes == 0
    assert from_arrays(X, np.ones((4, 2))).y.shape == (4, 2)
    whole = from_arrays(X, Y, task="regression")
    assert (whole.num_classes, whole.y.dtype) == (0, np.float32)


def test_float_labels_are_not_taken_for_a_regression_in_silence():
    x, y = np.zeros((8, 3)), np.repeat([0.0, 1.0, 2.0, 5.0], 2)
    with pytest.raises(DataError) as caught:
        from_arrays(x, y)
    assert str(caught.value) == (
        "Dataset 'arrays' has y of type float64 with 4 different values, all whole numbers; give classes as "
        "y.astype(int), or targets of a regression as y[:, None]."
    )
    assert from_arrays(x, y[:, None]).num_classes == from_arrays(x, y, task="regression").num_classes == 0
    assert from_arrays(x, np.minimum(y, 3).astype(int)).num_classes == 4
    assert from_arrays(x, np.arange(8.0)).num_classes == 0  # a value of its own for every sample


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 5), (2, 5)),
        ((2, 3, 50), (2, 3, 50)),
        ((2, 128, 9), (2, 9, 128)),
        ((2, 8, 2), (2, 2, 8)),
        ((2, 3, 8, 9), (2, 3, 8, 9)),
        ((2, 8, 9, 3), (2, 3, 8, 9)),
        ((2, 8, 9, 1), (2, 1, 8, 9)),
        ((2, 3, 9, 4), (2, 3, 9, 4)),
        ((2, 8, 9, 2), (2, 8, 9, 2)),
    ],
)
def test_axes_say_what_samples_are(shape, expected):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 100
    data = from_arrays(x, [0, 1])
    assert data.x.shape == expected
    if shape != expected:
        np.testing.assert_array_equal(data.x, np.moveaxis(x, -1, 1))
    assert bool(data.notes) == (len(shape) == 3 and shape != expected)


def test_windows_are_asked_about_where_their_axes_are_not_plain(tmp_path):
    x = np.arange(2 * 12 * 9, dtype=np.float32).reshape(2, 12, 9)
    with pytest.raises(DataError, match=r"12 channels of 9 steps, or 12 steps of 9 channels\? Say which by axes="):
        from_arrays(x, [0, 1])
    assert from_arrays(x, [0, 1], axes="channels_first").x.shape == (2, 12, 9)
    assert from_arrays(x, [0, 1], axes="channels_last").x.shape == (2, 9, 12)
    many = np.zeros((2, 128, 9))
    assert (from_arrays(many, [0, 1], axes="channels_first").x.shape, many.shape) == ((2, 128, 9), (2, 128, 9))
    np.savez(tmp_path / "a.npz", x=x, y=[0, 1], axes=["channels_last"])
    assert from_npz(tmp_path / "a.npz").x.shape == from_folder(tmp_path).x.shape == (2, 9, 12)
    np.savez(tmp_path / "b.npz", x=x, y=[0, 1], axes=["channels_first"])
    with pytest.raises(DataError, match="has another order of axes than"):
        from_folder(tmp_path)
    with pytest.raises(ConfigError, match="Unknown order of axes 'time_first'"):
        from_arrays(x, [0, 1], axes="time_first")


def test_images_of_bytes_are_raw():
    image = np.full((1, 1, 2, 2), 255, np.uint8)
    data = from_arrays(image, [0])
    assert (data.x.dtype, data.preparation.kind, len(data.preparation.columns)) == (np.uint8, "images", 1)
    assert from_arrays(np.zeros((1, 8, 9, 3), np.uint8), [0]).x.shape == (1, 3, 8, 9)
    assert from_arrays(image.astype(np.int16), [0]).x.max() == 255
    window = from_arrays(image[:, 0], [0], axes="channels_first")
    assert window.x.max() == 255 and window.preparation is None


@pytest.mark.parametrize(
    "x",
    [np.zeros((2, 28, 28)), np.zeros((2, 28, 40)), np.zeros((2, 28, 28), np.uint8), np.zeros((2, 9, 128), np.uint8)],
)
def test_what_may_be_grey_images_is_asked_about(x):
    """Rows of a picture would be trained as channels of a signal."""
    with pytest.raises(DataError, match=r"grey images, or windows of signals\? Give grey images an axis for the chan"):
        from_arrays(x, [0, 1])
    assert from_arrays(x[:, None], [0, 1]).x.shape == (2, 1, *x.shape[1:])
    assert from_arrays(x, [0, 1], axes="channels_first").x.shape == x.shape


def test_values_far_from_one_are_told_of():
    x = np.random.default_rng(0).uniform(0, 255, (20, 4))
    assert from_arrays(x / 255, np.arange(20) % 2).notes == ()
    (note,) = from_arrays(x, np.arange(20) % 2).notes
    assert "and are used as they are" in note and "tokens" not in note
    (note,) = from_arrays(x.astype(np.uint8), np.arange(20) % 2).notes
    assert note.endswith("if they are tokens, give them as int64")
    assert from_arrays(x.astype(np.uint8).reshape(20, 1, 2, 2), np.arange(20) % 2).notes == ()  # these are scaled
    prices = np.linspace(90_000, 400_000, 20)
    (note,) = from_arrays(x / 255, prices).notes
    assert note.startswith("targets in y go from 90000 to 400000 and are learned as they are")
    assert from_arrays(x / 255, (prices - prices.mean()) / prices.std()).notes == ()


def test_text_in_an_array_of_objects_is_text():
    """A column of a data frame."""
    assert from_arrays(X, np.array(["b", "a", "b", "a"], object)).class_names == ("a", "b")
    with pytest.raises(DataError, match="y of type object"):
        from_arrays(X, np.array(["b", None, "b", "a"], object))


def test_groupings_have_names(tmp_path):
    data = from_arrays(X, Y, groups={"recording": [1, 1, 2, 2]}, client=list("abab"))
    assert {name: members.tolist() for name, members in data.groups.items()} == {
        "client": list("abab"),
        "recording": list("1122"),
    }
    np.savez(tmp_path / "a.npz", x=X, y=Y, group_recording=[1, 1, 2, 2])
    assert from_npz(tmp_path / "a.npz").groups["recording"].tolist() == list("1122")
    assert set(from_folder(tmp_path).groups) == {"client", "recording"}


@given(st.lists(st.integers(-3, 6), min_size=1, max_size=8))
def test_labels_become_numbers_from_0_and_keep_their_names(labels):
    data = from_arrays(np.zeros((len(labels), 1)), labels)
    names = data.class_names or tuple(str(number) for number in range(data.num_classes))
    assert [names[label] for label in data.y] == [str(label) for label in labels]
    assert [int(name) for name in names] == sorted(set(labels))
    assert bool(data.class_names) == (sorted(set(labels)) != list(range(len(set(labels)))))


def test_text_is_a_class_in_the_order_of_the_alphabet():
    data = from_arrays(X, ["dog", "cat", "dog", "eel"])
    assert (data.y.tolist(), data.class_names, data.num_classes) == ([1, 0, 1, 2], ("cat", "dog", "eel"), 3)
    assert from_arrays(X, np.array([b"b", b"a", b"a", b"b"])).class_names == ("a", "b")


def test_classes_can_be_named_of_which_there_is_no_sample():
    data = from_arrays(X, ["dog", "cat", "dog", "cat"], classes=["eel", "dog", "cat"])
    assert (data.y.tolist(), data.num_classes) == ([1, 2, 1, 2], 3)
    assert from_arrays(X, [0, 2, 0, 2], classes=["eel", "dog", "cat"]).y.tolist() == [0, 2, 0, 2]
    by_value = from_arrays(X, [40, 20, 20, 20], classes=[20, 30, 40])
    assert (by_value.y.tolist(), by_value.num_classes) == ([2, 0, 0, 0], 3)


def test_labels_of_which_several_may_hold():
    held = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]])
    for y in (held, held.astype(bool), held.astype(np.uint8)):
        data = from_arrays(X, y, classes=["red", "large", "old"])
        assert (data.num_classes, data.multilabel, data.task, data.num_outputs) == (0, True, "multilabel", 3)
        assert data.y.dtype == np.float32
        np.testing.assert_array_equal(data.y, held)
    assert from_arrays(X, np.eye(4, dtype=bool)).multilabel
    assert from_arrays(X, np.eye(4), task="regression").task == "regression"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"y": ["cat", "", "cat", "dog"]}, "has labels without text; name every sample's class"),
        (
            {"y": ["cat", "dog", "cat", "dog"], "classes": ["cat", "eel"]},
            "has the label 'dog'; the classes are cat, eel",
        ),
        ({"y": Y, "classes": ["cat", "eel"]}, "has labels from 0 to 2 for 2 classes; expected 0 to 1, or names"),
        ({"y": Y, "classes": ["cat", "eel", "cat"]}, "has a class twice in classes"),
        ({"y": Y + 0.5, "task": "classification"}, "labels of type float64"),
        ({"y": Y[:, None]}, r"labels of type int32 and shape \(4, 1\)"),
        ({"y": np.eye(4, dtype=int)}, r"one 1 in every row of y; give classes as y\.argmax\(1\)"),
        ({"y": np.eye(4)}, r"zeros and ones of type float64 in y of shape \(4, 4\); give classes as y\.argmax\(1\)"),
        ({"y": np.eye(4, dtype=int) * 3}, r"whole numbers from 0 to 3 in y of shape \(4, 4\); give zeros and ones"),
        ({"y": np.eye(4) / 2, "task": "multilabel"}, "has labels other than 0 and 1"),
        ({"x": [[1], [1, 2], [1], [1]]}, "has rows of several lengths in x; give all one shape"),
        ({"x": X.astype(object)}, "has x of type object; expected numbers or strings"),
        ({"x": X * 1j}, "has x of type complex128; expected numbers or strings"),
        ({"x": X.astype(str)}, "has x of type <U.*; expected numbers: encode text as numbers first"),
        ({"x": X[0]}, r"has x of shape \(3,\); expected 2 axes \(samples, features\), 3"),
        ({"x": np.zeros((4, 1, 1, 1, 1))}, r"has x of shape \(4, 1, 1, 1, 1\)"),
        ({"x": X * 1e300}, "has NaN or infinite values in x"),
        ({"y": Y * 1e300}, "has NaN or infinite values in y"),
        ({"y": list("abcd"), "task": "regression"}, "has y of type <U1; expected numbers"),
        ({"y": Y[:2] * 0}, r"has 4 samples in x but y has shape \(2,\)"),
        ({"split": ["train", "dev", "test", "val"]}, "has the split name 'dev'"),
        ({"client": ["a"]}, "has the grouping 'client'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(DataError, match=message) as caught:
        from_arrays(**{"x": X, "y": Y, "name": "mine"} | arguments)
    assert str(caught.value).startswith("Dataset 'mine' has ")


def test_whole_numbers_of_nearly_every_sample_are_not_taken_for_classes_in_silence():
    prices = np.arange(100, 160)
    with pytest.raises(DataError, match=r"60 different whole numbers in y for 60 samples; give classes as text"):
        from_arrays(np.zeros((60, 1)), prices)
    assert from_arrays(np.zeros((60, 1)), prices.astype(str)).num_classes == 60
    assert from_arrays(np.zeros((60, 1)), prices.astype(float)[:, None]).num_classes == 0


def test_an_unknown_task_is_refused():
    with pytest.raises(ConfigError, match="Unknown task 'regresion'; did you mean 'regression'"):
        from_arrays(X, Y, task="regresion")


def test_an_npz_file_is_read(tmp_path):
    np.savez(tmp_path / "mine.npz", x=X, y=Y, client=["a", "b", "a", "b"], split=["train", "test"] * 2)
    data = from_npz(tmp_path / "mine.npz")
    assert (data.name, data.num_classes) == ("mine", 3)
    assert data.groups["client"].tolist() == ["a", "b", "a", "b"]
    assert data.split.tolist() == ["train", "test"] * 2
    np.savez_compressed(tmp_path / "plain.npz", x=X, y=Y)
    assert from_npz(str(tmp_path / "plain.npz")).split is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, r"has the arrays x; expected x and y, optionally client, optionally split, optionally classes"),
        ({}, r"has the arrays \(none\); expected x and y"),
        ({"x": X, "y": Y, "clients": Y}, "has the arrays clients, x, y; expected x and y"),
        (
            {"x": X, "y": Y.astype(object)},
            r"cannot be read as an .npz file of plain arrays \([^.]*\); write it with .* and no arrays of objects",
        ),
        ({"x": X, "y": 3}, "has an array without axes; expected one entry per sample"),
    ],
)
def test_an_npz_file_that_does_not_fit_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=message) as caught:
        from_npz(tmp_path / "mine.npz")
    assert str(caught.value).startswith(str(tmp_path / "mine.npz"))


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "mine.npz"
    with pytest.raises(DataError, match=r"There is no file .*mine.npz; give the path of an .npz file"):
        from_npz(path)
    np.savez(path, x=X, y=Y)
    whole = path.read_bytes()
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, X)
    for raw in (whole[:-40], whole[40:], b"", b"text", (tmp_path / "array.npz").read_bytes()):
        path.write_bytes(raw)
        with pytest.raises(DataError, match=r"mine\.npz cannot be read as an \.npz file"):
            from_npz(path)


def zipped(path, shape, data=b""):
    """A file whose array x says that it has that shape."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", header.getvalue() + data)
    return path


def test_a_header_that_promises_more_than_there_is_is_refused_before_memory_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(np, "ndarray", None)  # which numpy would make of the header
    for shape in ((1 << 40, 1 << 20), (1 << 33, 3), (3, 3)):
        with pytest.raises(DataError, match=r"mine\.npz cannot be read .*cut off, or not as long as it says"):
            from_npz(zipped(tmp_path / "mine.npz", shape, bytes(20)))


def test_arrays_that_memory_has_no_room_for_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("fedloom.data.own.total", lambda: 10**6)
    path = zipped(tmp_path / "mine.npz", (10**6, 3), bytes(12 * 10**6))
    assert path.stat().st_size < 10**5
    with pytest.raises(DataError, match=r"mine\.npz holds 0\.0 GB, and this machine has 0\.0 GB of memory"):
        from_npz(path)


def test_a_folder_has_one_file_per_client(tmp_path):
    folder = tmp_path / "hospitals"
    folder.mkdir()
    np.savez(folder / "b.npz", x=X[:1], y=Y[:1], split=["train"])
    np.savez(folder / "a.npz", x=X[1:], y=Y[1:], split=["test", "val", "test"])
    (folder / "notes.txt").touch()
    data = from_folder(folder)
    assert data.name == "hospitals"
    assert data.groups["client"].tolist() == ["a", "a", "a", "b"]
    assert data.split.tolist() == ["test", "val", "test", "train"]
    np.testing.assert_array_equal(data.x, X[[1, 2, 3, 0]])
    assert data.y.tolist() == [2, 1, 1, 0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X[:, :2], "y": Y}, r"b\.npz has x of shape \(2,\) per sample but .*a\.npz has \(3,\)"),
        ({"x": X, "y": Y.astype(float)}, r"b\.npz has y of type float64 but .*a\.npz has int32"),
        ({"x": X.astype(np.uint8), "y": Y}, r"b\.npz has x of type uint8 but .*a\.npz has float64"),
        (
            {"x": X, "y": Y, "split": ["train"] * 4},
            r"b\.npz has the arrays split, x, y but .*a\.npz has x, y",
        ),
        ({"x": X, "y": Y[:2]}, r"b\.npz has 4 samples in x but 2 in y"),
        (
            {"x": X, "y": Y, "client": Y},
            r"b\.npz has the arrays client, x, y; expected x and y, optionally split",
        ),
        ({"x": X}, r"b\.npz has the arrays x; expected x and y"),
    ],
)
def test_files_of_a_folder_must_agree(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(DataError, match=message):
        from_folder(tmp_path)


def test_clients_of_a_folder_need_not_have_all_classes(tmp_path):
    for name, labels in {"a": ["cow", "ant"], "b": ["bee", "bee"]}.items():
        np.savez(tmp_path / f"{name}.npz", x=X[:2], y=labels)
    data = from_folder(tmp_path)
    assert (data.y.tolist(), data.class_names) == ([2, 0, 1, 1], ("ant", "bee", "cow"))
    np.savez(tmp_path / "b.npz", x=X[:2], y=["bee", "bee"], classes=["bee"])
    with pytest.raises(DataError, match=r"b\.npz names other classes than .*a\.npz"):
        from_folder(tmp_path)


def test_classes_are_told_by_name_in_other_data():
    few, all_of_them = from_arrays(X, [5, 5, 9, 9]), ("5", "7", "9")
    assert few.with_classes(all_of_them, 3).y.tolist() == [0, 0, 2, 2]
    assert from_arrays(X, [0, 2, 0, 2]).with_classes((), 3).y.tolist() == [0, 2, 0, 2]
    assert few.with_classes(few.class_names, 2) is few
    with pytest.raises(DataError, match="has the label '7'; the classes are 5, 9"):
        from_arrays(X, [5, 7, 7, 9]).with_classes(few.class_names, 2)


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no \.npz file; expected one per client"):
        from_folder(tmp_path)


class Pairs(Dataset):
    def __init__(self, *pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


def test_a_torch_dataset_is_stacked():
    data = from_torch_dataset(TensorDataset(torch.arange(12.0).reshape(4, 3), torch.tensor([0, 2, 1, 1])), "torch")
    assert (data.name, data.num_classes) == ("torch", 3)
    np.testing.assert_array_equal(data.x, X)


def test_a_torch_dataset_of_pictures_and_numbers_is_stacked():
    from PIL import Image

    data = from_torch_dataset(Pairs(*((Image.new("RGB", (5, 6), (255, 0, 0)), label) for label in (0, 1))))
    assert data.x.shape == (2, 3, 6, 5)
    assert data.x[0, :, 0, 0].tolist() == [255, 0, 0]
    assert from_torch_dataset(Pairs((np.zeros(2), 0.5))).num_classes == 0


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[0], 0)])


@pytest.mark.parametrize(
    ("ds", "message"),
    [
        (Stream(), "Stream has no length or cannot be indexed; expected a map-style Dataset"),
        (Pairs(), "Pairs is empty; expected at least one pair"),
        (Pairs((X[0], 0, 1)), r"Pairs has items that are not pairs; expected \(x, y\)"),
        (Pairs(X[0]), "Pairs has items that are not pairs"),
        (Pairs((X[0], 0), (X[0, :2], 1)), r"Pairs has x of 2 shapes, \(2,\) among them; crop, pad or resize"),
        (Pairs((X[0], 0), (X[0], [1, 2])), r"Pairs has y of 2 shapes, \(\) among them"),
    ],
)
def test_a_torch_dataset_that_does_not_fit_is_refused(ds, message):
    with pytest.raises(DataError, match=message):
        from_torch_dataset(ds)


def _stored(header: str) -> bytes:
    """An .npz file whose arrays have that header, and nothing after it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("x.npy", "y.npy"):
            archive.writestr(name, b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    return file.getvalue()


def _flagged(place: int, value: int) -> bytes:
    """A plain .npz file, with a field of its zip headers changed: from the start of each, in the local ones."""
    file = io.BytesIO()
    np.savez(file, x=X, y=Y)
    data = bytearray(file.getvalue())
    for sign, offset in ((b"PK\x03\x04", place), (b"PK\x01\x02", place + 2)):
        at = data.find(sign)
        while at >= 0:
            data[at + offset] = value
            at = data.find(sign, at + 1)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        _flagged(6, 1),  # encrypted
        _flagged(8, 99),  # compressed in a way that nobody knows
        _stored("{'descr':'<f4','fortran_order':False,'shape':(2,"),
        _stored("  x\n y\n\tz"),
        _stored("{'descr':'<f4','fortran_order':False,'shape':(0,99999999999999999999)}"),
    ],
    ids=["encrypted", "unknown compression", "torn header", "indented header", "endless shape"],
)
def test_an_archive_that_numpy_stumbles_over_is_refused(tmp_path, data):
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(DataError, match=r"cannot be read as an .npz file of plain arrays"):
        from_npz(tmp_path / "a.npz")
