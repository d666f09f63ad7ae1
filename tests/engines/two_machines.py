# SPDX-License-Identifier: Apache-2.0
"""Two machines of Ray's on this one, joined at an address: rounds on both, then with one that is lost in mid-round.

A process of its own, since a process is at one cluster only. It prints what came of it as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import ray
from ray.cluster_utils import Cluster as Machines

from conftest import play, small_federation
from fedloom import algorithms
from fedloom.core.trees import flatten
from fedloom.engines import cluster
from fedloom.engines.machine import Machine
from fedloom.engines.parallel import ParallelVectorised
from fedloom.engines.ray import Load, Ray


def main() -> None:
    machines = Machines(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = machines.add_node(num_cpus=1)
    machines.wait_for_nodes()

    class Joined(Ray):
        """At that address."""

        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options, machine=Machine(ray_address=machines.address))

    class Losing(Joined):
        """In whose first round a machine is lost."""

        lost = False

        def _begin(self, actor: Any, load: Load, shared: Any) -> Any:
            answer = super()._begin(actor, load, shared)
            if not Losing.lost and "4" in load.job.clients:
                Losing.lost = True
                machines.remove_node(other, allow_graceful=False)
            return answer

    ParallelVectorised.part_size = lambda *_: 2  # type: ignore[method-assign]
    cluster.READY_SECONDS = 30
    fedavg, federation = algorithms.get("fedavg"), small_federation(sizes=(9, 4, 13, 7, 5, 6, 8, 3))
    here = play(fedavg, federation, "parallel_vectorised")
    both = play(fedavg, federation, Joined, added_up=True)
    number = len(both.engine.actors())
    cluster.READY_SECONDS = 3
    fewer = play(fedavg, federation, Losing, added_up=True)
    gaps = [
        max(float((a - b).abs().max()) for a, b in zip(flatten(one.state.params).values(), here.state.params.values()))
        for one in (both, fewer)
    ]
    found = {
        "actors": [number, len(fewer.engine.actors())],
        "gaps": gaps,
        "dropped": len(both.stats.dropped) + len(fewer.stats.dropped),
        "notes": fewer.engine.notes,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    ray.shutdown()
    machines.shutdown()


if __name__ == "__main__":
    main()
