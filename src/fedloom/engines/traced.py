# SPDX-License-Identifier: Apache-2.0
"""A batched step on a CPU as the bare list of its operations, traced once and run from then on.

Under ``vmap`` and ``grad`` every operation of a step passes through several layers of Python and dispatch: two
milliseconds a step, as long as eight small clients compute. The list has the same operations on the same numbers in the
same order, so it gives the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

TRACE_AFTER = 100
"""Calls of a kind before it is traced, which costs about as much."""

_VIEWS = {
    torch.ops.aten.expand.default,
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.permute.default,
}


class Traces:
    """Functions of trees of tensors, by kind. A kind must stand for one function, whatever is not in its arguments."""

    def __init__(self) -> None:
        self._calls: Counter[Hashable] = Counter()
        self._traced: dict[Hashable, tuple[Callable[..., Any], pytree.TreeSpec] | None] = {}

    def call(self, kind: Hashable, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(*arguments)``."""
        flat, structure = pytree.tree_flatten(arguments)
        # strides too: whether a view is a view depends on them
        whole = (kind, str(structure), *((leaf.shape, leaf.stride(), leaf.dtype) for leaf in flat))
        if whole not in self._traced:
            self._calls[whole] += 1
            if self._calls[whole] <= TRACE_AFTER:
                return function(*arguments)
            self._traced[whole] = _trace(function, flat, structure)
        traced = self._traced[whole]
        if traced is None:
            return function(*arguments)
        return pytree.tree_unflatten(traced[0](*flat), traced[1])


def _trace(
    function: Callable[..., Any], flat: list[Tensor], structure: pytree.TreeSpec
) -> tuple[Callable[..., Any], pytree.TreeSpec] | None:
    """The operations of a call and the structure of its result; None where it cannot be traced."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second, and not every run needs it

    result: list[pytree.TreeSpec] = []

    def flattened(*flat: Tensor) -> list[Any]:
        leaves, spec = pytree.tree_flatten(function(*pytree.tree_unflatten(flat, structure)))
        result.append(spec)
        return leaves

    try:
        # a tensor that is given twice, as the start of training often is, must be two inputs
        graph = make_fx(flattened)(*(leaf.detach() for leaf in flat))
        _drop_idle_views(graph, flat)
    except Exception:
        return None
    return graph, result[0]


def _drop_idle_views(graph: fx.GraphModule, flat: list[Tensor]) -> None:
    """Take out views that show a tensor as it is, and whatever is computed for nobody."""
    form: dict[fx.Node, tuple[Any, Any]] = {}

    class Watched(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                form[n] = value.shape, value.stride()
            return value

    Watched(graph).run(*flat)
    for node in list(graph.graph.nodes):
        if node.target in _VIEWS and form[node] == form[node.args[0]]:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
