# SPDX-License-Identifier: Apache-2.0
"""The options of a deployed federation, as a Flower app holds them: one flat table, text and numbers only.

The table is in the app's ``pyproject.toml``, and the server and every node read it. It has three kinds of options side
by side: those of the federation (``DeployOptions``), those of a run that make sense where clients bring their own data
(``SHARED``), and the method's own. ``read`` takes it apart into ``Settings``. A node's machine has options of its own
besides (``NodeOptions``), which no server can change: what it tells, how much, and to whom.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from fedloom import algorithms
from fedloom.core.config import build, check, option
from fedloom.core.errors import ConfigError, NeedsError, unknown
from fedloom.core.noised import hides_samples
from fedloom.core.task import CLASSIFICATION, SEQUENCE, Task
from fedloom.core.tokens import Tokens
from fedloom.core.trust import outside
from fedloom.data.preparation import Preparation
from fedloom.runs.options import RunOptions
from fedloom.training.config import check_together
from fedloom.training.machine import task_named

SHARED = (
    "rounds", "cohort", "seed", "task", "dtype", "precision", "device", "threads", "average", "adapt", "adapt_clip",
    "adapt_noise", "sampling", "dp_clip", "dp_noise", "dp_quantile", "dp_delta", "max_epsilon", "aggregate",
    "eval_every", "eval_clients", "keep", "tracker", "server_data", "data_root",
)  # fmt: skip
"""Those of a run's options that have a meaning where every client brings its own data and model."""

NAME = re.compile(r"(?!\.)[\w.-]{1,64}")
"""A client's name on a network."""


