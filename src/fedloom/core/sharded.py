# SPDX-License-Identifier: Apache-2.0
"""Tensors whose numbers live in other processes, cut along their first dimension: for looms larger than one GPU.

A ``Sharded`` is a leaf of a state like any other, and a value: what it stands for never changes, and shards forget
their parts when nobody refers to it. What is done number by number, such as a step of an optimiser, is done where the
numbers are, by itself; so are sums and norms, whose parts are added in the order of shards. A product with a cohort's
features is asked for by ``through``, which autograd can go back through: then the gradient of the parameters stays
where they are, and that of the features comes back. Nothing else works on a ``Sharded``; ``whole`` gathers it.

Who runs the processes is not known here (``Shards``): ``engines.shards`` has them run by Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom.core.trees import Tree, leaves, tree_map

aten = torch.ops.aten

AT_ONCE = 1 << 24
"""Bytes that are gathered at a time."""

Work = Callable[..., tuple[Sequence[Tensor], Any]]
"""What a shard does: from its parts and what it is sent to the tensors that it keeps and the answer that it gives."""


class Shards(Protocol):
    """Processes that hold the parts of sharded tensors."""

    number: int

    def run(self, work: Work, arguments: Sequence[Any], kept: Sequence[Held], *, answers: bool) -> list[Any]:
        """Have each shard do ``work`` with ``arguments``, and keep the tensors that it makes under the names ``kept``.

        In ``arguments`` each shard finds its part of a ``Sharded`` and its item of an ``Each``; all else is the same
        for all. Without ``answers`` nobody waits for it: what comes later is done later.
        """


class Held:
    """The name under which shards hold their parts of a tensor, which they may forget when this is gone."""

    def __init__(self) -> None:
        self.number = next(_numbers)


@dataclass(frozen=True, eq=False)
class Each:
    """An argument of which every shard gets its own item."""

    items: Sequence[Any]


class Sharded(Tensor):
    """A tensor by its shape; shard i has the i-th of ``sizes`` rows."""

    shards: Shards
    held: Held

    @staticmethod
    def __new__(
        cls, shards: Shards, held: Held, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Sharded:
        """Parts that ``shards`` hold already; ``device`` is where sums and gathered numbers go."""
        made: Sharded = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.shards, made.held = shards, held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Sharded({tuple(self.shape)}, {self.dtype}, {self.shards.number} shards)"

    @property
    def sizes(self) -> list[int]:
        """The rows of each shard."""
        return [len(rows) for rows in ranges(len(self), self.shards.number)]

    def whole(self) -> Tensor:
        """All of it, here."""
        return torch.cat([part.to(self.device) for part in self.parts()])

    def parts(self) -> Iterator[Tensor]:
        """Its rows in their order, some at a time."""
        at_once = max(1, AT_ONCE * len(self) // max(1, self.numel() * self.element_size()))
        for shard, rows in enumerate(self.sizes):
            for start in range(0, rows, at_once):
                wanted = [
                    range(start, min(start + at_once, rows)) if i == shard else range(0)
                    for i in range(self.shards.number)
                ]
                yield _told(self.shards, _give, self, Each(wanted))[shard]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The few operations that are done where the numbers are."""
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].shards, args[0].held, args[0].shape, args[0].dtype, args[0].device)
        if func is aten.sum.default:
            return _added(_told(args[0].shards, _sum, args[0])).to(args[0].device)
        if func is aten._foreach_norm.Scalar:
            return [_norm(one, *args[1:]) for one in args[0]]
        return _by_number(func, args, kwargs or {})


def ranges(rows: int, shards: int) -> list[range]:
    """Which of so many rows each shard has."""
    return [range(rows * i // shards, rows * (i + 1) // shards) for i in range(shards)]


def made(
    shards: Shards, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, work: Work, *given: Any
) -> list[Sharded]:
    """Tensors of these shapes, whose parts ``work`` makes of what is ``given``, without being waited for."""
    kept = [Held() for _ in shapes]
    shards.run(work, given, kept, answers=False)
    return [Sharded(shards, held, shape, dtype, device) for held, shape in zip(kept, shapes)]


def dealt(shards: Shards, tensor: Tensor, device: torch.device) -> Sharded:
    """A tensor of this process, dealt to shards, as one of ``device``. They have it when this returns."""
    parts, held = [tensor[rows.start : rows.stop] for rows in ranges(len(tensor), shards.number)], Held()
    shards.run(_take, [Each(parts)], [held], answers=True)
    return Sharded(shards, held, tensor.shape, tensor.dtype, device)


def gathered(tree: Tree) -> Any:
    """A tree with all of its leaves here."""
    return tree_map(lambda leaf: leaf.whole() if isinstance(leaf, Sharded) else leaf, tree)


def as_in(here: Any, tree: Any, device: torch.device) -> Any:
    """A tree on ``device``, but for leaves that are sharded ``here``: they go where those are, and nowhere else."""
    if isinstance(tree, Mapping):
        known = here if isinstance(here, Mapping) else {}
        return {name: as_in(known.get(name), branch, device) for name, branch in tree.items()}
    if isinstance(tree, Sharded):
        return tree
    return dealt(here.shards, tree, here.device) if isinstance(here, Sharded) else tree.to(device)


def is_sharded(tree: Tree) -> bool:
    """Whether a leaf of it is."""
    return any(isinstance(leaf, Sharded) for _, leaf in leaves(tree))


def through(layer: Callable[..., Tensor], x: Tensor, *params: Sharded, cut: bool) -> Tensor:
    """``layer(x, *params)``, worked out where the parameters are; the answers follow each other in dimension 1.

    ``cut``: shards see x as they have the parameters, cut along dimension 1; else all see all of it. ``layer`` is a
    function of some module, which shards import.

    Where autograd records, somebody wants to go back through it from gradients of their own, as looms do. Then the
    answer's numbers stay where they are: here they are NaN.
    """
    answer: Tensor
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *params)):
        answer = _Through.apply(layer, cut, x, *params)
    else:
        parts = _told(params[0].shards, _answer, layer, _seen(x, params[0], cut), *params)
        answer = torch.cat([part.to(x.device) for part in parts], dim=1)
    return answer


