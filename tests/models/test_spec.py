# SPDX-License-Identifier: Apache-2.0
"""Names of networks: read, written and refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.core.tokens import Tokens
from fedloom.models.spec import ModelSpec, networks, parse

SHAPE, OUTPUTS = (4,), 3
WHOLE = st.integers(-(10**9), 10**9)
OPTIONS = st.one_of(
    WHOLE,
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(WHOLE, max_size=4).map(tuple),
    st.text("abcdefg_", min_size=1, max_size=6),
)


class Wide(nn.Linear):
    """A user's network that takes no shapes and needs an option."""

    def __init__(self, width: int, kind: str = "a") -> None:
        super().__init__(width, OUTPUTS)


class Broken(nn.Module):
    """A user's network with a slip in it."""

    def __init__(self) -> None:
        raise KeyError("width")


class Anything(nn.Linear):
    """A user's network that takes whatever it is given."""

    def __init__(self, **given: Any) -> None:
        super().__init__(given["input_shape"][0], given["num_outputs"])
        self.given = given


CALLED: list[str] = []


def calls(what: str = "") -> nn.Module:
    """Not a class: must not be called, whatever it gives."""
    CALLED.append(what)
    return nn.Linear(4, 3)


class Plain:
    """A class of something else: must not be called either."""

    def __init__(self) -> None:
        CALLED.append("Plain")


NUMBER = 3


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["alpha", "beta", "gamma_delta"]), OPTIONS, max_size=3))
def test_a_spec_is_read_back_from_its_name(options: dict[str, Any]) -> None:
    spec = ModelSpec("mlp", tuple(sorted(options.items())), SHAPE, OUTPUTS)
    back = parse(str(spec), SHAPE, OUTPUTS)
    assert back == spec
    assert [type(value) for _, value in back.options] == [type(value) for _, value in spec.options]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("0.5", 0.5),
        ("1e-5", 1e-5),
        ("128x64", (128, 64)),
        ("128x", (128,)),
        ("x", ()),
        ("True", True),
        ("false", False),
        ("relux", "relux"),
        ("", ""),
    ],
)
def test_the_values_of_options(text: str, value: Any) -> None:
    assert parse(f"mlp:hidden={text}", SHAPE, OUTPUTS).options == (("hidden", value),)


def test_options_are_in_order_of_their_names_and_dashes_are_underscores() -> None:
    one, other = (parse(text, SHAPE, OUTPUTS) for text in ("mlp:b-c=1:a=2", " mlp:a=2:b_c=1 "))
    assert one == other
    assert hash(one) == hash(other)
    assert str(one) == "mlp:a=2:b_c=1"


@pytest.mark.parametrize("name", sorted(networks()))
def test_every_network_of_the_zoo_is_built_by_its_name(name: str) -> None:
    takes_tokens = "vocabulary" in inspect.signature(networks()[name]).parameters
    shape = (32,) if takes_tokens else (3, 32) if name == "conv1d" else (3, 32, 32)
    spec = parse(name, shape, 7, Tokens(9) if takes_tokens else None)
    assert type(spec.build()) is networks()[name]
    assert str(spec) == name


def test_a_network_with_no_hidden_layer_survives_its_name() -> None:
    spec = parse(str(parse("mlp:hidden=x", SHAPE, OUTPUTS)), SHAPE, OUTPUTS)
    assert len(list(spec.build().parameters())) == 2


def test_users_networks_are_built_with_the_options_they_take() -> None:
    made = parse(f"{__name__}:Wide:width=5", SHAPE, OUTPUTS).build()
    assert isinstance(made, Wide)
    assert made.in_features == 5
    anything = parse(f"{__name__}:Anything:some=0.5", SHAPE, OUTPUTS).build()
    assert anything.given == {"input_shape": SHAPE, "num_outputs": OUTPUTS, "some": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lenett", "Unknown model 'lenett'; did you mean 'lenet'"),
        ("", "Unknown model ''. Choose from: "),
        ("mlp:hiden=3", "Unknown option of mlp 'hiden'; did you mean 'hidden'? Choose from: hidden."),
        ("mlp:num_outputs=3", "Unknown option of mlp 'num_outputs'. Choose from: hidden."),
        ("mlp:hidden=3:wide", "--model mlp:hidden=3:wide: 'wide' is not of the form option=value."),
        ("mlp:hidden", "--model mlp:hidden: 'hidden' is not of the form option=value."),
        (f"{__name__}:Broken", "Broken cannot be built for samples of shape"),
        ("mlp:hidden=3:hidden=4x4", "--model mlp:hidden=3:hidden=4x4: hidden is given twice. Give it once."),
        ("no.such.module:Net", "--model no.such.module:Net: cannot import 'no.such.module'"),
        (".relative:Net", "--model .relative:Net: '.relative' is no module's full name."),
        (":Net", "--model :Net: '' is no module's full name."),
        (f"{__name__}:Nett", f"--model {__name__}:Nett: '{__name__}' has no 'Nett'. Check the name after the colon."),
        (f"{__name__}:", "Check the name after the colon."),
        (f"{__name__}:NUMBER", "NUMBER is a int; expected a subclass of torch.nn.Module."),
        (f"{__name__}:calls", "calls is a function; expected a subclass of torch.nn.Module."),
        (f"{__name__}:calls:what=all", "calls is a function; expected a subclass of torch.nn.Module."),
        (f"{__name__}:Plain", "Plain is the class Plain; expected a subclass of torch.nn.Module."),
        ("fedloom.api:run:method=fedavg", "fedloom.api:run is a function; expected a subclass of torch.nn.Module."),
        ("fedloom.models.spec:nn", "nn is a module; expected a subclass of torch.nn.Module."),
        ("fedloom.models.model:_BatchNorm", "is not fedloom's; write torch.nn.modules.batchnorm:_BatchNorm."),
        (f"{__name__}:Wide", "missing a required argument: 'width'"),
        (f"{__name__}:Wide:wdth=3", "did you mean 'width'? Choose from: kind, width."),
    ],
)
def test_what_names_no_network_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, SHAPE, OUTPUTS).build()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert CALLED == []


def test_specs_of_other_shapes_are_others() -> None:
    specs = {parse("mlp", shape, outputs) for shape in ((4,), (5,)) for outputs in (2, 3)}
    assert len(specs) == 4
