# SPDX-License-Identifier: Apache-2.0
"""A service measured: models a second, latencies, start, memory by clients, bytes by way of joining. On loopback.

    python benchmarks/serve.py                              # everything: some minutes
    python benchmarks/serve.py weave http                   # parts of it: weave, http, start, memory, joining
    python benchmarks/serve.py --out results/performance    # and written, for docs/how-to-serve.md

Models are LeNets for 3x32x32 images (121,000 parameters), woven by pFedHN's loom as it starts: a trained one is as
fast. The load comes from a process of its own, which takes part of the cores. Of everything that is timed there are
several turns, and the median is told; with the best turn, where whatever else the machine does would disturb it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

SHAPE, CLASSES = (3, 32, 32), 10
TURNS = 5


class Table(NamedTuple):
    """What a part has measured."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


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
    return {"models/s": number / seconds, "p50 ms": 1000 * p50, "p99 ms": 1000 * p99}


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


def told(columns: Sequence[str], row: Sequence[Any]) -> Sequence[Any]:
    """The row, shown as soon as it is there."""
    print(", ".join(f"{name or 'what'}: {value}" for name, value in zip(columns, row)), flush=True)
    return row


def middle(values: Sequence[float], best: Any = None, digits: int = 1) -> str:
    """The median, and the best in brackets: ``min`` or ``max``."""
    shown = f"{statistics.median(values):,.{digits}f}"
    return f"{shown} ({best(values):,.{digits}f})" if best else shown


def on_what() -> str:
    """What uvicorn runs on: it takes what is installed."""
    there = {name: importlib.util.find_spec(name) is not None for name in ("uvloop", "httptools")}
    return (
        f"uvicorn with {'uvloop' if there['uvloop'] else 'asyncio'} and {'httptools' if there['httptools'] else 'h11'}"
    )


def weave(folder: Path) -> Table:
    """Models a second without HTTP, on one thread."""
    import torch

    from fedloom.core.tensors import write_tensors
    from fedloom.serving.bundle import Bundle
    from fedloom.serving.weaver import Weaver

    torch.set_num_threads(1)
    weaver = Weaver(Bundle(bundle(folder / "weave", 50)))
    columns, rows = ("at a time", "models/s, median (best)", "processor ms a model"), []
    for size, shape in ((1, (13,)), (16, (16, 13)), (64, (64, 13))):
        body = write_tensors({"vector": torch.randn(shape)})
        weaver.weave(body, "")
        rates, used, times = [], [], max(4, 256 // size)
        for _ in range(TURNS):
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(times):
                weaver.weave(body, "")
            rates.append(times * size / (time.perf_counter() - start))
            used.append(1000 * (time.process_time() - cpu) / times / size)
        rows.append(told(columns, [size, middle(rates, max, 0), middle(used, digits=2)]))
    note = f"LeNets of 121,376 parameters, pFedHN's loom of 12.27 M, one thread, {TURNS} turns."
    return Table("Models woven a second, without HTTP", note, columns, rows)


def http(folder: Path) -> Table:
    """Models a second and latencies over HTTP."""
    from fedloom.serving.tokens import Identity, make_key, make_token, read_key

    path, key, number = bundle(folder / "http", 50), folder / "key", 300
    make_key(key)
    token = make_token(read_key(key), Identity("client", "0"))
    cases = [("a newcomer's, from its vector", "", "", workers, (1, 16, 64)) for workers in (1, 2)]
    cases += [("a participant's", token, "", 1, (1, 16)), ("a participant's, unchanged (304)", token, "*", 1, (1, 16))]
    columns = ("model", "workers", "at once", "models/s, median (best)", "p50 ms", "p99 ms", "processor ms a model")
    rows = []
    for what, token, tag, workers, at_once in cases:
        words = ["--workers", str(workers), *(["--key", str(key)] if token else [])]
        with service(path, *words) as (pid, url, _):
            loaded(url, 1, 50, token, tag)
            for concurrent in at_once:
                found, used = [], []
                for _ in range(TURNS):
                    before = processor(pid)
                    found.append(loaded(url, concurrent, number, token, tag))
                    used.append(1000 * (processor(pid) - before) / number)
                rate, p50, p99 = ([one[name] for one in found] for name in ("models/s", "p50 ms", "p99 ms"))
                times = [middle(rate, max, 0), middle(p50, min), middle(p99, min), middle(used)]
                rows.append(told(columns, [what, workers, concurrent, *times]))
    note = f"The same LeNets; each asks again when it has its answer; {TURNS} turns of {number} requests; {on_what()}."
    return Table("Models over HTTP", note, columns, rows)


def start(folder: Path) -> Table:
    """From the command to an address that answers; and what of it is torch."""
    path, listening, used = bundle(folder / "start", 50), [], []
    for _ in range(TURNS):
        with service(path) as (pid, _, seconds):
            listening.append(seconds)
            used.append(processor(pid))
    code = "import time; a = time.perf_counter(); import torch; print(time.perf_counter() - a, time.process_time())"
    command = [sys.executable, "-c", code]
    imports = [
        list(map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))
        for _ in range(TURNS)
    ]
    columns = ("", "seconds, median (best)", "processor seconds")
    cases = (("from the command to listening", listening, used), ("of it importing torch", *zip(*imports)))
    rows = [told(columns, [what, middle(wall, min), middle(cpu)]) for what, wall, cpu in cases]
    return Table("Starting", f"A bundle of 50 participants, {TURNS} turns.", columns, rows)