def _seen(x: Tensor, param: Sharded, cut: bool) -> Any:
    return Each(x.split(param.sizes, dim=1)) if cut else x


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Any, cut: bool, x: Tensor, *params: Sharded) -> Tensor:
        ctx.layer, ctx.cut, ctx.x, ctx.params = layer, cut, x.detach(), params
        return x.new_full((), torch.nan).expand(layer(*map(_shape_only, (x, *params))).shape)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        x, params = ctx.x, ctx.params
        shards, rows = params[0].shards, params[0].sizes
        wanted = ctx.needs_input_grad[3:]
        kept = [Held() for want in wanted if want]
        given = [ctx.layer, wanted, Each(slopes[0].split(rows, dim=1)), _seen(x, params[0], ctx.cut), *params]
        told = [part.to(x.device) for part in shards.run(_pulled, given, kept, answers=True)]
        names = iter(kept)
        grads = [
            Sharded(shards, next(names), param.shape, param.dtype, param.device) if want else None
            for want, param in zip(wanted, params)
        ]
        return None, None, torch.cat(told, dim=1) if ctx.cut else _added(told), *grads


class Shard:
    """What one of the processes does and holds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: dict[int, Tensor] = {}

    def run(self, work: Work, arguments: Sequence[Any], kept: Sequence[int], gone: Sequence[int]) -> Any:
        """As ``Shards.run``; a part is named by its ``Name``."""
        for number in gone:
            self._parts.pop(number, None)
        parts, answer = work(*pytree.tree_map(self._here, list(arguments)))
        self._parts |= {number: part.detach().to(self._device) for number, part in zip(kept, parts, strict=True)}
        return answer

    def _here(self, leaf: Any) -> Any:
        if isinstance(leaf, Name):
            return self._parts[leaf.number]
        return leaf.to(self._device) if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True)
class Name:
    """A part in a shard's arguments."""

    number: int


def sent_to(shard: int, arguments: Sequence[Any]) -> list[Any]:
    """The arguments of one shard, as ``Shard.run`` takes them."""
    own = [argument.items[shard] if isinstance(argument, Each) else argument for argument in arguments]
    named: list[Any] = pytree.tree_map(lambda leaf: Name(leaf.held.number) if isinstance(leaf, Sharded) else leaf, own)
    return named


def _told(shards: Shards, work: Work, *given: Any) -> list[Tensor]:
    return shards.run(work, given, (), answers=True)


def _by_number(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation number by number, or one that makes a tensor like another, in all shards."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    first = next(leaf for leaf in tensors if isinstance(leaf, Sharded))
    alike = all(leaf.shape == first.shape if isinstance(leaf, Sharded) else not leaf.dim() for leaf in tensors)
    known = torch.Tag.pointwise in func.tags or func is aten.zeros_like.default
    if not (known and alike) or func._schema.is_mutable:
        raise NotImplementedError(f"{func} is not for tensors that are divided over {first.shards.number} shards")

    like = func(*pytree.tree_map(_shape_only, args), **pytree.tree_map(_shape_only, kwargs))
    name = func.name().partition("::")[2]
    return made(first.shards, [first.shape], like.dtype, first.device, _operate, name, list(args), dict(kwargs))[0]


def _shape_only(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf


def _norm(tensor: Tensor, order: float) -> Tensor:
    if isinstance(tensor, Sharded):
        tensor = torch.stack([part.to(tensor.device) for part in _told(tensor.shards, _norm_here, tensor, order)])
    norm: Tensor = torch.linalg.vector_norm(tensor, order)
    return norm


def _added(parts: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def _give(part: Tensor, rows: range) -> Any:
    return (), part[rows.start : rows.stop]


def _take(part: Tensor) -> Any:
    return [part.clone()], None  # which may lie in memory that others have sent it in


def _sum(part: Tensor) -> Any:
    return (), part.sum()


def _norm_here(part: Tensor, order: float) -> Any:
    return (), torch.linalg.vector_norm(part, order) if part.numel() else part.new_zeros(())


def _operate(name: str, args: Sequence[Any], kwargs: Any) -> Any:
    operation, _, overload = name.partition(".")
    return [getattr(getattr(aten, operation), overload or "default")(*args, **kwargs)], None


def _answer(layer: Callable[..., Tensor], x: Tensor, *params: Tensor) -> Any:
    with torch.no_grad():
        return (), layer(x, *params)


def _pulled(
    layer: Callable[..., Tensor], wanted: Sequence[bool], slope: Tensor, x: Tensor, *params: Tensor
) -> tuple[Sequence[Tensor], Tensor]:
    """The gradients of the parameters that are ``wanted``, to keep, and that of x."""
    x = x.detach().requires_grad_()
    own = [param.detach().requires_grad_(want) for param, want in zip(params, wanted)]
    with torch.enable_grad():
        answer = layer(x, *own)
    grads = torch.autograd.grad(answer, [x, *(param for param in own if param.requires_grad)], slope)
    return grads[1:], grads[0]


_numbers = count(1)
