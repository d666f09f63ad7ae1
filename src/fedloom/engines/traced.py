# SPDX-License-Identifier: Apache-2.0
"""Steps on a CPU as the bare list of their operations, traced once and run from then on.

Under ``vmap`` and ``grad`` every operation of a step passes through several layers of Python and dispatch: two
milliseconds a step, twice as long as eight small clients compute; under ``grad`` alone, half of the time of a small
client's step. The list has the same operations on the same numbers in the same order, so it gives the same bits. What
is the same in every step is computed once, what is computed twice is computed once, and parameters are stepped on in
place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fedloom.engines.cache import FastForms, Way

TRACE_AFTER = 100
"""Calls of a batched kind before it is traced, which costs about as much."""

TRACE_SINGLE_AFTER = 2000
"""The same for the steps of one client, which gain a third of a millisecond each."""

KEPT = 1024
"""Traces kept at a time: each holds the constants of its network."""

aten = torch.ops.aten
_FILLED = {
    f.default for f in (aten.ones_like, aten.zeros_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full)
}
_SUMS: dict[Any, Callable[..., Any]] = {aten.add.Tensor: torch.add, aten.lerp.Tensor: torch.lerp}
"""What may be written in the place of a term, and the function that does it."""
_TIMES = (aten.mul.Scalar, aten.mul.Tensor)
_UNDECLARED = {
    aten._unsafe_view.default, aten.unsafe_chunk.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default
}  # fmt: skip
"""Operations that give views without saying so."""

_DIRECT: dict[Any, Callable[..., Any]] = {
    overload: getattr(torch, overload._schema.name.removeprefix("aten::"))
    for overload in (
        aten.add.Tensor, aten.bmm.default, aten.cat.default, aten.clamp.default, aten.div.Tensor, aten.gather.default,
        aten.mm.default, aten.mul.Tensor, aten.ne.Scalar, aten.neg.default, aten.pow.Tensor_Scalar,
        aten.reciprocal.default, aten.relu.default, aten.squeeze.dims, aten.sqrt.default, aten.stack.default,
        aten.sub.Tensor, aten.sum.dim_IntList, aten.transpose.int, aten.unsqueeze.default, aten.where.self,
    )
} | {aten.view.default: Tensor.view, aten.expand.default: Tensor.expand}  # fmt: skip
"""What a user calls for the same operation with the same arguments; ``torch.ops`` takes half a microsecond more.

