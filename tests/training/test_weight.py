# SPDX-License-Identifier: Apache-2.0
"""What a loom weighs, before there is one."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import fedloom
from conftest import few, models_for, setup_of, small_federation
from fedloom import algorithms
from fedloom.core.errors import NeedsError
from fedloom.core.trees import leaves
from fedloom.training import weight
from fedloom.training.weight import weigh

LOOMS = [name for name in algorithms.names() if algorithms.get(name).family == "loom"]


@pytest.mark.parametrize("method", LOOMS)
def test_the_weight_is_that_of_the_first_state_which_it_leaves_alone(method: str) -> None:
    algorithm = algorithms.get(method)
    federation = small_federation(models_for(algorithm, "lenet:kernels=2", "mlp:hidden=5"))
    setup = setup_of(federation, algorithm.config(**few(algorithm)))
    found, state = weigh(algorithm, setup), algorithm.init(setup)._asdict()
    tensors = {id(leaf): leaf for _, leaf in leaves(state)}.values()  # one that is in two places is one
    assert found is not None
    assert found.bytes == sum(leaf.numel() * leaf.element_size() for leaf in tensors)
    assert not any(isinstance(leaf, FakeTensor) for leaf in tensors)
    algorithm.send(setup, algorithm.init(setup), setup.clients)  # nothing that is kept is a shape alone


def test_pfedhns_weight_by_hand() -> None:
    """Embeddings of 1 + 5 // 4 = 2; a trunk 2-3-3, heads of 3 for 36 * 5 + 5 + 5 * 3 + 3 = 203 parameters.

    2 * 3 + 3 + 3 * 3 + 3 = 21 of the trunk, 4 * 203 = 812 of the heads, 5 * 2 of embeddings: 843 numbers of 8 bytes.
    SGD's momentum has as many, and there are 6 counters.
    """
    pfedhn = algorithms.get("pfedhn")
    found = weigh(pfedhn, setup_of(small_federation(), pfedhn.config(hidden=3, layers=1)))
    assert found is not None
    assert found.parameters == 843
    assert 2 * 843 * 8 <= found.bytes <= 2 * 843 * 8 + 100
    assert "may be too much" in found._replace(memory_bytes=found.working_bytes - 1).note
    assert "may be too much" not in found._replace(memory_bytes=found.working_bytes).note


def test_methods_without_a_loom_have_none() -> None:
    fedavg = algorithms.get("fedavg")
    assert weigh(fedavg, setup_of(small_federation(), fedavg.config())) is None


def test_what_certainly_does_not_fit_is_refused_before_any_of_it_is_there() -> None:
    pfedhn = algorithms.get("pfedhn")
    setup = setup_of(small_federation(), pfedhn.config(hidden=1_000_000))  # 8 TB in the trunk's layers alone
    with pytest.raises(NeedsError, match=r"pFedHN does not fit into memory: the loom has [\d,]+ parameters.*--hidden"):
        weigh(pfedhn, setup)


def test_a_run_says_what_its_loom_weighs(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    options = {"clients": 2, "rounds": 1, "local_steps": 1, "model": "mlp:hidden=4", "progress": "quiet"}
    run = fedloom.run("pfedhn", out=tmp_path / "one", **options)
    assert run.summary["loom"]["parameters"] == run.simulation.server.weight.parameters
    assert any(note.startswith("the loom has") and "--heads" not in note for note in run.summary["notes"])
    monkeypatch.setattr(weight, "LARGE", 1)
    run = fedloom.run("pfedhn", out=tmp_path / "two", **options)
    assert any("take mh_pfedhn with --heads single" in note for note in run.summary["notes"])


def test_a_method_whose_start_cannot_be_told_by_shapes_has_no_weight() -> None:
    from dataclasses import replace

    def init(setup):
        return pfedhn.init(setup) if float(torch.ones(())) else None

    pfedhn = algorithms.get("pfedhn")
    setup = setup_of(small_federation(), pfedhn.config())
    assert weigh(replace(pfedhn, init=init), setup) is None