def in_toml(value: bool | float | str) -> str:
    """A value as TOML has it. That is as in JSON, but for characters beyond 16 bits, of which JSON makes two."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def check_name(client: str) -> None:
    """Refuse an id that no node can have as its name."""
    if not NAME.fullmatch(client):
        raise ConfigError(
            f"A client cannot be called {client!r}; a name has 1 to 64 letters, digits, dots, dashes and "
            "underscores, and no dot first."
        )


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """The federation's own settings."""

    out: str = option("run", "The run directory, on the server's machine.")
    resume: bool = option(False, "Go on with the run in that directory.")
    admit: bool = option(False, "Do not train: admit the newcomers that are connected, with the run's best checkpoint.")
    input_shape: str = option("", "The shape of a sample, e.g. 3x32x32.")
    num_outputs: int = option(0, "The number of classes, or of target values.", low=0)
    classes: str = option("", "Names of the classes in their order, separated by commas; empty: numbers from 0.")
    vocabulary: int = option(
        0, "For samples of tokens, whole numbers from 0: how many different tokens there are; 0: samples are numbers.",
        low=0,
    )  # fmt: skip
    preparation: str = option(
        "", "For tables and images of bytes: the columns or channels, as JSON; what else there is to know clients tell."
    )
    networks: str = option("", "Import paths of clients' own networks, separated by commas, e.g. client:Net.")
    nodes: int = option(2, "Clients to wait for before round 1.", low=1)
    wait: float = option(600.0, "Seconds to wait for clients that are missing.", low=0)
    timeout: float = option(600.0, "Seconds to wait for replies in a round.", above=0)
    quorum: float = option(
        0.5, "Share of the clients asked that must answer; else the round is done again.", low=0, high=1
    )
    repeats: int = option(3, "How often a round without a quorum is done again before the run stops.", low=0)
    secure_aggregation: Literal["none", "unsigned", "signed"] = option(
        "none",
        "Clients' changes reach the server as a sum, each under masks: with keys that the server passes on, or with "
        "keys that the nodes sign.",
    )
    sum_norm: float = option(
        10.0, "The largest norm of a change in such a sum; clients shorten longer ones. With dp-noise it is dp-clip.",
        above=0,
    )  # fmt: skip
    max_norm: float = option(
        100.0, "How many times the median norm of a round's replies one may have; 0: no bound.", low=0
    )
    max_weight: float = option(
        10.0, "How many times the median number of samples a client may count for; 0: no bound.", low=0
    )
    largest: int = option(2 * 10**7, "Parameters that a client's model may have; one with more is refused.", low=1)
    node_keys: str = option("", "Folder with NAME.pub for every client; empty: nodes are not authenticated.")
    deliver: bool = option(True, "At the end every client gets its model, in its own folder.")

    def __post_init__(self) -> None:
        check(self)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; none for numbers."""
        return tuple(self.classes.split(",")) if self.classes else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample."""
        sides = self.input_shape.split("x")
        if not all(side.isdecimal() and int(side) for side in sides):
            raise ConfigError(f"input-shape is {self.input_shape!r}; give the shape of a sample, e.g. 3x32x32.")
        return tuple(map(int, sides))


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """What a node decides for itself, whatever the server's table says: ``flower-supernode --node-config``."""

    client: str = option("", "The client's name; without it, one that is drawn once.")
    folder: str = option("", "Where its secret and its memory lie; without it, ~/.fedloom/node.")
    role: Literal["participant", "newcomer"] = option("participant", "Takes part, or only wants a model.")
    device: str = option("auto", "cpu, cuda, cuda:1, or auto: a GPU if there is one.")
    evaluation: Literal["none", "noised", "exact"] = option(
        "exact", "What it tells of how models fare on its validation and test data."
    )
    evaluation_noise: float = option(
        1.0, "Of noised evaluations: the noise's deviation, in units of what one sample can change.", above=0
    )
    max_answers: int = option(
        10_000, "Answers with noise on them that it gives in all, kept count of in its folder; then it refuses.", low=1
    )
    min_summed: int = option(
        0,
        "It tells what it learned only in a secure sum of at least so many clients; 0: as the app has it, of at least "
        "three.",
        low=0,
    )
    identity: str = option("", "For signed sums: the file with its own private key, as in keys/nodes.")
    peers: str = option("", "For signed sums: its own folder with NAME.pub for every client, as in keys/clients.")
    min_batch: int = option(8, "Fewest samples that anything it tells the server may be computed on.", low=1)
    adapt_clip: float | None = option(None, "Its own bound on what it tells for --adapt prior.", low=0)
    adapt_noise: float | None = option(None, "Its own noise on that, in units of the bound.", low=0)
    max_epsilon: float = option(
        0.0,
        "The most that all its answers with noise spend of each sample's privacy, kept count of in its folder over all "
        "runs; then it refuses. 0: no limit.",
        low=0,
    )
    dp_delta: float = option(1e-5, "Delta for that epsilon; far below 1 / samples.", above=0, high=0.1)

    def __post_init__(self) -> None:
        check(self)


class Sums(NamedTuple):
    """How clients' changes are added up so that the server sees none of them."""

    norm: float
    """The largest norm of a change."""
    signed: bool
    """Clients know each other's keys, and do not take the server's word for them."""

    @property
    def note(self) -> str:
        """For whoever looks at the run."""
        keys = "keys that clients sign" if self.signed else "keys that the server passes on"
        return f"changes reach the server as a sum, under masks, by {keys}"


class Settings(NamedTuple):
    """Everything that an app's table says."""

    method: str
    run: RunOptions
    config: Any
    deploy: DeployOptions

    @property
    def task(self) -> Task:
        """What the clients' models are for."""
        return CLASSIFICATION if self.run.task == "auto" else task_named(self.run.task)

    @property
    def sums(self) -> Sums | None:
        """How changes are added up; None: each is told by itself."""
        kind = self.deploy.secure_aggregation
        return None if kind == "none" else Sums(self.run.dp_clip or self.deploy.sum_norm, kind == "signed")

    @property
    def preparation(self) -> Preparation | None:
        """Of raw samples: what is agreed on of how they are prepared; None: they come prepared."""
        return Preparation.of_text(self.deploy.preparation).form if self.deploy.preparation else None

    @property
    def tokens(self) -> Tokens | None:
        """What samples of tokens are like; None: samples are numbers."""
        return Tokens(self.deploy.vocabulary, self.task.per_token) if self.deploy.vocabulary else None


