# SPDX-License-Identifier: Apache-2.0
"""Who is there: Flower's nodes, asked for their names, become clients; messages to clients go to their nodes.

Flower's node numbers are random and change when a node restarts without a key. A client is its name. With
authentication the name follows from the node's key, which the link has checked. Without, the node says it, and says
the same *mark*, a digest of the secret in its folder, each time: a second node that claims a name that is taken is
refused.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedloom.core.trees import ClientId
from fedloom.deploy.codec import Malformed, facts_of, pack
from fedloom.deploy.options import NAME
from fedloom.runs.records import NO_ANSWER

log = logging.getLogger(__name__)

HELLO = "query.hello"
POLL = 0.3
"""Seconds between looks for replies."""

PATIENCE = 120.0
"""Seconds to wait for a greeting, and until a node that was refused is greeted again."""

GRACE = 30.0
"""Seconds of these for which everybody waits with a node that just came; after that only it does."""

MOST_SAMPLES = 1 << 48
"""Nobody has as many."""

LONGEST = 10_000
"""Letters in which a client describes its network."""


class Greeting(NamedTuple):
    """What a client tells of itself when it joins."""

    client: ClientId
    mark: str
    role: Literal["participant", "newcomer"]
    splits: tuple[str, ...]
    """Which of train, val and test it has samples in."""
    model: tuple[str, tuple[tuple[str, Any], ...]] | None
    """Name and options of its network, where the method needs them."""
    size: int
    """The number of its parameters that a server weaves, where that is all it is told."""
    samples: int = 0
    """Its number of training samples, by which it weighs; a newcomer, which weighs nothing, does not tell it."""


class Lobby:
    """The clients that are connected, by name, and the way to them."""

    def __init__(
        self, grid: Grid, run: str, keys: Mapping[bytes, ClientId] | None, check: Callable[[Greeting], object]
    ) -> None:
        self.grid, self.run = grid, run
        self._keys, self._check = keys, check
        self.nodes: dict[ClientId, int] = {}
        self.greetings: dict[ClientId, Greeting] = {}
        self.waited: dict[ClientId, float] = {}
        """How many seconds each reply took to come in the last exchange."""
        self._seconds: dict[int, float] = {}
        self.refused: list[str] = []
        """Nodes that are no clients, and why."""
        self._strangers: dict[int, float] = {}
        """When to try nodes again that are no clients yet."""
        self._hailed: dict[str, tuple[int, float]] = {}
        """Greetings that were not answered yet: by message, the node and when to give it up."""

    def refresh(self) -> None:
        """Say hello to nodes that are new; forget those that are gone.

        A node that is mute when it comes holds everybody up for ``GRACE`` seconds, once.
        """
        infos = {info.node_id: info for info in self.grid.get_nodes()}
        self.nodes = {client: node for client, node in self.nodes.items() if node in infos}
        self._hailed = {message: one for message, one in self._hailed.items() if one[0] in infos}
        known, now = {*self.nodes.values(), *(node for node, _ in self._hailed.values())}, time.monotonic()
        fresh = [node for node in sorted(infos) if node not in known and self._strangers.get(node, now) <= now]
        sent = self.push(HELLO, {node: pack({"run": self.run}) for node in fresh}, PATIENCE)
        self._hailed |= {message: (node, now + PATIENCE) for message, node in sent.items()}
        first = {message for message, node in sent.items() if node not in self._strangers}
        while True:
            for message, answer in self.pull(list(self._hailed)).items():
                self._answered(infos[self._hailed.pop(message)[0]], answer)
            late = [message for message, (_, last) in self._hailed.items() if time.monotonic() > last]
            for message in late:
                self._answered(infos[self._hailed.pop(message)[0]], f"{NO_ANSWER} within {PATIENCE:g} seconds")
            if first.isdisjoint(self._hailed) or time.monotonic() >= now + GRACE:
                return
            time.sleep(POLL)

    def _answered(self, info: Any, answer: RecordDict | str) -> None:
        """A node's answer to the greeting: it is a client from now on, or is turned away for ``PATIENCE`` seconds."""
        node = info.node_id
        who = f"node {node}"
        try:
            name = self._name(info)
            who = f"client {name}" if name else who
            self._greet(node, name, answer)
        except Malformed as fault:
            self._turn_away(node, f"{who} {fault}")
        except Exception as error:  # whatever a stranger made of it
            self._turn_away(node, f"{who} sent a greeting that cannot be used ({type(error).__name__})")

    def refuse(self, client: ClientId, reason: str) -> None:
        """A client that was greeted is none, after all."""
        self.greetings.pop(client)
        self._turn_away(self.nodes.pop(client), str(Malformed(f"client {client} {reason}")))

    def _turn_away(self, node: int, reason: str) -> None:
        """Write down why a node is no client, and try it again later: what is wrong with it may be mended."""
        self._strangers[node] = time.monotonic() + PATIENCE
        self.refused.append(reason)
        log.warning("Refused: %s", reason)

    def exchange(
        self, kind: str, contents: Mapping[ClientId, RecordDict], timeout: float
    ) -> dict[ClientId, RecordDict | str]:
        """Each client's reply, or why there is none."""
        there = {self.nodes[client]: client for client in contents if client in self.nodes}
        answers = self.send(kind, {node: contents[client] for node, client in there.items()}, timeout)
        self.waited = {there[node]: seconds for node, seconds in self._seconds.items()}
        found: dict[ClientId, RecordDict | str] = dict.fromkeys(contents, "is not connected")
        return found | {there[node]: answer for node, answer in answers.items()}

    def send(self, kind: str, contents: Mapping[int, RecordDict], timeout: float) -> dict[int, RecordDict | str]:
        """The same for nodes: it ends when all have replied, or after ``timeout`` seconds with the replies of some."""
        waiting = self.push(kind, contents, timeout)
        found: dict[int, RecordDict | str] = dict.fromkeys(contents, "could not be reached")
        found |= dict.fromkeys(waiting.values(), f"{NO_ANSWER} within {timeout:g} seconds")
        start, self._seconds = time.monotonic(), {}
        while waiting and time.monotonic() < start + timeout:
            for message, answer in self.pull(list(waiting)).items():
                node = waiting.pop(message)
                found[node], self._seconds[node] = answer, time.monotonic() - start
            time.sleep(POLL if waiting else 0)
        return found

    def push(self, kind: str, contents: Mapping[int, RecordDict], timeout: float) -> dict[str, int]:
        """Send to nodes: ``{message: node}`` of those that could be sent."""
        if not contents:
            return {}
        # a message that waited longer than its sender is not worth running
        letters = [Message(c, dst_node_id=node, message_type=kind, ttl=timeout) for node, c in contents.items()]
        ids = list(self.grid.push_messages(letters))
        return {message: node for message, node in zip(ids, contents) if message}

    def pull(self, messages: list[str]) -> dict[str, RecordDict | str]:
        """The answers to messages that are there. Each names the message it is for: none is taken for another's."""
        found: dict[str, RecordDict | str] = {}
        for reply in self.grid.pull_messages(messages) if messages else ():
            if reply.metadata.reply_to_message_id in messages:
                answer = f"failed: {reply.error.reason}" if reply.has_error() else reply.content
                found[reply.metadata.reply_to_message_id] = answer
        return found

    def _name(self, info: Any) -> ClientId | None:
        """Whose key the link has checked; None where there are no keys, and the node says who it is."""
        if self._keys is None:
            return None
        name = self._keys.get(bytes(info.public_key))
        if name is None:
            raise Malformed("has a key that is not among the keys of this federation's clients")
        return name

    def _greet(self, node: int, name: ClientId | None, answer: RecordDict | str) -> None:
        """Take a node in as the client that it says it is, if it is that client and the federation can serve it.

        A client that comes back keeps what it told the first time: the state was made for that.
        """
        if isinstance(answer, str):
            raise Malformed(answer)
        greeting = read_hello(facts_of(answer), name)
        client, known = greeting.client, self.greetings.get(greeting.client)
        if known is not None and name is None and known.mark != greeting.mark:
            raise Malformed(f"claims the name {client!r}, which another client has")
        if known is None:
            try:
                self._check(greeting)
            except Exception as error:
                raise Malformed(f"has a model that cannot be used: {error}") from error
            self.greetings[client] = greeting
        elif known.samples != greeting.samples:
            log.warning(
                "Client %s told %s samples when it joined and tells %s now; the first number counts",
                client, known.samples, greeting.samples,
            )  # fmt: skip
        self.nodes[client] = node
        log.info("Client %s is connected", client)


