# SPDX-License-Identifier: Apache-2.0
"""The ClientApp of ``with_flower.py``; a module of its own, which Ray's actors can import."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from networks import NETWORKS, client_data

app = ClientApp()
cached_data = cache(client_data)  # once in an actor's life


@app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    work = message.content["config"]
    network = NETWORKS[work["network"]]()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(network.parameters(), work["rate"], momentum=work["momentum"])
    x, y = cached_data(Path(work["data"]), work["clients"])[context.node_config["partition-id"]]
    for rows in torch.randperm(len(x)).split(work["batch"])[: work["steps"]]:
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
        optimiser.step()
    reply = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(content=RecordDict(reply), reply_to=message)
