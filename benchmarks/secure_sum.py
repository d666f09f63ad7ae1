# SPDX-License-Identifier: Apache-2.0
"""What a secure sum costs besides the network: processor time and bytes of a client, processor time of the server.

    python benchmarks/secure_sum.py --clients 100 --hidden 1000

All clients are in this process; what they would have learned is random numbers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from flwr.app import RecordDict

from fedloom import algorithms
from fedloom.clients.federation import Client, Federation
from fedloom.core.task import CLASSIFICATION
from fedloom.core.trees import PerClient, Tree, num_bytes, tree_map
from fedloom.deploy.codec import facts_of, pack
from fedloom.deploy.engine import Flower, Rules
from fedloom.deploy.options import NodeOptions, Sums
from fedloom.deploy.store import Store
from fedloom.deploy.summing import Member
from fedloom.engines.memories import Memories
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.programs.local import local_training

SUMS = Sums(10.0, signed=False)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--clients", type=int, default=100)
    words.add_argument("--hidden", type=int, default=1000, help="Units of an MLP on 28x28 images.")
    words.add_argument("--gone", type=int, default=0, help="Clients that go before they reply.")
    given = words.parse_args()
    torch.set_num_threads(1)
    model = Model(parse(f"mlp:hidden={given.hidden}", (28, 28), 10), torch.device("cpu"), torch.float32)
    names = [str(number) for number in range(given.clients)]
    rows = {split: np.arange(0) for split in ("train", "val", "test")}
    nothing = torch.empty(0, 28, 28), torch.empty(0, dtype=torch.int64)
    federation = Federation(*nothing, CLASSIFICATION, {name: Client(name, model, rows) for name in names})
    algorithm, seconds, sizes = algorithms.get("fedavg"), Counter[str](), Counter[str]()
    change = {"delta": tree_map(lambda leaf: 1e-4 * torch.randn_like(leaf), model.init(0))}
    reply: Tree = {**change, "num_samples": torch.tensor(1.0), "loss": torch.tensor(1.0)}

    with tempfile.TemporaryDirectory() as folder:
        stores = {name: Store(Path(folder) / name) for name in names}

        def answer(client: str, asked: Mapping[str, object]) -> RecordDict:
            member = Member(SUMS, NodeOptions(), stores[client], asked)
            if "letters" not in asked:
                return pack(member.respond(asked))
            ticket = {part: asked[part] for part in ("run", "client", "stage", "ask")}
            masked = member.masked(algorithm, member.taking_part(asked), reply)
            return pack({**ticket, "remembers": False}, reply=masked)

        def exchange(kind: str, contents: Mapping[str, RecordDict], timeout: float) -> Mapping[str, RecordDict | str]:
            found: dict[str, RecordDict | str] = {}
            since = time.process_time()
            for client, content in contents.items():
                asked = facts_of(content)
                gone = names.index(client) < given.gone and kind == "train"
                found[client] = "is gone" if gone else answer(client, asked)
                sizes["down"] += sum(len(str(value)) for value in asked.values())
                if not gone:
                    sizes["up"] += sum(len(str(value)) for value in facts_of(found[client]).values())
            seconds["clients"] += time.process_time() - since
            return found

        engine = Flower(
            federation, algorithm, algorithm.config(), 0, "run", exchange, Rules(sums=SUMS), {}, lambda client: ()
        )
        shared = {"params": model.init(0)}
        session, since = engine.session(1, Memories()), time.process_time()
        session.ask(local_training(algorithm.config()), shared, PerClient.empty(names))
        total = time.process_time() - since
    print(f"{given.clients} clients, {given.gone} gone; a change has {model.size:,} numbers")
    one, server = seconds["clients"] / given.clients, total - seconds["clients"]
    print(f"processor time: a client {one:.2f} s, server {server:.1f} s")
    told = [f"{way} {sizes[way] / given.clients / 1e3:.1f} kB" for way in ("up", "down")]
    print(f"a client, besides model and change: {', '.join(told)}")
    print(f"its change: {4 * (model.size + 2) / 1e6:.2f} MB under masks, {num_bytes(change) / 1e6:.2f} MB without")


if __name__ == "__main__":
    main()
