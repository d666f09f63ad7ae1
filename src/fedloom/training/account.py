# SPDX-License-Identifier: Apache-2.0
"""What a private run makes public, written down before it is, and how far the run may go.

The file is never shortened: rounds that a killed run had made public count, though it goes on from before them.
"""

from __future__ import annotations

import secrets

from fedloom.core.errors import ConfigError, RunError
from fedloom.privacy.ledger import Release, Sampling, epsilon, releases_of, rounds_within
from fedloom.runs.directory import PRIVACY, RunDirectory
from fedloom.training.trainer import Trainer


class Account:
    """The releases of a run. Without ``--dp-noise`` or ``--adapt-noise`` there are none."""

    def __init__(self, trainer: Trainer, directory: RunDirectory) -> None:
        self.trainer, self.directory = trainer, directory
        self.options = trainer.server.options
        saved = directory.checkpoints()
        written, counted = len(directory.lines(PRIVACY)), directory.meta(saved[-1]).get("released", 0) if saved else 0
        if written < counted:
            raise RunError(
                f"{directory.path / PRIVACY} has {written} releases where round {saved[-1]} counted {counted}; without "
                "them the run would promise too much. Restore the file."
            )

    def last_round(self) -> int:
        """The round after which training ends: that of ``--rounds``, or the last one within ``--max-epsilon``."""
        options, now = self.options, self.trainer.server.round
        if not options.max_epsilon or now >= options.rounds:
            return options.rounds
        done, coming = releases_of(self.directory.lines(PRIVACY)), self._of_round()
        more = rounds_within(done, coming, options.rounds - now, options.max_epsilon, options.dp_delta)
        if now + more == 0:
            first = epsilon([coming], options.dp_delta)
            raise ConfigError(
                f"--max-epsilon is {options.max_epsilon:g}, and one round would have {first:.3g} already (delta "
                f"{options.dp_delta:g}). Give a larger --dp-noise, or draw fewer clients a round."
            )
        return now + more

    def trained(self) -> None:
        """A round is done, and is about to be used."""
        if self.options.dp_noise:
            self._write(self._of_round())

    def settled(self, asks: int) -> None:
        """Clients answered so often, with noise of their own, for the adaptation."""
        if self.options.adapt_noise and asks:
            everybody = len(self.trainer.present)
            one = Release(self.trainer.server.round, "settling", self.options.adapt_noise, self.options.sampling,
                          everybody, everybody, self._draw(), asks)  # fmt: skip
            self._write(one)

    def _of_round(self) -> Release:
        """The round that the run is at, or the next one: they are alike."""
        options, clients = self.options, len(self.trainer.present)
        sampling: Sampling = options.sampling
        size = min(options.cohort, clients)
        return Release(self.trainer.server.round, "training", options.dp_noise, sampling, clients, size, self._draw())

    def _draw(self) -> str:
        return secrets.token_hex(8) if self.trainer.secret else "seed"

    def _write(self, release: Release) -> None:
        self.directory.append_to(PRIVACY, release._asdict())
