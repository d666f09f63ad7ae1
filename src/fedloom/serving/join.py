# SPDX-License-Identifier: Apache-2.0
"""A newcomer joins a service: what it has stays with it, and it says what was sent.

Everything is computed here, by the same code as ``Run.admit`` and with the same result to the last bit. Where the
method has a loom, either the loom comes here, or vectors go there: whichever moves fewer bytes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom import algorithms
from fedloom.api import Admission
from fedloom.core.errors import ConfigError, DataError, NeedsError, RunError, unknown
from fedloom.core.tensors import read_tensors, write_tensors
from fedloom.data.samples import samples_from
from fedloom.runs.checkpoint import digest
from fedloom.runs.files import to_json, write_file, writing
from fedloom.runs.portable import SAFETENSORS
from fedloom.serving.bundle import LOOM, Frame, check_room, usable
from fedloom.serving.remote import Access, Exchange, Remote
from fedloom.training.admission import admitted, checked_for
from fedloom.training.server import Server

Way = Literal["auto", "home", "service"]
WAYS = ("auto", "home", "service")
SLACK = 1 << 16
"""Bytes of headers that an answer may have besides its numbers."""


@dataclass
class Joined(Admission):
    """A newcomer's model, what was found out about it, and what was sent for it."""

    service: Service
    way: Way
    exchanges: list[Exchange]

    @property
    def sent(self) -> str:
        """What left this machine, in words."""
        told = [one for one in self.exchanges if one.fields]
        if not told:
            return "Sent: nothing; what was asked for is there for everybody."
        lines = [
            f"Sent to {one.request.partition(' ')[2]}: {', '.join(one.fields)}; {one.times} time"
            f"{'s' if one.times > 1 else ''}, {one.sent:,} bytes"
            for one in told
        ]
        return "\n".join(lines)

    @property
    def bytes(self) -> tuple[int, int]:
        """Sent and received in bodies."""
        return sum(one.sent for one in self.exchanges), sum(one.received for one in self.exchanges)

    def again(self, x: Any, y: Any = None) -> Joined:
        """The same with other samples, such as those that came in meanwhile; what was downloaded is used again."""
        if self.way == "service":  # which may have another loom by now
            self.service.refresh()
        return self.service.join(x, y, str(self.newcomer.home.model.spec), self.way)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the bundle, what was sent, and the report, if there is one."""
        return {
            "service": self.service.remote.url,
            "bundle": self.service.card["bundle"],
            "way": self.way,
            "exchanges": [asdict(one) for one in self.exchanges],
            "report": self.report.as_dict() if self.report else None,
        }

    def export(self, folder: str | Path, name: str = "newcomer", format: str = SAFETENSORS) -> Path:
        """Write the model, as safetensors with a loader or as onnx or pt2, and as JSON what was sent and found."""
        path = super().export(folder, name, format)
        write_file(path.with_suffix(".json"), to_json(self.as_dict(), indent=1))
        return path


def join(
    url: str,
    x: Any,
    y: Any = None,
    *,
    model: str | None = None,
    way: Way = "auto",
    token: str | None = None,
    ca: str | Path | None = None,
    cert: str | Path | None = None,
    cert_key: str | Path | None = None,
    epsilon: float | None = None,
    cache: str | Path | None = None,
    trust: bool = False,
) -> Joined:
    """Get a model for a newcomer from a service, fitted here to its samples ``x`` and, if there are any, labels ``y``.

    Args:
        url: The service's address.
        x: Samples, prepared as the federation's were.
        y: Their labels; -1 where a label is not known.
        model: The newcomer's network; without it, that of the first participant.
        way: With a loom: ``home`` downloads it, ``service`` sends vectors to it, ``auto`` moves fewer bytes.
        token: What the service's owner gave. ``ca``, ``cert``, ``cert_key``: files, for TLS.
        epsilon: A smaller one than the service's, for a private descriptor.
        cache: Where downloads are kept; without it, ``~/.cache/fedloom``.
        trust: Let the service name code outside of fedloom, such as a network of yours, which is then imported.

    >>> joined = fedloom.join("http://127.0.0.1:8470", x)  # doctest: +SKIP
    >>> joined.predict(x), joined.report, print(joined.sent)  # doctest: +SKIP
    """
    access = Access(token, *(Path(file) if file else None for file in (ca, cert, cert_key)))
    service = Service(url, access, epsilon=epsilon, cache=Path(cache) if cache else None, trust=trust)
    return service.join(x, y, model, way)


def versions(data: Path, every: float) -> Iterator[tuple[Any, Any]]:
    """The samples and labels in a file, now and whenever it has changed; it is looked at so often, in seconds.

    After the first time, a file that cannot be read is one that somebody still writes.
    """
    read = ""
    while True:
        try:
            now = digest(data.read_bytes()) if data.is_file() else ""
        except FileNotFoundError:  # taken away a moment ago
            now = ""
        if now != read:
            try:
                found = samples_from(data)
            except DataError:
                if not read:
                    raise
            else:
                read = now
                yield found
        time.sleep(every)


class Service:
    """A service, and what was downloaded from it."""

    def __init__(
        self, url: str, access: Access | None = None, *, epsilon: float | None = None, cache: Path | None = None,
        trust: bool = False,
    ) -> None:  # fmt: skip
        self.remote = Remote(url, access or Access())
        self._epsilon, self._trust = epsilon, trust
        self._cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"
        self.card: dict[str, Any] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Ask what is served now; whether it is another bundle than before."""
        with closing(self.remote):
            card = self.remote.card()
        if card.get("bundle") == self.card.get("bundle"):
            return False
        with usable(self.remote.url):
            config = dict(card["config"])
            if self._epsilon is not None:
                name, *_ = getattr(algorithms.get(str(card["method"])).config, "NEWCOMERS_PRIVACY", [""])
                config[name] = self._smaller(config.get(name) or 0.0, self._epsilon)
            self.frame = Frame({**card, "config": config}, self.remote.url, trust=self._trust)
            self._sizes = {name: int(one["bytes"]) for name, one in card["parts"].items()}
        for size in self._sizes.values():
            check_room(size, f"The parts that {self.remote.url} hands out")
        self.card, self.remote.bundle = card, str(card["bundle"])
        return True

    def join(self, x: Any, y: Any = None, model: str | None = None, way: Way = "auto") -> Joined:
        """Admit a newcomer."""
        if way not in WAYS:
            raise unknown("way", way, WAYS)
        self.remote.exchanges = []
        with closing(self.remote):
            with usable(self.remote.url):
                if not self.frame.joins:
                    raise NeedsError(
                        f"{self.frame.algorithm.name} has no model for clients that took no part in training."
                    )
                chosen = self._chosen(way, model)
                server = self._server(chosen)
            samples, labels = checked_for(server, x, y)
            with usable(self.remote.url):
                newcomer = admitted(server, samples, labels, model, name=str(self.card["newcomer"]))
                joined = Joined(server, newcomer, self, chosen, self.remote.exchanges)
                _ = joined.report, joined.outputs(samples[:1])  # a part that does not fit is found here
        return joined

    def moved(self, model: str | None = None) -> dict[Way, int]:
        """The bytes that each way would move for a network, of those ways that there are.

        What was downloaded before moves no more.
        """
        ways, found = self.card["ways"], dict[Way, int]()
        if not ways["loom"] or LOOM in self.card["parts"]:
            here = LOOM not in self._sizes or self._kept(LOOM) is not None
            found["home"] = 0 if here else self._sizes[LOOM]
        if ways["vector"]:
            found["service"] = (2 * int(ways["steps"]) + 1) * self._bytes_of(model)
        return found

    def _chosen(self, way: Way, model: str | None) -> Way:
        moved = self.moved(model)
        if way == "auto":
            return min(moved, key=lambda one: (moved[one], one))
        if way not in moved:
            offered = " or ".join(moved)
            raise NeedsError(
                f"{self.remote.url} does not serve {self.frame.algorithm.name} by way of {way}; it does by {offered}."
            )
        return way

    def _server(self, way: Way) -> Server:
        """The server that admits, here; with the loom there, one that has another in its place."""
        layout = self.card["layout"]["newcomers"]
        files = {file for _, file in layout if not (way == "service" and file == LOOM)}
        tensors = {file: read_tensors(self._part(file)) for file in files}
        leaves: dict[str, Tensor] = {}
        for path, file in layout:
            if file in tensors:  # copies, as alignment can change the last bits of a sum
                leaves[path] = tensors[file][path].clone().to(self.frame.setup.device)
        if way == "home":
            return self.frame.server(leaves)
        return self.frame.server({**leaves, f"{self.card['ways']['loom']}/": torch.empty(0)}, self._elsewhere)

    def _elsewhere(self, loom: Any) -> Any:
        return _Elsewhere(loom, self.remote)

    def _bytes_of(self, model: str | None) -> int:
        sizes = {str(one.spec): one.size for one in self.frame.setup.architectures.values()}
        size = sizes.get(model or "", next(iter(sizes.values())))  # an unknown one is refused when it is woven
        return size * self.frame.setup.dtype.itemsize

    def _part(self, name: str) -> bytes:
        """A part of the bundle, from the cache or from the service, with the digest that the card names."""
        kept = self._kept(name)
        if kept is not None:
            return kept
        listed = self.card["parts"][name]
        data = self.remote.get(f"/v1/parts/{listed['sha256']}.safetensors", int(listed["bytes"]))
        if digest(data) != listed["sha256"]:
            raise RunError(f"{self.remote.url} sent a {name} with another digest than its card has; try again.")
        file = self._file(name)
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, data)
        return data

    def _kept(self, name: str) -> bytes | None:
        file = self._file(name)
        if not file.is_file():
            return None
        data = file.read_bytes()
        return data if digest(data) == self.card["parts"][name]["sha256"] else None

    def _file(self, name: str) -> Path:
        sha256 = str(self.card["parts"][name]["sha256"])
        if len(sha256) != 64 or not sha256.isalnum():
            raise RunError(f"{self.remote.url} has a card with a digest that is none; do not use it.")
        return self._cache / f"{sha256}.safetensors"

    def _smaller(self, theirs: float, ours: float) -> float:
        if not theirs:
            raise ConfigError(
                "--epsilon is for a service whose descriptors are private; this one's are not. Leave it out."
            )
        if not 0 < ours <= theirs:
            raise ConfigError(f"--epsilon is {ours:g}; give a number above 0 and at most the service's, {theirs:g}.")
        return ours


