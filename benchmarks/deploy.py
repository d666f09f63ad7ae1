# SPDX-License-Identifier: Apache-2.0
"""What the network costs: seconds of a round, and processor time of a message, on this machine.

    python benchmarks/deploy.py --nodes 4 --rounds 5

pFedHN on digits with one local step, so that nearly all of a round is overhead. Nodes share this machine's cores; on
machines of their own they do not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from fedloom.deploy.local import LocalFederation, app_in, follow, started
from fedloom.deploy.template import write_app
from fedloom.deploy.trial import Trial, about
from fedloom.progress import display
from fedloom.runs.directory import RunDirectory


def client_seconds(federation: LocalFederation) -> tuple[float, int]:
    """Processor time of all client processes that have ended, and how many there were."""
    parents = {str(p.pid) for name, p in federation.processes.running.items() if name.startswith("node-")}
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        words = stat.read_text().rpartition(")")[2].split()
        if words[1] in parents:  # a node's executor, which starts a process per message
            total += sum(map(int, words[13:15])) / os.sysconf("SC_CLK_TCK")
    logs = [federation.processes.log(name).read_text() for name in federation.processes.running if "node-" in name]
    return total, sum(log.count("Start `flwr-clientapp` process") for log in logs)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--nodes", type=int, default=4)
    words.add_argument("--rounds", type=int, default=5)
    given = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = {**about(Trial()), "rounds": given.rounds, "cohort": given.nodes, "local_steps": 1, "threads": 1}
        write_app(Path(folder) / "app", "pfedhn", {**settings, "eval_every": 999, "deliver": False}, {"model": "mlp"})
        app = app_in(Path(folder) / "app")
        with started(app, given.nodes) as federation:
            federation.start_run({"out": str(app.out), "nodes": given.nodes})
            follow(federation, display("quiet"))
            seconds, messages = client_seconds(federation)
        rounds = [record["seconds"]["round"] for record in RunDirectory.open(app.out).records()]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {given.nodes} nodes")
    print(f"a round: median {statistics.median(rounds):.1f} s, from {min(rounds):.1f} to {max(rounds):.1f}")
    print(f"a message: {seconds / messages:.1f} s of processor time at the client ({messages} messages)")


if __name__ == "__main__":
    main()
