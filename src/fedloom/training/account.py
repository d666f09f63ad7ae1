# SPDX-License-Identifier: Apache-2.0
"""What a private run makes public, written down before it is, and how far the run may go.

The file is never shortened: rounds that a killed run had made public count, though it goes on from before them.
"""

from __future__ import annotations

import secrets
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

from fedloom.adaptation.calibration import Privacy
from fedloom.adaptation.prior import NOISED_ASKS, telling
from fedloom.clients.batching import steps_of
from fedloom.core.contract import Program
from fedloom.core.errors import ConfigError, RoundError, RunError
from fedloom.core.noised import hides_samples
from fedloom.core.trees import ClientId
from fedloom.engines.job import TRIED, Job
from fedloom.privacy.ledger import Release, Sampling, epsilon, hiding, most_steps, releases_of, rounds_within
from fedloom.programs.allowed import programs_of
from fedloom.runs.directory import PRIVACY, RunDirectory
from fedloom.runs.options import RunOptions
from fedloom.training.trainer import Trainer

SETTLING = "settling"
"""What participants are asked before an evaluation."""


class Account:
    """The releases of a run. Without an option that has noise in it there are none."""

    def __init__(self, trainer: Trainer, directory: RunDirectory) -> None:
        self.trainer, self.directory, self.config = trainer, directory, trainer.server.config
        self._allowed: dict[Release, int] = {}
        """Steps within ``--max-epsilon``, for clients whose steps are like these."""
        self._steps: Counter[ClientId] = Counter()
        """That clients have taken, each noised."""
        self._planned: tuple[Release, int] | None = None
        """What a round was taken to spend of clients' privacy, and the last round that there is room for."""
        base, how = trainer.server.algorithm.base, Privacy(self.options.adapt_clip, self.options.adapt_noise)
        self._settling = {program.name for program in telling(base, how)} if base and how.noise else set()
        """What participants are asked between rounds and answer with noise of their own."""
        saved = directory.checkpoints()
        written, counted = len(directory.lines(PRIVACY)), directory.meta(saved[-1]).get("released", 0) if saved else 0
        if written < counted:
            raise RunError(
                f"{directory.path / PRIVACY} has {written} releases where round {saved[-1]} counted {counted}; without "
                "them the run would promise too much. Restore the file."
            )
        self._known = set(releases_of(directory.lines(PRIVACY)))
        for one in hiding(self._known, "sample"):
            self._steps.update(dict.fromkeys(one.who, one.times))
        trainer.before_ask = partial(_tell, weakref.ref(self))

    @property
    def options(self) -> RunOptions:
        """The run's. Rounds grow with the federation, where clients come to one that runs."""
        return self.trainer.server.options

    def close(self) -> None:
        """Write nothing down any more."""
        self.trainer.before_ask = None

    def last_round(self) -> int:
        """The round after which training ends: that of ``--rounds``, or the last one within ``--max-epsilon``."""
        options, now = self.options, self.trainer.server.round
        if not options.max_epsilon or now >= options.rounds:
            return options.rounds
        return min(self._last_for_clients(), self._last_for_samples)

    def _last_for_clients(self) -> int:
        """The last round within ``--max-epsilon`` for clients; planned anew only where rounds have changed."""
        options, now = self.options, self.trainer.server.round
        if not options.dp_noise:
            return options.rounds
        # secret draws have names of their own: where what is asked again counts again, no plan holds for long
        alike = self._of_round()._replace(round=0)
        if self._planned and self._planned[0] == alike:
            return self._planned[1]
        more = rounds_within(self._done(), self._rounds, options.rounds - now, options.max_epsilon, options.dp_delta)
        if now + more == 0:
            first = epsilon(self._rounds(1), options.dp_delta)
            raise ConfigError(
                f"--max-epsilon is {options.max_epsilon:g}, and one round would have {first:.3g} already (delta "
                f"{options.dp_delta:g}). Give a larger --dp-noise, or draw fewer clients a round."
            )
        self._planned = alike, now + more
        return now + more

    def _done(self) -> list[Release]:
        """What clients have spent."""
        return hiding(releases_of(self.directory.lines(PRIVACY)), "client")

    def _rounds(self, number: int) -> list[Release]:
        """What so many more rounds spend of clients' privacy at most, with their evaluations: one at the end."""
        now, every, coming = self.trainer.server.round, self.trainer.eval_every, self._of_round()
        found = [coming._replace(round=now + 1, times=number)]
        if self._settling:
            evaluations = (now + number) // every - now // every + bool((now + number) % every)
            found.append(self._of_settling("")._replace(times=NOISED_ASKS * evaluations))
        return found

    def _check_round(self) -> None:
        """Refuse a round that would spend more than there is room for: clients have gone since it was planned.

        Fewer clients are drawn from fewer, so that each is drawn more often, and its round costs more.
        """
        options = self.options
        if not options.max_epsilon or (self._planned and self._planned[0] == self._of_round()._replace(round=0)):
            return
        spent = epsilon([*self._done(), *self._rounds(1)], options.dp_delta)
        if spent > options.max_epsilon:
            raise RoundError(
                f"Round {self.trainer.server.round + 1} of {len(self.trainer.present)} clients would have epsilon "
                f"{spent:.3g}, more than --max-epsilon {options.max_epsilon:g}. Nobody was asked; with more clients it "
                "would have less."
            )

    @cached_property
    def _last_for_samples(self) -> int:
        """The last round at which nobody who is drawn by then has spent more, evaluation and all."""
        options, trainer, now = self.options, self.trainer, self.trainer.server.round
        if not hides_samples(self.config):
            return options.rounds
        spent = Counter({client: self._steps[client] for client in trainer.present})
        both = {client: self._coming(client) for client in trainer.present}
        settling = Counter({client: tuning for client, (_, tuning) in both.items()})
        for number in range(now + 1, options.rounds + 1):
            spent.update({client: both[client][0] for client in trainer.cohort(number)})
            after = spent + settling
            if any(steps > self._most(client) for client, steps in after.items()):
                if number == 1:
                    raise ConfigError(
                        f"--max-epsilon is {options.max_epsilon:g}, and one round would have more already (delta "
                        f"{options.dp_delta:g}). Give a larger --sample-dp-noise, fewer --local-steps or a smaller "
                        "--batch-size."
                    )
                return number - 1
            spent = after if trainer.is_evaluated(number) else spent
        return options.rounds

    def _coming(self, client: ClientId) -> tuple[int, int]:
        """The steps of a round that a participant is drawn for, and of an evaluation, if it is tuned for that."""
        server = self.trainer.server
        asked = programs_of(server.algorithm, self.config, server.setup.models[client], newcomer=False)
        steps = {program: self._number(client, program) for program in asked}
        if not server.algorithm.settle:
            return sum(steps.values()), 0
        tuning = sum(number for program, number in steps.items() if program.batches != self.config.batches())
        return sum(steps.values()) - tuning, tuning

    def _number(self, client: ClientId, program: Program) -> int:
        """The steps of one ask, if it trains."""
        batches, samples = program.batches, self.trainer.engine.samples_of(client)
        if batches is None or batches.split in TRIED:
            return 0
        if batches.epochs and not samples:
            raise RoundError(
                f"Client {client} does not tell how many samples it has, so that nobody knows how many steps "
                f"{program.name} takes, which --sample-dp-noise is accounted for by. It was not asked; give "
                "--local-steps in the place of --local-epochs."
            )
        return steps_of(samples or 1, batches)

    def _most(self, client: ClientId) -> int:
        """How many steps this client may take within ``--max-epsilon``: the same for all with as many samples."""
        like = step_of(self.config, self.trainer.engine.samples_of(client))
        if like not in self._allowed:
            self._allowed[like] = most_steps(like, self.options.max_epsilon, self.options.dp_delta)
        return self._allowed[like]

    def asked(self, job: Job) -> None:
        """Clients are about to be asked, whatever for: write down what the answers will make public, before they do.

        Of noise on clients' changes a round is written down as a whole (``trained``); here it is only looked at whether
        there is room for it. All other noise is of single asks.
        """
        stage = job.moment.stage
        number = stage if isinstance(stage, int) else self.trainer.server.round
        what = "training" if stage == number else str(stage).partition(" after ")[0]
        about = Release(number, what, 0.0, "fixed", 0, 0, self._draw(job))
        if self.options.dp_noise and what == "training":
            self._check_round()
        if what == SETTLING and job.program.name in self._settling:
            self._write(self._of_settling(about.draw))
            return
        noise = job.program.noise
        if job.hides_samples:
            self._hidden(job, about)
        elif noise:
            about = about._replace(what=noise.what or what, noise=noise.scale, mechanism=noise.mechanism)
            if noise.unit == "client":
                everybody = len(job.clients)
                self._write(about._replace(clients=everybody, size=everybody))
                return
            for samples, clients in self._by_samples(job.clients):
                number = samples or 1
                self._write(about._replace(sampling="poisson", clients=number, size=number, unit="sample", who=clients))

    def _hidden(self, job: Job, about: Release) -> None:
        """Steps of local training, each noised, of some clients."""
        found = []
        for samples, clients in self._by_samples(job.clients):
            steps = self._number(clients[0], job.program)
            step = step_of(self.config, samples)
            found.append(step._replace(round=about.round, what=about.what, draw=about.draw, times=steps, who=clients))
        # a round that is done again from the seed makes nothing new public
        new = [one for one in found if one.times and one not in self._known]
        if self.options.max_epsilon:
            for one in new:
                for client in one.who:
                    if self._steps[client] + one.times > self._most(client):
                        raise RoundError(
                            f"Client {client} would exceed --max-epsilon {self.options.max_epsilon:g} by "
                            f"{job.program.name} ({one.what}, round {one.round}). It was not asked."
                        )
        for one in new:
            self._write(one)
            self._known.add(one)
            self._steps.update(dict.fromkeys(one.who, one.times))

    def _by_samples(self, clients: Iterable[ClientId]) -> list[tuple[int, tuple[ClientId, ...]]]:
        """Clients with equally many samples, by that number."""
        alike: dict[int, list[ClientId]] = {}
        for client in clients:
            alike.setdefault(self.trainer.engine.samples_of(client), []).append(client)
        return [(number, tuple(some)) for number, some in alike.items()]

    def trained(self) -> None:
        """A round is done, and is about to be used."""
        if self.options.dp_noise:
            self._write(self._of_round())

    def _of_settling(self, draw: str) -> Release:
        """One answer of all clients for the adaptation, each with noise of its own."""
        everybody = len(self.trainer.present)
        return Release(self.trainer.server.round, SETTLING, self.options.adapt_noise, self.options.sampling, everybody,
                       everybody, draw)  # fmt: skip

    def _of_round(self) -> Release:
        """The round that the run is at, or the next one: they are alike."""
        options, clients = self.options, len(self.trainer.present)
        sampling: Sampling = options.sampling
        size = min(options.cohort, clients)
        return Release(self.trainer.server.round, "training", options.dp_noise, sampling, clients, size, self._draw())

    def _draw(self, job: Job | None = None) -> str:
        """Where noise comes from: one draw of the seed is always the same; a secret one is another each time."""
        if self.trainer.secret:
            return secrets.token_hex(8)
        return f"seed {job.moment.stage} {job.moment.ask}" if job else "seed"

    def _write(self, release: Release) -> None:
        self.directory.append_to(PRIVACY, release._asdict())


def step_of(config: Any, samples: int) -> Release:
    """One noised step of a client with so many samples; 0: nobody knows, and each is taken to be in it."""
    size = min(config.batch_size, samples) or 1
    return Release(0, "", config.sample_dp_noise, "poisson", samples or 1, size, unit="sample")


def _tell(account: weakref.ref[Account], job: Job) -> None:
    """The trainer does not hold on to the account, which holds on to it: else a run would not be let go of at once."""
    found = account()
    if found is not None:
        found.asked(job)
