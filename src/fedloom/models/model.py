# SPDX-License-Identifier: Apache-2.0
"""Any ``nn.Module`` as pure functions of its parameters, for one client or a stack of them.

Two things keep a plain module from running for a padded stack of clients: BatchNorm, whose statistics must leave
padding out, and dropout, whose masks must not depend on how clients are scheduled. Both are replaced at the moment
they are called (``torch.nn.functional.batch_norm`` and ``dropout*``), so the module itself stays as its author wrote
it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fedloom.core.errors import ConfigError
from fedloom.core.memory import is_full
from fedloom.core.random import fold, uniform
from fedloom.core.trees import Params, Tree
from fedloom.models.batch_norm import batch_norm
from fedloom.models.load import fill
from fedloom.models.spec import ModelSpec


class Model:
    """A target network: see ``core.contract.Model`` for what each member is."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        training_dtype: torch.dtype | None = None,
    ) -> None:
        self.spec = spec
        self.device, self.dtype = torch.device(device), dtype
        self.training_dtype = training_dtype or dtype
        self.input_shape, self.num_outputs, self.tokens = spec.input_shape, spec.num_outputs, spec.tokens
        self.input_dtype = torch.int64 if spec.tokens else dtype
        module = _seeded_build(spec, 0)
        _check_parameters(spec, module)
        module = module.to(self.device, dtype)
        self._eval, self._train = copy.deepcopy(module).eval(), module.train()
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(p.shape) for n, p in trained.items()}
        self._head_layer, self.head = _head(module)
        self.norm = frozenset(
            f"{layer}.{name}"
            for layer, one in module.named_modules()
            if isinstance(one, _NORMS)
            for name, _ in one.named_parameters(recurse=False)
            if f"{layer}.{name}" in self.shapes
        )
        # parameters that the module's author froze are constants, and go where buffers go
        constant = [
            *self._eval.named_buffers(),
            *((n, p) for n, p in self._eval.named_parameters() if n not in trained),
        ]
        self._buffers = {n: b.detach().clone() for n, b in constant}
        self._frozen = frozenset(n for n, _ in module.named_parameters() if n not in trained)
        self._special = self._probe()
        self._cut = self._find_cut()
        self._channels_last = self._takes_channels_last()

    def __reduce__(self) -> tuple[Callable[..., Model], tuple[Any, ...]]:
        """For Ray's actors, which build the model that the spec names; each knows but one GPU."""
        return _rebuilt, (self.spec, self.device.type, self.dtype, self.training_dtype)

    def init(self, seed: int) -> dict[str, Tensor]:
        module = _seeded_build(self.spec, seed)
        return {n: p.detach().to(self.device, self.dtype) for n, p in module.named_parameters() if n in self.shapes}

    def fresh_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self._buffers.items()}

    def train(
        self, params: Params, buffers: Tree, x: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self._trained(functional_call, params, buffers, x, mask, key)

    def features(self, params: Params, buffers: Tree, x: Tensor) -> Tensor:
        return self._until_head(self._eval, (dict(params), dict(buffers)), (self._arranged(x),))

    def train_features(
        self, params: Params, buffers: Tree, x: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self._trained(self._until_head, params, buffers, x, mask, key)

    def classify(self, params: Params, z: Tensor) -> Tensor:
        layer = self._eval.get_submodule(self._head_layer)
        if self._cut.is_last:
            own = {name.removeprefix(f"{self._head_layer}."): value for name, value in params.items()}
            inside = {name: own[name] for name, _ in layer.named_parameters() if name in own}
            outputs: Tensor = functional_call(layer, inside, (z,))
            return outputs
        # what follows the head is only known as the rest of the forward pass
        dtype = self.input_dtype if self.tokens else z.dtype
        x = torch.zeros(len(z), *self.spec.input_shape, dtype=dtype, device=z.device)
        hook = layer.register_forward_pre_hook(lambda layer, inputs: (z,))
        try:
            outputs = functional_call(self._eval, (dict(params), self._buffers), (x,))
        finally:
            hook.remove()
        return outputs

    @property
    def feature_shape(self) -> tuple[int, ...] | None:
        return self._cut.shape

    @property
    def has_linear_head(self) -> bool:
        return self._cut.is_last and isinstance(self._eval.get_submodule(self._head_layer), nn.Linear)

    def _find_cut(self) -> _Cut:
        """Where the head begins, found by a forward pass."""
        inputs: list[Any] = []
        results: list[Any] = []
        layer = self._eval.get_submodule(self._head_layer)
        hooks = [
            layer.register_forward_pre_hook(lambda layer, given: inputs.append(given)),
            layer.register_forward_hook(lambda layer, given, result: results.append(result)),
        ]
        try:
            x = torch.zeros(2, *self.spec.input_shape, device=self.device, dtype=self.input_dtype)
            with torch.no_grad():
                outputs = functional_call(self._eval, self.fresh_buffers(), (x,))
        finally:
            for hook in hooks:
                hook.remove()
        one = len(inputs) == 1 and len(inputs[0]) == 1 and isinstance(inputs[0][0], Tensor) and len(inputs[0][0]) == 2
        return _Cut(tuple(inputs[0][0].shape[1:]), results[0] is outputs) if one else _Cut(None, False)

    def _until_head(self, module: nn.Module, state: Any, x: tuple[Tensor]) -> Tensor:
        """What the head gets. The forward pass ends there."""

        def stop(layer: nn.Module, inputs: tuple[Tensor, ...]) -> NoReturn:
            raise _Reached(inputs[0])

        hook = module.get_submodule(self._head_layer).register_forward_pre_hook(stop)
        try:
            functional_call(module, state, x)
        except _Reached as reached:
            return reached.features
        finally:
            hook.remove()
        raise ConfigError(f"{self.spec}: the forward pass does not call its output layer, {self._head_layer}.")

    def _trained(
        self,
        call: Callable[[nn.Module, Any, tuple[Tensor]], Tensor],
        params: Params,
        buffers: Tree,
        x: Tensor,
        mask: Tensor,
        key: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # the call updates the buffers in place, or puts new ones into this dict
        state: dict[str, Tensor] = {**params, **{name: buffer.clone() for name, buffer in buffers.items()}}
        kept = [name for name in buffers if name not in self._frozen]
        if self.training_dtype != self.dtype:
            # running statistics keep their type: batch_norm computes them in it
            state |= {n: v.to(self.training_dtype) for n, v in state.items() if n not in kept}
            x = x if self.tokens else x.to(self.training_dtype)
        with _Replaced(mask, key) if self._special else nullcontext():
            outputs = call(self._train, state, (self._arranged(x),))
        return outputs.to(self.dtype), {**buffers, **{name: state[name] for name in kept}}

    def __call__(self, params: Params, buffers: Tree, x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self._eval, (dict(params), dict(buffers)), (self._arranged(x),))
        return outputs

    def module(self, params: Params, buffers: Tree) -> nn.Module:
        """The module itself with these parameters, in evaluation mode: what a user deploys."""
        return fill(copy.deepcopy(self._eval), {**params, **buffers}, "the tree of parameters and buffers")

    @cached_property
    def size(self) -> int:
        """The number of trained parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def _arranged(self, x: Tensor) -> Tensor:
        """Images with their channels last, where that is faster: not for a stack of clients."""
        stacked = torch._C._functorch.maybe_current_level() is not None
        return x if stacked or not self._channels_last else channels_last(x)

    def _takes_channels_last(self) -> bool:
        """Whether images are to be laid out so: on a CPU torch pools and convolves them in two thirds of the time."""
        images = self.device.type == "cpu" and self.dtype == torch.float32 and len(self.spec.input_shape) == 3
        if not images or not any(len(shape) == 4 for shape in self.shapes.values()):
            return False
        x = channels_last(torch.zeros(2, *self.spec.input_shape))
        try:
            functional_call(self._eval, (self.init(0), self.fresh_buffers()), (x,))
        except RuntimeError:  # a view of what such a layout does not keep together
            return False
        return True

    def _probe(self) -> set[str]:
        """The replaced functions that a forward pass calls. Refuses modules that cannot be run exactly."""
        for name, layer in self._train.named_modules():
            if isinstance(layer, _BatchNorm) and (layer.momentum is None or not layer.track_running_stats):
                raise ConfigError(
                    f"{self.spec}: layer {name} is a BatchNorm with momentum=None or track_running_stats=False; its "
                    "result depends on how data are batched. Use the defaults of both."
                )
            if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
                raise ConfigError(
                    f"{self.spec}: layer {name} is an InstanceNorm with track_running_stats=True; its running "
                    "statistics would count padding. Use the default."
                )
        x = torch.zeros(2, *self.spec.input_shape, device=self.device, dtype=self.input_dtype)
        mask = torch.ones(2, dtype=torch.bool, device=self.device)
        devices = [self.device] if self.device.type == "cuda" else []
        before = _generators(self.device)
        with (
            torch.random.fork_rng(devices=devices),
            _Replaced(mask, torch.zeros((), dtype=torch.int64, device=self.device)) as replaced,
            torch.no_grad(),
        ):
            state: dict[str, Tensor] = {**dict(self._train.named_parameters()), **self.fresh_buffers()}
            try:
                outputs = functional_call(self._train, state, (x,))
            except ConfigError as error:
                raise ConfigError(f"{self.spec}: {error}") from None
            except Exception as error:
                if is_full(error):
                    raise
                why = str(error).partition("\n")[0].rstrip(".")
                plain = why and isinstance(error, RuntimeError | TypeError | ValueError | IndexError | AssertionError)
                why = why if plain else f"{type(error).__name__}: {why}".removesuffix(": ")
                raise ConfigError(
                    f"{self.spec} cannot take data of shape {self.spec.input_shape}: {why}. "
                    "Choose another --model, or options that fit."
                ) from error
            drew = not torch.equal(before, _generators(self.device))
        if drew:
            raise ConfigError(f"{self.spec}: {_draws('a function that')}")
        per_token = self.input_shape if self.tokens and self.tokens.per_token else ()
        expected = (2, *per_token, self.num_outputs)
        if not isinstance(outputs, Tensor) or outputs.shape != expected:
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            each = "one row for each token" if per_token else "one row each"
            raise ConfigError(
                f"{self.spec} gives {got} for two samples; expected {expected}, {each}. "
                "Give the network num_outputs outputs."
            )
        called: set[str] = replaced.called
        return called


def _rebuilt(spec: ModelSpec, device: str, dtype: torch.dtype, training_dtype: torch.dtype) -> Model:
    return Model(spec, device, dtype, training_dtype=training_dtype)


@cache  # building a network takes time, and methods ask for theirs in every round
def network(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Model:
    """A network of a method's own; one object for equal ones."""
    return Model(spec, device, dtype)


class _Cut(NamedTuple):
    """Where a network's head begins."""

    shape: tuple[int, ...] | None
    """Of what the head gets for a sample; None for a head that is not called once, with one tensor."""
    is_last: bool
    """What the head gives is the network's output."""


class _Reached(Exception):
    """The forward pass has come to the head."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


_NORMS = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm)


def channels_last(x: Tensor) -> Tensor:
    """``x`` laid out with its channels last. ``contiguous`` would leave one channel as it is, and all that follows."""
    return x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)


def _seeded_build(spec: ModelSpec, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also touch the GPUs' generators
        return spec.build()


def _check_parameters(spec: ModelSpec, module: nn.Module) -> None:
    parameters = dict(module.named_parameters())
    if not any(p.requires_grad for p in parameters.values()):
        raise ConfigError(
            f"{spec} has no parameters that are not frozen; there is nothing to train. Choose another --model."
        )
    for name, value in [*parameters.items(), *module.named_buffers()]:
        if is_lazy(value):
            raise ConfigError(f"{spec}: {name} has no shape before the first call. Give lazy layers their sizes.")


def _generators(device: torch.device) -> Tensor:
    """The state of torch's global generators."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _draws(what: str) -> str:
    return (
        f"the model calls {what} draws from torch's global generator, so that results would depend on the order "
        "of clients. Use dropout layers, with dropout=0 in attention and recurrent layers."
    )


def _head(module: nn.Module) -> tuple[str, frozenset[str]]:
    """The layer that the class names as ``head``, else the last one with parameters; and its parameters."""
    layer = getattr(type(module), "head", None)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    if not isinstance(layer, str):
        layer = trained[-1].rpartition(".")[0]
    names = frozenset(n for n in trained if n.startswith(f"{layer}.") or not layer)
    if not names:
        raise ConfigError(f"{type(module).__name__}.head is {layer!r}, which names no layer with parameters.")
    return layer, names


class _Replaced(TorchFunctionMode):
    """Within it, BatchNorm leaves masked samples out and dropout draws from ``key``."""

    def __init__(self, mask: Tensor, key: Tensor) -> None:
        super().__init__()
        self.mask, self.key = mask, key
        self.called: set[str] = set()
        self.layers = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            self.called.add("batch_norm")
            return batch_norm(self.mask, *args, **kwargs)
        if func in _DROPOUTS:
            self.called.add("dropout")
            self.layers += 1
            dropped = _DROPOUTS[func](fold(self.key, self.layers), *args, **kwargs)
            return args[0].copy_(dropped) if kwargs.get("inplace") else dropped
        if func in _RANDOM or _dropout_rate(func, args, kwargs) > 0:
            raise ConfigError(_draws(f"{func.__name__}, which"))
        return func(*args, **kwargs)


def _keep(key: Tensor, x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    return (uniform(key, shape, x.dtype) >= p).to(x.dtype)


def _dropout(key: Tensor, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return input * _keep(key, input, p, tuple(input.shape)) / max(1.0 - p, 1e-12) if training and p else input


def _channel_dropout(
    key: Tensor, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    shape = (*input.shape[:2], *(1,) * (input.dim() - 2))
    return input * _keep(key, input, p, shape) / max(1.0 - p, 1e-12) if training and p else input


def _alpha_dropout(key: Tensor, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    if not (training and p):
        return input
    low = -1.7580993408473766  # SELU's negative limit, to which dropped units are set (Klambauer et al. 2017)
    scale = max((1.0 - p) * (1.0 + p * low**2), 1e-24) ** -0.5
    keep = _keep(key, input, p, tuple(input.shape))
    dropped: Tensor = scale * (input * keep + low * (1.0 - keep)) - scale * low * p
    return dropped


_DROPOUTS: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _dropout,
    F.dropout1d: _channel_dropout,
    F.dropout2d: _channel_dropout,
    F.dropout3d: _channel_dropout,
    F.alpha_dropout: _alpha_dropout,
}

_RANDOM = {
    F.feature_alpha_dropout, F.rrelu, F.gumbel_softmax, F.fractional_max_pool2d, F.fractional_max_pool3d,
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.bernoulli, torch.multinomial, torch.normal, Tensor.bernoulli, Tensor.multinomial,
}  # fmt: skip


def _dropout_rate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The dropout inside of torch's attention functions, which cannot be replaced from outside."""
    at = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}.get(func)
    if at is None or not kwargs.get("training", True):
        return 0.0
    return float(args[at] if len(args) > at else kwargs.get("dropout_p", 0.0))
