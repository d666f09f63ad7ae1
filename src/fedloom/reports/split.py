# SPDX-License-Identifier: Apache-2.0
"""The picture of a split: who holds how much of which class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedloom.clients.partition import Partition
from fedloom.core.errors import ConfigError
from fedloom.data.arrays import Arrays

DPI = 100
LARGEST = 300
"""Inches: above, matplotlib's renderer refuses the picture."""
COLOURS = {False: "tab:blue", True: "tab:orange"}  # by unseen


def picture(partition: Partition, arrays: Arrays, path: Path) -> Path:
    """Save a picture: dots of clients by classes, sized by samples; for regression, bars of samples."""
    # the object interface: pyplot would choose a backend for a screen, and keep the figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    writable = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in writable:
        raise ConfigError(f"--out is {path}; a picture's name ends in one of: {', '.join(sorted(writable))}.")
    counts = class_counts(partition, arrays)
    clients, classes = counts.shape
    size = (min(max(0.25 * classes, 4) + 1.5, LARGEST), min(max(0.16 * clients, 2) + 1.5, LARGEST))
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    unseen = np.array([client.unseen for client in partition.clients])
    for kind in np.unique(unseen):
        label = "unseen" if kind else "participants"
        rows = np.flatnonzero(unseen == kind)
        if arrays.num_classes:
            y, x = np.nonzero(counts[rows])
            # areas tell samples; the largest dot fills its row
            areas = 110 * counts[rows][y, x] / counts.max()
            axes.scatter(x, rows[y], s=areas, color=COLOURS[bool(kind)], label=label, linewidths=0)
        else:
            axes.barh(rows, counts[rows, 0], color=COLOURS[bool(kind)], label=label)
    axes.set_yticks(range(clients), [client.id for client in partition.clients], fontsize=7)
    axes.set_ylim(clients - 0.5, -0.5)
    axes.set_ylabel("client")
    axes.set_xlabel("class" if arrays.num_classes else "samples")
    axes.set_title(arrays.name)
    if arrays.num_classes:
        axes.set_xlim(-0.7, classes - 0.3)
        axes.set_xticks(range(classes), arrays.class_names or range(classes), fontsize=7, rotation=90)
        axes.grid(alpha=0.2)
        axes.set_axisbelow(True)
    if unseen.any():
        figure.legend(loc="outside upper right", markerscale=0.6, fontsize=7)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror or error}; give another --out.") from error
    return path


def class_counts(partition: Partition, arrays: Arrays) -> np.ndarray:
    """Samples by client and class; one column for regression."""
    labels = arrays.y if arrays.num_classes else np.zeros(len(arrays), dtype=np.int64)
    held = [np.concatenate([c.train, c.val, c.test]) for c in partition.clients]
    return np.stack([np.bincount(labels[rows], minlength=max(arrays.num_classes, 1)) for rows in held])