def clients(folder: Path) -> Table:
    """Memory and start by the number of registered clients."""
    from fedloom.serving.tokens import Identity, make_key, make_token, read_key

    key = folder / "key"
    make_key(key)
    token = make_token(read_key(key), Identity("client", "0"))
    columns = ("participants", "bundle, MB", "memory, MiB", "of it the process's own", "processor s to start")
    rows = []
    for number in (10, 1_000, 100_000, 1_000_000):
        path = bundle(folder / f"clients{number}", number, dim=32)
        with service(path, "--key", str(key)) as (pid, url, _):
            used = processor(pid)
            loaded(url, 16, 400, token)
            sizes = [round(memory(pid)[name]) for name in ("Rss", "Private")]
            rows.append(told(columns, [number, round(path.stat().st_size / 1e6), *sizes, f"{used:.1f}"]))
        path.unlink()
    note = "One worker, embeddings of 32 numbers, after 400 participants' models; one start each."
    return Table("Memory of a service by the number of participants", note, columns, rows)


def joining(folder: Path) -> Table:
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
    columns, rows = ("run", "way", "bytes sent", "bytes received", "both, when it joins again"), []
    for method, more, ways in cases:
        run = fedloom.run(method, out=folder / f"{method}{len(more)}", **options, **more)
        path = make_bundle(run, folder / f"{method}.fedloom")
        labels = y[:60] if run.server.algorithm.needs_labels(run.server.config) else None
        shown = [f"--{name} {value}" for name, value in more.items() if name in ("adapt", "descriptor")]
        with service(path) as (_, url, _):
            for way in ways:
                joined = fedloom.join(url, x[:60], labels, way=way, cache=folder / f"cache-{method}-{way}-{len(more)}")
                again = sum(joined.again(x[:60], labels).bytes)
                rows.append(told(columns, [" ".join([method, *shown]), way, *joined.bytes, again]))
    note = "A newcomer's LeNet; the bytes are exact, and the same on any machine."
    return Table("Bytes of joining", note, columns, rows)


PARTS = {"weave": weave, "http": http, "start": start, "memory": clients, "joining": joining}


def written(table: Table, others: float) -> dict[str, Any]:
    """The file; ``others`` is how many processes wanted to run on this machine when the part began."""
    import torch

    from fedloom.engines.workers import cores

    commit = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True)
    made = {
        "commit": commit.stdout.strip(),
        "date": date.today().isoformat(),
        "hardware": f"{cores()} CPU cores, for which {others:.0f} other processes competed",
        "torch": torch.__version__.partition("+")[0],
    }
    command = "python benchmarks/serve.py --out results/performance"
    return {"format": 1, "title": table.title, "command": command, "note": table.note, "made": [made],
            "columns": list(table.columns), "rows": [list(row) for row in table.rows]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="What to measure; without any, everything.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Where to write serve-PART.json.")
    parser.add_argument("--load", nargs=6, metavar="WORD", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        url, concurrent, number, dim, token, tag = given.load
        print(json.dumps(asyncio.run(load(url, int(concurrent), int(number), int(dim), token, tag))))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for part in given.parts or PARTS:
            others, _, _ = os.getloadavg()
            with tempfile.TemporaryDirectory() as made:
                table = PARTS[part](Path(made))
            if given.out:
                content = json.dumps(written(table, others), indent=1, ensure_ascii=False)
                (given.out / f"serve-{part}.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