Only the operations of which a step of a dense network has many: there that is several per cent of the step.
"""

Run = Callable[..., list[Tensor]]


class Traces:
    """Steps by kind. A kind must stand for one function, whatever is not in its arguments.

    ``notes`` is told of steps that cannot be traced, which run as they are.
    """

    def __init__(self, notes: list[str], *, single: bool = False) -> None:
        self._single = single
        self._forms: FastForms[Run] = FastForms(notes, KEPT)

    def steps(
        self,
        kind: Hashable,
        label: str,
        step: Callable[..., Any],
        fixed: Any,
        carry: Any,
        batches: Iterable[tuple[Tensor, ...]],
    ) -> Any:
        """The carry after ``carry = step(fixed, carry, batch)`` for each of ``batches``; ``label`` is for notes.

        The carry that is given is left as it is; the steps work on a copy, which traced ones write into. A kind is
        traced anew for every form of its arguments, shapes, strides and types: the last batch of a pass is another one
        than those before.
        """
        still, structure = pytree.tree_flatten(fixed)
        moving, form = pytree.tree_flatten(carry)
        moving = _own(moving)
        name = (kind, str(structure), *map(_form, still))
        built, after = str(form), TRACE_SINGLE_AFTER if self._single else TRACE_AFTER
        last: Hashable = None
        for batch in batches:
            # strides too: whether a view is a view depends on them
            whole = (built, *map(_form, moving), *map(_form, batch))
            if whole != last:
                last, run, is_known = whole, None, False
            if not is_known and self._forms.seen((name, whole)) > after:
                now = pytree.tree_unflatten(moving, form)
                run, is_known = self._traced((name, whole), label, step, fixed, now, batch), True
            if run is None:
                moving, left = pytree.tree_flatten(step(fixed, pytree.tree_unflatten(moving, form), batch))
                moving = _own(moving)
                if left != form:  # a dict in another order, say
                    form, built = left, str(left)
            else:
                with torch.no_grad():  # of what a network holds besides its parameters
                    moving = run(*still, *moving, *batch)
        return pytree.tree_unflatten(moving, form)

    def _traced(self, kind: Hashable, label: str, *step: Any) -> Run | None:
        return self._forms.get(kind, label, lambda: [Way("traced", partial(_trace, *step))])


def _own(leaves: list[Tensor]) -> list[Tensor]:
    """Copies: a traced step writes into its carry, and the start of training is often the same tensor twice."""
    return [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]


def _copy(leaf: Tensor) -> Tensor:
    """A copy laid out the same; itself where there can be none, as of every other column."""
    copied = leaf.detach().clone()
    return copied if _form(copied) == _form(leaf) else leaf.detach()


def _form(leaf: Tensor) -> tuple[Any, ...]:
    return leaf.shape, leaf.stride(), leaf.dtype


def _trace(step: Callable[..., Any], fixed: Any, carry: Any, batch: tuple[Tensor, ...]) -> Run:
    """A step as its operations, from the leaves of its arguments to those of the carry; fails where that cannot be.

    It cannot be where what is computed depends on values, by reading one, by a shape that follows from values, or by
    autocast: the trace would hold for these arguments alone, and give wrong numbers in silence for others.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second, and not every run needs it

    flat, structure = pytree.tree_flatten((fixed, carry, batch))
    moving = range(len(pytree.tree_leaves(fixed)), len(flat) - len(batch))

    def flattened(*flat: Tensor) -> list[Any]:
        fixed, carry, batch = pytree.tree_unflatten(flat, structure)
        leaves, after = pytree.tree_flatten(step(fixed, carry, batch))
        if after != pytree.tree_structure(carry):
            raise TypeError("a step must leave the carry as it is built")
        return leaves

    flat = [_copy(leaf) for leaf in flat]  # a network may write into its input
    with _Unread():
        graph = make_fx(flattened)(*flat)
    if any(_shaped_by_values(node) for node in graph.graph.nodes):
        raise TypeError("the shape of what a step computes depends on values")
    _tidy(graph, flat, moving)
    run: Run = graph.forward
    return run


class _Unread(TorchFunctionMode):
    """Within it, values cannot be read: a trace would take them for constants. It refuses ``item`` by itself.

    Nor can a network compute in other types than it is given (autocast), of which a trace has half.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("a step uses autocast")  # a TypeError of an operator would get other words
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            raise RuntimeError("a step reads values")
        return func(*args, **(kwargs or {}))


def _shaped_by_values(node: fx.Node) -> bool:
    """Whether its shape depends on values, as that of ``x[x > 0]``: a trace would take it for a constant."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape not in target.tags:
        return False
    if target is aten.index.Tensor:
        places = [at for at in node.args[1] if isinstance(at, fx.Node)]  # type: ignore[union-attr]
        return any(at.meta["val"].dtype in (torch.bool, torch.uint8) for at in places)
    return True


