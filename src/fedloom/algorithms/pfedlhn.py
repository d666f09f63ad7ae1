# SPDX-License-Identifier: Apache-2.0
"""pFedLHN: pFedHN in which every tensor of a client's network has an embedding of its own, out of a common few.

Zhu, Liu, Sun: Layer-wise personalized federated learning with hypernetwork. Neural Processing Letters 55(9), 2023.

The loom has a few common embeddings. A client has, for each tensor of its network, coefficients over them, so that
clients can be alike in one layer and differ in another. All else is pFedHN: weave, train, pull the change back, step.

Symbols: E: ``loom["basis"]``, c_i: a row of ``coefficients``, theta_i: ``woven``, K: ``local_steps``.

Sent down: the client's own woven parameters.
Sent up: the change of the parameters, the number of samples, the training loss. Evaluations as in FedAvg.
Kept by the client: its model's running statistics.
Kept by the server: the loom, the coefficients, the state of the outer optimiser for each of them.
Reduces to: pFedHN with a linear loom if a client's coefficients are the same for all tensors and E is the identity.
Differs from the paper: we follow the authors' code. Where several clients take part it multiplies the sum of their
models by the sum of their changes; here each change is pulled back through its own model. Newcomers' coefficients start
at the participants' mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedloom.algorithms import pfedhn
from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Ask, Cohort, Diagnostics, Handover, Model, Program, Sent, Setup, as_saved
from fedloom.core.optim import Optimiser, OptimiserName, clipped
from fedloom.core.random import seed_of, stream
from fedloom.core.rows import rows_of, with_rows
from fedloom.core.training import LocalConfig
from fedloom.core.trees import ClientId, PerClient, Tree
from fedloom.looms.layerwise import LayerwiseLoom
from fedloom.looms.weaving import one_by_one, pull_back, weave
from fedloom.programs.local import local_training

SPREAD = 0.002
"""The deviation of the first coefficients, in the authors' commands."""


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """pFedLHN's options."""

    basis: int = option(5, "Common embeddings (the authors' code).", low=1)
    embed_dim: int = option(40, "Size of a common embedding (the authors' code).", low=1)
    hidden: int = option(128, "Width of the layer after them (the authors' code).", low=1)
    server_optimiser: OptimiserName = option("adamw", "Outer optimiser (the authors' commands).")
    server_lr: float = option(3e-4, "Outer learning rate (the authors' commands).", low=0)
    server_momentum: float = option(0.9, "Outer momentum, for sgd (the authors' code).", low=0, high=1)
    server_weight_decay: float = option(0.01, "Outer weight decay, coefficients included (as AdamW has it).", low=0)
    server_clip: float = option(30.0, "Largest norm of an outer gradient; 0: no clipping (the authors' code).", low=0)
    server_step: Literal["per_client", "cohort_mean"] = option(
        "per_client", "One outer step per reply, as for a cohort of one, or one on the mean."
    )
    admit_rounds: int = option(100, "Outer steps on a newcomer's coefficients (the authors' code).", low=1)

    def outer(self) -> Optimiser:
        """The optimiser of loom and coefficients; clipping takes both together."""
        return Optimiser(self.server_optimiser, self.server_lr, self.server_momentum, self.server_weight_decay)


class State(NamedTuple):
    """The loom and a row of coefficients for every client of the roster."""

    loom: Mapping[str, Tensor]
    coefficients: Tensor  # (clients, tensors * basis)
    optimiser: Tree  # of the loom; and of the rows, each with a count of its own


def loom_of(setup: Setup[Any]) -> Any:
    """The loom for a roster."""
    config, targets = setup.config, {str(spec): model.shapes for spec, model in setup.architectures.items()}
    most = max(len(shapes) for shapes in targets.values())
    loom = LayerwiseLoom(most * config.basis, targets, config.basis, config.embed_dim, config.hidden)
    return setup.elsewhere(loom) if setup.elsewhere else loom


def init(setup: Setup[Any]) -> State:
    """Coefficients near 0, so that at first all clients are nearly alike."""
    loom, outer = loom_of(setup), setup.config.outer()
    phi = loom.init(seed_of(setup.seed, "loom"), setup.device, setup.dtype)
    drawn = SPREAD * stream(setup.seed, "coefficients").standard_normal((len(setup.clients), loom.embed_dim))
    table = phi["basis"].new_tensor(drawn)
    return State(phi, table, {"loom": outer.init(phi), "rows": first_rows(outer, table)})


