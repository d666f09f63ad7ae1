# SPDX-License-Identifier: Apache-2.0
"""fedloom on a GPU against a plain PyTorch loop on the same GPU: whole rounds of pFedHN, as ratios in one run.

    PYTHONPATH=src python benchmarks/gpu.py [--part rounds kernels memory schedule] [--cohorts 1 50]
        [--ways compiled bf16] [--repeats 5] [--data-root DIR]

``rounds``: weave, train, step, for cohorts of 1 to 500, by a plain loop over clients, recorded, compiled, compiled
without kernels of our own, and with TF32 and bfloat16. ``kernels``: LeNet's convolutions by themselves, by cuDNN and
by our own. ``memory``: a cohort that the memory it may use has no room for. All have random data. ``schedule``:
pFedHN's 5,000 client updates on CIFAR-10, with its accuracy, for cohorts of 1 or 10, once each; needs the data.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedloom import algorithms
from fedloom.clients.federation import federate
from fedloom.clients.partition import partition
from fedloom.core.contract import Cohort, Setup
from fedloom.core.task import CLASSIFICATION
from fedloom.data.registry import load
from fedloom.engines import capture
from fedloom.engines.convolution import MANY, why_no_kernels
from fedloom.engines.machine import Machine, set_precision
from fedloom.engines.memories import Memories
from fedloom.engines.vectorised import Vectorised
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.training.config import parse_options
from fedloom.training.simulation import Simulation

SHAPE, CLASSES, STEPS = (3, 32, 32), 10, 50
DEVICE = torch.device("cuda")
PEAK = 67e12
"""float32 operations a second of an H100 or H200 without tensor cores (NVIDIA's data sheet)."""

SERVER_LR = 1e-4
"""Labels are random: at pFedHN's own rate the numbers overflow after some rounds."""

Round = Callable[[int], float]
"""Gives the seconds that it spent on training, if it knows."""


def fedloom_rounds(
    clients: int, batch: int, *, compiled: bool, precision: str = "exact", model: str = "lenet", registered: int = 0,
    method: str = "pfedhn", convolutions: str = "own", **options: Any,
) -> tuple[Round, Vectorised]:  # fmt: skip
    """Rounds of fedloom's engine with a cohort of ``clients`` out of ``registered``."""
    capture.MIN_COMPILED_STEPS = 0 if compiled else 1 << 60
    narrow = torch.bfloat16 if precision == "bf16" else None
    registered = registered or clients
    rng = np.random.default_rng(0)
    x = rng.standard_normal((max(2 * registered, 20_000), *SHAPE), dtype=np.float32)
    y = rng.integers(0, CLASSES, len(x))
    network = Model(parse(model, SHAPE, CLASSES), DEVICE, training_dtype=narrow)
    federation = federate(x, y, partition(y, "iid", registered, 0), [network], CLASSIFICATION, DEVICE)
    algorithm = algorithms.get(method)
    if method == "pfedhn":
        options["server_lr"] = SERVER_LR
    config = algorithm.config(**{"local_steps": STEPS, "batch_size": batch, **options})
    machine = Machine(precision=precision, own_kernels=convolutions == "own")
    engine = Vectorised(federation, algorithm, config, 0, machine)
    setup = Setup(config, federation.participants, federation.models, CLASSIFICATION, 0, DEVICE, replay=engine.replay)
    state, memory = algorithm.init(setup), Memories()

    def one_round(number: int) -> float:
        nonlocal state, memory
        rows = np.sort(np.random.default_rng(number).choice(registered, clients, replace=False))
        session = engine.session(number, memory, rounds_left=1)
        cohort = Cohort(number, tuple(federation.participants[row] for row in rows))
        state, _ = algorithm.round(setup, state, cohort, session.ask)
        memory = session.memory
        return session.stats.asking

    return one_round, engine


def plain_rounds(clients: int, batch: int) -> Round:
    """pFedHN as one would write it: a loop over clients, their steps, and the hypernetwork's step after each."""
    set_precision("exact")
    network = Model(parse("lenet", SHAPE, CLASSES), DEVICE)
    shapes = network.shapes
    x, y = torch.randn(6400, *SHAPE, device=DEVICE), torch.randint(0, CLASSES, (6400,), device=DEVICE)
    layers = [nn.Linear(13, 100), *(layer for _ in range(3) for layer in (nn.ReLU(), nn.Linear(100, 100)))]
    trunk = nn.Sequential(*layers).to(DEVICE)
    heads = nn.ModuleList([nn.Linear(100, int(np.prod(shape))) for shape in shapes.values()]).to(DEVICE)
    table = nn.Embedding(50, 13).to(DEVICE)
    everything = [*trunk.parameters(), *heads.parameters(), *table.parameters()]
    outer = torch.optim.SGD(everything, SERVER_LR, momentum=0.9, weight_decay=1e-3)

    def one_round(number: int) -> float:
        for client in range(clients):
            features = trunk(table(torch.tensor(client % 50, device=DEVICE)))
            woven = {name: head(features).view(shape) for head, (name, shape) in zip(heads, shapes.items())}
            module = network.module({name: value.detach() for name, value in woven.items()}, {}).train()
            inner = torch.optim.SGD(module.parameters(), 5e-3, momentum=0.9, weight_decay=5e-5)
            for _ in range(STEPS):
                rows = torch.randint(0, len(x), (batch,), device=DEVICE)
                inner.zero_grad()
                F.cross_entropy(module(x[rows]), y[rows]).backward()
                nn.utils.clip_grad_norm_(module.parameters(), 50.0)
                inner.step()
            after = dict(module.named_parameters())
            change = [woven[name].detach() - after[name].detach() for name in woven]
            outer.zero_grad()
            torch.autograd.backward(list(woven.values()), change)
            nn.utils.clip_grad_norm_(everything, 50.0)
            outer.step()
        return 0.0

    return one_round


def seconds(one_round: Round, repeats: int, warm: int = 4) -> tuple[float, float]:
    """Medians of the rounds after the first ones, which record and compile: of whole rounds, and of their training."""
    taken, training = [], []
    for number in range(warm + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        training.append(one_round(number))
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[warm:]), statistics.median(training[warm:])


def operations_per_sample() -> float:
    """Forward and backward, as torch counts them."""
    module = parse("lenet", SHAPE, CLASSES).build()
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(64, *SHAPE)).sum().backward()
    return counter.get_total_flops() / 64


