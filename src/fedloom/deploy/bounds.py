# SPDX-License-Identifier: Apache-2.0
"""What one client can do to the others: how far its reply may reach, how much it may weigh, what its scores count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median, median_low

import numpy as np
import torch

from fedloom.core.task import TASKS, Task
from fedloom.core.trees import ClientId, Tree, leaves, squared_norm
from fedloom.data.preparation import Sums
from fedloom.engines.job import Job
from fedloom.programs.evaluation import Score, worst

NOT_A_CHANGE = ("num_samples", "loss", "counts", "sums", "effective_steps")
"""Parts of a reply that move no parameter by themselves, and have bounds of their own."""

NOT_BELOW_0 = ("running_var", "num_batches_tracked")
"""How torch calls those of BatchNorm's running statistics that are never below 0."""

FEW = 3
"""Replies of which a median says something."""

ROUNDING = 1e-3
"""By how much shares may miss their sum."""


def too_far(job: Job, replies: Mapping[ClientId, Tree], bound: float) -> dict[ClientId, str]:
    """The clients whose replies are absurdly large, and why; none for ``bound`` 0.

    A reply's norm may be ``bound`` times the median of those that came with it. Of fewer than three, it is compared
    with the norm of what was sent. The same for the number of steps that it says it took, by itself: it is of another
    size than a change.
    """
    if not bound:
        return {}
    steps = {c: abs(float(reply["effective_steps"])) for c, reply in replies.items() if "effective_steps" in reply}
    norms = {client: _norm(reply) for client, reply in replies.items()}
    about_steps, about_norms = "says that it took {:.3g} steps", "replied with numbers of norm {:.3g}"
    return _beyond(job, steps, bound, about_steps) | _beyond(job, norms, bound, about_norms)


def _beyond(job: Job, norms: dict[ClientId, float], bound: float, told: str) -> dict[ClientId, str]:
    norms = {client: norm for client, norm in norms.items() if not math.isnan(norm)}  # which are refused as such
    found = {}
    for client, norm in norms.items():
        sent = max(_norm(job.shared), _norm(job.mine[client]), 1.0)
        usual = max(median(norms.values()), 1e-6 * sent) if len(norms) >= FEW else sent
        if norm > bound * usual:
            of = "the median of the cohort" if len(norms) >= FEW else "the norm of what it was sent"
            found[client] = f"{told.format(norm)}, more than {bound:g} times {of}, {usual:.3g}"
    return found


def believed_losses(replies: Mapping[ClientId, Tree], most: float) -> tuple[dict[ClientId, Tree], list[str]]:
    """Replies with training losses as they count, and what of them was more than that.

    Of three clients at least nobody's loss is more than ``most`` times the median, or so many nats; 0: no bound.
    """
    given = {client: reply["loss"] for client, reply in replies.items() if isinstance(reply.get("loss"), torch.Tensor)}
    numbers = {client: loss for client, loss in given.items() if loss.numel() == 1 and loss.is_floating_point()}
    # others are refused as such
    told = {client: float(loss) for client, loss in numbers.items() if bool(loss.isfinite().all())}
    if not most or len(told) < FEW:
        return dict(replies), []
    limit = most * max(median_low(abs(loss) for loss in told.values()), 1.0)
    found, notes = dict(replies), []
    for client, loss in told.items():
        if abs(loss) > limit:
            counted = math.copysign(limit, loss)
            found[client] = {**replies[client], "loss": torch.full_like(replies[client]["loss"], counted)}
            notes.append(f"client {client}'s training loss of {loss:.6g} counts as {counted:.6g}")
    return found, notes


def _norm(tree: Tree) -> float:
    changes = {name: branch for name, branch in tree.items() if name not in NOT_A_CHANGE}
    numbers = {path: leaf.double() for path, leaf in leaves(changes) if leaf.is_floating_point() and leaf.numel()}
    return float(squared_norm(numbers).sqrt()) if numbers else 0.0


def weights_of(samples: Mapping[ClientId, int], most: float) -> dict[ClientId, int]:
    """What clients weigh: the number of samples that they told when they joined, at most ``most`` times the median.

    Of an even number of clients it is the lower median: one of two must not make its own bound.
    """
    counts = [number for number in samples.values() if number]
    limit = int(most * median_low(counts)) if counts and most else max(counts, default=0)
    return {client: min(number, max(limit, 1)) for client, number in samples.items()}


MEANS_AWAY = 10.0
"""How far a client's mean of a column may be from the median of all, in units of how they usually vary."""
VARIANCES_MORE = 100.0
"""How many times the median variance a client's may be."""


def sums_of(replies: Mapping[ClientId, Tree], weights: Mapping[ClientId, int], *, missing: bool) -> Sums:
    """What clients told of their raw training data, as one; of few clients as told, of more within bounds.

    A client counts at most for its weight. ``missing``: a column may have fewer values than there are samples.
    """
    told = [{name: leaf.double().cpu().numpy() for name, leaf in reply["sums"].items()} for reply in replies.values()]
    most = np.array([float(weights.get(client) or 1) for client in replies])[:, None]
    number, mean, variance, categories = (
        np.stack([one[name] for one in told]) for name in ("number", "mean", "variance", "categories")
    )
    mean = mean + np.stack([one["rest"] for one in told])
    variance = np.maximum(variance, 0)
    number = np.clip(number, 0, most) if missing else np.where(number > 0, most, 0)
    if len(told) >= FEW:
        middle, usual = np.median(mean, axis=0), np.median(variance, axis=0)
        apart = MEANS_AWAY * (np.sqrt(usual) + np.median(np.abs(mean - middle), axis=0))
        mean = np.clip(mean, middle - apart, middle + apart)
        variance = np.minimum(variance, VARIANCES_MORE * usual)
    total = np.maximum(number.sum(0), 1)
    whole = (number * mean).sum(0) / total
    spread = (number * (variance + (mean - whole) ** 2)).sum(0) / total
    return Sums(number.sum(0), whole, spread, np.clip(categories, 0, most).sum(0))


