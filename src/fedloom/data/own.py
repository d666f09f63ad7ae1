# SPDX-License-Identifier: Apache-2.0
"""Users' own data: arrays, .npz files, a folder with one .npz per client, or a torch Dataset.

The number of axes of x says what the samples are: 2 axes are feature vectors (samples, features), 3 are
windows (samples, channels, length), 4 are images (samples, channels, height, width). Grey images without an
axis for the channel would be taken for windows: give them one with ``x[:, None]``. Samples with the channels
last are turned where that is plain: images (samples, height, width, channels) whose last axis is 1, 3 or 4 long and
the second is not; windows (samples, steps, channels) with at least four times as many steps as channels, which a note
says. Windows with more steps than channels, but fewer than that, are refused without ``axes``; so is whatever may be
grey images that lack an axis: bytes with three axes, or two axes of nearly one length.

Images of bytes (uint8, 4 axes) are raw: they are centred and scaled by their channels' mean and deviation in training
data (``preparation``). Any other numbers are taken as they are, so normalise them first.

Whole numbers in x with two axes are sequences of tokens, (samples, length), from 0; how many different ones there are
follows from them, or is given as ``vocabulary``. Give features that are whole numbers as floating-point ones, or as
bytes. Labels of tokens are one for each sample, or one for each token, (samples, length), with -1 for none.

Whole numbers and text in y are classes; those that are not all of 0 to C - 1 are numbered in their order, and keep
their names. Truth values, or zeros and ones, of shape (samples, k) say of k labels which hold (multi-label).
Floating-point numbers in y are targets of a regression, one or several. Those that are all whole, with many samples of
each, could be either and are refused without a task; targets of shape (samples, 1) cannot be taken for classes.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.lib import format
from numpy.typing import ArrayLike

from fedloom.core.errors import DataError, unknown
from fedloom.core.memory import total
from fedloom.data.arrays import Arrays
from fedloom.data.labels import classes_of, coded
from fedloom.data.preparation import images

Task = Literal["classification", "multilabel", "regression", "seq"]
Axes = Literal["channels_first", "channels_last"]
PLAIN = 4
"""So many times as many steps as channels a window has, to be turned without being asked about."""
SQUARE = 2
"""Fewer times as many steps as channels than this, and it may be a grey image."""
LARGE = 10.0
"""Samples and targets whose values are larger than this on average are told to be used as they are."""
GROUP = "group_"
"""How the names of arrays begin that are groupings."""
_CHANNELS = (1, 3, 4)


def from_arrays(
    x: ArrayLike,
    y: ArrayLike,
    client: ArrayLike | None = None,
    split: ArrayLike | None = None,
    name: str = "arrays",
    task: Task | None = None,
    classes: Sequence[str] | ArrayLike | None = None,
    groups: Mapping[str, ArrayLike] | None = None,
    vocabulary: int | None = None,
    alphabet: str = "",
    axes: Axes | None = None,
) -> Arrays:
    """A dataset from arrays; ``client`` names each sample's client, ``split`` its part (train, val, test).

    ``groups`` are other groupings by name, for ``--partition group:NAME`` and ``--split-by``. ``axes`` says where a
    sample's channels are, where its shape does not.

    Without a task, whole numbers and text in y mean classification, truth values (samples, k) multi-label
    classification, and floating-point numbers regression. ``classes`` names all classes in their order, also those of
    which there is no sample here; of several labels or targets, each of them. ``vocabulary`` says how many different
    tokens there are, without it as many as the largest one needs; ``alphabet`` what they stand for.
    """
    what = f"Dataset {name!r}"
    features, targets = _array(what, "x", x), _array(what, "y", y)
    named = {**({} if client is None else {"client": client}), **(groups or {})}
    targets = targets.astype(str) if targets.dtype.kind == "S" else targets
    tokens = vocabulary is not None or are_tokens(features)
    if task is None:
        task = "seq" if tokens and _are_of_tokens(features, targets) else _task(what, targets)
    elif task not in get_args(Task):
        raise unknown("task", task, get_args(Task))
    names = () if classes is None else tuple(_array(what, "classes", classes).astype(str).tolist())
    if len(set(names)) < len(names):
        raise DataError(f"{what} has a class twice in classes; give each a name of its own.")
    num_classes = 0
    if task == "classification":
        labels, names = _labels(what, targets, names)
        num_classes = len(names) or int(labels.max(initial=0)) + 1
    elif task == "seq":
        labels = _labels_of_tokens(what, targets)
        num_classes = len(names) or max(1, int(labels.max(initial=0)) + 1)
    else:
        labels = _float32(what, "y", targets)
    first, notes = (features, ()) if tokens else _channels_first(what, features, axes)
    samples = _tokens(what, first) if tokens else _features(what, first)
    notes = notes if tokens else (*notes, *_large(samples, features))
    return Arrays(
        name=name,
        x=samples,
        vocabulary=(vocabulary or _vocabulary(what, features)) if tokens else 0,
        alphabet=alphabet,
        y=labels,
        num_classes=num_classes,
        split=None if split is None else _array(what, "split", split).astype(str),
        groups={key: _array(what, key, members).astype(str) for key, members in named.items()},
        class_names=names,
        multilabel=task == "multilabel",
        preparation=images(samples.shape[1]) if samples.dtype == np.uint8 else None,
        notes=(*notes, *(_large_targets(labels) if task == "regression" else ())),
    )


def from_npz(path: str | Path) -> Arrays:
    """A dataset from an .npz file with the arrays x and y and, if there are any, client, split and classes.

    An array ``group_NAME`` is a grouping of that name.
    """
    path = Path(path)
    content = _read_npz(path, optional=("client", "split", "classes", "axes", "vocabulary"))
    given: dict[str, Any] = {key: content.get(key) for key in ("client", "split", "classes")}
    given |= {"vocabulary": _given_vocabulary(path, content), "axes": _axes(content.get("axes"))}
    return from_arrays(content["x"], content["y"], name=path.stem, groups=_groups(content), **given)


def samples_from_npz(path: str | Path) -> tuple[np.ndarray, np.ndarray | None]:
    """A newcomer's samples, raw if they are images of bytes, and their labels if there are any (-1: not known)."""
    path = Path(path)
    content = _read_npz(path, optional=("y", "axes", "vocabulary"), needed=("x",))
    x = content["x"]
    return _tokens(str(path), x) if are_tokens(x) else _features(str(path), x), content.get("y")


