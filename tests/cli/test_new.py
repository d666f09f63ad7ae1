# SPDX-License-Identifier: Apache-2.0
import ast
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from fedloom import algorithms
from fedloom.core.contract import Algorithm
from fedloom.data import load
from fedloom.training.config import parse_options


@pytest.fixture
def scaffold(cli, monkeypatch):
    """A generated module, imported as if it lay in the folder of methods."""
    assert cli("new", "fedmine").out == "fedmine.py\n"
    spec = importlib.util.spec_from_file_location("fedmine", Path("fedmine.py").absolute())
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fedmine", module)
    spec.loader.exec_module(module)
    return module


def test_a_scaffold_is_a_method_that_trains(scaffold, monkeypatch):
    from fedloom.training.simulation import Simulation

    assert isinstance(scaffold.ALGORITHM, Algorithm)
    assert scaffold.ALGORITHM.name == "Fedmine"
    known = algorithms.get
    monkeypatch.setattr(algorithms, "get", lambda name: scaffold.ALGORITHM if name == "fedmine" else known(name))

    def after_two_rounds(method):
        # batches of all samples, as their order is drawn by the program's name
        given = {"clients": 4, "local_steps": 3, "model": "mlp", "batch_size": 2000, "dtype": "float64"}
        shared, own = parse_options(method, given)
        simulation = Simulation(method, shared, own, load("digits"))
        losses = [simulation.train_round()["diagnostics"]["local_loss"] for _ in range(2)]
        return losses, simulation.evaluation().metrics

    losses, metrics = after_two_rounds("fedmine")
    assert np.isfinite(losses).all()
    expected = after_two_rounds("fedavg")  # which it is, as it stands
    assert losses == pytest.approx(expected[0])
    assert metrics == pytest.approx(expected[1])


def test_a_scaffold_explains_itself(scaffold):
    text = Path("fedmine.py").read_text()
    assert "TODO" not in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            assert ast.get_docstring(node), node


def test_a_scaffold_goes_by_its_own_name(scaffold):
    assert scaffold.ALGORITHM.name == "Fedmine" and scaffold.__doc__.startswith("Fedmine: ")
    assert "fedmine" not in algorithms.names()  # and is no method until its folder is given


@pytest.mark.parametrize("name", ["FedMine", "fed-mine", "class", "9fed", "_fed", "a/b"])
def test_refuses_bad_names(refused, name):
    assert f"{name!r} is no name for a method; use lowercase letters" in refused("new", name)


def test_refuses_what_is_there_and_folders_that_are_not(cli, refused):
    cli("new", "fedmine")
    assert "fedmine.py is there already; choose another name or --folder." in refused("new", "fedmine")
    assert "--folder nowhere is not a folder" in refused("new", "fedmine", "--folder", "nowhere")
