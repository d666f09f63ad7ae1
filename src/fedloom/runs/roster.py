# SPDX-License-Identifier: Apache-2.0
"""``roster.json``: who the clients of a run are, and what its samples look like. No data, and no torch to read it.

With ``config.yaml`` and a checkpoint it is all that is needed to hand a run's models on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.core.errors import RunError

FORMAT = 1


class Member(NamedTuple):
    """A client of the roster."""

    id: str
    unseen: bool
    """It took no part in training."""
    model: str | None
    """The name of its network, with options; None where only its size is known."""
    size: int
    """The number of its network's parameters."""
    samples: Mapping[str, int]
    """Samples by split; of a client on another machine, as it told them."""
    labels: tuple[int, ...] = ()
    """How many of its samples are of each class; empty where that is not known, or of no use."""


class Roster(NamedTuple):
    """The clients of a run, participants first, and the form of their samples."""

    input_shape: tuple[int, ...]
    num_outputs: int
    num_classes: int
    """0 for a task without classes."""
    class_names: tuple[str, ...]
    target_shape: tuple[int, ...]
    """The shape of one target; () for a label."""
    members: Sequence[Member]

    @property
    def classes(self) -> list[str]:
        """A name for each class."""
        return list(self.class_names) or [f"class {number}" for number in range(self.num_classes)]

    @property
    def participants(self) -> tuple[str, ...]:
        """The clients that take part."""
        return tuple(member.id for member in self.members if not member.unseen)

    def as_json(self) -> dict[str, Any]:
        """Networks are listed once; a client names its own by number."""
        models: dict[tuple[str | None, int], int] = {}
        clients = [
            {
                "id": member.id,
                "unseen": member.unseen,
                "model": models.setdefault((member.model, member.size), len(models)),
                **member.samples,
                **({"labels": member.labels} if member.labels else {}),
            }
            for member in self.members
        ]
        form = {name: value for name, value in self._asdict().items() if name != "members"}
        named = [{"name": name, "parameters": size} for name, size in models]
        return {"format": FORMAT, **form, "models": named, "clients": clients}

    @classmethod
    def of_json(cls, content: Mapping[str, Any], where: str) -> Roster:
        """The roster in a file; refuses what is not one."""
        if content.get("format") != FORMAT:
            raise RunError(
                f"{where} has format {content.get('format')!r} where this fedloom knows {FORMAT}; use the fedloom that "
                "wrote it."
            )
        try:
            models = [(one["name"], int(one["parameters"])) for one in content["models"]]
            members = []
            for one in content["clients"]:
                name, size = models[one["model"]]
                samples = {split: int(one[split]) for split in ("train", "val", "test")}
                if not isinstance(name, str | None):
                    raise TypeError("a network's name is text")
                labels = tuple(map(int, one.get("labels", ())))
                members.append(Member(str(one["id"]), bool(one["unseen"]), name, size, samples, labels))
            return cls(
                tuple(map(int, content["input_shape"])),
                int(content["num_outputs"]),
                int(content["num_classes"]),
                tuple(map(str, content["class_names"])),
                tuple(map(int, content["target_shape"])),
                members,
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RunError(f"{where} is damaged: it is not the roster of a run; restore it.") from error
