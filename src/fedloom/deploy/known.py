# SPDX-License-Identifier: Apache-2.0
"""What the server of a deployment knows before any client has come, and which clients it can serve by that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fedloom import algorithms
from fedloom.clients.federation import Federation
from fedloom.core.contract import Setup
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.core.task import Task
from fedloom.core.tokens import Tokens
from fedloom.deploy.lobby import Greeting
from fedloom.deploy.options import Settings
from fedloom.deploy.roster import check_model, federation_of
from fedloom.training.config import algorithm_of
from fedloom.training.machine import device_of
from fedloom.training.server_data import Form, ServerSamples, share_is_refused
from fedloom.training.server_data import read as read_samples


class Known(NamedTuple):
    """What the server knows of clients before they come."""

    shape: tuple[int, ...]
    outputs: int
    networks: list[str]
    task: Task
    device: torch.device
    dtype: torch.dtype
    tokens: Tokens | None

    @classmethod
    def of(cls, settings: Settings) -> Known:
        """From the app's table."""
        options, deploy = settings.run, settings.deploy
        networks = [name for name in deploy.networks.split(",") if name]
        device, dtype = device_of(options.device), getattr(torch, options.dtype)
        return cls(deploy.shape, deploy.num_outputs, networks, settings.task, device, dtype, settings.tokens)

    @property
    def classes(self) -> int:
        """How many classes there are; 0 for a task without any."""
        return self.outputs if self.task.class_scores or self.task.per_token else 0

    def federation(self, greetings: Sequence[Greeting]) -> Federation:
        """A federation of those who told of themselves."""
        return federation_of(greetings, *self)

    def server_samples(self, settings: Settings) -> ServerSamples | None:
        """What the server has of its own, with labels only if the method needs them."""
        options, labelled = settings.run, algorithms.get(settings.method).needs.server_data == "labelled"
        share_is_refused(options.server_data)
        if not isinstance(options.server_data, str):
            return None
        if settings.preparation:
            raise ConfigError("server-data is for samples that are not raw, and the clients' are; leave it out.")
        targets = () if self.classes or self.outputs == 1 else (self.outputs,)
        names = settings.deploy.class_names if self.classes else ()
        form = Form(self.shape, self.classes, self.shape if self.task.per_token else targets, names,
                    tokens=self.tokens)  # fmt: skip
        return read_samples(options.server_data, options.data_root, form, labelled=labelled)


def check_of(settings: Settings) -> Callable[[Greeting], None]:
    """What the lobby calls with each greeting: it fails, in a sentence, where that client cannot be served.

    A client is looked at as if it were alone: what needs several of them, such as one network for all, is looked at
    when enough have come (``waiting.wait_for``).
    """
    known, algorithm = Known.of(settings), algorithm_of(settings.method, settings.run)

    def check(one: Greeting) -> None:
        check_model(one, algorithm.told, settings.deploy.largest, known.shape, known.outputs, known.networks,
                    known.tokens)  # fmt: skip
        alone = known.federation([one._replace(role="participant")])
        setup = Setup(settings.config, alone.participants, alone.models, known.task, 0, known.device, known.dtype)
        violations = algorithm.needs.of_clients.violations(setup, algorithm.name)
        if violations:
            raise NeedsError(" ".join(violations))

    return check
