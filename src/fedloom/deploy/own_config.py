# SPDX-License-Identifier: Apache-2.0
"""A node's own config: what it decides for itself, and which of the method's options it wants otherwise.

It is refused whole where it cannot be had: a node must not take part on other terms than those that it was given.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from fedloom.core.config import build, with_implied
from fedloom.core.errors import ConfigError
from fedloom.deploy.options import NodeOptions, Settings, code_in, code_options
from fedloom.deploy.store import Refusal
from fedloom.runs.options import RunOptions

NodeConfig = Mapping[str, Any]

USUAL = ("data", "model", "partition-id", "num-partitions")
"""What ``deploy local`` and Flower give every node, whether its functions read it or not."""


def own_options(node: NodeConfig) -> NodeOptions:
    """What the node decides for itself: the options of its own config that are those of ``NodeOptions``."""
    names = {field.name for field in fields(NodeOptions)}
    given = {name.replace("-", "_"): value for name, value in node.items()}
    try:
        found = build(NodeOptions, {name: value for name, value in given.items() if name in names})
    except ConfigError as error:
        raise Refusal(f"has a config of its own that cannot be: {error}") from error
    if "evaluation_noise" in given and found.evaluation != "noised":
        raise Refusal(f"wants evaluation-noise, and its evaluation is {found.evaluation}: set evaluation to noised.")
    return found


class OwnConfig(dict[str, Any]):
    """A node's own config as the user's functions get it; it knows what they have read."""

    def __init__(self, node: NodeConfig) -> None:
        super().__init__(node)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As that of ``dict``."""
        self.read.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self.read |= super().keys()
        return super().__iter__()

    def keys(self) -> Any:
        """As that of ``dict``."""
        self.read |= super().keys()
        return super().keys()

    def items(self) -> Any:
        """As that of ``dict``."""
        self.read |= super().keys()
        return super().items()

    def check_all_read(self, settings: Settings) -> None:
        """Refuse to take part with an option that nothing reads: who wrote it relies on it."""
        options = {field.name for kind in (NodeOptions, type(settings.config)) for field in fields(kind)}
        known = {name.replace("_", "-") for name in options | code_options(settings).keys()}
        for name in sorted(super().keys() - self.read - set(USUAL)):
            if name.replace("_", "-") not in known:
                near = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.7)
                hint = f"; did you mean {near[0]!r}?" if near else ", nor has the method such an option."
                raise Refusal(f"has {name!r} in its own config, which nothing reads{hint} Mend it, or leave it out.")


def check_code(settings: Settings, node: NodeConfig) -> None:
    """Refuse to import anything that the app's table names and this node's own config does not."""
    code = code_in(settings)
    for name, value in code_options(settings).items():
        option = name.replace("_", "-")
        own = node.get(option, node.get(name))
        if own is None and name in code:
            raise Refusal(
                f"does not run {value} ({option}), which its own config does not name; give it there as well."
            )
        if own is not None and own != value:
            raise Refusal(f"has {own} for {option} in its own config, and the app has {value or 'nothing'}.")


def own_privacy(options: RunOptions, own: NodeOptions) -> RunOptions:
    """The run's options with the clipping and noise that this node wants; it refuses what cannot be had."""
    wanted = {name: getattr(own, name) for name in ("adapt_clip", "adapt_noise")}
    given = {name: value for name, value in wanted.items() if value is not None}
    if given and options.adapt == "none":
        names = " and ".join(name.replace("_", "-") for name in given)
        raise Refusal(f"wants {names}, which this federation has no use for: it does not adapt. Leave it out.")
    try:
        return replace(options, **given)
    except ConfigError as error:
        raise Refusal(f"wants privacy of its own that cannot be had: {error}") from error


def own_config(config: Any, node: NodeConfig) -> Any:
    """The method's config with the options that this node was given; others follow from these as anywhere.

    Refused is what would make it another model than the federation's (``form``).
    """
    names = {field.name for field in fields(config)}
    given = {name.replace("-", "_"): value for name, value in node.items()}
    own = {name: value for name, value in given.items() if name in names}
    epsilon, delta = (name.replace("_", "-") for name in getattr(type(config), "NEWCOMERS_PRIVACY", ("", "")))
    if epsilon.replace("-", "_") in own and delta.replace("-", "_") not in own:
        raise Refusal(f"wants {epsilon} of its own with the app's {delta}, on which its noise depends too; give both.")
    own = with_implied(type(config), own)
    try:
        made = build(type(config), own)
    except ConfigError as error:
        raise Refusal(f"has a config of its own that cannot be: {error}") from error
    changed = replace(config, **{name: getattr(made, name) for name in own})
    if changed.form != config.form:
        wanted, usual = (" and ".join(one.form) or "none" for one in (changed, config))
        raise Refusal(
            f"wants a model for {wanted} where the federation's is for {usual} ({', '.join(own)}). Set it for all; "
            "then a node can vary it."
        )
    return changed
