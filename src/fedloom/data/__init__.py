# SPDX-License-Identifier: Apache-2.0
"""Data: published datasets by name, users' own arrays and files, all as checked ``Arrays``."""

from fedloom.data.arrays import Arrays
from fedloom.data.own import from_arrays, from_folder, from_npz, from_torch_dataset
from fedloom.data.registry import dataset, load, names
from fedloom.data.tables import from_table
from fedloom.data.text import encode, from_leaf, from_texts

__all__ = [
    "Arrays",
    "dataset",
    "encode",
    "from_arrays",
    "from_folder",
    "from_leaf",
    "from_npz",
    "from_table",
    "from_texts",
    "from_torch_dataset",
    "load",
    "names",
]
