# SPDX-License-Identifier: Apache-2.0
"""``roster.json``: who the clients of a run are, and what its samples look like. No data, and no torch to read it.

With ``config.yaml`` and a checkpoint it is all that is needed to hand a run's models on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.core.errors import RunError
from fedloom.core.tokens import Tokens
from fedloom.data.preparation import Preparation

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
    preparation: Preparation | None = None
    """How raw samples become those that networks take; None where they are given as networks take them."""
    tokens: Tokens | None = None
    """What samples of tokens are like; None: samples are numbers."""
    alphabet: str = ""
    """Of text: token i stands for its character i."""

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
        named = [{"name": name, "parameters": size} for name, size in models]
        return {"format": FORMAT, **self.form_as_json(), "models": named, "clients": clients}

    def form_as_json(self) -> dict[str, Any]:
        """The form of the samples."""
        form = {name: value for name, value in self._asdict().items() if name not in ("members", "preparation")}
        return {**form, **({"preparation": self.preparation.as_json()} if self.preparation else {})}

    @classmethod
    def of_form(cls, form: Mapping[str, Any], members: Sequence[Member]) -> Roster:
        """A roster of these members, whose samples are of that form; ValueError and its like for what is none."""
        preparation = Preparation.of_json(form["preparation"]) if form.get("preparation") else None
        shape = tuple(map(int, form["input_shape"]))
        if preparation and not preparation.fits(shape):
            raise ValueError("samples are prepared for another shape")
        return cls(
            shape,
            int(form["num_outputs"]),
            int(form["num_classes"]),
            tuple(map(str, form["class_names"])),
            tuple(map(int, form["target_shape"])),
            members,
            preparation,
            Tokens.of_json(form.get("tokens")),
            str(form.get("alphabet", "")),
        )

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
            return cls.of_form(content, members)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise RunError(f"{where} is damaged: it is not the roster of a run; restore it.") from error
