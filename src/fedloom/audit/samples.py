# SPDX-License-Identifier: Apache-2.0
"""Samples that were sought: whose they may be, how like they are to true ones, what a guess is like, a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedloom.audit.replies import attacked, head_of
from fedloom.core.errors import NeedsError
from fedloom.core.random import stream
from fedloom.core.trees import ClientId
from fedloom.training.simulation import Simulation

COLOURS = 32
"""Of a picture."""
HARDLY = 1e-12
"""The smallest squared error that is told from none."""


def attackable(simulation: Simulation, most: int) -> list[ClientId]:
    """Some clients with one network, whose samples can be sought by gradients."""
    server, data = simulation.server, simulation.federation
    name = server.algorithm.name
    if not data.task.class_scores or data.x.dtype == torch.int64:
        raise NeedsError(
            f"This attack seeks samples of numbers by their class; the task of {name} is {data.task.name} here, on "
            f"{'tokens' if data.x.dtype == torch.int64 else 'numbers'}. There is nothing to audit in this way."
        )
    model = server.setup.models[server.setup.clients[0]]
    if model.fresh_buffers():
        raise NeedsError(
            f"{model.spec} has running statistics (BatchNorm), which mix the samples of a batch; this attack seeks "
            "samples without. There is nothing to audit in this way."
        )
    head_of(model)
    clients = [c for c in attacked(simulation) if server.setup.models[c].spec == model.spec][:most]
    if len(clients) < 2:
        raise NeedsError("There is one client alone, so that there are no samples of others to guess. Run with more.")
    return clients


def training_rows(simulation: Simulation, client: ClientId) -> Tensor:
    """Where the client's training samples are in the federation's data."""
    data = simulation.federation
    return torch.as_tensor(data.roster[client].rows["train"], device=data.device)


def drawn_rows(simulation: Simulation, client: ClientId, number: int) -> Tensor:
    """Some of them, by the seed."""
    rows = training_rows(simulation, client)
    drawn = stream(simulation.server.options.seed, client, "victims").permutation(len(rows))[:number]
    return rows[torch.as_tensor(drawn, device=rows.device)]


def guesses(simulation: Simulation, clients: Sequence[ClientId], client: ClientId, labels: Tensor) -> list[Tensor]:
    """What can be said without a reply of samples with these labels: other clients' of the class, and their mean.

    Of any class, where no other of these clients has it.
    """
    data = simulation.federation
    rows = torch.cat([training_rows(simulation, other) for other in clients if other != client])
    draw = stream(simulation.server.options.seed, client, "guess")
    one, mean = [], []
    for label in labels.tolist():
        alike = rows[data.y[rows] == label]
        alike = alike if len(alike) else rows
        one.append(data.x[alike[int(draw.integers(len(alike)))]])
        mean.append(data.x[alike].mean(0))
    return [torch.stack(one), torch.stack(mean)]


def matched(found: Tensor, true: Tensor) -> Tensor:
    """Which of the true samples each one found is taken for: no two for one, and all together as like as can be."""
    from scipy.optimize import linear_sum_assignment

    taken = linear_sum_assignment(_errors(found, true).log().cpu().numpy())[1]
    return torch.as_tensor(taken, device=true.device)


def likeness(found: Tensor, true: Tensor, span: float) -> float:
    """The mean PSNR, in dB, of samples to those that they are taken for."""
    errors = _errors(found / span, true / span)
    at = torch.arange(len(found), device=errors.device)
    return float((-10 * errors[at, matched(found / span, true / span)].log10()).mean())


def _errors(found: Tensor, true: Tensor) -> Tensor:
    """The mean squared error of each found sample to each true one."""
    errors = torch.stack([(true - one).double().square().flatten(1).mean(1) for one in found])
    return errors.clamp(min=HARDLY)


def picture(rows: Mapping[str, Tensor], low: float, high: float) -> bytes:
    """Rows of images as one PNG; nothing where samples are none."""
    shape = next(iter(rows.values())).shape[1:]
    if len(shape) != 3 or shape[0] not in (1, 3):
        return b""
    from matplotlib.figure import Figure
    from PIL import Image

    columns = len(next(iter(rows.values())))
    figure = Figure(figsize=(0.7 * columns, 0.85 * len(rows)))
    for place, (name, images) in enumerate(rows.items()):
        for column, image in enumerate(images):
            axes = figure.add_subplot(len(rows), columns, place * columns + column + 1)
            shown = ((image - low) / (high - low)).clamp(0, 1).permute(1, 2, 0).cpu().float().numpy()
            axes.imshow(shown, cmap="gray", vmin=0, vmax=1)
            axes.set_axis_off()
            if column == 0:
                axes.set_title(name, loc="left", fontsize=9)
    drawn, written = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=80, bbox_inches="tight")
    # a report has room for a small one
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(written, format="png", optimize=True)
    return written.getvalue()


def ends(x: Tensor) -> tuple[float, float]:
    """Between which values samples lie."""
    return float(x.min()), float(x.max())


def in_words(numbers: Sequence[int]) -> str:
    """Numbers of steps."""
    low, high = min(numbers), max(numbers)
    return f"{low} step{'s' * (low != 1)}" if low == high else f"{low} to {high} steps"
