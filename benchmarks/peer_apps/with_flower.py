# SPDX-License-Identifier: Apache-2.0
"""FedAvg in Flower's simulation: a ClientApp on Ray, one actor with one thread per worker."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from flower_client import app
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from networks import NETWORKS, options, tell

OPTIONS = options()
server_app = ServerApp()


class Everybody(FedAvg):
    """FedAvg that goes on only if every client has answered: a failed client would make a fast round."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        failed = OPTIONS.clients - sum(not reply.has_error() for reply in replies)
        if failed:
            raise SystemExit(f"{failed} of {OPTIONS.clients} clients failed in round {server_round}")
        return super().aggregate_train(server_round, replies)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    everybody = {"min_train_nodes": OPTIONS.clients, "min_available_nodes": OPTIONS.clients}
    strategy = Everybody(fraction_train=1.0, fraction_evaluate=0.0, **everybody)
    network, stamps = NETWORKS[OPTIONS.network](), []
    work = {name: str(value) if name == "data" else value for name, value in vars(OPTIONS).items()}
    result = strategy.start(
        grid,
        ArrayRecord(network.state_dict()),
        OPTIONS.rounds,
        train_config=ConfigRecord(work),
        # called before the first round and after each one; it evaluates nothing
        evaluate_fn=lambda *_: stamps.append(time.perf_counter()),
    )
    network.load_state_dict(result.arrays.to_torch_state_dict())
    tell(stamps, network, OPTIONS)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": OPTIONS.workers}}
    run_simulation(server_app, app, OPTIONS.clients, backend_config=resources)
