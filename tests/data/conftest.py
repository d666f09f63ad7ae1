# SPDX-License-Identifier: Apache-2.0
"""What the tests of the data share: the folder with the real files, and writers of published formats."""

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def real_root() -> Path:
    root = os.environ.get("FEDLOOM_DATA")
    if not root:
        pytest.skip("FEDLOOM_DATA is not set: no published files to read")
    return Path(root)


@pytest.fixture(scope="session")
def real(real_root: Path) -> Callable:
    from fedloom.data import dataset, load

    def read(name: str):
        missing = dataset(name).missing(real_root)
        if missing:
            pytest.skip(f"not below FEDLOOM_DATA: {', '.join(missing)}")
        return load(name, real_root)

    return read


@pytest.fixture(scope="session")
def write_idx() -> Callable[[Path, np.ndarray], None]:
    def write(path: Path, values: np.ndarray) -> None:
        code = {"u": 0x08, "i": 0x0C}[values.dtype.kind]
        raw = struct.pack(f">BBBB{values.ndim}I", 0, 0, code, values.ndim, *values.shape)
        raw += values.astype(">i4" if code == 0x0C else "u1").tobytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)

    return write
