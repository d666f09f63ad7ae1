# SPDX-License-Identifier: Apache-2.0
"""Rounds whose replies come when they are done: on paper, beside synchronous ones, and stopped in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from conftest import needed
from fedloom import algorithms
from fedloom.core.contract import Cohort, Setup
from fedloom.core.errors import ConfigError, NeedsError, RunError
from fedloom.core.trees import Tree, flatten, leaves
from fedloom.data.arrays import Arrays
from fedloom.data.own import from_arrays
from fedloom.engines.engine import SENT
from fedloom.engines.memories import Memories
from fedloom.engines.sequential import Sequential
from fedloom.runs.directory import RunDirectory
from fedloom.training.asynchronous import play
from fedloom.training.clock import Turn
from fedloom.training.config import parse_options
from fedloom.training.rounds import LookAhead
from fedloom.training.simulation import Simulation
from tiny import HAND, lines

SMALL = {"clients": 4, "rounds": 8, "local_steps": 2, "model": "mlp:hidden=4", "batch_size": 8, "cohort": 3,
         "eval_every": 4, "engine": "sequential"}  # fmt: skip


def data() -> Arrays:
    rng = np.random.default_rng(0)
    y = np.arange(160) % 4
    x = (rng.standard_normal((160, 4, 4, 1)) + y[:, None, None, None]).astype(np.float32)
    return from_arrays(x.transpose(0, 3, 1, 2), y)


def simulation(method: str, **options: Any) -> Simulation:
    given = {**SMALL, **needed(algorithms.get(method)), **options}
    return Simulation(method, *parse_options(method, given), data())


def equally_fast(folder: Path, clients: int = 4) -> str:
    path = folder / "there.csv"
    path.write_text("client,start,end,speed\n" + "".join(f"{i},0,1,1\n" for i in range(clients)))
    return str(path)


def trained(built: Simulation, rounds: int = 4) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    told = [built.train_round() for _ in range(rounds)]
    return told, flatten({"state": built.now.state._asdict(), **dict(sorted(built.now.memory.items()))})


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_change_counts_from_where_it_was_begun_and_less_the_older_it_is() -> None:
    """FedAvg on two lines, from w = 1, where the clients' changes are 0.4 and -0.2.

    Both begin; the first answers at once: w = 1.4. The second answers a round later with its change of w = 1, which
    counts 1 / sqrt(2): w = 1.4 - 0.2 / sqrt(2). Then the first, who began again at 1.4, where its change is
    -0.1 * 2 (1.4 - 3) = 0.32, answers two rounds late: w grows by 0.32 / sqrt(3).
    """
    federation, algorithm = lines(), algorithms.get("fedavg")
    config = algorithm.config(**HAND)
    setup: Setup[Any] = Setup(config, federation.participants, federation.models, federation.task, 0,
                              dtype=torch.float64)  # fmt: skip
    engine, state, memory = Sequential(federation, algorithm, config, 0), algorithm.init(setup), Memories()
    expected = (1.4, 1.4 - 0.2 / 2**0.5, 1.4 - 0.2 / 2**0.5 + 0.32 / 3**0.5)
    turns = (
        Turn(1.0, ("0",), (), ("0", "1"), {"0": 0}),
        Turn(2.0, ("1",), (), ("0",), {"1": 1}),
        Turn(3.0, ("0",), (), ("1",), {"0": 2}),
    )
    for number, (turn, w) in enumerate(zip(turns, expected), 1):
        session = engine.session(number, memory)
        state, told = play(algorithm, turn, session, setup, state, Cohort(number, turn.came), session.ask)
        memory = session.memory
        assert float(state.params["line.weight"]) == pytest.approx(w, abs=1e-12)
        assert told["staleness"] == told["staleness_most"] == number - 1
    assert [SENT in memory[client] for client in ("0", "1")] == [False, True]


@pytest.mark.parametrize("method", ["fedavg", "pfedhn", "pfedhn_pc"])
def test_where_all_are_equally_fast_it_is_the_synchronous_method(method: str, tmp_path: Path) -> None:
    options = {"cohort": 4}
    plain, state = trained(simulation(method, **options))
    told, other = trained(simulation(method, async_=4, availability=equally_fast(tmp_path), **options))
    assert_same_bits(state, other)
    assert [record["cohort"] for record in told] == [record["cohort"] for record in plain]
    assert [record["diagnostics"]["clock"] for record in told] == [2, 4, 6, 8]


@pytest.mark.parametrize("method", ["fedavg", "mh_pfedhn"])
def test_a_clock_changes_no_bit_of_synchronous_rounds(method: str) -> None:
    assert_same_bits(trained(simulation(method))[1], trained(simulation(method, availability="always"))[1])


def test_looking_ahead_changes_nothing() -> None:
    plain, ahead = (simulation("pfedhn", async_=2, engine="vectorised") for _ in range(2))
    ahead._ahead = LookAhead(ahead)  # as on a GPU
    one, other = trained(plain, 8), trained(ahead, 8)
    assert_same_bits(one[1], other[1])
    assert [record["cohort"] for record in one[0]] == [record["cohort"] for record in other[0]]
    assert not ahead._ahead.why_not


@pytest.mark.parametrize("engine", ["vectorised", "loopback"])
@pytest.mark.parametrize("method", ["fedavg", "pfedhn"])
def test_engines_agree(method: str, engine: str) -> None:
    one, other = (trained(simulation(method, async_=2, dtype="float64", engine=name))
                  for name in ("sequential", engine))  # fmt: skip
    assert list(one[1]) == list(other[1])
    assert all(torch.allclose(one[1][name], other[1][name], atol=1e-9, rtol=0) for name in one[1])
    assert [record["diagnostics"]["staleness"] for record in one[0]] == [
        record["diagnostics"]["staleness"] for record in other[0]
    ]


@pytest.mark.parametrize("method", ["fedavg", "pfedhn_pc"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(method: str, tmp_path: Path) -> None:
    """Stopped while clients train: what they were sent is in the checkpoint."""
    given = {**SMALL, "async_": 2, "model": "mlp:hidden=4", "progress": "quiet", "adapt": "none"}
    x, y = data().x, data().y
    paths = [tmp_path / "straight", tmp_path / "stopped"]
    fedloom.run(method, dataset=(x, y), out=paths[0], **given)
    fedloom.run(method, dataset=(x, y), out=paths[1], **{**given, "rounds": 3})
    stopped = RunDirectory.open(paths[1])
    assert any(SENT in tree for tree in stopped.load("last").memory.values())
    fedloom.resume(paths[1], dataset=(x, y), rounds=8, progress="quiet")
    found = [RunDirectory.open(path) for path in paths]
    trees: list[Tree] = [{"state": one.load("last").state, "memory": one.load("last").memory} for one in found]
    assert_same_bits(*(dict(leaves(tree)) for tree in trees))
    numbers = [[{n: v for n, v in r.items() if n in ("cohort", "diagnostics", "dropped")} for r in one.records()]
               for one in found]  # fmt: skip
    assert numbers[0] == numbers[1]


def test_another_file_of_times_is_refused(tmp_path: Path) -> None:
    x, y = data().x, data().y
    given = {**SMALL, "async_": 2, "rounds": 2, "availability": equally_fast(tmp_path), "progress": "quiet"}
    fedloom.run("fedavg", dataset=(x, y), out=tmp_path / "run", **given)
    Path(given["availability"]).write_text("client,start,end\n" + "".join(f"{i},0,2\n" for i in range(4)))
    with pytest.raises(RunError, match="The times of --availability were changed since round 2 was saved"):
        fedloom.resume(tmp_path / "run", dataset=(x, y), rounds=4, progress="quiet")
    Path(given["availability"]).unlink()
    assert fedloom.load(tmp_path / "run", dataset=(x, y)).evaluate()  # which takes no clock


def test_who_went_away_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "there.csv"
    path.write_text("client,start,end,speed\n0,0,10,1\n1,0,10,1\n2,0,3,0.5\n3,0,3,1\n")
    told, _ = trained(simulation("fedavg", async_=2, cohort=4, availability=str(path)))
    left = [one for record in told for one in record["dropped"]]
    assert left and {one["client"] for one in left} <= {"2", "3"}
    assert {one["reason"] for one in left} == {"went away before it was done"}
    assert all(len(record["cohort"]["client"]) == 2 for record in told)


@pytest.mark.parametrize(
    ("method", "options", "error", "said"),
    [
        ("scaffold", {}, NeedsError, "Clients of SCAFFOLD reply with control_delta, delta here, and --async is for"),
        ("local", {}, NeedsError, "Clients of Local reply with no change here"),
        ("pefll", {}, NeedsError, "PeFLL asks for pefll.describe and for train here, and --async is for methods that"),
        ("lg_fedavg", {"pretrain_rounds": 2}, NeedsError, "LG-FedAvg asks for train and for .* here"),
        ("pfedhn", {"descriptor": "class_shares"}, NeedsError, "pFedHN asks for label_shares and for train here"),
        ("fedavg", {"async_": 5}, ConfigError, "Of 4 clients 4 are ever there .*, and a round needs 5"),
        ("fedavg", {"dp_noise": 1.0, "dp_clip": 1.0}, ConfigError, "--async and --dp-noise do not go together"),
        ("fedavg", {"engine": "flower-sim"}, ConfigError, "--async is for clients on a clock of this process"),
        ("fedavg", {"sample_dp_noise": 1.0, "sample_dp_clip": 1.0}, ConfigError, "--async and --sample-dp-noise have"),
    ],
)
def test_what_does_not_go_together_is_refused(
    method: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        assert simulation(method, **{"async_": 2, **options}).clock


def test_a_run_that_is_refused_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(NeedsError, match="--async is for methods"):
        fedloom.run("scaffold", out=tmp_path / "run", async_=2, progress="quiet", **{**SMALL, "model": "mlp:hidden=4"})
    assert not (tmp_path / "run").exists()
