# SPDX-License-Identifier: Apache-2.0
"""Commands on runs that are there: resume, evaluate, export, admit, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.output import json_line, stoppable, table, tell
from fedloom.cli.results import AUTO, JSON, QUIET, comparison, finished
from fedloom.core.errors import ConfigError, RunError, unknown

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Which = Annotated[
    str | None,
    typer.Option(
        metavar="best|last|ROUND",
        help="The checkpoint. Without it, the best by validation; for newcomers to IT-PFL-HN, the last.",
    ),
]
Adapt = Annotated[
    str | None, typer.Option(metavar="prior", help="Add each client's label shares to a global model's scores.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


def resume(
    run: RunPath,
    rounds: Annotated[int | None, typer.Option(metavar="N", help="Go on to round N.")] = None,
    device: Annotated[str | None, typer.Option(metavar="TEXT", help="Another device than the run began on.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines: the rounds, then the summary.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the run directory and nothing else.")] = False,
) -> None:
    """Go on with a run that was stopped, or further with one that was not.

    Example: fedloom resume runs/pfedhn-digits-seed0 --rounds 200
    """
    from fedloom import api
    from fedloom.runs.directory import RunDirectory

    progress = JSON if json else QUIET if quiet else AUTO
    had_finished = (RunDirectory.open(run).summary() or {}).get("finished") and rounds is None
    with stoppable(run, f" --rounds {rounds}" if rounds is not None else ""):
        done = api.resume(run, rounds=rounds, device=device, progress=progress)
    if had_finished:
        typer.echo(f"{run} had finished; give --rounds N to go further.", err=True)
    finished(done, progress)


def evaluate(
    run: RunPath,
    which: Which = None,
    split: Annotated[str, typer.Option(metavar="test|val|train|all", help="Which of the clients' own data.")] = "test",
    unseen: Annotated[bool, typer.Option("--unseen", help="The clients held out of training instead.")] = False,
    mode: Annotated[
        str,
        typer.Option(
            metavar="admit|sampled|ensemble|nearest",
            help="With --unseen: they are admitted, or get participants' models.",
        ),
    ] = "admit",
    samples: Annotated[
        int, typer.Option(min=0, metavar="N", help="With --unseen: admit each with N of its samples; 0: with all.")
    ] = 0,
    of_global: Annotated[bool, typer.Option("--global", help="The method's global model, on clients' data.")] = False,
    adapt: Adapt = None,
    json: AsJson = False,
) -> None:
    """Try every client's model on its own data.

    Example: fedloom evaluate runs/pfedhn-digits-seed0 --split val

    Unseen clients' whole data: fedloom evaluate runs/fedavg-digits-seed0 --unseen --split all
    """
    from fedloom import api
    from fedloom.clients.federation import SPLITS
    from fedloom.metrics.summary import summarise

    if split not in (*SPLITS, "all"):
        raise unknown("split", split, [*SPLITS, "all"])
    if not unseen and (mode != "admit" or samples):
        raise ConfigError("--mode and --samples are about clients held out of training; give --unseen too.")
    if of_global and (mode != "admit" or samples):
        raise ConfigError("--mode and --samples are about models for newcomers; --global is there without them.")
    loaded = api.load(run, which=_checkpoint(which), adapt=adapt)
    loaded = loaded.for_newcomers if unseen else loaded
    if unseen and not loaded.simulation.federation.unseen:
        raise RunError(f"{loaded.path} held no clients out of training; run with --unseen to hold some out.")
    scores: dict[str, Any] = {}
    if unseen and not of_global:
        metrics = loaded.evaluate_unseen(split, mode, samples)
    else:
        scores = loaded.evaluate_global(split, unseen=unseen) if of_global else loaded.evaluate(split)
        model, group = "global" if of_global else "deployed", "unseen" if unseen else "participants"
        metrics = summarise(scores, loaded.simulation.setup.task, group, split, model)
    if not metrics:
        raise RunError(f"No client of {run} has {split} data; choose another --split.")
    clients = {client: score._asdict() for client, score in scores.items()}
    if json:
        round = loaded.simulation.round
        json_line({"run": str(run), "round": round, "split": split, "metrics": metrics, "clients": clients})
        return
    if clients:
        metric = loaded.simulation.setup.task.metric_name
        rows = [(client, s["samples"], s["metric"], s["loss"]) for client, s in clients.items()]
        table(["client", "samples", metric, "loss"], rows)
    table([f"after round {loaded.simulation.round}", ""], metrics.items())


def export(
    run: RunPath,
    client: Annotated[list[str] | None, typer.Option(metavar="ID", help="A client; may be repeated.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Every client that took part.")] = False,
    of_global: Annotated[bool, typer.Option("--global", help="The method's global model, if it has one.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to; without it, RUN/export.")] = None,
    which: Which = None,
    adapt: Adapt = None,
) -> None:
    """Write clients' models as safetensors files, each with a Python file that loads it.

    Example: fedloom export runs/pfedhn-digits-seed0 --client 3 --out models
    """
    from fedloom import api

    if bool(client) + all + of_global != 1:
        raise ConfigError("Say whose models to write: give one of --client ID, once or more, --all, and --global.")
    loaded = api.load(run, which=_checkpoint(which), adapt=adapt)
    if of_global:
        typer.echo(loaded.export_global(out or run / "export"))
    for one in loaded.clients if all else client or ():
        typer.echo(loaded.export(one, out or run / "export"))


def admit(
    run: RunPath,
    data: Annotated[Path, typer.Option(metavar="FILE.npz", help="The newcomer's samples x and, if any, labels y.")],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The newcomer's network; without it, the first participant's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to; without it, RUN/admitted.")] = None,
    which: Which = None,
    adapt: Adapt = None,
) -> None:
    """Make a model for a newcomer from its own samples, and write it as export does.

    With --adapt prior it prints a report on the newcomer's classes, and writes it as JSON beside the model.
    Labels are needed where the method trains on them; a label of -1 says that it is not known.

    Example: fedloom admit runs/fedavg-digits-seed0 --data new.npz --adapt prior
    """
    from fedloom import api
    from fedloom.data.own import samples_from_npz

    x, y = samples_from_npz(data)
    admitted = api.load(run, which=_checkpoint(which), adapt=adapt).admit(x, y, model)
    path = admitted.export(out or run / "admitted", data.stem)
    if admitted.report:
        typer.echo(admitted.report)
    elif admitted.simulation.arrays.num_classes and not admitted.simulation.algorithm.carries_prior:
        tell("The model knows nothing of the newcomer; with --adapt prior it is fitted to the newcomer's classes.")
    typer.echo(path)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or directories of runs.")],
    json: AsJson = False,
) -> None:
    """Put finished runs side by side: a row per method and config, mean ± standard deviation over seeds.

    Example: fedloom compare runs/fedavg-digits-seed0 runs/pfedhn-digits-seed0
    """
    comparison(runs, JSON if json else AUTO)


def _checkpoint(which: str | None) -> Any:
    if which is None or which in ("best", "last"):
        return which
    if not which.isdecimal():
        raise ConfigError(f"--which is {which!r}; give best, last or the number of a round.")
    return int(which)
