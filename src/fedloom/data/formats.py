# SPDX-License-Identifier: Apache-2.0
"""The file formats that several datasets are published in, read without trusting them.

Whatever is wrong with a file becomes one DataError that names it; no pickle is ever executed.
"""

import gzip
import io
import math
import pickle
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError

# http://yann.lecun.com/exdb/mnist/: the third byte of an idx file is the type, the fourth the number of axes
_IDX_TYPES: dict[int, np.dtype] = {0x08: np.dtype("u1"), 0x0C: np.dtype(">i4")}

# NumPy's own helper for rebuilding an array, under the name of either major version
_REBUILD = np.empty(0).__reduce__()[0]
_HARMLESS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _REBUILD,
    ("numpy._core.multiarray", "_reconstruct"): _REBUILD,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): str.encode,
}


def corrupt(path: Path, why: object) -> DataError:
    """The error for a published file that is not as it was published."""
    reason = str(why).partition("\n")[0]  # tarfile, for one, writes a list
    return DataError(f"{path} is damaged or not the published file ({reason}); delete it and fetch it again.")


def read_idx(path: Path) -> np.ndarray:
    """An array from an idx file, gzipped or not."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise corrupt(path, error) from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES:
        raise corrupt(path, f"its first bytes {raw[:4].hex()} are not an idx header")
    dtype, axes = _IDX_TYPES[raw[2]], raw[3]
    start = 4 + 4 * axes
    if len(raw) < start:
        raise corrupt(path, "its idx header breaks off")
    shape = np.frombuffer(raw, ">u4", axes, 4).tolist()
    expected = start + math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise corrupt(path, f"it holds {len(raw)} bytes where its header promises {expected}")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape)


def read_idx_pair(images_path: Path, labels_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (samples, height, width) and labels (samples,), both uint8, from two idx files."""
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3:
        raise corrupt(images_path, f"expected images on 3 axes, got shape {images.shape}")
    if labels.ndim != 1:
        raise corrupt(labels_path, f"expected labels on 1 axis, got shape {labels.shape}")
    if len(images) != len(labels):
        raise corrupt(labels_path, f"it has {len(labels)} labels for the {len(images)} images of {images_path.name}")
    return images, labels


def read_pickle(path: Path) -> dict[str, Any]:
    """A dictionary of plain values and arrays from a pickle, which may not call anything else."""
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="latin1").load()
    except DataError as error:
        raise corrupt(path, error) from error
    except Exception as error:  # a damaged pickle can raise anything at all
        raise corrupt(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise corrupt(path, f"expected a dictionary, got {type(content).__name__}")
    return content


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _HARMLESS[module, name]
        except KeyError:
            raise DataError(f"its pickle asks for {module}.{name}, which is refused") from None


class Zip:
    """A zip archive of which members are read in memory, never unpacked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except Exception as error:  # a damaged archive can raise anything at all
            raise corrupt(path, error) from error

    def __enter__(self) -> "Zip":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def names(self) -> list[str]:
        """The members that are files, sorted."""
        return sorted(name for name in self._zip.namelist() if not name.endswith("/"))

    def read(self, name: str) -> bytes:
        """One member."""
        try:
            return self._zip.read(name)
        except Exception as error:
            raise corrupt(self.path, f"{name}: {error}") from error

    def image(self, name: str, mode: str) -> Any:
        """One member as a PIL image of that mode."""
        from PIL import Image

        raw = self.read(name)
        try:
            with Image.open(io.BytesIO(raw)) as image:
                return image.convert(mode)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise corrupt(self.path, f"{name}: {error}") from error


def scaled(images: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Images (samples, channels, height, width) of bytes as (value / 255 - mean) / std, float32."""
    x = images.astype(np.float32, order="C")
    x /= 255
    x -= np.array(mean, np.float32)[:, None, None]
    x /= np.array(std, np.float32)[:, None, None]
    return x
