# SPDX-License-Identifier: Apache-2.0
"""A run's config: the options of every run and those of its method, as one flat mapping and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from fedloom import algorithms
from fedloom.adaptation.average import with_average
from fedloom.adaptation.calibration import Privacy
from fedloom.adaptation.prior import with_prior
from fedloom.adaptation.tune import with_tuning
from fedloom.core.config import build
from fedloom.core.contract import Algorithm
from fedloom.core.errors import ConfigError, unknown
from fedloom.core.noised import hides_samples
from fedloom.privacy.client_level import ClientPrivacy, with_client_privacy
from fedloom.robust.attacks import with_liars
from fedloom.robust.servers import with_bounded_weights, with_rule
from fedloom.runs.options import RunOptions


def parse_options(method: str, given: Mapping[str, Any]) -> tuple[RunOptions, Any]:
    """The shared options and the method's config, from one flat mapping."""
    shared_names = {field.name for field in fields(RunOptions)}
    config_type = algorithms.get(method).config
    own_names = {field.name for field in fields(config_type)}
    for name in given:
        if name not in shared_names | own_names:
            raise unknown(f"option of {method}", name, shared_names | own_names)
    shared = build(RunOptions, {k: v for k, v in given.items() if k in shared_names})
    config: Any = build(config_type, {k: v for k, v in given.items() if k in own_names})
    check_together(shared, config)
    return shared, config


def check_together(options: RunOptions, config: Any) -> None:
    """Refuse options of a run and of its method that do not go together."""
    if options.max_epsilon and not options.dp_noise and not hides_samples(config):
        raise ConfigError(
            "--max-epsilon is about --dp-noise or --sample-dp-noise, and neither is given. Give one, with its clip."
        )
    if options.async_ and hides_samples(config):
        raise ConfigError("--async and --sample-dp-noise have not been tried together. Leave one out.")
    if options.adapt != "none" and hides_samples(config):
        raise ConfigError(
            "--adapt asks clients about all of their samples at once, and --sample-dp-noise does not hide them there. "
            "Leave one out."
        )


def flat_config(method: str, options: RunOptions, config: Any) -> dict[str, Any]:
    """The run's config as one flat mapping: what the config file holds."""
    return {"method": method, **asdict(options), **asdict(config)}


def algorithm_of(method: str, options: RunOptions, *, secret: bool = False, base: Algorithm | None = None) -> Algorithm:
    """The method, averaged, made private or robust, and adapted as the options say.

    ``secret``: what the server draws to hide something comes from the operating system. ``base``: in its place.
    """
    found = base or algorithms.get(method)
    if options.average:
        found = with_average(found, options.average)
    if how := client_privacy(options, secret):
        found = with_client_privacy(found, how)
    if options.aggregate:
        found = with_rule(found, options.aggregate, secret=secret)
    if options.max_weight:
        found = with_bounded_weights(found, options.max_weight)
    if options.malicious:
        found = with_liars(found, options.attack, options.malicious)
    wrapper = {"prior": with_prior, "tune": with_tuning}.get(options.adapt)
    return wrapper(found, Privacy(options.adapt_clip, options.adapt_noise)) if wrapper else found


def client_privacy(options: RunOptions, secret: bool = False) -> ClientPrivacy | None:
    """How clients are hidden, if they are."""
    if not options.dp_noise:
        return None
    return ClientPrivacy(options.dp_clip, options.dp_noise, options.dp_quantile, secret)
