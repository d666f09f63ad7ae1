# SPDX-License-Identifier: Apache-2.0
"""What a run is made of: the options that every method shares. The method's own ``Config`` stands beside them, flat.

They are the flags of ``fedloom run``, the arguments of ``fedloom.run`` and the lines of ``config.yaml``; the help text
of each is its documentation. What can be said of them without data is checked here: values out of range, options that
need or exclude each other. The rest is known when the data are there, and ``training.simulation`` checks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedloom.core.config import check, flag, option
from fedloom.core.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.data.tables import Roles

PYTHON_DATA = "python"
"""For a dataset: the data came as Python objects, and must be given again."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Federation, schedule and machine."""

    dataset: str = option(
        "digits",
        "A dataset's name, an .npz file, a table (.csv, .parquet), LEAF's JSON, or a folder with one per "
        "client, or one text (.txt).",
    )
    data_root: str | None = option(None, "Where published files lie; without it, the variable FEDLOOM_DATA.")
    target: str | None = option(
        None, "Of a table: the column that is predicted, or several separated by commas; without it, y."
    )
    groups: str | None = option(
        None, "Of a table: columns that say whose a sample is, or are no features, separated by commas."
    )
    partition: str = option(
        "auto",
        "How samples are split over clients: see `fedloom datasets`; auto: by the clients that the data name, or "
        "classes:2.",
    )
    clients: int | None = option(None, "Clients that take part; without it, as many as the data name, else 20.", low=1)
    unseen: float = option(0.0, "Clients held out of training: a count, or a share of all clients.", low=0)
    unseen_partition: str | None = option(None, "Another partition for the unseen clients, e.g. dirichlet:1.")
    unseen_groups: str | None = option(
        None, "With --partition group:NAME: the groups held out of training by name, separated by commas."
    )
    split_by: str | None = option(
        None, "A grouping whose samples stay together when validation and test data are cut, e.g. recording."
    )
    client_shift: str | None = option(
        None,
        "A change of every client's images by a strength of its own, as if each had its own camera: shifts separated "
        "by commas, each perhaps with the greatest strength to draw, e.g. rotation:40,brightness.",
    )
    unseen_shift: str | None = option(None, "A change of the unseen clients' images, e.g. blur or rotation.")
    unseen_shift_strength: float | None = option(None, "Strength of --unseen-shift; without it, drawn for each image.")
    val_share: float = option(0.15, "Share of the training data kept for validation.", low=0, high=0.9)
    test_share: float = option(0.15, "Share kept for testing, for data without a published test set.", low=0, high=0.9)
    server_data: float | str = option(
        0.0,
        "Samples of the server's own, for methods that need some: a share of the training data, a dataset's name, or "
        "an .npz file.",
        low=0,
        high=0.9,
    )
    task: str = option(
        "auto",
        "classification, multilabel, regression, seq (a label for each token), a task's import path, or auto: by the "
        "labels.",
        code=True,
    )
    model: str = option(
        "auto", "A network, several separated by commas (clients take them in turn), or an import path.", code=True
    )
    unseen_model: str | None = option(
        None, "Another network for the unseen clients; without it, the same as everybody's.", code=True
    )
    average: float = option(
        0.0,
        "Use the exponential mean of the server's states over rounds, with this weight on what came before, e.g. 0.97; "
        "0: the last state.",
        low=0,
        high=0.9999,
    )
    adapt: Literal["none", "prior", "tune"] = option(
        "none",
        "prior: add each client's label shares to the scores of a global model; tune: then each client trains it "
        "further and mixes both.",
    )
    adapt_clip: float = option(
        0.0, "Largest norm of a client's reply in the calibration of --adapt; 0: no bound.", low=0
    )
    adapt_noise: float = option(0.0, "Gaussian noise on that reply, in units of --adapt-clip.", low=0)
    sampling: Literal["fixed", "poisson"] = option(
        "fixed",
        "Rounds of a fixed number of clients; or each client is drawn by itself, which --dp-noise hides much better.",
    )
    dp_clip: float = option(0.0, "With --dp-noise: the largest norm of what a client changes in a round.", low=0)
    dp_noise: float = option(
        0.0,
        "Differential privacy for clients: Gaussian noise on the sum of a round's changes, in units of --dp-clip; "
        "0: none.",
        low=0,
    )
    dp_quantile: float = option(
        0.0,
        "The bound follows this quantile of the norms of changes, from --dp-clip on, e.g. 0.5; 0: it stays.",
        low=0,
        high=0.99,
    )
    dp_delta: float = option(1e-5, "Delta, for which epsilon is worked out; far below 1 / clients.", above=0, high=0.1)
    max_epsilon: float = option(0.0, "Stop before the round that would exceed this epsilon; 0: no limit.", low=0)
    aggregate: str = option(
        "",
        "Combine replies, each counted once, by mean, median, trimmed:B, krum:F, geomedian or dnc:F, where B or F of a "
        "round may lie; empty: as the method does.",
    )
    max_weight: float = option(
        0.0, "How many times the median number of samples a client may count for; 0: no bound.", low=0
    )
    malicious: float = option(0.0, "Share of the participants that lie, to try it out.", low=0, high=0.9)
    attack: Literal["sign_flip", "scale", "overclaim", "alie", "free_ride", "label_flip", "backdoor"] = option(
        "sign_flip",
        "How they lie: the opposite of what was learned, ten times that, that with a thousand times the samples, a "
        "little off together, nothing; or they train on wrong labels, or on a pattern that goes with class 0, which is "
        "then tried on test data (triggered).",
    )
    rounds: int = option(100, "Rounds of training.", low=0)
    cohort: float = option(
        0, "Clients asked in a round: a count, or a share of those that take part; 0: as many as in the paper.", low=0
    )
    async_: int = option(
        0,
        "Asynchronous rounds: --cohort clients train at any time, each from the state that it found when it began, and "
        "the server steps with every so many replies; 0: it waits for the whole cohort.",
        low=0,
    )
    availability: str | None = option(
        None,
        "When clients are there and how fast they are, on a clock that is only counted: always, or a file with the "
        "columns client, start, end and perhaps speed (see docs/how-to-asynchronous.md).",
    )
    engine: str = option(
        "auto",
        "auto, sequential, parallel, vectorised, parallel_vectorised, loopback, ray: on several machines or GPUs (see "
        "docs/how-to-scale.md), or flower-sim: one message for each client, by Flower.",
    )
    device: str = option("auto", "cpu, cuda, cuda:1, or auto: a GPU if there is one.")
    threads: int = option(
        0,
        "Threads per operator on a CPU; results differ in the last bits. 0: chosen by model and engine, at most 8.",
        low=0,
        high=1024,
    )
    workers: int = option(
        0,
        "Processes of the parallel engines and, in all, of ray; results do not depend on it, but with ray on GPUs. 0: "
        "one per core, or per GPU.",
        low=0,
        high=1024,
    )
    ray_address: str | None = option(
        None,
        "With --engine ray: the cluster's address, or auto for the one on this machine; without it, one is started.",
    )
    loom_shards: int = option(
        0,
        "With --engine ray: processes that hold a loom's heads, for looms too large for one GPU (see "
        "docs/explanation-large-looms.md); 0: they stay with the server.",
        low=0,
        high=1024,
    )
    gpus: int = option(0, "With --engine ray and --device cuda: GPUs that clients run on; 0: all.", low=0, high=4096)
    dtype: Literal["float32", "float64"] = option("float32", "Floating-point type of data and parameters.")
    precision: Literal["exact", "tf32", "bf16"] = option(
        "exact", "Arithmetic on a GPU: exact, or faster with 10 bits of mantissa, or with 7 in local training."
    )
    convolutions: Literal["own", "library"] = option(
        "own", "Convolutions of compiled steps on a GPU: by fedloom's kernels, or by the library's only."
    )
    seed: int = option(0, "Seed of everything random.", low=0)
    eval_every: int = option(0, "Rounds between evaluations; 0: twenty in a run.", low=0)
    eval_clients: int = option(0, "Clients evaluated each time, drawn by the seed; 0: all.", low=0)
    keep: int = option(2, "Checkpoints kept besides the best.", low=1)
    tracker: str | None = option(None, "tensorboard, mlflow or wandb.")

    def __post_init__(self) -> None:
        """Refuse what cannot be, and what would be left unused: an option without effect is taken for a mistake.

        What depends on the data, the method or the machine is refused where that is known.
        """
        check(self)
        if self.server_data == self.dataset:
            raise ConfigError(
                f"--server-data is {self.dataset}, the clients' own data, test data included; give a share of it, such "
                "as 0.1, or another dataset."
            )
        if self.adapt_noise and not self.adapt_clip:
            raise ConfigError("--adapt-noise needs --adapt-clip: noise protects only what is bounded. Give both.")
        if bool(self.dp_noise) != bool(self.dp_clip):
            raise ConfigError(
                "--dp-noise and --dp-clip go together: noise hides only what is bounded, and a bound alone hides "
                "nothing. Give both."
            )
        if self.dp_quantile and not self.dp_noise:
            raise ConfigError("--dp-quantile is about --dp-noise, which is not given. Give --dp-noise and --dp-clip.")
        for name in ("ray_address", "gpus", "loom_shards"):
            if getattr(self, name) and self.engine != "ray":
                raise ConfigError(
                    f"{flag(name)} is about --engine ray; the engine is {self.engine}. Give --engine ray."
                )
        for name in ("async_", "availability"):
            if getattr(self, name) and self.dp_noise:
                raise ConfigError(
                    f"{flag(name)} and --dp-noise do not go together: what it promises rests on who is drawn, and here "
                    "that depends on who is there and has time. Leave one out."
                )
            if getattr(self, name) and self.engine == "flower-sim":
                raise ConfigError(
                    f"{flag(name)} is for clients on a clock of this process, and --engine flower-sim has them "
                    "elsewhere. Choose another engine."
                )
        if self.sampling == "poisson" and not self.dp_noise:
            raise ConfigError("--sampling poisson is for --dp-noise: without it, a round might have nobody to ask.")
        if self.aggregate:
            from fedloom.robust.rules import parse  # needs torch, which help does without

            parse(self.aggregate)  # refuses what is no rule
        if self.aggregate and self.dp_noise:
            raise ConfigError(
                "--aggregate and --dp-noise do not go together: noise for privacy is accounted for on a sum. Leave one "
                "out."
            )
        if self.aggregate and self.loom_shards:
            raise ConfigError(
                "--aggregate and --loom-shards do not go together: a rule compares gradients of the whole loom, which "
                "is in no one place. Leave one out."
            )
        if self.engine == "flower-sim" and (self.malicious or self.attack == "backdoor"):
            raise ConfigError(
                "--malicious and --attack are for clients in this process, and --engine flower-sim has them elsewhere. "
                "Choose another engine."
            )
        for name in ("unseen_partition", "unseen_shift", "unseen_model"):
            if getattr(self, name) and not (self.unseen or self.unseen_groups):
                raise ConfigError(
                    f"{flag(name)} is about clients held out of training, and there are none. Give --unseen too."
                )
        if self.unseen_shift_strength is not None and not self.unseen_shift:
            raise ConfigError("--unseen-shift-strength needs --unseen-shift, whose strength it is. Give both.")
        if self.cohort > 1 and self.cohort % 1:
            raise ConfigError(f"--cohort is {self.cohort:g}; give a whole number of clients, or a share below 1.")
        if self.clients is not None and self.cohort > self.clients:
            raise ConfigError(
                f"--cohort is {self.cohort:g}, but there are {self.clients} clients; ask at most as many as there are."
            )

    @property
    def roles(self) -> Roles:
        """Which columns of a table are no features."""
        from fedloom.data.tables import Roles  # needs numpy, which help does without

        return Roles.of(self.target, self.groups, self.task)

    @property
    def named_unseen(self) -> tuple[str, ...]:
        """The groups that are held out by name."""
        return tuple(self.unseen_groups.split(",")) if self.unseen_groups else ()

    @property
    def server_share(self) -> float:
        """The share of the training data that the server keeps; 0 if it has none, or data of another source."""
        return 0.0 if isinstance(self.server_data, str) else self.server_data

    def cohort_of(self, clients: int, papers: int) -> int:
        """The number of clients asked in a round of a federation with so many; ``papers`` where it is left open."""
        wanted = self.cohort or papers
        return min(int(wanted) if wanted >= 1 else max(1, round(wanted * clients)), clients)