def from_folder(path: str | Path) -> Arrays:
    """A dataset from a folder with one .npz file per client, named after it: x, y and perhaps split and classes.

    Clients need not have samples of every class, nor every token.
    """
    path = Path(path)
    files = sorted(path.glob("*.npz"))
    if not files:
        raise DataError(f"{path} holds no .npz file; expected one per client, with the arrays x and y.")
    contents = [_read_npz(file, optional=("split", "classes", "axes", "vocabulary")) for file in files]
    classes = [content.pop("classes", None) for content in contents]
    given = [_given_vocabulary(file, content) for file, content in zip(files, contents)]
    axes = [_axes(content.pop("axes", None)) for content in contents]
    for file, content, own, order in zip(files, contents, classes, axes):
        if order != axes[0]:
            raise DataError(f"{file} has another order of axes than {files[0]}; give every client the same.")
        if not np.array_equal(own, classes[0]):  # type: ignore[arg-type]
            raise DataError(f"{file} names other classes than {files[0]}; give every client the same ones.")
        _check_same(files[0], contents[0], file, content)
    joined = {key: np.concatenate([content[key] for content in contents]) for key in contents[0]}
    client = np.repeat([file.stem for file in files], [len(content["x"]) for content in contents])
    name = path.resolve().name
    vocabulary = None if None in given else max(number for number in given if number is not None)
    return from_arrays(
        joined["x"], joined["y"], client, joined.get("split"), name, classes=classes[0], groups=_groups(joined),
        vocabulary=vocabulary, axes=axes[0],
    )  # fmt: skip


