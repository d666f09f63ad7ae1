# SPDX-License-Identifier: Apache-2.0
"""A service measured: models a second, latencies, start, memory by clients, bytes by way of joining. On loopback.

    python benchmarks/serve.py                 # everything: some minutes
    python benchmarks/serve.py weave http      # parts of it: weave, http, start, memory, bytes

Models are LeNets for 3x32x32 images (121,000 parameters), woven by pFedHN's loom as it starts: a trained one is as
fast. The load comes from a process of its own, which takes part of the two cores: what is printed with each line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

SHAPE, CLASSES = (3, 32, 32), 10


def bundle(path: Path, clients: int, dim: int = 13) -> Path:
    """A bundle of pFedHN with so many clients, before any training."""
    import torch

    from fedloom.core.contract import Setup
    from fedloom.models.model import Model
    from fedloom.models.spec import parse
    from fedloom.runs.directory import RunDirectory
    from fedloom.runs.roster import Member, Roster
    from fedloom.serving.bundle import make_bundle
    from fedloom.training.config import algorithm_of, flat_config, parse_options
    from fedloom.training.machine import task_named
    from fedloom.training.server import Server

    options, config = parse_options("pfedhn", {"model": "lenet", "embed_dim": dim})
    model = Model(parse("lenet", SHAPE, CLASSES))
    samples = {"train": 0, "val": 0, "test": 0}
    members = [Member(str(number), False, "lenet", model.size, samples) for number in range(clients)]
    roster = Roster(SHAPE, CLASSES, CLASSES, (), (), members)
    task = task_named("classification")
    models = dict.fromkeys(roster.participants, model)
    setup: Setup[Any] = Setup(config, roster.participants, models, task, 0)  # type: ignore[arg-type]
    server = Server("pfedhn", algorithm_of("pfedhn", options), options, roster, setup)
    directory = RunDirectory(path.parent, flat_config("pfedhn", options, config))
    run: Any = SimpleNamespace(server=server, directory=directory, path=path.parent)
    run.for_newcomers = run
    with torch.no_grad():
        return make_bundle(run, path)


@contextlib.contextmanager
def service(path: Path, *words: str) -> Iterator[tuple[int, str, float]]:
    """A service in a process: its number, its address, and the seconds until it listened."""
    command = [sys.executable, "-m", "fedloom", "serve", str(path), "--port", "0", "--rate", "0", *words]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        try:
            assert running.stdout
            line = running.stdout.readline()
            yield running.pid, line.rpartition(" ")[2].strip(), time.perf_counter() - start
        finally:
            running.terminate()
            running.wait()


async def load(url: str, concurrent: int, number: int, dim: int, token: str = "", tag: str = "") -> dict[str, float]:
    """``number`` requests over ``concurrent`` connections that stay open, each after the answer to the last."""
    import torch

    from fedloom.core.tensors import write_tensors

    parts, times = urlsplit(url), []
    vectors = torch.randn(number, dim, generator=torch.Generator().manual_seed(0))
    body_of = [write_tensors({"vector": vector}) for vector in vectors]
    left = iter(range(number))

    async def client() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
        for row in left:
            start = time.perf_counter()
            if token:
                head = f"GET /v1/clients/0/model HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n"
                head += f"if-none-match: {tag}\r\n\r\n" if tag else "\r\n"
                writer.write(head.encode())
            else:
                head = f"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body_of[row])}\r\n\r\n"
                writer.write(head.encode() + body_of[row])
            answer = await reader.readuntil(b"\r\n\r\n")
            if tag:
                assert answer.startswith(b"HTTP/1.1 304"), answer
                times.append(time.perf_counter() - start)
                continue
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            times.append(time.perf_counter() - start)
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrent)))
    seconds = time.perf_counter() - start
    p50, p99 = np.percentile(times, [50, 99])
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"models/s": number / seconds, "p50 ms": 1000 * p50, "p99 ms": 1000 * p99, "seconds": seconds,
            "cpu of the load": used.ru_utime + used.ru_stime}  # fmt: skip


def loaded(url: str, concurrent: int, number: int, token: str = "", tag: str = "") -> dict[str, float]:
    """``load`` from another process."""
    words = [sys.executable, __file__, "--load", url, str(concurrent), str(number), "13", token, tag]
    found: dict[str, float] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return found


def processor(pid: int) -> float:
    """Seconds of processor time that a process and its children have taken."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    ticks = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:13] for one in pids]
    return sum(int(tick) for pair in ticks for tick in pair) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> dict[str, float]:
    """MiB of a process: all that it holds, and what is its own."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    size = {name: int(value.split()[0]) / 1024 for name, value in lines.items()}
    return {"Rss": size["Rss"], "Private": size["Private_Dirty"] + size["Private_Clean"]}


def show(what: str, **values: Any) -> None:
    shown = {name: f"{value:.1f}" if isinstance(value, float) else value for name, value in values.items()}
    told = ", ".join(f"{name} {value}" for name, value in shown.items())
    print(f"{what:42} {told}", flush=True)


def weave(folder: Path) -> None:
    """Models a second without HTTP, on one thread."""
    import torch

    from fedloom.core.tensors import write_tensors
    from fedloom.serving.bundle import Bundle
    from fedloom.serving.weaver import Weaver

    torch.set_num_threads(1)
    weaver = Weaver(Bundle(bundle(folder / "weave", 50)))
    for size, shape in ((1, (13,)), (16, (16, 13)), (64, (64, 13))):
        body = write_tensors({"vector": torch.randn(shape)})
        weaver.weave(body, "")
        start, cpu, turns = time.perf_counter(), time.process_time(), max(4, 256 // size)
        for _ in range(turns):
            weaver.weave(body, "")
        seconds, used = time.perf_counter() - start, time.process_time() - cpu
        show(
            f"weave, {size} at a time",
            **{"models/s": turns * size / seconds, "models per cpu second": turns * size / used},
        )


def http(folder: Path) -> None:
    """Models a second and latencies over HTTP."""
    from fedloom.serving.tokens import Identity, make_key, make_token, read_key

    path, key = bundle(folder / "http", 50), folder / "key"
    make_key(key)
    token = make_token(read_key(key), Identity("client", "0"))
    kinds = (("a newcomer's vector", "", ""), ("a participant's model", token, ""), ("an unchanged model", token, "*"))
    for workers in (1, 2):
        for what, token, tag in kinds:
            with service(path, "--workers", str(workers), *(["--key", str(key)] if token else [])) as (pid, url, _):
                loaded(url, 1, 50, token, tag)
                for concurrent in (1, 16, 64):
                    before = processor(pid)
                    found = loaded(url, concurrent, 600, token, tag)
                    found["cpu ms a model"] = 1000 * (processor(pid) - before) / 600
                    show(f"{workers} workers, {what}, {concurrent} at once", **found)


def start(folder: Path) -> None:
    """From the command to the first model; and what of it is torch."""
    path = bundle(folder / "start", 50)
    for number in range(3):
        begin = time.perf_counter()
        with service(path) as (pid, url, listening):
            loaded(url, 1, 1)  # warm the load's own files
            show(f"start, trial {number + 1}", **{"listening after s": listening, "cpu s": processor(pid)})
        del begin
    code = "import time; a = time.perf_counter(); import torch; print(time.perf_counter() - a, time.process_time())"
    wall, cpu = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    show("of which import torch", **{"s": float(wall), "cpu s": float(cpu)})


def clients(folder: Path) -> None:
    """Memory and start by the number of registered clients."""
    from fedloom.serving.tokens import Identity, make_key, make_token, read_key

    key = folder / "key"
    make_key(key)
    token = make_token(read_key(key), Identity("client", "0"))
    for number in (10, 1_000, 100_000, 1_000_000):
        path = bundle(folder / f"clients{number}", number, dim=32)
        with service(path, "--key", str(key)) as (pid, url, listening):
            loaded(url, 1, 100, token)
            found = loaded(url, 16, 400, token)
            sizes = {f"{name} MiB": value for name, value in memory(pid).items()}
            about = {"bundle MB": path.stat().st_size / 1e6, "listening after s": listening}
            show(f"{number:,} clients", **about, **sizes, **{"p99 ms": found["p99 ms"]})
        path.unlink()


def joining(folder: Path) -> None:
    """Bytes of each way to join, with LeNets."""
    import fedloom
    from fedloom.serving.bundle import make_bundle

    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, 600)
    x = (rng.standard_normal((600, *SHAPE)) + y[:, None, None, None] / 5).astype(np.float32)
    options = {"dataset": (x, y), "clients": 5, "rounds": 2, "local_steps": 2, "model": "lenet", "progress": "quiet"}
    cases = [("fedavg", {"adapt": "prior"}, ("home",)), ("it_pfl_hn", {"finetune_after": 1}, ("service", "home")),
             ("pfedhn", {"descriptor": "class_shares"}, ("service", "home")),
             ("pfedhn", {}, ("service", "home")), ("mh_pfedhn", {"admit_rounds": 5}, ("home",))]  # fmt: skip
    for method, more, ways in cases:
        run = fedloom.run(method, out=folder / f"{method}{len(more)}", **options, **more)
        path = make_bundle(run, folder / f"{method}.fedloom")
        labels = y[:60] if run.server.algorithm.needs_labels(run.server.config) else None
        with service(path) as (_, url, _):
            for way in ways:
                begin = time.perf_counter()
                joined = fedloom.join(url, x[:60], labels, way=way, cache=folder / f"cache-{method}-{way}-{len(more)}")
                up, down = joined.bytes
                seconds = time.perf_counter() - begin
                again = joined.again(x[:60], labels).bytes
                what = " ".join([method, *(f"{name}={value}" for name, value in more.items())])
                show(f"{what}, {way}", **{"bytes up": up, "bytes down": down, "again": sum(again), "seconds": seconds})


PARTS = {"weave": weave, "http": http, "start": start, "memory": clients, "bytes": joining}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="What to measure; without any, everything.")
    parser.add_argument("--load", nargs=6, metavar="WORD", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        url, concurrent, number, dim, token, tag = given.load
        print(json.dumps(asyncio.run(load(url, int(concurrent), int(number), int(dim), token, tag))))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for part in given.parts or PARTS:
            with tempfile.TemporaryDirectory() as made:
                PARTS[part](Path(made))


if __name__ == "__main__":
    main()
