# SPDX-License-Identifier: Apache-2.0
"""A recorded function gives what the function gives; off a GPU it is the function."""

import pytest
import torch

from fedloom.engines import graphs
from fedloom.engines.graphs import Reading, Replayer
from tiny import Replayed


def kept(replay: Replayer) -> list[object]:
    return list(replay._recordings.kept.values())


def test_without_a_gpu_the_function_is_called_every_time() -> None:
    calls = []

    def function(tree: dict[str, torch.Tensor], more: torch.Tensor) -> dict[str, torch.Tensor]:
        calls.append(len(calls))
        return {"sum": tree["a"] + more}

    replay = Replayer([])
    for value in (1.0, 2.0):
        assert float(replay("f", function, {"a": torch.tensor(value)}, torch.tensor(3.0))["sum"]) == value + 3
    assert calls == [0, 1] and not kept(replay)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_recorded_once_per_shape_and_results_are_values_of_their_own() -> None:
    calls = []

    def function(a: torch.Tensor) -> dict[str, torch.Tensor]:
        calls.append(a.shape)
        (grad,) = torch.autograd.grad((b := a.detach().requires_grad_()).square().sum(), b)
        return {"grad": grad}

    replay = Replayer([])
    first = replay("f", function, torch.ones(3, device="cuda"))
    second = replay("f", function, torch.full((3,), 2.0, device="cuda"))
    assert first["grad"].tolist() == [2.0] * 3 and second["grad"].tolist() == [4.0] * 3
    assert len(calls) == 4  # the first call; two trials and the recording
    third = replay("f", function, torch.full((3,), 3.0, device="cuda"))
    assert third["grad"].tolist() == [6.0] * 3 and second["grad"].tolist() == [4.0] * 3 and len(calls) == 4
    replay("f", function, torch.ones(4, device="cuda"))
    assert len(calls) == 5 and len(kept(replay)) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_what_cannot_be_recorded_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return a * float(a.sum())

    monkeypatch.setattr(graphs, "KEPT", 1)
    notes: list[str] = []
    replay = Replayer(notes)
    for value in (1.0, 2.0, 3.0):
        assert replay("f", function, torch.full((2,), value, device="cuda")).tolist() == [2 * value**2] * 2
    assert len(notes) == 1 and notes[0].startswith("f cannot be recorded: ")
    for _ in range(2):
        replay("g", torch.neg, torch.ones(2, device="cuda"))
    assert len(kept(replay)) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recordings_that_share_memory_leave_each_other_alone_and_a_failed_one_too() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return a * 2 + (a * 3).sum()

    def reading(a: torch.Tensor) -> torch.Tensor:
        return a * float(a.sum())

    replay = Replayer([])
    for names in (("a", "b", "failing", "c"), ("c", "a", "b")):
        for name in names:
            for value in (1.0, 2.0, 3.0):
                given = torch.full((1000,), value, device="cuda")
                wanted = 1000 * value**2 if name == "failing" else 2 * value + 3000 * value
                found = replay(name, reading if name == "failing" else function, given)
                assert found.tolist() == pytest.approx([wanted] * 1000)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_large_arguments_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LARGE", 100)
    replay = Replayer([])
    for size, recorded in ((26, 0), (25, 1)):
        for _ in range(3):
            assert replay("f", torch.neg, torch.ones(size, device="cuda")).tolist() == [-1.0] * size
        assert len(kept(replay)) == recorded


def test_the_same_leaves_in_other_places_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayer, "pays", lambda self, leaves: True)
    monkeypatch.setattr(graphs, "Recording", Replayed)
    replay, one, two = Replayer([]), torch.ones(()), torch.tensor(2.0)
    for given in ({"a": one, "b": two}, {"a": one, "b": two}, {"b": two, "a": one}):
        assert float(replay("f", lambda tree: 10 * tree["a"] + tree["b"], given)) == 12
    assert len(kept(replay)) == 1


def test_numbers_come_in_their_order() -> None:
    numbers = [torch.tensor(True), torch.tensor(0.1, dtype=torch.float32), torch.tensor([3])]
    assert Reading(numbers).wait() == [1.0, float(numbers[1]), 3.0]
