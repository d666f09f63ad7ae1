# SPDX-License-Identifier: Apache-2.0
"""Commands on runs that are there: resume, evaluate, export, admit, compare."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from fedloom.cli.look import Baseline
from fedloom.cli.output import json_line, printable, stoppable, table, tell
from fedloom.cli.results import AUTO, JSON, QUIET, comparison, finished, side_by_side
from fedloom.core.errors import ConfigError, RunError

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Which = Annotated[
    str | None,
    typer.Option(
        metavar="best|last|ROUND",
        help="The checkpoint. Without it, the best by validation; for newcomers to some methods, the last.",
    ),
]
Adapt = Annotated[
    str | None,
    typer.Option(metavar="prior|tune", help="Correct a global model by each client's label shares; tune it further."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Continue although config, roster, data or records have changed since.")
]
Trust = Annotated[bool, typer.Option("--trust", help="Run code outside of fedloom that RUN names.")]
Format = Annotated[
    str,
    typer.Option(
        metavar="safetensors|onnx|pt2", help="A state dict with its loader, or one file for ONNX runtimes or for torch."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


def resume(
    run: RunPath,
    rounds: Annotated[int | None, typer.Option(metavar="N", help="Go on to round N.")] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where the run's data are now, if they have moved.")
    ] = None,
    data_root: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where published files are now, if they have moved.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="TEXT", help="Another device than the run began on.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines: the rounds, then the summary.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the run directory and nothing else.")] = False,
    force: Force = False,
    trust: Trust = False,
) -> None:
    """Continue a run that was stopped, or train a finished one for more rounds.

    Example: fedloom resume runs/pfedhn-digits-seed0 --rounds 200
    """
    from fedloom import api
    from fedloom.runs.directory import RunDirectory

    progress = JSON if json else QUIET if quiet else AUTO
    before = RunDirectory.open(run).summary() or {}
    again = {"--rounds": rounds, "--dataset": dataset, "--data-root": data_root}
    flags = [f" {name} {shlex.quote(str(value))}" for name, value in again.items() if value is not None]
    with stoppable(run, "".join(flags) + " --trust" * trust):
        done = api.resume(
            run, dataset=dataset, data_root=data_root, rounds=rounds, device=device, progress=progress, force=force,
            trust=trust,
        )  # fmt: skip
    if before.get("finished") and before["rounds"] == done.summary["rounds"]:
        typer.echo(f"{run} had finished; give --rounds N to go further.", err=True)
    finished(done, progress)


def evaluate(
    run: RunPath,
    which: Which = None,
    split: Annotated[
        str,
        typer.Option(
            metavar="test|val|train|all", help="Which of the clients' own data; triggered, too, with --attack backdoor."
        ),
    ] = "test",
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
    mix: Annotated[
        bool, typer.Option("--mix", help="Every client's output layer on every client's body (pFedHN, Fig. 3).")
    ] = False,
    curve: Annotated[
        bool,
        typer.Option("--curve", help="With --unseen: after each round of their admission (MH-pFedHN, Fig. 3 to 5)."),
    ] = False,
    adapt: Adapt = None,
    force: Force = False,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Try every client's model on its own data.

    Example: fedloom evaluate runs/pfedhn-digits-seed0 --split val

    Unseen clients' whole data: fedloom evaluate runs/fedavg-digits-seed0 --unseen --split all
    """
    from fedloom import api
    from fedloom.metrics.summary import Group, summarise

    if not unseen and (mode != "admit" or samples):
        raise ConfigError("--mode and --samples are about clients held out of training; give --unseen too.")
    if of_global and (mode != "admit" or samples):
        raise ConfigError("--mode and --samples are about models for newcomers; --global is there without them.")
    if mix and (unseen or of_global or curve):
        raise ConfigError("--mix is about participants' own models; leave --unseen, --global and --curve out.")
    if curve and (not unseen or of_global or mode != "admit" or samples):
        raise ConfigError("--curve is about clients that are admitted; give --unseen too, and no other mode.")
    loaded = api.load(run, which=checkpoint(which), adapt=adapt, force=force, trust=trust)
    if mix or curve:
        found = loaded.mix(split) if mix else loaded.admission_curve(split)
        _told(found, "mix" if mix else "admission", run, json)
        return
    loaded = loaded.for_newcomers if unseen else loaded
    server = loaded.simulation.server
    if unseen and not server.unseen:
        raise RunError(f"{loaded.path} held no clients out of training; run with --unseen to hold some out.")
    scores: dict[str, Any] = {}
    if unseen and not of_global:
        metrics = loaded.evaluate_unseen(split, mode, samples)
    else:
        scores = loaded.evaluate_global(split, unseen=unseen) if of_global else loaded.evaluate(split)
        group = Group("global" if of_global else "deployed", "unseen" if unseen else "participants", split)
        metrics = summarise(scores, server.setup.task, group)
    if not metrics:
        raise RunError(f"No client of {run} has {split} data; choose another --split.")
    clients = {client: score._asdict() for client, score in scores.items()}
    if json:
        json_line({"run": str(run), "round": server.round, "split": split, "metrics": metrics, "clients": clients})
        return
    if clients:
        rows = [(client, s["samples"], s["metric"], s["loss"]) for client, s in clients.items()]
        table(["client", "samples", server.setup.task.metric_name, "loss"], rows)
    table([f"after round {server.round}", ""], metrics.items())