class _Elsewhere:
    """A loom whose parameters are at the service: vectors go there and models come back, gradients likewise."""

    def __init__(self, loom: Any, remote: Remote) -> None:
        self._loom, self._remote = loom, remote
        self._last: tuple[bytes, str, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loom, name)

    def __call__(self, params: Mapping[str, Tensor], embeddings: Tensor, target: str) -> Tensor:
        woven: Tensor = _Woven.apply(embeddings, self, target)  # type: ignore[no-untyped-call]
        return woven

    def weave(self, rows: Tensor, target: str) -> Tensor:
        """(1, size) -> (1, parameters). The last answer is kept: a gradient is asked for at the same vector."""
        vector = write_tensors({"vector": rows[0]})
        if self._last is None or self._last[:2] != (vector, target):
            shapes = self._loom.targets[target]
            numbers = sum(map(math.prod, shapes.values()))
            largest = numbers * rows.element_size() + SLACK
            field = f"vector of {rows.shape[1]} numbers"
            answer = self._remote.post("/v1/models", {"architecture": target}, vector, (field,), largest)
            found = self._fitting(read_tensors(answer), shapes, rows)
            self._last = (vector, target, torch.cat([found[name].reshape(-1) for name in shapes])[None])
        return self._last[2].clone()

    def pull_back(self, rows: Tensor, change: Tensor, target: str) -> Tensor:
        """(1, size) and (1, parameters) -> (1, size)."""
        body = write_tensors({"vector": rows[0], "gradient": change[0]})
        fields = (f"vector of {rows.shape[1]} numbers", f"change of the model, {change.shape[1]:,} numbers")
        answer = self._remote.post("/v1/gradients", {"architecture": target}, body, fields, SLACK)
        found = self._fitting(read_tensors(answer), {"gradient": tuple(rows.shape[1:])}, rows)
        return found["gradient"][None].clone()

    def _fitting(
        self, found: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], like: Tensor
    ) -> Mapping[str, Tensor]:
        for name, shape in shapes.items():
            one = found.get(name)
            if one is None or tuple(one.shape) != tuple(shape) or one.dtype != like.dtype or not one.isfinite().all():
                raise RunError(f"{self._remote.url} sent a {name} that does not fit its card; do not use it.")
        return found


class _Woven(torch.autograd.Function):
    """The forward and the backward pass of a loom that is elsewhere."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, loom: _Elsewhere, target: str) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.loom, ctx.target = loom, target
        return loom.weave(rows.detach(), target)

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return ctx.loom.pull_back(rows.detach(), change, ctx.target), None, None
