# SPDX-License-Identifier: Apache-2.0
"""Admitting one newcomer to a finished run: a server, the newcomer's samples, and nobody else.

The newcomer is a federation of one, in this process, and the method's ``admit`` asks it as it would any client. Nothing
of it stays with the server: what it remembers and deploys is in the ``Newcomer`` that comes out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.clients.federation import Client, Federation
from fedloom.core.contract import Algorithm, Home
from fedloom.core.errors import DataError, NeedsError
from fedloom.core.task import MULTILABEL
from fedloom.core.trees import ClientId, Tree
from fedloom.data.labels import UNKNOWN
from fedloom.data.samples import checked_labels, labels_among, prepared_samples
from fedloom.engines.auto import ENGINES, choose, heavy
from fedloom.engines.memories import Memories
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.runs.roster import Roster
from fedloom.training.server import Server

log = logging.getLogger(__name__)


class Newcomer(NamedTuple):
    """A client that was admitted, on its own machine.

    ``deployed`` is what its predictor takes, with ``home``; ``memory`` what it would need to be asked again.
    """

    client: ClientId
    home: Home
    samples: int
    memory: Tree
    deployed: Tree


def admitted(
    server: Server, x: Tensor, y: Tensor | None, model: str | None = None, *, name: ClientId | None = None
) -> Newcomer:
    """Admit a newcomer with samples ``x`` and, if it has any, labels ``y`` (-1: not known).

    ``model`` names its network; without it, that of the first participant. ``name`` is what its random streams follow
    from; without it, one that nobody has. Noise for privacy is secret: it does not follow from the run's seed, which
    others know.
    """
    algorithm, setup, roster = server.algorithm, server.setup, server.roster
    if algorithm.admit and y is None and algorithm.needs_labels(server.config):
        raise unlabelled(algorithm)
    client = name or name_of_newcomer(roster)
    named = model or roster.members[0].model
    if named is None:
        raise NeedsError(
            f"The server of {algorithm.name} is told the sizes of models only; name the newcomer's network: --model "
            "(in Python, model=)."
        )
    network = Model(parse(named, roster.input_shape, roster.num_outputs, roster.tokens), setup.device, setup.dtype)
    # labels that no program may read: any use of them as classes fails
    labels = torch.full((len(x), *roster.target_shape), -1, device=setup.device) if y is None else y
    labels = labels if roster.num_classes else labels.to(setup.dtype)
    rows, nothing = np.arange(len(x)), np.arange(0)
    own = Client(client, network, {"train": rows, "val": nothing, "test": nothing}, unseen=True)
    federation = Federation(x, labels, setup.task, {client: own})
    engine = ENGINES[choose("auto", setup.device, [network], 1)[0]](
        federation, algorithm, server.config, server.options.seed
    )
    session = engine.session("admission", Memories(), secret_noise=True)
    with _threads(1 if setup.device.type == "cpu" and not heavy(network) else 0):
        sent = server.admit(session, [client])
        home, memory = server.home_of(network, len(x)), session.recall(client)
        deployed = algorithm.client_deploy(home, sent.shared, sent.mine[client], memory)
    return Newcomer(client, home, len(x), memory, deployed)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Operators run with so many threads within; 0: as before. In those of small models, more wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def name_of_newcomer(roster: Roster) -> ClientId:
    """A name that nobody on the roster has: random streams follow from it."""
    client, taken = "newcomer", {member.id for member in roster.members}
    while client in taken:
        client += "'"
    return client


def unlabelled(algorithm: Algorithm) -> NeedsError:
    """The error for a newcomer without labels, to a method that needs some."""
    return NeedsError(
        f"{algorithm.name} admits a newcomer by training on its labelled samples; got none. "
        "Give them (admit(x, y), or an array y in the file), or choose a method that needs no labels."
    )


def checked_for(server: Server, x: Any, y: Any) -> tuple[Tensor, Tensor | None]:
    """A newcomer's samples and labels, if it has any, as the server wants them: for ``admitted``.

    A method that trains on labels gets those samples that have some.
    """
    samples, algorithm = samples_for(server, x), server.algorithm
    if not len(samples):
        raise DataError("admit got no samples; give the newcomer at least one.")
    y = labels_among(x, server.roster.preparation) if y is None else y
    if y is None:
        return samples, None
    labels = _labels(server, y, len(samples))
    if not server.setup.task.class_scores or labels.ndim > 1 or not algorithm.needs_labels(server.config):
        return samples, labels
    known = labels != UNKNOWN
    if not bool(known.all()):
        left = int((~known).sum())
        log.warning(f"{algorithm.name} trains on labels; {left} of {len(labels)} samples have none and are left out.")
    return samples[known], labels[known]


def samples_for(server: Server, x: Any) -> Tensor:
    """A user's samples on the device of the server, checked to be like the federation's."""
    roster = server.roster
    samples = prepared_samples(x, roster.input_shape, roster.preparation, roster.tokens).to(server.setup.device)
    return samples if roster.tokens else samples.to(server.setup.dtype)


def _none_known(y: Any) -> bool:
    """Whether every label is the one that stands for none."""
    plain = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    return bool((plain == "").all() if plain.dtype.kind == "U" else (plain == UNKNOWN).all())


def _labels(server: Server, y: Any, number: int) -> Tensor:
    """A newcomer's labels, checked to be like the federation's."""
    roster, needed = server.roster, server.algorithm.needs_labels(server.config)
    if roster.num_classes and needed and _none_known(y):
        raise unlabelled(server.algorithm)
    shape, names = (number, *roster.target_shape), roster.class_names if roster.num_classes else ()
    labels = checked_labels(y, shape, roster.num_classes, names)
    if server.setup.task is MULTILABEL and bool(((labels != 0) & (labels != 1)).any()):
        raise DataError("Got labels other than 0 and 1; expected one of these for each label that may hold.")
    return labels.to(server.setup.device)
