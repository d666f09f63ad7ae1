# SPDX-License-Identifier: Apache-2.0
"""The picture of a split: who holds how much of which class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedloom.clients.partition import Partition
from fedloom.core.errors import ConfigError
from fedloom.data.arrays import Arrays

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 300.0
"""Inches, at 100 dots each: the renderer refuses pictures of twice that."""
ROW, COLUMN = 0.16, 0.25  # inches
DOT = 110
"""The area of the largest dot in square points: it fills its row."""
LOOKS = (("participants", "tab:blue"), ("unseen", "tab:orange"))


def picture(partition: Partition, arrays: Arrays, path: Path) -> Path:
    """Save a picture: dots of clients by classes, sized by samples; for regression, bars of samples."""
    # the object interface: pyplot would look for a screen, and keep the figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise ConfigError(f"--out is {path}; the name of a picture ends in one of: {', '.join(sorted(kinds))}.")
    counts = class_counts(partition, arrays)
    clients, classes = counts.shape
    size = (min(max(COLUMN * classes, 4) + 1.5, LARGEST), min(max(ROW * clients, 2) + 1.5, LARGEST))
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for unseen, (label, colour) in enumerate(LOOKS):
        rows = np.array([row for row, client in enumerate(partition.clients) if client.unseen == bool(unseen)], int)
        if len(rows):
            (_dots if arrays.sample_classes else _bars)(axes, rows, counts, label, colour)
    _label(axes, partition, arrays)
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror or error}; give another --out.") from error
    return path


def class_counts(partition: Partition, arrays: Arrays) -> np.ndarray:
    """Samples by client and class; one column where there are none."""
    labels = arrays.y if arrays.sample_classes else np.zeros(len(arrays), dtype=np.int64)
    held = [np.concatenate([c.train, c.val, c.test]) for c in partition.clients]
    return np.stack([np.bincount(labels[rows], minlength=max(arrays.sample_classes, 1)) for rows in held])


def _dots(axes: Axes, rows: np.ndarray, counts: np.ndarray, label: str, colour: str) -> None:
    which, classes = np.nonzero(counts[rows])
    areas = DOT * counts[rows[which], classes] / counts.max()
    axes.scatter(classes, rows[which], s=areas, color=colour, label=label, linewidths=0)


def _bars(axes: Axes, rows: np.ndarray, counts: np.ndarray, label: str, colour: str) -> None:
    axes.barh(rows, counts[rows, 0], color=colour, label=label)


def _label(axes: Axes, partition: Partition, arrays: Arrays) -> None:
    clients, classes = len(partition.clients), arrays.sample_classes
    axes.set_title(arrays.name)
    axes.set_ylabel("client")
    axes.set_yticks(range(clients), [client.id for client in partition.clients], fontsize=7)
    axes.set_ylim(clients - 0.5, -0.5)  # the first client on top
    axes.set_xlabel("class" if classes else "samples")
    if classes:
        names = arrays.class_names or [str(number) for number in range(classes)]
        axes.set_xticks(range(classes), names, fontsize=7, rotation=90)
        axes.set_xlim(-0.7, classes - 0.3)
        axes.grid(alpha=0.2)
        axes.set_axisbelow(True)
