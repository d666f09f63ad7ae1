# SPDX-License-Identifier: Apache-2.0
"""Rounds until the end, written down as they come: what is on disk is always a run that can go on.

A round's record is written when the round and, where one follows, its evaluation are done; then comes the checkpoint,
if one is due. Where this is interrupted, or a round fails, the run goes back to the last record and writes a checkpoint
of that moment. Records beyond the last checkpoint, of a process that was killed, are removed when the run is resumed.

Nothing is evaluated twice: the summary is made from the records and the scores that are on disk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from typing import Any

import numpy as np

from fedloom.core.errors import NeedsError, RoundError
from fedloom.core.interrupts import taken_as_one
from fedloom.core.task import Task
from fedloom.core.trees import ClientId
from fedloom.metrics.summary import Group
from fedloom.programs.evaluation import Score
from fedloom.progress import Display, Headline
from fedloom.runs.directory import EMBEDDINGS, ESTIMATES, SCORES, RunDirectory
from fedloom.runs.records import embeddings_line, scores_line
from fedloom.runs.trackers import tracker
from fedloom.training.account import Account
from fedloom.training.trainer import Evaluation, Trainer, estimates_line

TRIES = 10
"""Rounds after which networks should have learned something."""

SAVE_SECONDS = 60.0
"""A checkpoint is also written when this much time has passed since the last one."""


def train(trainer: Trainer, directory: RunDirectory, shown: Display, until: int | None = None) -> None:
    """Train to the last round, or pause after ``until``; interrupted, or if a round fails, the last whole one is saved.

    For each round: train; count what it made public; evaluate, if it is due; write the record; write the checkpoint.
    ``done`` is the last moment whose record is written, to which an interruption goes back wherever it struck.

    What is paused has a summary, in which unseen clients were not tried, and can go on as if it never had been.
    """
    server, options = trainer.server, trainer.server.options
    account = Account(trainer, directory)
    allowed, last = _ends(trainer, account, until)
    best, is_best = best_of(directory), False
    done = trainer.mark(), is_best  # the last round whose record is written
    follow = closing(tracker(options.tracker, directory)) if options.tracker else nullcontext()
    saved = time.monotonic()
    with taken_as_one(), follow as log, shown as screen:
        try:
            screen.begin(headline(trainer))
            while server.round < last:
                record, is_best = trainer.train_round(), False
                account.trained()
                evaluated = trainer.is_evaluated(server.round)
                if evaluated:
                    _evaluate(trainer, directory, record)
                    is_best = better(record["metrics"], server.setup.task, best)
                    if is_best:
                        best = {"round": server.round, **record["metrics"]}
                directory.append(record)
                done = trainer.mark(), is_best
                if evaluated or trainer.saves_every_round or time.monotonic() - saved > SAVE_SECONDS:
                    save(trainer, directory, best=is_best)
                    saved = time.monotonic()
                if log is not None:
                    log.log(_numbers(record), server.round)
                screen.update(record)
                allowed, last = _ends(trainer, account, until)
        except (KeyboardInterrupt, RoundError):
            # wherever it was: in a round, in an evaluation, or between a record and its checkpoint
            mark, is_best = done
            trainer.go_back(mark)
            directory.rewind(server.round)
            if server.round not in directory.checkpoints():
                save(trainer, directory, best=is_best)
            directory.write_summary(_summary(trainer, directory, finished=False))
            raise
        if options.rounds == 0:
            save(trainer, directory, best=False)
        chance = at_chance(trainer, directory.records())
        if chance:
            trainer.notes = [*trainer.notes, chance]
            screen.note(chance)
        directory.write_summary(_summary(trainer, directory, finished=True, paused=last < allowed))
        screen.end(directory)


def _ends(trainer: Trainer, account: Account, until: int | None) -> tuple[int, int]:
    """The last round that is allowed, and the one after which training ends or pauses.

    Asked anew after every round: with clients that come and go, a round costs more or less privacy than was planned.
    """
    allowed = account.last_round()
    trainer.last_round = allowed if until is None else min(until, allowed)
    return allowed, trainer.last_round


def at_chance(trainer: Trainer, records: Sequence[Mapping[str, Any]]) -> str | None:
    """A note where networks never did better than to name the commonest class of all, beyond what luck explains."""
    task, roster = trainer.server.setup.task, trainer.server.roster
    labels = [np.array(member.labels) for member in roster.members if member.labels and not member.unseen]
    name = f"deployed/participants/val/{task.metric_name}_pooled"
    found = [record["metrics"][name] for record in records if name in record.get("metrics", {})]
    if not (task.class_scores and labels and roster.num_classes > 1) or len(records) < TRIES or not found:
        return None
    counts, best = np.sum(labels, axis=0), max(found)
    commonest = float(counts.max() / counts.sum())
    samples = sum(member.samples["val"] for member in roster.members if not member.unseen)
    if best > commonest + 2 * (commonest * (1 - commonest) / max(samples, 1)) ** 0.5:
        return None
    x = trainer.federation.x
    values = f" (its values run from {float(x.min()):.3g} to {float(x.max()):.3g})" if x.numel() else ""
    return (
        f"the networks stayed at chance: {best:.3f} of validation samples are right at best, and {commonest:.3f} are "
        f"of the commonest class. See that x is centred and scaled{values}; then try another --local-lr or --model"
    )


def _evaluate(trainer: Trainer, directory: RunDirectory, record: dict[str, Any]) -> None:
    """Evaluate, into the record and the file of scores; the seconds of settling are among those of the evaluation."""
    start = time.perf_counter()
    found = trainer.evaluation()
    record["metrics"] = found.metrics
    record["dropped"] = [*record["dropped"], *(one._asdict() for one in found.dropped)]
    record["seconds"]["evaluation"] = time.perf_counter() - start
    if found.settling:
        record["seconds"]["settling"] = found.settling
    record["notes"] = [*record["notes"], *found.notes]
    write(directory, trainer, found)


def write(directory: RunDirectory, trainer: Trainer, found: Evaluation, *, end: bool = False) -> None:
    """The scores, embeddings and estimates behind an evaluation; ``end``: one that belongs to the end of training."""
    task, number, last = trainer.server.setup.task, trainer.server.round, {"end": True} if end else {}
    named = {"name": task.metric_name, "higher_is_better": task.higher_is_better}
    for group, scores in found.scores.items():
        columns = {name: [getattr(score, name) for score in scores.values()] for name in Score._fields}
        directory.append_to(SCORES, {**scores_line(number, group, named, list(scores), columns), **last})
    for who, embeddings in found.embeddings.items():
        directory.append_to(EMBEDDINGS, {**embeddings_line(number, who, embeddings), **last})
    if found.estimates:
        directory.append_to(ESTIMATES, {**estimates_line(number, found.estimates), **last})


def scores_at(directory: RunDirectory, round: int, group: Group) -> dict[ClientId, dict[str, Any]]:
    """The scores that were written for a group of clients after a round."""
    for line in reversed(directory.scores()):
        if tuple(map(line.get, ("round", "model", "group", "split"))) == (round, *group):
            rows = zip(line["client"], *(line[name] for name in Score._fields))
            return {client: dict(zip(Score._fields, values)) for client, *values in rows}
    return {}


def save(trainer: Trainer, directory: RunDirectory, best: bool) -> None:
    """Write a checkpoint of this moment; ``best``: its round is the best so far, by validation.

    The roster is written before it, where clients have come: no checkpoint may name one that the roster lacks.
    """
    now = trainer.now
    if trainer.roster_is_new:
        directory.write_roster(trainer.server.roster)
        trainer.roster_is_new = False
    directory.save(
        now.round, now.state._asdict(), now.memory, trainer.meta(), best=best, keep=trainer.server.options.keep
    )
    trainer.saved(directory.checkpoints())


def best_of(directory: RunDirectory) -> dict[str, Any] | None:
    """The metrics of the best round so far, by validation."""
    number = directory.best_round()
    return next(({"round": number, **r["metrics"]} for r in directory.records() if r["round"] == number), None)


def better(metrics: Mapping[str, float], task: Task, best: Mapping[str, Any] | None) -> bool:
    """Selection by validation, never by test; the later of two equals is kept out.

    An adapted run's best round is that of the plain method: participants know their classes and hardly gain by a model
    that tells all classes apart; newcomers do.
    """
    name = chosen_by(metrics, task.metric_name)
    if name is None:
        return False
    if best is None or name not in best:
        return True
    gain = float(metrics[name] - best[name])
    return gain > 0 if task.higher_is_better else gain < 0


def chosen_by(metrics: Mapping[str, float], metric: str) -> str | None:
    """The name of the number among ``metrics`` that chooses a round, if it is there."""
    names = (f"{model}/participants/val/{metric}" for model in ("plain", "deployed"))
    return next((name for name in names if name in metrics), None)


def headline(trainer: Trainer) -> Headline:
    """What runs, on what: the first line of a run's display."""
    server, options = trainer.server, trainer.server.options
    return Headline(
        name=server.algorithm.name,
        dataset=options.dataset,
        clients=len(server.setup.clients),
        cohort=int(options.cohort),
        unseen=len(trainer.federation.unseen),
        models=tuple(str(model.spec) for model in server.setup.architectures.values()),
        engine=options.engine,
        device=options.device,
        engine_reason=trainer.engine_reason,
        notes=tuple(trainer.notes),
        metric=server.setup.task.metric_name,
        round=server.round,
        rounds=options.rounds,
    )


