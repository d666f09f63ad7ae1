# SPDX-License-Identifier: Apache-2.0
"""Samples that are sequences of tokens: whole numbers from 0, which stay whole numbers wherever they go.

They are never converted to another type: bfloat16 cannot tell 257 from 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

UNLABELLED = -1
"""The label of a token that has none, such as padding: it counts neither in the loss nor in the metric."""


class Tokens(NamedTuple):
    """What is known of samples of tokens; None in its place: samples are numbers."""

    vocabulary: int
    """How many different tokens there are: 0 to ``vocabulary - 1``."""
    per_token: bool = False
    """Labels and outputs are one for each token, (length,) and (length, classes); else one for a sample."""

    @classmethod
    def of_json(cls, content: Sequence[Any] | None) -> Tokens | None:
        """What a file says of them."""
        if not content:
            return None
        vocabulary, per_token = content
        return cls(int(vocabulary), bool(per_token))

    def fault(self, lowest: int, highest: int) -> str:
        """What is wrong with samples whose tokens go from ``lowest`` to ``highest``, in words; empty if nothing is."""
        if lowest >= 0 and highest < self.vocabulary:
            return ""
        return f"tokens from {lowest} to {highest}; expected 0 to {self.vocabulary - 1}"