def _tidy(graph: fx.GraphModule, flat: list[Tensor], moving: range) -> None:
    """Leave out what need not be done in every step, and have the carry written in place.

    Only where all operations are pure: one that writes into a tensor, or draws, must be done where and when it stands.
    Results are parted from each other in any case, since the next step writes into them.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    carry = [inputs[i] for i in moving]
    pure = all(node.op != "call_function" or _pure(node) for node in graph.graph.nodes)
    values = _simplify(graph, dict(zip(inputs, flat))) if pure else {}
    _part_results(graph, carry)
    if pure:
        _write_in_place(graph, carry, values)
    for node in graph.graph.nodes:  # last: what goes before knows operations by their overloads
        node.target = _DIRECT.get(node.target, node.target)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _pure(node: fx.Node) -> bool:
    """Whether it gives the same whenever it is called, and changes nothing."""
    target = node.target
    if target is operator.getitem:
        return True
    assert isinstance(target, torch._ops.OpOverload)
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _simplify(graph: fx.GraphModule, values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Replace each operation by its value if that is always the same, or by an earlier node that gives the same.

    ``values`` are those of the inputs; the result has those of all nodes.
    """
    constant: set[fx.Node] = set()
    met: dict[Any, fx.Node] = {(node, value.data_ptr(), _form(value)): node for node, value in values.items()}
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            if node.op == "get_attr":
                values[node] = getattr(graph, str(node.target))
            continue
        arguments, options = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        value = values[node] = node.target(*arguments, **options)
        if isinstance(value, Tensor) and (node.target in _FILLED or constant.issuperset(node.all_input_nodes)):
            name = f"constant_{len(constant)}"
            graph.register_buffer(name, value)
            with graph.graph.inserting_before(node):
                same = graph.graph.get_attr(name)
            values[same] = value
            constant.add(same)
        elif node.target in _TIMES and node.args[1] == 1 and _form(value) == _form(arguments[0]):
            same = node.args[0]
        else:
            keys: list[Any] = [repr((node.target, node.args, node.kwargs))]
            if isinstance(value, Tensor) and value.numel():
                # views of one tensor that show the same memory in the same form
                keys.append((_root(node), value.data_ptr(), _form(value)))
            same = next((met[key] for key in keys if key in met), node)
            met |= dict.fromkeys(keys, same)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)
    return values


def _views(node: fx.Node) -> bool:
    """Whether it shows the tensor that it is given, as far as that can be told without running it."""
    if node.target in _UNDECLARED:
        return True
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory this one may show."""
    while _views(node) or (node.target is operator.getitem and _views(node.all_input_nodes[0])):
        node = node.all_input_nodes[0]
    return node


def _part_results(graph: fx.GraphModule, carry: list[fx.Node]) -> None:
    """See to it that no two results share memory, nor one with an input but that in its own place."""
    output = graph.graph.output_node()
    (results,) = output.args
    assert isinstance(results, list | tuple)
    parted, taken = [], set(carry)
    for place, result in zip(carry, results):
        assert isinstance(result, fx.Node)
        root = _root(result)
        if result is not place and (root in taken or root.op in ("placeholder", "get_attr")):
            with graph.graph.inserting_before(output):
                result = graph.graph.call_function(aten.clone.default, (result,))
        taken.add(root)
        parted.append(result)
    output.args = (parted,)


def _write_in_place(graph: fx.GraphModule, carry: list[fx.Node], values: dict[fx.Node, Any]) -> None:
    """Have sums with a leaf of the carry that take its place be written there: parameters that take a step, mostly.

    It is safe only if nobody reads the leaf, or a view of it, after that, and the other term shows none of its memory.
    """
    (results,) = graph.graph.output_node().args
    assert isinstance(results, list | tuple)
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    shown: dict[fx.Node, list[fx.Node]] = {place: [] for place in carry}
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "output") and _root(node) in shown:
            shown[_root(node)].append(node)
    for place, result in zip(carry, results):
        assert isinstance(result, fx.Node)
        if result.target not in _SUMS or place not in result.args:
            continue
        readers = {user for node in (place, *shown[place]) for user in node.users} - {result}
        alone = not any(other in shown[place] for other in result.args)
        if alone and _form(values[place]) == _form(values[result]) and all(order[r] < order[result] for r in readers):
            result.target = _SUMS[result.target]
            result.kwargs = {**result.kwargs, "out": place}
