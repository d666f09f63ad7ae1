# SPDX-License-Identifier: Apache-2.0
"""What a service computes: a participant's model, a newcomer's model from a vector, a change pulled back to one.

Equal questions to one bundle have equal answers, to the last bit, whoever else asks at that time.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from typing import Any

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, DataError, NeedsError
from fedloom.core.tensors import header_of, read_tensors, write_tensors
from fedloom.core.trees import ClientId, flatten
from fedloom.models.load import is_one_network
from fedloom.serving.bundle import Bundle, Given

HEADER = 1 << 14
"""Bytes that the header of a request's body may have."""
MOST = 64
"""Models in one answer."""


class Weaver:
    """A bundle at work."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        frame = bundle.frame
        self.architectures: dict[str, int] = {}
        """The networks that models can be had for, with their numbers of parameters."""
        self._plain: dict[str, bool] = {}
        handover = frame.algorithm.handover
        self._loom: Any = None
        if frame.joins and handover.vector and handover.structure:
            server = bundle.newcomers
            self._loom = handover.structure(server.setup)
            self._phi = getattr(server.state, handover.loom)
            sizes = {str(model.spec): model.size for model in server.setup.architectures.values()}
            self.architectures = {name: sizes[name] for name in self._loom.targets}
            self._headers = {name: self._header(name) for name in self.architectures}
        # another build of torch, or another kind of processor, may round otherwise
        self._machine = f"{torch.__version__} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"

    @property
    def weaves(self) -> bool:
        """Whether newcomers' models can be had from a vector."""
        return self._loom is not None

    @property
    def size(self) -> int:
        """The size of the vector."""
        return int(self._loom.embed_dim)

    @property
    def largest(self) -> int:
        """Bytes of the largest request that makes sense."""
        kind = self.bundle.frame.setup.dtype.itemsize
        return HEADER + 8 + kind * max(MOST * self.size, self.size + max(self.architectures.values()))

    def tag(self, *parts: str) -> str:
        """The entity tag of what is computed from these parts."""
        text = json.dumps([self.bundle.digest, self._machine, *parts])
        return f'"{hashlib.sha256(text.encode()).hexdigest()[:40]}"'

    def participant(self, client: ClientId) -> bytes:
        """A participant's model, as far as it lies here; its metadata say what the client brings."""
        given, frame = self.bundle.given(client), self.bundle.frame
        plain = self._is_plain(given)
        tree = given.sent
        tensors = {**tree["params"], **tree["buffers"]} if plain else flatten(tree)
        tensors = {name: value for name, value in tensors.items() if not name.endswith("/")}  # of an empty branch
        metadata = {
            "format": "pt",
            "form": "model" if plain else "deployed" if given.complete else "sent",
            "missing": ",".join(given.missing),
            "method": frame.algorithm.name,
            "model": str(given.model.spec),
            "input_shape": ",".join(map(str, frame.roster.input_shape)),
            "num_outputs": str(frame.roster.num_outputs),
            **({"preparation": frame.roster.preparation.as_text()} if frame.roster.preparation else {}),
            **({"classes": json.dumps(frame.roster.class_names)} if frame.roster.class_names else {}),
        }
        return write_tensors(tensors, metadata)

    def _is_plain(self, given: Given) -> bool:
        """Whether what a participant is given is its network and nothing else: the same for all with that network."""
        name = str(given.model.spec)
        if name not in self._plain:
            home, algorithm = self.bundle.frame.home(given.model), self.bundle.frame.algorithm
            self._plain[name] = given.complete and is_one_network(algorithm.module(home, given.sent))
        return self._plain[name]

    def weave(self, body: bytes, architecture: str) -> list[bytes | memoryview]:
        """The model of the vector in ``body``: ``vector`` (size,); or of several, (models, size), in one file."""
        name = self._known(architecture)
        (vector,) = self._tensors(body, "vector")
        rows = vector if vector.ndim == 2 else vector[None]
        if rows.ndim != 2 or rows.shape[1] != self.size or not 1 <= len(rows) <= MOST:
            raise DataError(
                f"The vector has the shape {tuple(vector.shape)}; expected ({self.size},), or (models, {self.size}) "
                f"for at most {MOST} models."
            )
        with torch.no_grad():
            woven = self._loom(self._phi, rows, name)
        header = self._headers[name] if vector.ndim == 1 else self._header(name, len(rows))
        return [header, memoryview(woven.contiguous().numpy().reshape(-1).view("u1"))]

    def pull_back(self, body: bytes, architecture: str) -> bytes:
        """``gradient`` of the vector, from ``vector`` (size,) and ``gradient`` (parameters,) of the woven model."""
        name = self._known(architecture)
        vector, gradient = self._tensors(body, "vector", "gradient")
        woven = sum(math.prod(shape) for shape in self._loom.targets[name].values())
        if vector.shape != (self.size,) or gradient.shape != (woven,):
            raise DataError(
                f"The vector has the shape {tuple(vector.shape)} and the gradient {tuple(gradient.shape)}; expected "
                f"({self.size},) and ({woven},)."
            )
        rows = vector[None].requires_grad_()
        (found,) = torch.autograd.grad(self._loom(self._phi, rows, name), rows, gradient[None])
        return write_tensors({"gradient": found[0]})

    def _known(self, architecture: str) -> str:
        if not self.weaves:
            raise NeedsError(f"{self.bundle.manifest['name']} weaves no newcomer's model from a vector.")
        name = architecture or next(iter(self.architectures))
        if name not in self.architectures:
            raise ConfigError(f"There is no such architecture here; choose from: {', '.join(self.architectures)}.")
        return name

    def _tensors(self, body: bytes, *names: str) -> list[Tensor]:
        found, dtype = read_tensors(body, HEADER), self.bundle.frame.setup.dtype
        if set(found) != set(names):
            raise DataError(f"The body has {len(found)} tensors; expected {' and '.join(names)}.")
        for name in names:
            if found[name].dtype != dtype or not bool(found[name].isfinite().all()):
                raise DataError(f"{name} is of type {found[name].dtype}; expected finite numbers of type {dtype}.")
        return [found[name].clone() for name in names]

    def _header(self, name: str, models: int = 0) -> bytes:
        """What stands before the numbers of one model, or of so many, one after another, named ``0/...``, ``1/...``."""
        dtype = self.bundle.frame.setup.dtype
        shapes = {part: (dtype, shape) for part, shape in self._loom.targets[name].items()}
        if models:
            shapes = {f"{row}/{part}": one for row in range(models) for part, one in shapes.items()}
        return header_of(shapes, {"format": "pt", "model": name})
