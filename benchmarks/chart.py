# SPDX-License-Identifier: Apache-2.0
"""The chart of docs/performance.md, from the figures beside it.

    python benchmarks/chart.py docs/img/performance.json docs/img/performance.svg

The file has a title per group of bars, and for each bar its label and its ratio to the plain loop.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    groups: dict[str, dict[str, float]] = json.loads(source.read_text())
    matplotlib.rcParams["svg.hashsalt"] = source.name  # the same bytes for the same numbers
    figure = Figure(figsize=(7, 0.3 * sum(len(bars) + 1 for bars in groups.values()) + 0.8), layout="constrained")
    axes = figure.add_subplot()
    places, labels = [], []
    at = 0.0
    for title, bars in groups.items():
        axes.text(0, -at, title, fontsize=9, va="center", weight="bold")
        at += 1
        for label, ratio in bars.items():
            axes.barh(-at, ratio, color="tab:blue" if label != "plain loop" else "tab:gray", height=0.7)
            axes.text(ratio, -at, f" {ratio:g}x", va="center", fontsize=8)
            places.append(-at)
            labels.append(label)
            at += 1
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_xlabel("speed, plain PyTorch loop = 1")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
