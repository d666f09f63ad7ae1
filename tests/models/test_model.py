# SPDX-License-Identifier: Apache-2.0
"""Any module as pure functions: masked BatchNorm, keyed dropout, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap

from fedloom.core.errors import ConfigError
from fedloom.core.random import fold, key
from fedloom.models.model import Model
from fedloom.models.spec import ModelSpec, parse

KEY = key("step")


def model_of(
    network: Any, shape: tuple[int, ...] = (4,), outputs: int = 3, dtype: torch.dtype = torch.float64, **options: Any
) -> Model:
    """A class of this file as a user would name it."""
    setattr(sys.modules[__name__], network.__name__, network)
    spec = ModelSpec(f"{__name__}:{network.__name__}", tuple(sorted(options.items())), shape, outputs)
    return Model(spec, dtype=dtype)


def network_with(forward: Callable[..., Any], **layers: Callable[[], nn.Module]) -> Any:
    """A class with a linear layer ``fc`` after what ``forward`` does, and the ``layers``."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, make in layers.items():
                self.add_module(name, make())
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    return Network


class Normed(nn.Module):
    """BatchNorm over features and over images, with and without scale."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        channels = input_shape[0]
        images = len(input_shape) == 3
        self.conv: nn.Module = nn.Conv2d(channels, 5, 3, padding=1) if images else nn.Linear(channels, 5)
        self.bn1 = (nn.BatchNorm2d if images else nn.BatchNorm1d)(5, momentum=0.3)
        self.bn2 = nn.BatchNorm1d(5, affine=False, eps=1e-3)
        self.fc = nn.Linear(5, num_outputs)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.bn1(self.conv(x)))
        x = x.flatten(2).mean(2) if x.dim() > 2 else x
        return self.fc(self.bn2(x))


def plain(model: Model, params: Any, buffers: Any) -> nn.Module:
    """The module as its author would use it, in training mode."""
    return model.module(params, buffers).train()


def everyone(x: Tensor) -> Tensor:
    return torch.ones(len(x), dtype=torch.bool)


# --- BatchNorm


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 7), st.integers(0, 4), st.sampled_from([(4,), (2, 3, 3), (1, 1, 1)]), st.integers(0, 99))
def test_masked_batch_norm_equals_torchs_on_the_batch_without_padding(
    size: int, padding: int, shape: tuple[int, ...], seed: int
) -> None:
    model = model_of(Normed, shape)
    params, buffers = model.init(seed), model.fresh_buffers()
    x = torch.randn(size + padding, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(size + padding) < size

    def loss(params: Any) -> Any:
        outputs, after = model.train(params, buffers, x, mask, KEY)
        return (outputs[:size].sin()).sum(), (outputs, after)

    grads, (outputs, after) = grad(loss, has_aux=True)(params)
    module = plain(model, params, buffers)
    wanted = module(x[:size])
    wanted.sin().sum().backward()
    torch.testing.assert_close(outputs[:size], wanted, rtol=1e-7, atol=1e-9)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-6, atol=1e-8)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(after[name], buffer, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(buffers[name], value) for name, value in model.fresh_buffers().items())


def test_a_stack_of_ragged_batches_under_vmap_equals_a_loop() -> None:
    model = model_of(Normed, (2, 3, 3))
    params = [model.init(seed) for seed in range(3)]
    x = torch.randn(3, 5, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    masks = torch.arange(5) < torch.tensor([[5], [2], [3]])
    stacked = {name: torch.stack([p[name] for p in params]) for name in params[0]}
    buffers = {name: torch.stack([b] * 3) for name, b in model.fresh_buffers().items()}
    outputs, after = vmap(model.train)(stacked, buffers, x, masks, torch.stack([KEY] * 3))
    for i, size in enumerate((5, 2, 3)):
        alone, alone_after = model.train(params[i], model.fresh_buffers(), x[i, :size], everyone(x[i, :size]), KEY)
        torch.testing.assert_close(outputs[i, :size], alone, rtol=1e-9, atol=1e-11)
        for name, value in alone_after.items():
            torch.testing.assert_close(after[name][i], value, rtol=1e-9, atol=1e-12)


def test_a_batch_norm_that_its_author_froze_uses_its_running_statistics() -> None:
    class Frozen(Normed):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.bn1.eval()
            return self

    model = model_of(Frozen)
    params, buffers = model.init(0), model.fresh_buffers()
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs, after = model.train(params, buffers, x, everyone(x), KEY)
    torch.testing.assert_close(outputs, plain(model, params, buffers)(x))
    assert torch.equal(after["bn1.running_mean"], buffers["bn1.running_mean"])


def test_buffers_that_a_forward_pass_puts_anew_are_given_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.seen: Tensor = self.seen + 1
            return self.fc(x)

    model = model_of(Counting)
    x = torch.ones(2, 4, dtype=torch.float64)
    _, after = model.train(model.init(0), model.fresh_buffers(), x, everyone(x), KEY)
    _, again = model.train(model.init(0), after, x, everyone(x), KEY)
    assert (float(after["seen"]), float(again["seen"])) == (1, 2)
    assert model.fresh_buffers()["seen"] == 0


# --- dropout


def dropped(network: Any, x: Tensor, step: Tensor = KEY) -> Tensor:
    """What a network without any learned change gives in training mode."""
    model = model_of(network, tuple(x.shape[1:]), x[0].numel(), dtype=x.dtype)
    return model.train(model.init(0), model.fresh_buffers(), x, everyone(x), step)[0]


def only(layer: Callable[[Tensor], Tensor] | nn.Module) -> Any:
    """A class whose forward pass is ``layer`` and a parameter that does nothing."""

    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Any:
            return self.layer(x).flatten(1)

    return Only


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_scales_the_rest(rate: float) -> None:
    """Of 200 000 ones a share of 1 - p stays, as 1 / (1 - p); the standard error of a share is at most 0.0011."""
    out = dropped(only(nn.Dropout(rate)), torch.ones(200, 1000, dtype=torch.float64))
    kept = out != 0
    assert float(kept.double().mean()) == pytest.approx(1 - rate, abs=0.005)
    torch.testing.assert_close(out[kept], torch.full((int(kept.sum()),), 1 / (1 - rate)).double())


@pytest.mark.parametrize(("rate", "wanted"), [(0.0, 1.0), (1.0, 0.0)])
def test_dropout_of_nothing_and_of_everything(rate: float, wanted: float) -> None:
    for layer in (nn.Dropout(rate), nn.Dropout1d(rate)):
        assert torch.equal(dropped(only(layer), torch.ones(3, 2, 5)), torch.full((3, 10), wanted))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout(0.5), (6, 5)),
        (nn.Dropout1d(0.5), (6, 5)),
        (nn.Dropout2d(0.5), (6, 5, 5)),
        (nn.AlphaDropout(0.5), (30,)),
    ],
    ids=str,
)
def test_padding_does_not_change_the_draws_of_real_samples(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.rand(7, *shape, generator=torch.Generator().manual_seed(0)) + 1
    assert torch.equal(dropped(only(layer), x)[:4], dropped(only(layer), x[:4]))


def test_steps_and_layers_have_draws_of_their_own() -> None:
    twice = only(lambda x: torch.cat([F.dropout(x), F.dropout(x)], 1))
    sys.modules[__name__].Only = twice  # type: ignore[attr-defined]
    model = Model(ModelSpec(f"{__name__}:Only", (), (100,), 200), dtype=torch.float64)
    x = torch.ones(2, 100, dtype=torch.float64)
    first, again, later = (model.train(model.init(0), {}, x, everyone(x), k)[0] for k in (KEY, KEY, fold(KEY, 1)))
    assert torch.equal(first, again)
    halves = [out[:, half] for out in (first, later) for half in (slice(100), slice(100, None))]
    for i, one in enumerate(halves):
        for other in halves[i + 1 :]:
            assert 0.3 < float((one == other).double().mean()) < 0.7


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Dropout1d(), (50, 4)), (nn.Dropout2d(), (50, 2, 2)), (nn.Dropout3d(), (50, 1, 2, 2))]
)
def test_channel_dropout_drops_whole_channels(layer: nn.Module, shape: tuple[int, ...]) -> None:
    out = dropped(only(layer), torch.ones(40, *shape)).reshape(40, 50, 4)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(out, out[:, :, :1].expand_as(out))
    assert float(out[:, :, 0].mean()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_alpha_dropout_keeps_mean_and_variance(rate: float) -> None:
    x = torch.randn(200, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = dropped(only(nn.AlphaDropout(rate)), x)
    assert float(out.mean()) == pytest.approx(0, abs=0.02)
    assert float(out.var()) == pytest.approx(1, abs=0.02)
    assert float((out == out.mode().values[0]).double().mean()) == pytest.approx(rate, abs=0.01)


def test_in_place_dropout_changes_its_input_as_torchs_does() -> None:
    """With nobody looking at the result, and with the input used again."""

    def careless(x: Tensor) -> Tensor:
        hidden = x * 1
        F.dropout(hidden, 0.5, inplace=True)
        return hidden

    out = dropped(only(careless), torch.ones(10, 100))
    assert set(out.unique().tolist()) == {0.0, 2.0}


def test_gradients_flow_through_the_kept_units_only() -> None:
    model = model_of(network_with(lambda self, x: F.dropout(self.fc(x), 0.5, self.training)))
    params, x = model.init(0), torch.ones(6, 4, dtype=torch.float64)
    outputs, _ = model.train(params, {}, x, everyone(x), KEY)
    grads = grad(lambda p: model.train(p, {}, x, everyone(x), KEY)[0].sum())(params)
    torch.testing.assert_close(grads["fc.bias"], 2.0 * (outputs != 0).double().sum(0))
    assert torch.equal(model(params, {}, x), F.linear(x, params["fc.weight"], params["fc.bias"]))


def test_dropout_of_a_cohort_under_vmap_has_the_bits_of_a_loop() -> None:
    model = model_of(network_with(lambda self, x: F.dropout(self.fc(x), 0.3, self.training)))
    params, x = model.init(0), torch.ones(3, 6, 4, dtype=torch.float64)
    keys = torch.stack([key("client", i) for i in range(3)])
    together = vmap(lambda x, k: model.train(params, {}, x, everyone(x), k)[0] == 0)(x, keys)
    assert torch.equal(together, torch.stack([model.train(params, {}, x[0], everyone(x[0]), k)[0] == 0 for k in keys]))


# --- the rest of a model


class Everything(nn.Module):
    """BatchNorm, dropout, a buffer that is not saved, and tied weights."""

    head: ClassVar[str] = "out"

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(input_shape[0], width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        self.third.weight = self.second.weight
        self.bn = nn.BatchNorm1d(width)
        self.drop = nn.Dropout()
        self.out = nn.Linear(width, num_outputs)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.drop(self.bn(self.third(self.second(self.first(x)))))) * self.scale


def test_the_module_gives_what_the_model_gives_and_shares_nothing() -> None:
    model = model_of(Everything, width=6)
    params, x = model.init(1), torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, buffers = model.train(params, model.fresh_buffers(), x, everyone(x), KEY)
    module = model.module(params, buffers)
    assert not module.training
    outputs = model(params, buffers, x)
    assert torch.equal(module(x), outputs)
    with torch.no_grad():
        for value in module.parameters():
            value.zero_()
    assert torch.equal(model(params, buffers, x), outputs)


def test_evaluation_is_the_plain_module() -> None:
    model = model_of(Everything)
    params, x = model.init(1), torch.ones(2, 4, dtype=torch.float64)
    torch.manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = Everything((4,), 3).double().eval()
    assert torch.equal(model(params, model.fresh_buffers(), x), module(x))


def test_initial_parameters_are_those_of_the_seed_and_no_global_state_moves() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    model = model_of(Everything)
    one, same, other = model.init(3), model.init(3), model.init(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(not torch.equal(one[name], other[name]) for name in one if not name.startswith("bn"))
    assert one["first.weight"].dtype == torch.float64
    assert {name: tuple(value.shape) for name, value in one.items()} == dict(model.shapes)


def test_a_model_knows_its_size_and_shapes() -> None:
    """first 20, tied weight 16, two biases 8, bn 8, out 15."""
    model = model_of(Everything)
    assert model.size == 20 + 16 + 8 + 8 + 15
    assert model.num_outputs == 3
    assert model.shapes["out.weight"] == (3, 4)


def test_the_head_is_the_named_layer_or_else_the_last_one() -> None:
    assert model_of(Everything).head == {"out.weight", "out.bias"}
    last = network_with(lambda self, x: self.fc(self.before(x)), before=lambda: nn.Linear(4, 4))
    assert model_of(last).head == {"fc.weight", "fc.bias"}
    whole = type("Whole", (nn.Linear,), {"__init__": lambda self: nn.Linear.__init__(self, 4, 3)})
    assert model_of(whole).head == {"weight", "bias"}


def test_a_method_called_head_is_no_name_of_a_layer() -> None:
    network = network_with(lambda self, x: self.head(x))
    network.head = lambda self, x: self.fc(x)
    assert model_of(network).head == {"fc.weight", "fc.bias"}


def test_constructors_may_take_the_shapes_or_not() -> None:
    taking, not_taking = model_of(Normed, (4,), 3), model_of(network_with(lambda self, x: self.fc(x)))
    assert taking.shapes["fc.weight"] == (3, 5)
    assert not_taking.shapes["fc.weight"] == (3, 4)


ATTENTION = {"attention": lambda: nn.MultiheadAttention(4, 1, dropout=0.5, batch_first=True)}

REFUSED = {
    "rand": (lambda self, x: self.fc(x) + torch.rand(3), {}, "calls rand, which draws"),
    "randn_like": (lambda self, x: self.fc(x + torch.randn_like(x)), {}, "calls randn_like, which draws"),
    "bernoulli": (lambda self, x: self.fc(x * torch.bernoulli(x + 0.5)), {}, "calls bernoulli, which draws"),
    "in place": (lambda self, x: self.fc(x + torch.empty_like(x).normal_()), {}, "a function that draws"),
    "poisson": (lambda self, x: self.fc(torch.poisson(x + 1)), {}, "a function that draws"),
    "torch.dropout": (lambda self, x: self.fc(torch.dropout(x, 0.5, True)), {}, "a function that draws"),
    "rrelu": (lambda self, x: self.fc(self.r(x)), {"r": nn.RReLU}, "calls rrelu, which draws"),
    "feature alpha": (
        lambda self, x: self.fc(self.d(x[:, None])[:, 0]),
        {"d": nn.FeatureAlphaDropout},
        "calls feature_alpha_dropout, which draws",
    ),
    "attention": (
        lambda self, x: self.fc(self.attention(*(x[:, None],) * 3)[0][:, 0]),
        ATTENTION,
        "calls multi_head_attention_forward, which draws",
    ),
    "sdpa": (
        lambda self, x: self.fc(F.scaled_dot_product_attention(x, x, x, None, 0.5)),
        {},
        "calls scaled_dot_product_attention, which draws",
    ),
    "lstm": (
        lambda self, x: self.fc(self.lstm(x[:, None])[0][:, 0]),
        {"lstm": lambda: nn.LSTM(4, 4, 2, dropout=0.5)},
        "a function that draws",
    ),
    "momentum": (
        lambda self, x: self.fc(self.bn(x)),
        {"bn": lambda: nn.BatchNorm1d(4, momentum=None)},
        "layer bn is a BatchNorm with momentum=None",
    ),
    "no statistics": (
        lambda self, x: self.fc(self.bn(x)),
        {"bn": lambda: nn.BatchNorm1d(4, track_running_stats=False)},
        "layer bn is a BatchNorm with momentum=None or track_running_stats=False",
    ),
    "functional batch norm": (
        lambda self, x: self.fc(F.batch_norm(x, None, None, training=True)),
        {},
        "batch_norm without running statistics",
    ),
    "instance norm": (
        lambda self, x: self.fc(self.norm(x[:, None])[:, 0]),
        {"norm": lambda: nn.InstanceNorm1d(1, track_running_stats=True)},
        "layer norm is an InstanceNorm",
    ),
    "output shape": (lambda self, x: self.fc(x)[:, :2], {}, r"gives \(2, 2\) for two samples; expected \(2, 3\)"),
    "output type": (lambda self, x: (self.fc(x), x), {}, "gives tuple for two samples"),
    "input shape": (lambda self, x: self.fc(x[:, :3]), {}, r"cannot take data of shape \(4,\)"),
    "assertion": (lambda self, x: self.fail(), {}, r"cannot take data of shape \(4,\): AssertionError\."),
    "a slip": (lambda self, x: self.fc(self.no_such_layer(x)), {}, r"shape \(4,\): AttributeError: .*no_such_layer"),
    "lazy": (lambda self, x: self.fc(self.lazy(x)), {"lazy": lambda: nn.LazyLinear(4)}, "lazy.weight has no shape"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_network_that_cannot_be_run_exactly_is_refused(why: str) -> None:
    forward, layers, message = REFUSED[why]
    network = network_with(forward, **layers)
    network.fail = lambda self: (_ for _ in ()).throw(AssertionError)
    with pytest.raises(ConfigError, match=message) as caught:
        model_of(network)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{__name__}:Network")
    assert str(caught.value).endswith(".")


def test_a_head_that_names_nothing_is_refused() -> None:
    network = network_with(lambda self, x: self.fc(x))
    network.head = "output"
    with pytest.raises(ConfigError, match=r"Network\.head is 'output', which names no layer with parameters"):
        model_of(network)


def test_a_network_without_parameters_is_refused() -> None:
    network = type("Bare", (nn.Flatten,), {})
    with pytest.raises(ConfigError, match="has no parameters"):
        model_of(network, (3,))


def test_attention_without_dropout_is_fine() -> None:
    network = network_with(
        lambda self, x: self.fc(self.attention(*(x[:, None],) * 3)[0][:, 0]),
        attention=lambda: nn.MultiheadAttention(4, 1, batch_first=True),
    )
    assert model_of(network).num_outputs == 3


def test_a_refused_network_moves_no_global_generator() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigError):
        model_of(network_with(lambda self, x: self.fc(x + torch.empty_like(x).normal_())))
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_that_do_not_fit_are_refused() -> None:
    model = model_of(Everything)
    params = {**model.init(0), "out.bias": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"out.bias of shape \(1,\)"):
        model.module(params, model.fresh_buffers())


@pytest.mark.parametrize("name", ["lenet:kernels=2", "testnets:Normed", "testnets:Dropping"])
def test_training_in_bfloat16_is_near_and_keeps_parameters_gradients_and_statistics_in_float32(name: str) -> None:
    exact, narrow = (Model(parse(name, (1, 8, 8), 3), training_dtype=kind) for kind in (None, torch.bfloat16))
    params, buffers = exact.init(0), exact.fresh_buffers()
    x, mask = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) < 5
    results = []
    for model in (exact, narrow):
        leaves = {n: v.clone().requires_grad_() for n, v in params.items()}
        outputs, after = model.train(leaves, buffers, x, mask, torch.tensor(3))
        grads = torch.autograd.grad(outputs.square().sum(), list(leaves.values()))
        assert {t.dtype for t in [outputs, *grads, *(b for b in after.values() if b.is_floating_point())]} == {
            torch.float32
        }
        results.append((outputs, grads, after))
    assert not torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0.05, atol=0.05)
    for one, other in zip(results[0][1], results[1][1]):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)


class Viewing(nn.Module):
    """Counts on the layout of its activations, as much code does."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(input_shape[0], 3, 3), nn.Linear(3 * 16, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x).view(-1, 3 * 16))


