# SPDX-License-Identifier: Apache-2.0
"""What a finding says: better than chance, no better, or nothing at all."""

from __future__ import annotations

from fedloom.audit.finding import Measure, judged, side

GOOD, BAD = side([0.9, 0.8, 0.9], [0.5] * 3, higher=True), side([0.6, 0.4, 0.5], [0.5] * 3, higher=True)


def test_an_interval_decides() -> None:
    assert GOOD.beats and not BAD.beats
    assert not side([0.9, 0.8], [0.5, 0.5], higher=False).beats
    assert side([0.1, 0.2], [0.5, 0.5], higher=False).beats
    assert not side([0.9], [0.5], higher=True).beats, "one client says nothing of others"


def test_clients_are_compared_with_their_own_guesses() -> None:
    """Errors that differ by client, each a little below that client's guess."""
    values, guesses = [0.1, 0.5, 0.9, 0.3], [0.15, 0.56, 0.95, 0.34]
    assert side(values, guesses, higher=False).beats


def test_a_verdict_needs_its_control() -> None:
    assert judged("it", Measure("", GOOD, GOOD)).startswith("The attack succeeded")
    assert "does not prove" in judged("it", Measure("", BAD, GOOD))
    assert judged("it", Measure("", GOOD, BAD)).startswith("The control failed")