def first_rows(outer: Optimiser, table: Tensor) -> Tree:
    """The optimiser's state for a table whose rows step apart."""
    state = outer.init({"coefficients": table})
    return {**state, "count": table.new_zeros(len(table), 1)} if "count" in state else state


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """theta_i = h(c_i; phi)."""
    own = rows_of(setup, {"coefficients": state.coefficients}, clients)["coefficients"]
    return Sent({}, weave(setup, loom_of(setup), state.loom, own, clients))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Send, train, and step on the loom and the coefficients along the pulled-back change."""
    replies = ask(local_training(setup.config), *send(setup, state, cohort.clients))
    for part in one_by_one(setup, replies) if setup.config.server_step == "per_client" else [replies]:
        state = learn(setup, state, part)
    return state, {"local_loss": mean_loss(replies)}


def learn(setup: Setup[Any], state: State, replies: PerClient) -> State:
    """One step on the loom and on the rows that the replies came from; the other rows rest."""
    outer, clients = setup.config.outer(), list(replies)
    own = rows_of(setup, {"coefficients": state.coefficients, "memory": state.optimiser["rows"]}, clients)
    grads, slope = pull_back(setup, loom_of(setup), state.loom, own["coefficients"], clients, replies)
    if setup.config.server_clip:
        grads = clipped({**grads, "coefficients": slope}, setup.config.server_clip)
        slope = grads.pop("coefficients")
    phi, memory = outer.update(state.loom, grads, state.optimiser["loom"])
    rows, own_memory = outer.update({"coefficients": own["coefficients"]}, {"coefficients": slope}, own["memory"])
    table = {"coefficients": state.coefficients, "memory": state.optimiser["rows"]}
    after = with_rows(setup, table, clients, {**rows, "memory": own_memory})
    return State(phi, after["coefficients"], {"loom": memory, "rows": after["memory"]})


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """Freeze the loom and step on coefficients for each newcomer."""
    config, loom, clients = setup.config, loom_of(setup), newcomers.clients
    table = state.coefficients.mean(0).repeat(len(clients), 1)
    memory = first_rows(config.outer(), table)
    for _ in range(config.admit_rounds):
        replies = ask(local_training(config), {}, weave(setup, loom, state.loom, table, clients))
        _, slope = pull_back(setup, loom, state.loom, table, clients, replies, through_loom=False)
        # every newcomer steps on its own change, not on a mean
        slope = slope * len(replies)
        if config.server_clip:
            slope = slope * (config.server_clip / (slope.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        after, memory = config.outer().update({"coefficients": table}, {"coefficients": slope}, memory)
        table = after["coefficients"]
    return Sent({}, weave(setup, loom, state.loom, table, clients))


def for_participants(setup: Setup[Any], state: State) -> State:
    """The loom and the coefficients."""
    return state._replace(optimiser={})


def for_newcomers(setup: Setup[Any], state: State) -> State:
    """The loom, and the mean of the coefficients in the place of all."""
    return state._replace(coefficients=state.coefficients.mean(0, keepdim=True), optimiser={})


def vector(config: Config) -> Literal["embedding"]:
    """What a model is woven from: coefficients, all in one row."""
    return "embedding"


def steps(config: Config) -> int:
    """How often a newcomer's coefficients step."""
    return config.admit_rounds


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A client trains what was woven for it."""
    return [local_training(config)]


CITATION = """@article{zhu2023pfedlhn,
  title={Layer-Wise Personalized Federated Learning with Hypernetwork},
  author={Zhu, Suxia and Liu, Tianyu and Sun, Guanglu},
  journal={Neural Processing Letters}, volume={55}, number={9}, pages={12273--12287}, year={2023}}"""

ALGORITHM = replace(
    pfedhn.ALGORITHM,
    name="pFedLHN",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    one_step=None,
    programs=programs,
    admit=admit,
    embeddings=None,
    handover=Handover(for_participants, for_newcomers, loom="loom", vector=vector, structure=loom_of, steps=steps),
    restored=as_saved,
)
