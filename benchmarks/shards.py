# SPDX-License-Identifier: Apache-2.0
"""What processes hold when a loom's heads are divided over them: its own process, and each of its shards.

    python benchmarks/shards.py [--parameters 400000] [--out results/performance]

A round weaves models for two clients of so many parameters, and steps on a change of each; nobody trains. Three rounds
and a checkpoint, each way in a process of its own, whose greatest resident memory counts. What a process holds before
there is a loom is taken off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedloom import algorithms
from fedloom.core.contract import Cohort, Program, Setup
from fedloom.core.task import CLASSIFICATION
from fedloom.core.trees import PerClient, Tree, num_bytes, tree_map
from fedloom.engines.machine import Machine
from fedloom.engines.shards import RayShards
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.runs.checkpoint import pack
from fedloom.runs.files import write_folder

METHODS = {"pfedhn": "pFedHN", "mh_pfedhn": "MH-pFedHN"}
INPUTS, OUTPUTS, ROUNDS = 64, 10, 3
MEGA = 1e6


def held(process: int | str) -> dict[str, float]:
    """Megabytes that a process has in memory now (``VmRSS``), and has had at most (``VmHWM``)."""
    lines = (line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 / MEGA for line in lines if line[0] in ("VmRSS:", "VmHWM:")}


def changed(program: Program, shared: Tree, mine: Mapping[str, Tree]) -> PerClient:
    """Replies of clients of which each number has changed by a hundredth."""
    like = {client: program.expects(shared, tree) for client, tree in mine.items()}
    return PerClient.of(tree_map(lambda leaf: torch.full(leaf.shape, 0.01), like))


def one_way(method: str, parameters: int, shards: int) -> dict[str, Any]:
    """Three rounds and a checkpoint in this process, with its heads here or in so many shards."""
    torch.set_num_threads(1)
    algorithm, clients = algorithms.get(method), ("0", "1")
    model = Model(parse(f"mlp:hidden={parameters // (INPUTS + OUTPUTS + 1)}", (INPUTS,), OUTPUTS))
    setup = Setup(algorithm.config(), clients, dict.fromkeys(clients, model), CLASSIFICATION, 0)
    there = RayShards(Machine(workers=shards), setup.device, shards) if shards else None
    setup = replace(setup, shards=there)
    processes = {"server": "self"} | {
        f"shard {i}": actor.process for i, actor in enumerate(there._actors if there else [], start=1)
    }
    before = {name: held(process)["VmRSS"] for name, process in processes.items()}
    state = algorithm.init(setup)
    for number in range(1, ROUNDS + 1):
        state, _ = algorithm.round(setup, state, Cohort(number, clients), changed)
    rounds = {name: held(process)["VmHWM"] - before[name] for name, process in processes.items()}
    with TemporaryDirectory() as folder:
        write_folder(Path(folder) / "checkpoint", pack(state._asdict(), {})[0])
    saved = {name: held(process)["VmHWM"] - before[name] for name, process in processes.items()}
    return {
        "state": num_bytes(state._asdict()) / MEGA,
        "model": 4 * model.size / MEGA,
        "rounds": rounds,
        "saved": saved,
    }


def lines(method: str, parameters: int) -> list[list[str]]:
    """The table's lines of a method."""
    found = []
    for shards in (0, 2):
        command = [sys.executable, __file__, "--parameters", str(parameters), "--one", method, str(shards)]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        way = json.loads(told.splitlines()[-1])
        for name in way["rounds"]:
            numbers = [way["state"], way["model"], way["rounds"][name], way["saved"][name]]
            found.append([METHODS[method], str(shards or "none"), name, *(f"{number:,.0f}" for number in numbers)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=400_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "SHARDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_way(options.one[0], options.parameters, int(options.one[1]))))
        return
    rows = [line for method in METHODS for line in lines(method, options.parameters)]
    for row in rows:
        print(" | ".join(row))
    if options.out:
        commit = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True)
        found = {
            "format": 1,
            "title": "Memory of a loom whose heads are divided over two processes",
            "command": "python benchmarks/shards.py --out results/performance",
            "note": f"The most that a process had in memory, less what it had before there was a loom: {ROUNDS} rounds "
            "of two clients, then a checkpoint. The loom is counted with its optimiser.",
            "made": [
                {
                    "commit": commit.stdout.strip(), "date": datetime.now(UTC).date().isoformat(),
                    "hardware": "CPU, 2 cores", "torch": torch.__version__.partition("+")[0],
                }
            ],
            "columns": ["method", "shards", "process", "loom, MB", "a client's model, MB", "rounds, MB",
                        "and a checkpoint, MB"],
            "rows": rows,
        }  # fmt: skip
        content = json.dumps(found, indent=1, ensure_ascii=False)
        (options.out / "shards.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