class Layout(Viewing):
    """Notes the layout of its activations."""

    seen: ClassVar[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if torch._C._functorch.maybe_current_level() is None:  # under vmap it cannot be asked
            self.seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return self.out(x.flatten(1))


@pytest.mark.parametrize(("dtype", "last"), [(torch.float32, True), (torch.float64, False)])
@pytest.mark.parametrize("channels", [1, 2])
def test_images_have_their_channels_last_on_a_cpu(channels: int, dtype: torch.dtype, last: bool) -> None:
    model = model_of(Layout, (channels, 6, 6), dtype=dtype)
    params, x = model.init(0), torch.randn(4, channels, 6, 6, dtype=dtype)
    Layout.seen.clear()
    trained = model.train(params, {}, x, torch.ones(4, dtype=torch.bool), KEY)[0]
    assert [*Layout.seen] == [last]
    assert model(params, {}, x).equal(trained) and Layout.seen == [last, last]
    torch.testing.assert_close(trained, model.module(params, {})(x))
    stacked = vmap(model, in_dims=(None, None, 0))(params, {}, torch.stack([x, x]))
    torch.testing.assert_close(stacked[1], trained)


def test_a_network_that_counts_on_its_layout_keeps_it() -> None:
    model = model_of(Viewing, (2, 6, 6), dtype=torch.float32)
    params, x = model.init(0), torch.randn(4, 2, 6, 6)
    assert model(params, {}, x).equal(model.module(params, {})(x))
