# SPDX-License-Identifier: Apache-2.0
"""What fedloom raises when the fault is the input's and not the program's.

Every message is one sentence that a user can act on: what was got, what was expected, what to do. The command
line prints it alone and exits with code 2; from Python it is an ordinary exception.

    FedloomError
    ├── ConfigError     a flag, a key or a value that cannot be
    ├── DataError       files or arrays that are missing or do not fit
    ├── NeedsError      a method that cannot serve what is asked of it
    ├── RunError        a run directory or checkpoint that cannot be used
    └── RoundError      no client of a round gave a usable reply
        └── DivergedError   its numbers, or those that it began from, were not finite
"""

import difflib
from collections.abc import Iterable


class FedloomError(Exception):
    """The base of every error that is the input's fault."""


class ConfigError(FedloomError, ValueError):
    """A flag, a key or a value that cannot be."""


class DataError(FedloomError, ValueError):
    """Files or arrays that are missing or do not fit."""


class NeedsError(FedloomError, ValueError):
    """A method that cannot serve what is asked of it."""


class RunError(FedloomError, RuntimeError):
    """A run directory or checkpoint that cannot be used."""


class RoundError(FedloomError, RuntimeError):
    """No client of a round gave a usable reply."""


class DivergedError(RoundError):
    """A round whose numbers were not finite: the state that it began from may be the cause."""


def unknown(what: str, got: str, choices: Iterable[str]) -> ConfigError:
    """The error for a name that is not among ``choices``, with the nearest ones.

    >>> str(unknown("method", "pfedhm", ["pfedhn", "fedavg"]))
    "Unknown method 'pfedhm'; did you mean 'pfedhn'? Choose from: fedavg, pfedhn."
    >>> str(unknown("method", "SCAFFOLD", ["pfedhn", "scaffold"]))
    "Unknown method 'SCAFFOLD'; did you mean 'scaffold'? Choose from: pfedhn, scaffold."
    """
    known = sorted(choices)
    near = [name for name in known if name.lower() == str(got).lower()]
    near = near or difflib.get_close_matches(str(got), known, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else "."
    shown = ", ".join(known[:40]) + (f" and {len(known) - 40} more" if len(known) > 40 else "")
    return ConfigError(f"Unknown {what} {got!r}{hint} Choose from: {shown}.")
