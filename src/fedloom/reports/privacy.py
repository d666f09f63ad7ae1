# SPDX-License-Identifier: Apache-2.0
"""What a run guarantees its clients, in words and numbers: what is covered, and what is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.core.errors import NeedsError
from fedloom.privacy.ledger import DESCRIPTOR, Release, Spent, epsilon, hiding, releases_of, worst
from fedloom.reports.about import about


class Kind(NamedTuple):
    """Releases that are alike."""

    what: str
    noise: float
    drawn: str
    times: int


class Statement(NamedTuple):
    """The guarantee of a run."""

    epsilon: float | None
    """For one client, of all that hides clients; None: there is no guarantee, or it cannot be worked out here."""
    sample_epsilon: float | None
    """For one sample, of the client whose samples it hides least; likewise."""
    delta: float
    releases: Sequence[Kind]
    covered: Sequence[str]
    not_covered: Sequence[str]

    @property
    def sentences(self) -> list[str]:
        """All of it."""
        return [*self.covered, *self.not_covered]


def statement(
    config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], delta: float | None = None, *, prepared: bool = False
) -> Statement:
    """What holds for a run with this config and these releases; ``prepared``: of raw samples."""
    releases = releases_of(lines)
    delta = delta or float(config.get("dp_delta", 1e-5))
    found, covered, why_not = None, [], []
    clients, samples, least = hiding(releases, "client"), hiding(releases, "sample"), None
    trained = [one for one in samples if one.what != DESCRIPTOR]
    try:
        if clients:
            found = epsilon(clients, delta)
            covered.append(_of_clients(config, clients, found, delta))
        if trained and (least := worst(trained, delta)):
            covered.append(_of_samples(trained, least, delta))
        described = [one for one in samples if one.what == DESCRIPTOR]
        covered += _descriptors(config, described)
    except NeedsError as error:
        why_not = [str(error)]
    return Statement(found, least.epsilon if least else None, delta, _listed(releases), covered,
                     [*_open(config, releases, prepared), *why_not])  # fmt: skip


def _listed(releases: Sequence[Release]) -> list[Kind]:
    found: Counter[tuple[str, float, str]] = Counter()
    for one in releases:
        share = f"{one.size:g} of {one.clients:,} {one.unit}s"
        each = " on average, each by itself" if one.sampling == "poisson" and one.size < one.clients else ""
        what = one.what if one.is_bounded else f"{one.what}, without a bound"
        found[what, one.noise, share + each] += one.times * (len(one.who) or 1)
    return [Kind(*kind, times) for kind, times in found.items()]


def _of_clients(config: Mapping[str, Any], releases: Sequence[Release], found: float, delta: float) -> str:
    what = "The models of this run" if config.get("dp_noise") else "What participants told for the calibration"
    if config.get("dp_noise") and config.get("server_step"):
        what = "The loom of this run, with the models woven for all other clients"
    sampled_fixed = any(one.sampling == "fixed" and one.size < one.clients for one in releases)
    other = "its data were any others" if sampled_fixed else "it had taken no part"
    return (
        f"{what}: epsilon {found:.3g} at delta {delta:g} for each client. Whoever sees all of it can tell no better "
        f"than that whether a client's data are in it, or {other}. What is computed from it is covered too."
    )


def _of_samples(releases: Sequence[Release], least: Spent, delta: float) -> str:
    return (
        f"What clients say in training, and the models: epsilon {least.epsilon:.3g} at delta {delta:g} for each sample "
        f"of client {least.client}, whose samples are hidden least; for those of other clients no more. Whoever sees "
        "all of it, the server too, can tell no better than that whether a training sample is what it is or its place "
        "is empty. How many samples a client has is no secret."
    )


def _open(config: Mapping[str, Any], releases: Sequence[Release], prepared: bool) -> list[str]:
    """What the guarantee for clients does not cover."""
    found = []
    if config.get("sample_dp_noise"):
        found += [
            "Validation and test samples: their scores are exact, and so is the choice of the best round by them.",
            "All samples of a client together: a client with many is hidden far less than one sample is "
            "(--dp-noise hides clients).",
        ]
    elif not config.get("dp_noise"):
        found += ["Training was not differentially private: nothing bounds what the models tell of a client."]
    if config.get("dp_noise"):
        found += [
            "Scores are exact, and so is the choice of the best round by them.",
            "So are the other records of the run: losses, who was asked. Keep the run directory to yourself, or hand "
            "on its models alone (fedloom bundle).",
            "What clients keep for themselves, such as layers of their own, is in the checkpoints of a simulation.",
        ]
        if config.get("server_step"):
            found.append(
                "Embeddings are exact, each for its own client: the guarantee is towards everybody else who sees the "
                "loom, or models woven for others. A bundle for participants has all embeddings, and newcomers start "
                "at their mean; neither is covered."
            )
    if prepared and (config.get("dp_noise") or config.get("sample_dp_noise")):
        found.append(
            "How raw samples are prepared, means, scales and categories, was worked out exactly from the training data "
            "of all participants, and goes with every model. Prepared samples have nothing of it."
        )
    if any(one.from_seed for one in releases):
        found.append(
            "This is a simulation, whose noise follows from its seed: it shows what a guarantee costs. Who knows the "
            "seed can take the noise away."
        )
    if config.get("adapt", "none") != "none" and not config.get("adapt_noise"):
        found.append(
            "The calibration (--adapt) is exact: participants' label shares and validation scores went into it without "
            "noise (--adapt-noise)."
        )
    for kind, scale in dict.fromkeys((one.mechanism, one.noise) for one in releases if not one.is_bounded):
        found.append(
            f"{kind.capitalize()} noise of scale {scale:g} was added to replies that have no bound, so that no epsilon "
            "can be named for it."
        )
    return found


def _descriptors(config: Mapping[str, Any], releases: Sequence[Release]) -> list[str]:
    """What newcomers tell, where the method has options for the noise on it."""
    names = about(str(config["method"])).newcomers_privacy if "method" in config else ()
    if len(names) != 2 or not config.get(names[0]):
        return []
    found, delta = config[names[0]], float(config[names[1]])
    told = [
        f"A newcomer's descriptor: epsilon {found:g} at delta {delta:g} for each of its samples, in whose place there "
        "may be another one, for one admission; every further one adds as much."
    ]
    if releases and (most := worst(releases, delta)) and most.epsilon > 1.001 * found:
        told.append(
            f"This run admitted newcomers more than once: epsilon {most.epsilon:.3g} for all descriptors of client "
            f"{most.client}."
        )
    return told
