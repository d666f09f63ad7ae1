# SPDX-License-Identifier: Apache-2.0
"""Models handed to clients on other machines. Newcomers are admitted for it; what became of each is written down."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.core.contract import Sent
from fedloom.core.errors import FedloomError
from fedloom.core.trees import ClientId, PerClient
from fedloom.deploy.codec import pack, refusal
from fedloom.deploy.engine import VERSION
from fedloom.deploy.lobby import Lobby
from fedloom.engines.memories import Memories
from fedloom.runs.directory import RunDirectory
from fedloom.runs.files import to_json, write_file
from fedloom.training.trainer import Trainer


class Delivery:
    """Who got a model, and who got none, and why."""

    def __init__(self, lobby: Lobby, timeout: float) -> None:
        self._lobby, self._timeout = lobby, timeout
        self.delivered: list[ClientId] = []
        self.undelivered: dict[ClientId, str] = {}
        """The reasons. Those of clients that get a model later, after all, are dropped."""
        self.admitted = Sent({}, PerClient.empty(()))
        """What newcomers were sent that have been admitted and tried already: they get this, and no other model."""

    def admit(self, trainer: Trainer, newcomers: Sequence[ClientId], memory: Memories) -> tuple[Sent, Memories]:
        """Admit all at once; where that fails one by one, so that nobody's fault is another's.

        What is sent has nothing for those who could not be admitted; ``undelivered`` says why.
        """
        session = trainer.session("admission", memory)
        try:
            sent = trainer.server.admit(session, newcomers)
        except Exception as error:
            if len(newcomers) == 1:
                reason = str(error) if isinstance(error, FedloomError) else f"({type(error).__name__})"
                self.undelivered[newcomers[0]] = f"could not be admitted: {reason}"
                return Sent({}, PerClient.empty(())), memory
            parts = []
            for client in newcomers:
                part, memory = self.admit(trainer, [client], memory)
                parts.append(part)
            # what is shared is the run's, whoever is admitted
            shared = next((part.shared for part in parts if len(part.mine)), {})
            mine = PerClient.of({client: part.mine[client] for part in parts for client in part.mine})
            return Sent(shared, mine), memory
        why = {one.client: one.reason for one in session.stats.dropped}
        self.undelivered |= {c: why.get(c, "was not admitted") for c in newcomers if c not in set(sent.mine)}
        return sent, session.memory

    def hand_over(self, sent: Sent, memory: Memories, preparation: str) -> None:
        """Send clients what they are to use; ``memory`` names the version of their own that they put it together with.

        ``preparation``: how they are to prepare raw samples, as JSON.
        """
        contents = {}
        for client in sent.mine:
            about: dict[str, str | int] = {
                "run": self._lobby.run,
                "client": client,
                "from_version": int(memory.get(client, {VERSION: 0})[VERSION]),
                "preparation": preparation,
            }
            contents[client] = pack(about, shared=sent.shared, mine=sent.mine[client])
        for client, answer in self._lobby.exchange("query.deploy", contents, self._timeout).items():
            reason = refusal(answer)
            if reason is None:
                self.delivered.append(client)
                self.undelivered.pop(client, None)
            else:
                self.undelivered[client] = reason

    def write(self, directory: RunDirectory) -> None:
        """Write down what became of it."""
        found = {"delivered": self.delivered, "failed": self.undelivered}
        write_file(directory.path / "delivery.json", to_json(found, indent=2))
