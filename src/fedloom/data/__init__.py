# SPDX-License-Identifier: Apache-2.0
"""Data: published datasets by name, users' own arrays and files, all as checked ``Arrays``."""

from fedloom.data.arrays import Arrays
from fedloom.data.own import from_arrays, from_folder, from_npz, from_torch_dataset
from fedloom.data.registry import dataset, load, names
from fedloom.data.tables import from_table

__all__ = [
    "Arrays",
    "dataset",
    "from_arrays",
    "from_folder",
    "from_npz",
    "from_table",
    "from_torch_dataset",
    "load",
    "names",
]