def _groups(content: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The groupings among the arrays of a file, by name."""
    return {key.removeprefix(GROUP): array for key, array in content.items() if key.startswith(GROUP)}


def _axes(given: np.ndarray | None) -> Any:
    """The order of axes that a file names."""
    return None if given is None else str(given.reshape(-1)[0])


def from_torch_dataset(ds: Any, name: str = "dataset") -> Arrays:
    """A dataset from a map-style torch Dataset (or any sequence) of pairs (x, y)."""
    if not hasattr(ds, "__len__") or not hasattr(ds, "__getitem__"):
        raise DataError(
            f"{type(ds).__name__} has no length or cannot be indexed; expected a map-style Dataset of pairs (x, y)."
        )
    pairs = [ds[index] for index in range(len(ds))]
    if not pairs:
        raise DataError(f"{type(ds).__name__} is empty; expected at least one pair (x, y).")
    if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise DataError(f"{type(ds).__name__} has items that are not pairs; expected (x, y) for every index.")
    x, y = ([np.asarray(value) for value in column] for column in zip(*pairs))
    for what, values in (("x", x), ("y", y)):
        shapes = {value.shape for value in values}
        if len(shapes) > 1:
            raise DataError(
                f"{type(ds).__name__} has {what} of {len(shapes)} shapes, {min(shapes)} among them; "
                "crop, pad or resize them to one shape."
            )
    return from_arrays(np.stack(x), np.stack(y), name=name)


def _array(what: str, key: str, value: ArrayLike) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{what} has rows of several lengths in {key}; give all one shape.") from error
    if array.dtype.kind == "O" and all(isinstance(one, str) for one in array.reshape(-1)):
        array = array.astype(str)  # a column of a data frame
    if array.dtype.kind not in "buifUS":
        raise DataError(f"{what} has {key} of type {array.dtype}; expected numbers or strings.")
    return array


def _channels_first(what: str, x: np.ndarray, axes: Axes | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Samples with their channels before everything else, and a note where that had to be guessed."""
    if axes is not None and axes not in get_args(Axes):
        raise unknown("order of axes", str(axes), get_args(Axes))
    if x.ndim not in (3, 4) or axes == "channels_first":
        return x, ()
    turned = np.moveaxis(x, -1, 1)
    if axes == "channels_last":
        return turned, ()
    if x.ndim == 4:
        return (turned if x.shape[3] in _CHANNELS and x.shape[1] not in _CHANNELS else x), ()
    rows, last = x.shape[1:]
    if x.dtype == np.uint8 or rows <= last < SQUARE * rows:
        raise DataError(
            f"{what} has x of shape {x.shape} and type {x.dtype}: grey images, or windows of signals? Give grey images "
            'an axis for the channel, x[:, None]; for windows, say axes="channels_first" or "channels_last"; in a '
            'file, an array axes=["channels_last"].'
        )
    if rows <= last:
        return x, ()
    if rows < PLAIN * last:
        raise DataError(
            f"{what} has x of shape {x.shape}: {rows} channels of {last} steps, or {rows} steps of {last} channels? "
            'Say which by axes="channels_first" or "channels_last"; in a file, an array axes=["channels_last"].'
        )
    note = (
        f"x of shape {x.shape} is taken for windows of {rows} steps of {last} channels; "
        'if it is the other way round, give axes="channels_first"'
    )
    return turned, (note,)


def _features(what: str, x: np.ndarray) -> np.ndarray:
    if x.ndim not in (2, 3, 4):
        raise DataError(
            f"{what} has x of shape {x.shape}; expected 2 axes (samples, features), "
            "3 (samples, channels, length) or 4 (samples, channels, height, width)."
        )
    if x.ndim == 4 and x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    return _float32(what, "x", x)


def _large(samples: np.ndarray, given: np.ndarray) -> tuple[str, ...]:
    """A note on values that are far from 1 and are not prepared."""
    if samples.dtype == np.uint8 or not samples.size or not float(np.abs(samples).mean()) > LARGE:
        return ()
    other = ", or give images as bytes (uint8)" if samples.ndim == 4 else ""
    tokens = "; if they are tokens, give them as int64" if given.ndim == 2 and given.dtype == np.uint8 else ""
    return (
        f"values in x go from {samples.min():g} to {samples.max():g} and are used as they are; networks learn better "
        f"from values near 1: subtract the mean and divide by the deviation{other}{tokens}",
    )


def _large_targets(targets: np.ndarray) -> tuple[str, ...]:
    """A note on targets that are far from 1."""
    if not targets.size or not float(np.abs(targets).mean(dtype=np.float64)) > LARGE:
        return ()
    return (
        f"targets in y go from {targets.min():g} to {targets.max():g} and are learned as they are; networks learn "
        "better from values near 1: subtract the mean and divide by the deviation",
    )


def are_tokens(x: np.ndarray) -> bool:
    """Whether samples are sequences of tokens: whole numbers on two axes, other than bytes."""
    return x.ndim == 2 and x.dtype.kind in "iu" and x.dtype != np.uint8


def _tokens(what: str, x: np.ndarray) -> np.ndarray:
    if x.dtype.kind not in "iu" or x.ndim != 2:
        raise DataError(
            f"{what} has x of type {x.dtype} and shape {x.shape} with a vocabulary; expected whole numbers of shape "
            "(samples, length)."
        )
    return x.astype(np.int64, order="C")


def _vocabulary(what: str, x: np.ndarray) -> int:
    """As many tokens as the largest one needs."""
    if x.size and int(x.min()) < 0:
        raise DataError(
            f"{what} has whole numbers from {x.min()} to {x.max()} in x, on two axes, which are tokens from 0; if they "
            "are features, give them as floating-point numbers."
        )
    return int(x.max()) + 1 if x.size else 1


def _are_of_tokens(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether labels are of tokens and not of samples: whole numbers for each, or others than zeros and ones."""
    return y.ndim == 2 and y.dtype.kind in "iu" and (y.shape == x.shape or not np.isin(y, (0, 1)).all())


def _labels_of_tokens(what: str, y: np.ndarray) -> np.ndarray:
    if y.dtype.kind not in "iu":
        raise DataError(f"{what} has labels of tokens of type {y.dtype}; expected whole numbers.")
    return y.astype(np.int64)


def _float32(what: str, key: str, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "buif":
        raise DataError(f"{what} has {key} of type {values.dtype}; expected numbers: encode text as numbers first.")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, which is refused as such
        return values.astype(np.float32, order="C")


def _task(what: str, y: np.ndarray) -> Task:
    """What the targets are for, by their type and their shape."""
    if y.dtype.kind == "f":
        _check_plain(what, y)
        return "regression"
    if y.ndim != 2 or y.shape[1] < 2 or y.dtype.kind not in "bui" or y.size == 0:
        return "classification"
    if y.dtype.kind != "b" and not (y.min() >= 0 and y.max() <= 1):
        raise DataError(
            f"{what} has whole numbers from {y.min()} to {y.max()} in y of shape {y.shape}; give zeros and ones for "
            "labels of which several may hold, or targets of a regression as y.astype(float)."
        )
    if y.dtype.kind != "b" and (y.sum(1) == 1).all():
        raise DataError(
            f"{what} has one 1 in every row of y; give classes as y.argmax(1), or labels of which several may hold as "
            "y.astype(bool)."
        )
    return "multilabel"


def _check_plain(what: str, y: np.ndarray) -> None:
    """Refuse floating-point numbers that look like classes: as targets of a regression they would pass in silence."""
    if y.ndim == 2 and y.shape[1] > 1 and np.isin(y, (0, 1)).all() and 0 < y.mean() < 1:
        raise DataError(
            f"{what} has zeros and ones of type {y.dtype} in y of shape {y.shape}; give classes as y.argmax(1), or "
            "labels of which several may hold as y.astype(bool)."
        )
    if y.ndim != 1 or not np.array_equal(y, np.round(y)):
        return
    values = np.unique(y)
    if np.isfinite(values).all() and 2 <= len(values) <= len(y) // 2:
        raise DataError(
            f"{what} has y of type {y.dtype} with {len(values)} different values, all whole numbers; give classes as "
            "y.astype(int), or targets of a regression as y[:, None]."
        )


def _labels(what: str, y: np.ndarray, names: tuple[str, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as numbers of classes, and the classes' names: those given, or else those that the labels have."""
    if y.dtype.kind not in "buiU" or y.ndim != 1:
        raise DataError(
            f"{what} has labels of type {y.dtype} and shape {y.shape}; expected whole numbers or text of shape "
            "(samples,)."
        )
    if not names:
        return classes_of(what, y)
    labels = coded(what, y, names).astype(np.int64)
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(names):
        raise DataError(
            f"{what} has labels from {labels.min()} to {labels.max()} for {len(names)} classes; expected 0 to "
            f"{len(names) - 1}, or names of classes."
        )
    return labels, names


def _read_npz(path: Path, optional: tuple[str, ...], needed: tuple[str, ...] = ("x", "y")) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise DataError(f"There is no file {path}; give the path of an .npz file with the arrays x and y.")
    try:
        # np.load leaves a damaged file open if it is the one to open it
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            _check_size(path, content)
            arrays = {key: content[key] for key in content.files}
    except (DataError, MemoryError):
        raise
    except Exception as error:  # a damaged archive can raise anything at all
        reason = str(error).partition(" If you trust")[0].rstrip(".")  # numpy then tells how to run what is in it
        raise DataError(
            f"{path} cannot be read as an .npz file of plain arrays ({reason}); write it with "
            "np.savez(path, x=x, y=y) and no arrays of objects."
        ) from error
    known = {*needed, *optional, *(key for key in arrays if "y" in needed and key.startswith(GROUP))}
    missing, strange = set(needed) - set(arrays), set(arrays) - known
    if missing or strange:
        raise DataError(
            f"{path} has the arrays {', '.join(sorted(arrays)) or '(none)'}; expected {' and '.join(needed)}"
            f"{''.join(f', optionally {key}' for key in optional)}."
        )
    if any(array.ndim == 0 for name, array in arrays.items() if name != "vocabulary"):
        raise DataError(f"{path} has an array without axes; expected one entry per sample in each.")
    return arrays


def _given_vocabulary(path: Path, content: dict[str, np.ndarray]) -> int | None:
    """How many tokens there are, if a file says so; it is taken out of ``content``."""
    if "vocabulary" not in content:
        return None
    given = content.pop("vocabulary")
    if given.size != 1 or given.dtype.kind not in "iu" or int(given.reshape(())) < 1:
        raise DataError(f"{path} has the vocabulary {given}; expected one whole number, how many tokens there are.")
    return int(given.reshape(()))


def _check_size(path: Path, content: Any) -> None:
    """Refuse arrays that are longer than what is there of them, or than memory, before any is read."""
    size = 0
    for member in content.zip.infolist():
        with content.zip.open(member) as file:
            header = {1: format.read_array_header_1_0, 2: format.read_array_header_2_0}
            version = format.read_magic(file)[0]
            if version not in header:
                raise ValueError(f"{member.filename} is of an unknown version")
            shape, _, dtype = header[version](file)
            wanted = math.prod(shape) * dtype.itemsize
            if not dtype.hasobject and wanted != member.file_size - file.tell():
                raise ValueError(f"{member.filename} is cut off, or not as long as it says")
        size += wanted
    if size > total():
        raise DataError(
            f"{path} holds {size / 1e9:,.1f} GB, and this machine has {total() / 1e9:,.1f} GB of memory; give a part "
            "of it, or numbers of a smaller type."
        )


def _check_same(first: Path, expected: dict[str, np.ndarray], file: Path, content: dict[str, np.ndarray]) -> None:
    if set(content) != set(expected):
        raise DataError(
            f"{file} has the arrays {', '.join(sorted(content))} but {first} has "
            f"{', '.join(sorted(expected))}; give every client the same ones."
        )
    for key, array in content.items():
        if len(array) != len(content["x"]):
            raise DataError(
                f"{file} has {len(content['x'])} samples in x but {len(array)} in {key}; give one for each."
            )
        other = expected[key]
        if array.shape[1:] != other.shape[1:]:
            raise DataError(
                f"{file} has {key} of shape {array.shape[1:]} per sample but {first} has {other.shape[1:]}; "
                "give every client the same shape."
            )
        # strings may differ in length; for numbers, the type decides on scaling and on the task
        if array.dtype.kind != other.dtype.kind or (array.dtype.kind != "U" and array.dtype != other.dtype):
            raise DataError(
                f"{file} has {key} of type {array.dtype} but {first} has {other.dtype}; "
                "give every client the same type."
            )
