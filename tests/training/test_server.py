# SPDX-License-Identifier: Apache-2.0
"""A server without data: what a run directory alone is good for, and which checkpoints a server takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedloom
from fedloom.core.errors import ConfigError, DataError, NeedsError, RunError
from fedloom.core.trees import Tree, flatten
from fedloom.data.own import from_arrays
from fedloom.runs.checkpoint import Checkpoint
from fedloom.training.config import parse_options
from fedloom.training.server import Server
from fedloom.training.simulation import Simulation

SMALL: dict[str, Any] = {
    "clients": 4, "rounds": 2, "local_steps": 2, "model": "mlp:hidden=4", "batch_size": 8, "engine": "sequential"
}  # fmt: skip
RNG = np.random.default_rng(0)
Y = np.arange(120) % 3
X = (RNG.standard_normal((120, 6)) + Y[:, None]).astype(np.float32)


def simulation(method: str = "fedavg", **options: Any) -> Simulation:
    return Simulation(method, *parse_options(method, {**SMALL, **options}), from_arrays(X, Y))


def same(one: Tree, other: Tree) -> bool:
    here, there = flatten(one), flatten(other)
    return list(here) == list(there) and all(torch.equal(here[path], there[path]) for path in here)


# A run directory without its data


@pytest.mark.parametrize(("method", "adapt"), [("fedavg", "prior"), ("pfedhn", "none"), ("fedper", "none")])
def test_a_run_directory_needs_nothing_but_itself(method: str, adapt: str, tmp_path: Path) -> None:
    """Moved elsewhere, its data deleted, it gives the bits that it gave: only what takes data says that it does."""
    file, here, there = tmp_path / "data.npz", tmp_path / "here", tmp_path / "there"
    np.savez(file, x=X, y=Y)
    admits = method != "fedper"
    options = {**SMALL, "adapt": adapt, "unseen": 1, "dataset": file}
    run = fedloom.run(method, **options, out=here, progress="quiet")
    before = handed_on(run, tmp_path / "before", admits)
    shutil.move(here, there)
    file.unlink()
    moved = fedloom.load(there)
    after = handed_on(moved, tmp_path / "after", admits)
    assert moved.clients == ("0", "1", "2", "3")
    assert len(flatten(before)) > 30 and same(before, after)
    if not admits:
        with pytest.raises(NeedsError, match="FedPer cannot serve clients that took no part"):
            moved.admit(X[:9], Y[:9])
    for takes_data in (moved.evaluate, moved.evaluate_unseen, lambda: fedloom.resume(there, rounds=3)):
        with pytest.raises(DataError) as caught:
            takes_data()
        assert str(caught.value).startswith(
            f"Evaluating or resuming {there} takes the data it was trained on. There is no file {file};"
        )
    np.savez(file, x=X, y=Y)
    assert moved.evaluate() and fedloom.resume(there, rounds=3, progress="quiet").summary["rounds"] == 3


def handed_on(run: fedloom.Run, folder: Path, admits: bool) -> dict[str, Any]:
    """All that comes out of a run without data."""
    found: dict[str, Any] = {}
    for client in run.clients:
        exported = load_file(run.export(client, folder))
        with torch.no_grad():
            outputs = run.model(client)(torch.as_tensor(X[:5]))
        assert torch.equal(outputs, run.predict(client, X[:5]))
        found[client] = {"file": exported, "predicted": outputs, **run.parameters(client)}
    if admits:
        admission = run.admit(X[:9], Y[:9])
        exported = load_file(admission.export(folder))
        found["newcomer"] = {"file": exported, "predicted": admission.predict(X[:5]), **admission.parameters}
    return found


def test_a_server_is_opened_from_each_of_its_checkpoints(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", dataset=(X, Y), **SMALL, out=tmp_path / "run", progress="quiet")
    servers = [Server.open(run.directory, which) for which in (1, 2, "last")]
    assert [server.round for server in servers] == [1, 2, 2]
    assert same(servers[1].state._asdict(), servers[2].state._asdict())
    assert not same(servers[0].state._asdict(), servers[1].state._asdict())
    assert servers[0].roster == run.directory.roster() and servers[0].unseen == ()


def test_code_that_a_run_names_is_imported_only_if_it_is_trusted(tmp_path: Path) -> None:
    images = RNG.standard_normal((60, 1, 6, 6)).astype(np.float32)
    for model in ("testnets:Normed", "mlp:hidden=4"):
        given = {**SMALL, "dataset": (images, Y[:60]), "model": model}
        directory = fedloom.run("fedavg", **given, out=tmp_path / model, progress="quiet").directory
        if model == "testnets:Normed":
            named = "config.yaml"
            assert "norm.running_mean" in Server.open(directory, "last", trust=True).module("0").state_dict()
        else:
            named = "roster.json"
            (directory.path / named).write_text(
                (directory.path / named).read_text().replace("mlp:hidden=4", "testnets:Normed")
            )
        with pytest.raises(ConfigError, match=f"{named} names code outside of fedloom, --model testnets:Normed"):
            Server.open(directory, "last")


def test_what_clients_keep_on_other_machines_cannot_be_handed_on() -> None:
    plain, keeps = (simulation(method).server for method in ("fedavg", "fedper"))
    for server in (plain, keeps):
        server.memories_here = False
    assert plain.deployed("0")["params"].keys() == plain.state.params.keys()
    with pytest.raises(NeedsError, match=r"Client 0 keeps part of its model \(own\) on its own machine"):
        keeps.deployed("0")


# Checkpoints


def refusal(built: Simulation, other: Simulation) -> str:
    """What is said to a checkpoint of another simulation; nothing has changed."""
    before = built.mark()
    with pytest.raises(RunError) as caught:
        built.server.restore(Checkpoint(1, other.now.state._asdict(), dict(other.now.memory), {}))
    assert built.mark() == before
    return str(caught.value)


def test_a_checkpoint_of_another_network_is_refused() -> None:
    assert refusal(simulation(), simulation(model="mlp:hidden=9")) == (
        "The checkpoint does not fit fedavg on this federation: params/hidden.0.weight is (9, 6), expected (4, 6). "
        "Use the config it was made with."
    )


def test_a_checkpoint_of_another_method_is_refused() -> None:
    assert "does not fit scaffold on this federation: control/" in refusal(simulation("scaffold"), simulation())
    told = refusal(simulation("fedavg"), simulation("scaffold"))
    assert "does not fit fedavg on this federation: buffers/ is missing, expected (0,)." in told


def test_a_plain_checkpoint_that_says_it_is_adapted_is_refused() -> None:
    plain = simulation()
    with pytest.raises(RunError, match="does not fit fedavg: its parts are others"):
        simulation().server.restore(Checkpoint(1, plain.now.state._asdict(), {}, {"adapted": True}))


def test_a_checkpoint_of_other_clients_is_refused() -> None:
    built = simulation("local", clients=9, cohort=9)
    built.train_round()
    assert refusal(simulation("local"), built) == (
        "The checkpoint remembers client '4', which this federation does not have. "
        "Use the config and data it was made with."
    )


def test_memory_of_another_network_is_refused() -> None:
    built = simulation("local", model="mlp:hidden=9")
    built.train_round()
    assert refusal(simulation("local"), built) == (
        "The checkpoint does not fit local on this federation: own/hidden.0.weight is (9, 6), expected (4, 6). "
        "Use the config it was made with."
    )


def test_a_checkpoint_of_the_plain_method_can_be_adapted_and_the_other_way_round() -> None:
    plain, adapted = simulation(), simulation(adapt="prior")
    plain.train_round()
    adapted.server.restore(Checkpoint(1, plain.now.state._asdict(), dict(plain.now.memory), {}))
    assert same(adapted.server.plain(adapted.server.state)._asdict(), plain.server.state._asdict())
    again = simulation()
    again.server.restore(Checkpoint(1, adapted.now.state._asdict(), {}, adapted.meta()))
    assert same(again.server.state._asdict(), plain.server.state._asdict())
