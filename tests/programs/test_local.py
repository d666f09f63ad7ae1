# SPDX-License-Identifier: Apache-2.0
"""Local training: what a client trains is what was sent and what is its own; only the change of the first travels."""

from __future__ import annotations

import pytest
import torch

from fedloom.core.contract import Batch, Home, composed
from fedloom.core.random import key
from fedloom.core.task import REGRESSION
from fedloom.core.training import LocalConfig
from fedloom.core.trees import Tree, flatten
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.programs.local import local_training
from tiny import HAND

BODY, TOP = {"body.weight": torch.ones(1, 1).double()}, {"top.weight": torch.full((1, 1), 2.0).double()}


@pytest.mark.parametrize(
    ("shared", "mine", "own"),
    [
        ({"params": {**BODY, **TOP}}, {}, {}),
        ({"params": BODY}, {"params": TOP}, {}),
        ({}, {"params": {**BODY, **TOP}}, {}),
        ({"params": BODY}, {}, TOP),
        ({}, {"params": TOP}, BODY),
        ({}, {}, {**BODY, **TOP}),
    ],
    ids=["shared", "shared and mine", "mine", "own head", "own body", "own"],
)
def test_a_model_may_be_divided_in_any_way(shared: Tree, mine: Tree, own: Tree) -> None:
    """y = h b x at b = 1, h = 2 and (1, 3): slopes -4 for b and -2 for h, so that they move by 0.4 and 0.2."""
    config = LocalConfig(**HAND)
    model = Model(parse("tiny:BodyAndHead", (1,), 1), dtype=torch.float64)
    home = Home(model, REGRESSION, config, torch.ones((), dtype=torch.float64), key(0))
    memory = {"buffers": {}, **({"own": own} if own else {}), "other": torch.ones(2)}
    program = local_training(config)
    batch = Batch(
        torch.ones(1, 1).double(),
        torch.full((1, 1), 3.0).double(),
        torch.ones(1, dtype=torch.bool),
        torch.tensor(0),
        torch.tensor(0),
        key(1),
    )
    carry = program.step(home, shared, program.init(home, shared, mine, memory), batch)
    reply, kept = program.final(home, shared, carry, memory)
    moved = {"body.weight": 0.4, "top.weight": 0.2}
    sent = [name for name in moved if name not in own]
    delta = {name: float(value) for name, value in reply.get("delta", {}).items()}
    assert delta == pytest.approx({name: moved[name] for name in sent}, abs=1e-12)
    assert flatten(reply).keys() == flatten(program.expects(shared, mine)).keys()
    assert float(reply["loss"]) == pytest.approx(1.0) and float(reply["num_samples"]) == 1
    ends = {name: float(value) for name, value in kept.get("own", {}).items()}
    assert ends == pytest.approx({name: float(own[name]) + moved[name] for name in own}, abs=1e-12)
    assert kept["other"] is memory["other"]
    # what it deploys is composed likewise
    params = composed(home, shared, mine, kept)["params"]
    assert {name: float(value) for name, value in params.items()} == pytest.approx(
        {**{name: float({**BODY, **TOP}[name]) for name in sent}, **ends}, abs=1e-12
    )


def test_programs_of_equal_configs_are_equal() -> None:
    """Engines keep what they compiled for a program, and find it by the program."""
    one, other = (local_training(LocalConfig(**HAND)) for _ in range(2))
    assert one is not other and one == other and hash(one) == hash(other)
    assert local_training(LocalConfig(**{**HAND, "batch_size": 7})) != one