def export(
    run: RunPath,
    client: Annotated[list[str] | None, typer.Option(metavar="ID", help="A client; may be repeated.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Every client that took part.")] = False,
    of_global: Annotated[bool, typer.Option("--global", help="The method's global model, if it has one.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write; without it, RUN/export.")] = None,
    format: Format = "safetensors",
    which: Which = None,
    adapt: Adapt = None,
    force: Force = False,
    trust: Trust = False,
) -> None:
    """Write clients' models as files: safetensors, each with a Python file that loads it, or ONNX, or torch.export's.

    Example: fedloom export runs/pfedhn-digits-seed0 --client 3 --out models
    """
    from fedloom import api

    if bool(client) + all + of_global != 1:
        raise ConfigError("Say whose models to write: give one of --client ID, once or more, --all, and --global.")
    loaded = api.load(run, which=checkpoint(which), adapt=adapt, force=force, trust=trust)
    if of_global:
        typer.echo(loaded.export_global(out or run / "export", format))
    for one in loaded.clients if all else client or ():
        typer.echo(loaded.export(one, out or run / "export", format))


def admit(
    run: RunPath,
    data: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The newcomer's samples and, if any, labels: .npz with x and y, or a table."),
    ],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The newcomer's network; without it, the first participant's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write; without it, RUN/admitted.")] = None,
    format: Format = "safetensors",
    which: Which = None,
    adapt: Adapt = None,
    force: Force = False,
    trust: Trust = False,
) -> None:
    """Make a model for a newcomer from its own samples, and write it as export does.

    With --adapt prior it prints a report on the newcomer's classes, and writes it as JSON beside the model.
    Labels are needed where the method trains on them; a label of -1 says that it is not known.

    Example: fedloom admit runs/fedavg-digits-seed0 --data new.npz --adapt prior
    """
    from fedloom import api
    from fedloom.data.samples import samples_from

    x, y = samples_from(data)
    admitted = api.load(run, which=checkpoint(which), adapt=adapt, force=force, trust=trust).admit(x, y, model)
    path = admitted.export(out or run / "admitted", data.stem, format)
    if admitted.report:
        typer.echo(admitted.report)
    elif admitted.server.roster.num_classes and not admitted.server.algorithm.carries_prior:
        tell("The model knows nothing of the newcomer; with --adapt prior it is fitted to the newcomer's classes.")
    typer.echo(path)


def _told(found: Mapping[str, Any], figure: str, run: Path, json: bool) -> None:
    """What was found out and kept in the run directory, in short or as JSON."""
    if json:
        json_line(found)
        return
    if figure == "mix":
        own = [row[i] for i, row in enumerate(found["metric"])]
        others = [value for i, row in enumerate(found["metric"]) for j, value in enumerate(row) if i != j]
        rows = [("own body", fmean(own)), *([("another's body", fmean(others))] if others else [])]
        table(["output layer on", "mean over clients"], rows)
    else:
        rows = [(point["admission_round"], fmean(point["metric"])) for point in found["points"]]
        table(["admission round", "mean over newcomers"], rows)
    tell(f"kept for the report; as a figure: `fedloom report {run} --figure {figure} --out {figure}.pdf`.")


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or directories of runs.")],
    baseline: Baseline = None,
    latex: Annotated[
        bool, typer.Option("--latex", help="Print the table for LaTeX (booktabs), with intervals.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown, with intervals.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV, with intervals.")] = False,
    json: AsJson = False,
) -> None:
    """Put finished runs side by side: a row per method and config, mean ± standard deviation over seeds.

    Compared client by client, it says which differences are real. `fedloom report RUN...` draws it.

    Example: fedloom compare runs/fedavg-digits-seed0 runs/pfedhn-digits-seed0 --baseline fedavg
    """
    if latex + markdown + csv + json > 1:
        raise ConfigError("Give one of --latex, --markdown, --csv and --json.")
    if latex or markdown or csv:
        from fedloom.reports import tables
        from fedloom.reports.several import cells

        form = tables.as_latex if latex else tables.as_markdown if markdown else tables.as_csv
        printed = form(cells(side_by_side(runs, baseline)))
        typer.echo("\n".join(map(printable, printed.split("\n"))), nl=False)
        return
    comparison(runs, JSON if json else AUTO, baseline)


def checkpoint(which: str | None) -> Any:
    if which is None or which in ("best", "last"):
        return which
    if not which.isdecimal():
        raise ConfigError(f"--which is {which!r}; give best, last or the number of a round.")
    return int(which)