COHORTS = {1: 64, 10: 64, 50: 64, 500: 32}
"""Clients: samples in a batch."""

WAYS: dict[str, dict[str, Any]] = {
    "recorded": {"compiled": False},
    "compiled": {"compiled": True},
    "library": {"compiled": True, "convolutions": "library"},
    "tf32": {"compiled": True, "precision": "tf32"},
    "bf16": {"compiled": True, "precision": "bf16"},
}


def rounds(options: argparse.Namespace) -> None:
    """Cohorts of several sizes, in several ways."""
    cost, known = operations_per_sample(), any(name in torch.cuda.get_device_name() for name in ("H100", "H200"))
    print(f"\nLeNet of pFedHN, {STEPS} steps a client, {cost / 1e6:.1f} million operations a sample")
    print(f"{'clients':>7s} {'batch':>5s}  {'way':22s}{'ms a round':>12s}{'training':>10s}{'samples/s':>13s}"
          f"{'of plain':>10s}{'of peak':>9s}")  # fmt: skip
    for clients in options.cohorts:
        batch = COHORTS[clients]
        samples = clients * STEPS * batch
        few = min(clients, 4)  # of a loop, some clients are as good as all
        plain = seconds(plain_rounds(few, batch), 3, warm=1)[0] * clients / few
        print(
            f"{clients:7d} {batch:5d}  {'plain loop':22s}{plain * 1e3:12.1f}{'':10s}{samples / plain:13,.0f}{1:9.1f}x"
        )
        for way in options.ways:
            step = {"server_step": "cohort_mean"} if clients == 500 else {}
            one_round, engine = fedloom_rounds(clients, batch, **WAYS[way], **step)
            taken, training = seconds(one_round, options.repeats)
            share = f"{samples / training * cost / PEAK:8.1%}" if known else f"{'':8s}"
            print(f"{clients:7d} {batch:5d}  {way:22s}{taken * 1e3:12.1f}{training * 1e3:10.1f}{samples / taken:13,.0f}"
                  f"{plain / taken:9.1f}x{share}  {'; '.join(engine.notes)}", flush=True)  # fmt: skip
            del one_round, engine
            torch.cuda.empty_cache()


LAYERS = {"first": (3, 16, 5, 32), "second": (16, 32, 5, 14)}
"""LeNet's convolutions: inputs, outputs, kernel, width of the image."""


def kernels(options: argparse.Namespace) -> None:
    """LeNet's convolutions by themselves, with the gradients that a step needs: cuDNN's and our own."""
    missing = why_no_kernels(DEVICE)
    if missing:
        print(f"\nNo kernels of our own here: {missing}")
        return
    from fedloom.engines.kernels import convolution  # needs Triton

    print("\nA convolution and its gradients, batches of 64; errors: the greatest, as a part of the largest value")
    print(f"{'layer':8s}{'precision':10s}{'clients':>7s}{'cuDNN, µs':>13s}{'error':>9s}{'own, µs':>11s}{'error':>9s}")
    for layer, precision, clients in itertools.product(LAYERS, ("exact", "tf32", "bf16"), options.cohorts):
        if clients >= MANY:  # left to products
            continue
        set_precision(precision)
        inputs, outputs, size, width = LAYERS[layer]
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        shapes = [(inputs, width, width), (outputs, width - size + 1, width - size + 1)]
        x, out = (torch.randn(clients, 64, *shape, device=DEVICE, dtype=dtype) for shape in shapes)
        weight = torch.randn(clients, outputs, inputs, size, size, device=DEVICE, dtype=dtype)

        def own(x: Tensor, weight: Tensor, split: str = "tf32" if precision == "tf32" else "tf32x3") -> Tensor:
            return convolution(x, weight, None, 0, 0, split)

        true = passes(torch.conv2d, layer, x.double(), weight.double(), out.double())
        line = f"{layer:8s}{precision:10s}{clients:7d}"
        for convolve, space in ((torch.conv2d, 13), (own, 11)):
            work = partial(passes, convolve, layer, x, weight, out)
            error = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(work(), true))
            line += f"{microseconds(work):{space}.1f}{error:9.0e}"
        print(line, flush=True)


