# SPDX-License-Identifier: Apache-2.0
"""Waiting for nodes: until enough participants are there to begin with, or a newcomer is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fedloom.core.errors import RoundError
from fedloom.core.trees import ClientId
from fedloom.deploy.lobby import Lobby
from fedloom.deploy.roster import in_order

OTHER_NETWORK = "has another network than the others; the method needs one for all"

PAUSE = 2.0
"""Seconds between looks for nodes."""

Tell = Callable[[str], None]
"""Takes a text for whoever watches: what is waited for."""


def pause() -> None:
    """Time for nodes to come."""
    time.sleep(PAUSE)


def wait_for(lobby: Lobby, number: int, seconds: float, tell: Tell, *, same_model: bool = False) -> None:
    """Until so many participants are connected, at most so long; then a ``RoundError`` says who was refused.

    ``same_model``: with one network, the commonest of those that came. Clients with another are refused when there are
    enough, not before: who comes first should not decide which network it is.
    """
    end, said = time.monotonic() + seconds, (-1, 0)
    while True:
        lobby.refresh()
        there = [client for client in lobby.nodes if lobby.greetings[client].role == "participant"]
        if same_model and there:
            networks = [lobby.greetings[client].model for client in in_order(there)]
            common = max(networks, key=networks.count)  # the first of equals
            there = [client for client in there if lobby.greetings[client].model == common]
        if len(there) >= number:
            for client in in_order([c for c in lobby.nodes if same_model and lobby.greetings[c].model != common]):
                lobby.refuse(client, OTHER_NETWORK)
            return
        if time.monotonic() > end:
            advice = "Start more nodes, or set nodes lower."
            if lobby.refused:
                advice = f"Refused: {'; '.join(lobby.refused[-3:])}. See to them, or set nodes lower."
            other = sum(lobby.greetings[client].role == "participant" for client in lobby.nodes) > len(there)
            alike = " with one network, which the method needs," if other else ""
            raise RoundError(
                f"{len(there)} clients{alike} are connected, and {number} are needed; waited {seconds:g} seconds."
                f" {advice}"
            )
        if (len(there), len(lobby.refused)) != said:
            said = (len(there), len(lobby.refused))
            latest = f"; refused: {lobby.refused[-1]}" if lobby.refused else ""
            tell(f"for {number} clients; {are_connected(len(there))}{latest}")
        pause()


def are_connected(number: int) -> str:
    """How many are there, in words."""
    return f"{number or 'none'} {'is' if number < 2 else 'are'} connected"


def wait_for_newcomers(lobby: Lobby, look: Callable[[], Sequence[ClientId]], seconds: float, tell: Tell) -> None:
    """Until a newcomer is connected; ``look`` takes in who came and gives the newcomers that are there."""
    end = time.monotonic() + seconds
    there = look()
    if not there:
        tell("for newcomers; none is connected")
    while not there:
        if time.monotonic() > end:
            refused = f" Refused: {'; '.join(lobby.refused[-3:])}." if lobby.refused else ""
            raise RoundError(f"No newcomer came within {seconds:g} seconds.{refused} Start its node, then try again.")
        pause()
        there = look()
