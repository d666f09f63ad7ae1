# SPDX-License-Identifier: Apache-2.0
"""A figure of matplotlib that a notebook shows, and that keeps its style when it is saved. Loads matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Drawn(Figure):
    """Made without pyplot, which would look for a screen and keep the figure; hence nobody else shows it."""

    def __init__(self, style: Mapping[str, Any], size: tuple[float, float]) -> None:
        super().__init__(figsize=size, layout="constrained")
        self._style: Any = dict(style)
        FigureCanvasAgg(self)

    def savefig(self, fname: Any, **options: Any) -> None:
        """As matplotlib does, with fonts that publishers take: type 42 in PDF, text as text in SVG."""
        with mpl.rc_context(self._style):
            super().savefig(fname, **options)

    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        self.savefig(drawn, format="png")
        return drawn.getvalue()
