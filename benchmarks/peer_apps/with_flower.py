# SPDX-License-Identifier: Apache-2.0
"""FedAvg in Flower's simulation: a ClientApp on Ray, one actor with one thread per worker."""

from __future__ import annotations

import time
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from networks import NETWORKS, client_data, options, tell

OPTIONS = options()
client_app, server_app = ClientApp(), ServerApp()
stamps: list[float] = []

# once in an actor's life, as its data are: what is sent replaces the parameters
cached_data = cache(client_data)
cached_network = cache(lambda: NETWORKS[OPTIONS.network]())


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    network = cached_network()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(network.parameters(), OPTIONS.rate, momentum=OPTIONS.momentum)
    x, y = cached_data(OPTIONS.data, OPTIONS.clients)[context.node_config["partition-id"]]
    order = torch.randperm(len(x))
    for rows in order.split(OPTIONS.batch)[: OPTIONS.steps]:
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
        optimiser.step()
    reply = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(content=RecordDict(reply), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    everybody = {"min_train_nodes": OPTIONS.clients, "min_available_nodes": OPTIONS.clients}
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, **everybody)
    initial = ArrayRecord(NETWORKS[OPTIONS.network]().state_dict())
    # called before the first round and after each one; it evaluates nothing
    strategy.start(grid, initial, OPTIONS.rounds, evaluate_fn=lambda *_: stamps.append(time.perf_counter()))


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": OPTIONS.workers}}
    run_simulation(server_app, client_app, OPTIONS.clients, backend_config=resources)
    tell(stamps)