def read(table: Mapping[str, Any]) -> Settings:
    """The settings in an app's table, in which names have dashes."""
    given = {name.replace("-", "_"): value for name, value in table.items()}
    method = given.pop("method", None)
    if not isinstance(method, str):
        raise ConfigError('The app\'s config names no method; write e.g. method = "pfedhn".')
    kinds = {
        "run": (RunOptions, set(SHARED)),
        "config": (algorithms.get(method).config, None),
        "deploy": (DeployOptions, None),
    }
    found: dict[str, Any] = {}
    known: set[str] = set()
    for part, (kind, names) in kinds.items():
        names = names or {field.name for field in fields(kind)}
        known |= names
        found[part] = build(kind, {name: value for name, value in given.items() if name in names and value != ""})
    for name in given:
        if name not in known:
            raise unknown(f"setting of the app for {method}", name, known)
    settings = Settings(method, **found)
    check_together(settings.run, settings.config)
    if not settings.deploy.shape or not settings.deploy.num_outputs:
        raise ConfigError("num-outputs is 0; give the number of classes, or of target values.")
    classes, outputs = len(set(settings.deploy.class_names)), settings.deploy.num_outputs
    if classes not in (0, outputs):
        raise ConfigError(f"classes names {classes} of the {outputs} that num-outputs says; name each once.")
    raw = settings.preparation
    if raw and not raw.fits(settings.deploy.shape):
        wanted = str(raw.size) if raw.kind == "table" else f"{len(raw.columns)} channels, then height and width"
        raise ConfigError(f"input-shape is {settings.deploy.input_shape}, and preparation makes {wanted}; give that.")
    if settings.run.task == SEQUENCE.name and not settings.tokens:
        raise ConfigError(
            "vocabulary is 0, and the task is seq, a label for each token; say how many tokens there are."
        )
    if settings.sums:
        _check_summed(settings)
    return settings


def code_options(settings: Settings) -> dict[str, Any]:
    """The options of the table that may name code, with their values."""
    kinds = ((settings.run, SHARED), (settings.config, tuple(field.name for field in fields(settings.config))))
    return {
        field.name: getattr(part, field.name)
        for part, names in kinds
        for field in fields(part)
        if field.name in names and field.metadata.get("code")
    }


def code_in(settings: Settings) -> dict[str, str]:
    """Those of them that name code outside of fedloom."""
    kinds = RunOptions, type(settings.config)
    return {name: value for name, value in code_options(settings).items() if outside({name: value}, *kinds)}


def _check_summed(settings: Settings) -> None:
    """Refuse what needs to know of single clients more than a sum tells."""
    algorithm, options = algorithms.get(settings.method), settings.run
    if not algorithm.means:
        raise NeedsError(
            f"{algorithm.name} needs individual replies, and secure-aggregation hides them: it is for methods that "
            'need only a mean over clients. `fedloom methods "only means"` lists them.'
        )
    needed = {
        "aggregate": options.aggregate,
        f"adapt {options.adapt}": options.adapt != "none",
        "dp-quantile": options.dp_quantile,
        "preparation": settings.deploy.preparation,
    }
    for name, given in needed.items():
        if given:
            raise NeedsError(
                f"{name} needs individual replies, and secure-aggregation hides them. Leave one of the two out."
            )
    if hides_samples(settings.config):
        raise NeedsError(
            "sample-dp-noise is accounted for by how many samples each client has, and with secure-aggregation nobody "
            "tells. Leave one of the two out; a node can still set it for itself, as privacy of its own."
        )
    if options.sampling == "poisson":
        raise NeedsError(
            "sampling poisson has rounds of any size, and secure-aggregation none of few clients: what is drawn again "
            "would not be accounted for. Set sampling to fixed."
        )
