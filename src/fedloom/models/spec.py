# SPDX-License-Identifier: Apache-2.0
"""Names for target networks: ``lenet``, ``lenet:kernels=8``, ``mlp:hidden=128x64``, ``package.module:Class:width=3``.

Networks of fedloom's own are found by scanning ``zoo/``; any ``nn.Module`` class is named by its import path, and
nothing but such a class is ever called: with ``input_shape`` and ``num_outputs``, if it takes them, and the options of
the name.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from fedloom.core.errors import ConfigError, FedloomError, unknown
from fedloom.core.memory import is_full
from fedloom.core.tokens import Tokens
from fedloom.core.trust import PACKAGE, import_path, is_own, path_in
from fedloom.models import zoo

SHORTEST_WINDOW = 8
"""Steps of a window from which convolutions over time have something to go by."""


@dataclass(frozen=True)
class ModelSpec:
    """Everything that fixes an architecture; clients with equal specs can be trained as one stack."""

    name: str
    options: tuple[tuple[str, Any], ...]
    input_shape: tuple[int, ...]
    num_outputs: int
    tokens: Tokens | None = None

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{key}={_text(value)}" for key, value in self.options)])

    def build(self) -> nn.Module:
        """The module, initialised by the global generator of torch."""
        network = network_class(self.name)
        signature = inspect.signature(network)
        wanted = signature.parameters
        given = {"input_shape": self.input_shape, "num_outputs": self.num_outputs}
        if self.tokens:
            given |= self.tokens._asdict()
        self._check_takes_samples(wanted)
        given = {name: value for name, value in given.items() if _takes(wanted, name)}
        for name, _ in self.options:
            if name in given or not _takes(wanted, name):
                raise unknown(f"option of {self.name}", name, [p for p in wanted if p not in given and p != "self"])
        arguments = {**given, **dict(self.options)}
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ConfigError(f"{self}: {error}; give it as an option, as in {self.name}:option=value.") from None
        try:
            return network(**arguments)
        except Exception as error:
            if ":" not in self.name or isinstance(error, FedloomError) or is_full(error):
                raise
            why = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
            raise ConfigError(
                f"{self} cannot be built for samples of shape {self.input_shape} and {self.num_outputs} outputs: "
                f"{why}. Mend it, or choose another --model."
            ) from error

    def _check_takes_samples(self, wanted: Mapping[str, inspect.Parameter]) -> None:
        """Refuse tokens to those of fedloom's networks that take numbers, and numbers to those that take tokens."""
        takes_tokens = "vocabulary" in wanted
        if ":" in self.name or takes_tokens == bool(self.tokens):
            return
        if self.tokens:
            raise ConfigError(
                f"{self.name} takes numbers, and samples of whole numbers are tokens. Use --model gru, lstm or "
                "transformer; or, if they are features, give them as floating-point numbers."
            )
        raise ConfigError(
            f"{self.name} takes tokens, whole numbers of shape (samples, length); these samples are numbers of shape "
            f"{self.input_shape}. Use --model {'lenet or mlp' if len(self.input_shape) > 1 else 'mlp'}."
        )


def parse(text: str, input_shape: tuple[int, ...], num_outputs: int, tokens: Tokens | None = None) -> ModelSpec:
    """The spec that ``text`` names, checked for existence."""
    text = text.strip()
    own = text.partition(":")[0]
    name = own if own in networks() else path_in(text) or own
    network_class(name)
    options: dict[str, Any] = {}
    for part in text.removeprefix(name).split(":")[1:]:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--model {text}: {part!r} is not of the form option=value. Write e.g. lenet:kernels=8.")
        key = key.replace("-", "_")
        if key in options:
            raise ConfigError(f"--model {text}: {key} is given twice. Give it once.")
        options[key] = _value(value)
    return ModelSpec(name, tuple(sorted(options.items())), tuple(input_shape), num_outputs, tokens)


def usual_network(input_shape: tuple[int, ...], tokens: Tokens | None) -> str:
    """The network that ``auto`` stands for."""
    windows = len(input_shape) == 2 and input_shape[1] >= SHORTEST_WINDOW
    return "gru" if tokens else "lenet" if len(input_shape) == 3 else "conv1d" if windows else "mlp"


@cache
def networks() -> Mapping[str, type[nn.Module]]:
    """fedloom's own networks by name."""
    found: dict[str, type[nn.Module]] = {}
    for module in pkgutil.iter_modules(zoo.__path__):
        for member in vars(importlib.import_module(f"{zoo.__name__}.{module.name}")).values():
            if (
                isinstance(member, type)
                and issubclass(member, nn.Module)
                and isinstance(member.__dict__.get("name"), str)
            ):
                found[member.__dict__["name"]] = member
    return dict(sorted(found.items()))


def network_class(name: str) -> type[nn.Module]:
    """The class of the network of that name."""
    if ":" not in name:
        if name not in networks():
            raise unknown("model", name, networks())
        return networks()[name]
    found = import_path(name, "--model")
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ConfigError(f"--model {name} is {what}; expected a subclass of torch.nn.Module.")
    if is_own(name) and not found.__module__.startswith(f"{PACKAGE}."):
        raise ConfigError(f"--model {name} is not fedloom's; write {found.__module__}:{found.__name__}.")
    return found


def _takes(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _value(text: str) -> Any:
    """A number, a tuple of whole numbers written 128x64, true or false, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return tuple(int(part) for part in text.split("x") if part) if "x" in text else int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    return "x".join(map(str, value)) + ("x" if len(value) < 2 else "") if isinstance(value, tuple) else str(value)