def read_hello(facts: Mapping[str, Any], name: ClientId | None) -> Greeting:
    """A client's own words, checked; ``name`` is who it is, where that is known better."""
    if "error" in facts:
        raise Malformed(str(facts["error"]))
    client = name or facts.get("client")
    if not isinstance(client, str) or not NAME.fullmatch(client):
        raise Malformed(
            f"calls itself {client!r}; a name has 1 to 64 letters, digits, dots, dashes and underscores, no dot first"
        )
    if facts.get("role") not in ("participant", "newcomer"):
        raise Malformed(f"comes as {facts.get('role')!r}; expected a participant or a newcomer")
    size, samples = facts.get("size", 0), facts.get("samples", 0)
    if not isinstance(size, int) or size < 0:
        raise Malformed(f"has a model of {size!r} parameters")
    least = 1 if facts["role"] == "participant" else 0
    if type(samples) is not int or not least <= samples < MOST_SAMPLES:
        raise Malformed(f"says that it has {samples!r} training samples")
    try:
        model = _model(json.loads(facts["model"][:LONGEST])) if "model" in facts else None
        splits = tuple(str(facts["splits"])[:LONGEST].split())
        return Greeting(client, str(facts["mark"])[:LONGEST], facts["role"], splits, model, size, samples)
    except (KeyError, ValueError, TypeError, RecursionError):
        raise Malformed("sent a greeting that cannot be read") from None


def _model(given: list[Any]) -> tuple[str, tuple[tuple[str, Any], ...]]:
    name, options = given
    return str(name), tuple((str(key), tuple(v) if isinstance(v, list) else v) for key, v in options)