def passes(
    convolve: Callable[[Tensor, Tensor], Tensor], layer: str, x: Tensor, weight: Tensor, out: Tensor
) -> tuple[Tensor, ...]:
    """A convolution of every client, and what a step needs of its gradients: of images none."""

    def one(x: Tensor, weight: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        if layer == "first":
            y, back = torch.func.vjp(lambda weight: convolve(x, weight), weight)
        else:
            y, back = torch.func.vjp(convolve, x, weight)
        return (y, *back(out))

    found: tuple[Tensor, ...] = torch.vmap(one)(x, weight, out)
    return found


def microseconds(work: Callable[[], Any], times: int = 10) -> float:
    """Of one call, recorded several times and replayed; the least of five."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    taken = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / times)
    return min(taken[1:])


def memory(options: argparse.Namespace) -> None:
    """500 clients of a ResNet-18 in a part of the memory."""
    total = torch.cuda.get_device_properties(0).total_memory
    room = min(12 << 30, total)
    torch.cuda.set_per_process_memory_fraction(room / total)
    torch.cuda.reset_peak_memory_stats()
    one_round, engine = fedloom_rounds(500, 8, compiled=False, model="resnet18", method="fedavg", local_steps=8)
    taken, _ = seconds(one_round, 1, warm=1)
    print(f"\n500 clients of a ResNet-18 (8 steps of 8) with {room >> 30} GiB: {taken:.1f} s a round, at most "
          f"{torch.cuda.max_memory_reserved() / 2**30:.0f} GiB; {'; '.join(engine.notes)}", flush=True)  # fmt: skip


UPDATES = 5000
"""Client updates of pFedHN's Table 1."""

SCHEDULED = (1, 10)
"""Cohorts they are done in: as in the paper, and the same updates in fewer rounds."""

COMPILED = capture.MIN_COMPILED_STEPS


def schedule(options: argparse.Namespace) -> None:
    """pFedHN's training as in its Table 1: all that a run does in its rounds; evaluations are not counted."""
    arrays = load("cifar10", options.data_root)
    print(f"\npFedHN on CIFAR-10, 50 clients with two classes, {UPDATES:,} client updates")
    print(
        f"{'cohort':>6s}  {'way':10s}{'seconds':>9s}{'first 10 rounds':>17s}{'ms, others':>12s}{'best':>8s}{'last':>8s}"
    )
    for cohort in (cohort for cohort in options.cohorts if cohort in SCHEDULED):
        for way in options.ways:
            torch.compiler.reset()
            capture.MIN_COMPILED_STEPS = COMPILED if WAYS[way]["compiled"] else 1 << 60
            given = {"clients": 50, "partition": "classes:2", "val_share": 0.2, "cohort": cohort, "device": str(DEVICE)}
            given |= {"rounds": UPDATES // cohort}
            given |= {name: value for name, value in WAYS[way].items() if name != "compiled"}
            simulation = Simulation("pfedhn", *parse_options("pfedhn", given), arrays)
            taken, found = [], []
            server = simulation.server
            while server.round < server.options.rounds:
                taken.append(simulation.train_round()["seconds"]["round"])
                if server.round % simulation.eval_every == 0:
                    metrics = simulation.evaluation().metrics
                    found.append([metrics[f"deployed/participants/{part}/accuracy"] for part in ("val", "test")])
            best, last = max(found)[1], found[-1][1]
            print(f"{cohort:6d}  {way:10s}{sum(taken):9.1f}{sum(taken[:10]):17.1f}"
                  f"{statistics.mean(taken[10:]) * 1e3:12.2f}{best:8.2%}{last:8.2%}"
                  f"  {'; '.join(simulation.engine.notes)}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"rounds": rounds, "kernels": kernels, "memory": memory, "schedule": schedule}
    parser.add_argument("--part", nargs="+", choices=parts, default=["rounds", "kernels", "memory"])
    parser.add_argument("--cohorts", type=int, nargs="+", choices=COHORTS, default=list(COHORTS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--data-root", help="where CIFAR-10 is")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU here that torch can use; benchmarks/engines.py is for CPUs.")
    print(f"{time.strftime('%Y-%m-%d')}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part in options.part:
        parts[part](options)


if __name__ == "__main__":
    main()
