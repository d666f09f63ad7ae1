# SPDX-License-Identifier: Apache-2.0
"""fedloom: federated learning in which every client gets a model of its own, woven by a hypernetwork.

    run = fedloom.run("pfedhn", dataset="digits", clients=20, rounds=100)
    run.summary["best"]
    run.model("3")                  # an nn.Module with that client's parameters

Importing fedloom is light: torch is imported when something is computed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.api import Admission, Run, load, resume, run
    from fedloom.serving.join import Joined, join
    from fedloom.tables.tune import Tuned, tune

__version__ = "0.1.0"
__all__ = ["Admission", "Joined", "Run", "Tuned", "__version__", "join", "load", "resume", "run", "tune"]


def __getattr__(name: str) -> Any:
    if name in ("Joined", "join"):
        module = importlib.import_module("fedloom.serving.join")
        return getattr(module, name)
    if name in ("Tuned", "tune"):
        module = importlib.import_module("fedloom.tables.tune")
        return getattr(module, name)
    if name in __all__:
        from fedloom import api

        return getattr(api, name)
    raise AttributeError(f"module 'fedloom' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