def _summary(trainer: Trainer, directory: RunDirectory, finished: bool, paused: bool = False) -> dict[str, Any]:
    """The run in numbers, from its records: nothing is evaluated again but what was not yet.

    Of participants that is nothing, but for a run of no rounds. Unseen clients are tried when training has ended, at
    the last round and, where newcomers are served from it, at the best. If they cannot be, the summary has the reason
    in the place of their numbers: training is done all the same.
    """
    server, options = trainer.server, trainer.server.options
    records, best = directory.records(), best_of(directory)
    summary: dict[str, Any] = {
        "method": server.method,
        "name": server.algorithm.name,
        "finished": finished,
        "rounds": server.round,
        "seed": options.seed,
        "engine": options.engine,
        "engine_reason": trainer.engine_reason,
        "device": options.device,
        "metric": server.setup.task.metric_name,
        "notes": list(trainer.notes),
        **({"loom": server.weight._asdict()} if server.weight else {}),
        "server_samples": 0 if server.setup.server_data is None else len(server.setup.server_data.x),
        "dropped": sum(len(r["dropped"]) for r in records),
        "seconds": sum(r["seconds"]["round"] for r in records),
        "evaluation_seconds": sum(r["seconds"].get("evaluation", 0.0) for r in records),
        "bytes": {way: sum(r["bytes"][way] for r in records) for way in ("down", "up")},
        "best": best,
    }
    if not finished:
        return summary
    if paused:
        summary["stopped"] = f"paused after {server.round} rounds of {options.rounds}"
    elif server.round < options.rounds:
        summary["stopped"] = f"--max-epsilon {options.max_epsilon:g} allows {server.round} rounds of {options.rounds}"
    if not records or "metrics" not in records[-1]:  # a run of no rounds
        found = trainer.evaluation()
        write(directory, trainer, found, end=True)
        metrics = found.metrics
    else:
        metrics = records[-1]["metrics"]
    summary["last"] = {"round": server.round, **metrics}
    chosen = best["round"] if best else server.round
    summary["clients"] = scores_at(directory, chosen, Group("deployed", "participants", "test"))
    if trainer.federation.unseen and not paused:
        try:
            summary["unseen"] = _unseen(trainer, directory, metrics)
            if best and best["round"] != server.round and server.algorithm.newcomers_at == "best":
                best |= _unseen_at(trainer, directory, best)
        except (NeedsError, RoundError) as reason:  # training is done, and its numbers stand
            summary["unseen"] = {"reason": str(reason)}
        if best and best["round"] == server.round:
            best |= {name: value for name, value in summary["unseen"].items() if name != "reason"}
    return summary


def _unseen(trainer: Trainer, directory: RunDirectory, known: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of unseen clients now, unless they are ``known``."""
    found = {name: value for name, value in known.items() if name.split("/")[1:2] == ["unseen"]}
    if found:
        return found
    unseen = trainer.evaluation_of_unseen()
    write(directory, trainer, unseen, end=True)
    return unseen.metrics


def _unseen_at(trainer: Trainer, directory: RunDirectory, best: Mapping[str, Any]) -> dict[str, Any]:
    """Those at the best round. Clients on machines of their own are not asked for what they had then."""
    if not trainer.server.memories_here:
        return {}
    now = trainer.mark()
    trainer.server.restore(directory.load("best"))
    try:
        return _unseen(trainer, directory, best)
    finally:
        trainer.go_back(now)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What trackers get of a record: its numbers by flat names."""
    found = {**record["diagnostics"], **record.get("metrics", {})}
    found |= {f"seconds/{k}": v for k, v in record["seconds"].items()}
    return found | {f"bytes/{k}": v for k, v in record["bytes"].items()}