def weight_fault(reply: Tree) -> str | None:
    """Why the number of samples in a reply is none; None if it is one, or there is none in it."""
    if "num_samples" not in reply:
        return None
    claimed = reply["num_samples"]
    if not isinstance(claimed, torch.Tensor) or claimed.numel() != 1:
        return "replied with something that is not one number of samples"
    number = float(claimed)
    return None if number >= 1 and number.is_integer() else f"says that it has {number:g} samples"


def count_fault(reply: Tree, samples: int | None, *, noised: bool) -> str | None:
    """Why numbers of a reply that count samples or steps count none; None if they do, or there are none in it.

    ``samples``: how many the client told when it joined; None: it is not known. ``noised``: noise of a node's own may
    be on the numbers of samples in answers for adaptation, which weigh nothing.
    """
    for name in ("counts",) if noised else ("counts", "samples"):
        for _, counts in leaves({name: reply[name]} if name in reply else {}):
            if not bool(((counts >= 0) & (counts == counts.round())).all()):
                return f"replied with {name} that are not whole numbers of at least 0"
            if name == "counts" and samples is not None and float(counts.sum()) > samples:
                return f"counts {float(counts.sum()):g} samples in all; it told {samples} when it joined"
    if "effective_steps" in reply and not float(reply["effective_steps"]) > 0:
        return f"says that it took {float(reply['effective_steps']):g} steps"
    return None


def statistics_fault(reply: Tree) -> str | None:
    """Why running statistics are none; None if they are, or there are none in the reply."""
    for path, leaf in leaves({"buffers": reply["buffers"]} if "buffers" in reply else {}):
        if path.endswith(NOT_BELOW_0) and not bool((leaf >= 0).all()):
            return f"replied with {path} below 0"
    return None


def shares_fault(reply: Tree) -> str | None:
    """Why shares are none; None if they are, or there are none in the reply."""
    if "shares" not in reply:
        return None
    given = reply["shares"]
    if bool((given >= -ROUNDING).all()) and float(given.sum()) <= 1 + ROUNDING:
        return None
    return f"replied with shares from {float(given.min()):g} to {float(given.max()):g}, {float(given.sum()):g} in all"


def as_shares(noised: torch.Tensor) -> torch.Tensor:
    """Shares that noise was added to, as shares again: none below 0, and no more than 1 in all."""
    found = noised.nan_to_num().clamp(0, 1)
    return found / found.sum().clamp(min=1)


def sums_fault(reply: Tree, task: Task) -> str | None:
    """Why the sums of an evaluation are not those of some samples; None if they may be."""
    samples, loss, metric = (float(reply[name]) for name in ("samples", "loss", "metric"))
    if not (samples >= 1 and samples.is_integer()):
        return f"says that it tried {samples:g} samples"
    if task.metric_is_share and not 0 <= metric <= samples:
        return f"says that {metric:g} of {samples:g} samples were right"
    if TASKS.get(task.name) is task and min(loss, metric) < 0:
        return f"says that its loss is {loss:g} and its {task.metric_name} {metric:g}, below 0"
    return None


def believed(
    scores: Mapping[ClientId, Score], task: Task, most: float, most_weight: float
) -> tuple[dict[ClientId, Score], list[str]]:
    """Scores as they count, and what of them was more than that.

    Nobody's samples are more than ``most_weight`` times the median; nobody's loss, or metric where it is no share, is
    more than ``most`` times the median of three clients at least; 0: no bound. Who gave no usable reply has the worst
    of the others' numbers where there is no worst number, so that a score without it can be compared with one with it.
    """
    nothing = worst(higher_is_better=task.higher_is_better)
    told = {client: score for client, score in scores.items() if score != nothing}
    if not told:
        return dict(scores), []
    notes: list[str] = []
    limits = {"samples": most_weight * median_low(score.samples for score in told.values())}
    if len(told) >= FEW:
        # one nat is no large loss, however well the others do
        limits["loss"] = most * max(median_low(abs(score.loss) for score in told.values()), 1.0)
        if not task.metric_is_share:
            limits["metric"] = most * median_low(abs(score.metric) for score in told.values())

    def counted(client: ClientId, score: Score) -> Score:
        held: dict[str, float] = score._asdict()
        for name, limit in limits.items():
            value = held[name]
            if limit and abs(value) > limit:
                held[name] = math.copysign(limit, value)
                what = {"samples": "number of samples", "metric": task.metric_name}.get(name, name)
                notes.append(f"client {client}'s {what} of {value:.6g} counts as {held[name]:.6g}")
        return Score(held["loss"], held["metric"], int(held["samples"]))

    found = {client: counted(client, score) for client, score in told.items()}
    loss = max(score.loss for score in found.values())
    metric = nothing.metric if task.higher_is_better else max(score.metric for score in found.values())
    return {client: found.get(client, Score(loss, metric, 1)) for client in scores}, notes
