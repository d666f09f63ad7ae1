# SPDX-License-Identifier: Apache-2.0
"""FedAvg in fedloom, through its Python interface, everything left to it but the work itself."""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import torch
from networks import options, tell

import fedloom
from fedloom.progress import Headline, Quiet

NAMES = {"mlp": "mlp:hidden=100", "lenet": "lenet"}


class Stamp(Quiet):
    """When each round ended."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def begin(self, run: Headline) -> None:
        print(f"{run.engine} engine: {run.engine_reason}", file=sys.stderr)

    def update(self, record: dict[str, Any]) -> None:
        self.stamps.append(time.perf_counter())


def main() -> None:
    chosen = options()
    stored = torch.load(chosen.data, weights_only=True)
    stamp = Stamp()
    with tempfile.TemporaryDirectory() as folder:
        run = fedloom.run(
            "fedavg",
            dataset=(stored["x"].numpy(), stored["y"].numpy()),
            model=NAMES[chosen.network],
            out=f"{folder}/run",
            progress=stamp,
            partition="iid",
            clients=chosen.clients,
            cohort=chosen.clients,
            val_share=0.0,
            test_share=0.0,
            rounds=chosen.rounds + 1,  # the last one is evaluated, and not counted
            eval_every=chosen.rounds + 1,
            local_steps=chosen.steps,
            batch_size=chosen.batch,
            local_lr=chosen.rate,
            momentum=chosen.momentum,
            weight_decay=0.0,
            clip=0.0,
            workers=chosen.workers,
        )
        tell(stamp.stamps[:-1], run.model(0), chosen)


if __name__ == "__main__":
    main()
