# SPDX-License-Identifier: Apache-2.0
"""Networks for sequences of tokens: torch's numbers, no look ahead, stacks of clients, files for other programs."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedloom.core.errors import ConfigError
from fedloom.core.task import SEQUENCE
from fedloom.core.tokens import Tokens
from fedloom.engines import traced
from fedloom.engines.auto import batchable
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.models.zoo.recurrent import GRU, LSTM
from fedloom.models.zoo.transformer import Transformer
from fedloom.runs.portable import write_portable

LENGTH, OUTPUTS, VOCABULARY = 6, 4, 11
NETWORKS = [GRU, LSTM, Transformer]
every_network = pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
X = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def built(network, per_token: bool = True, **options) -> nn.Module:
    torch.manual_seed(0)
    return network((LENGTH,), OUTPUTS, VOCABULARY, per_token, **options).double()


@pytest.mark.parametrize(("network", "theirs"), [(GRU, nn.GRU), (LSTM, nn.LSTM)])
def test_cells_are_torchs(network, theirs) -> None:
    ours = built(network, embedding=3, hidden=5, layers=2)
    like = theirs(3, 5, num_layers=2, batch_first=True).double()
    with torch.no_grad():
        for i, layer in enumerate(ours.layers):
            for name, linear in (("ih", layer.input), ("hh", layer.state)):
                getattr(like, f"weight_{name}_l{i}").copy_(linear.weight)
                getattr(like, f"bias_{name}_l{i}").copy_(linear.bias)
    torch.testing.assert_close(ours(X), ours.output(like(ours.embedding(X))[0]))


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        # GRU: 11 * 16 embedding; 3 * 64 * (16 + 1 + 64 + 1); 65 * 4. LSTM: four gates
        (GRU, 11 * 16 + 3 * 64 * 82 + 65 * 4),
        (LSTM, 11 * 16 + 4 * 64 * 82 + 65 * 4),
        # embedding and positions; two blocks of 12 width^2 + 13 width; a LayerNorm; 65 * 4
        (Transformer, (11 + 6) * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64 + 65 * 4),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_parameter_counts(network, expected: int) -> None:
    assert sum(p.numel() for p in built(network).parameters()) == expected


@every_network
def test_an_output_knows_nothing_of_later_tokens(network) -> None:
    model, other = built(network), X.clone()
    other[:, 4:] = (other[:, 4:] + 1) % VOCABULARY
    before, after = model(X), model(other)
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(2).all()


@every_network
def test_one_label_is_read_from_the_last_state(network) -> None:
    torch.testing.assert_close(built(network, per_token=False)(X), built(network)(X)[:, -1])


@every_network
@pytest.mark.parametrize("per_token", [False, True], ids=["label", "labels"])
def test_a_stack_of_clients_gives_the_gradients_of_each_without_a_warning(network, per_token: bool) -> None:
    models = [built(network, per_token) for _ in range(3)]
    for i, model in enumerate(models):
        for p in model.parameters():
            p.data += 0.01 * i
    x = torch.stack([X, (X + 1) % VOCABULARY, (X + 2) % VOCABULARY])

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(models[0], params, (x,)).square().sum()

    torch._C._functorch._set_vmap_fallback_warning_enabled(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch says where it has no batched form
            together = vmap(grad(loss))(stack_module_state(models)[0], x)
    finally:
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)
    for i, model in enumerate(models):
        alone = grad(loss)(dict(model.named_parameters()), x[i])
        for name, value in alone.items():
            torch.testing.assert_close(together[name][i], value)


@every_network
def test_steps_can_be_traced(network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 1)
    model = Model(parse(network.name, (LENGTH,), OUTPUTS, Tokens(VOCABULARY, True)))
    params, y, mask = model.init(0), torch.where(X < 9, X % OUTPUTS, -1), torch.ones(3, dtype=torch.bool)

    def step(fixed, carry, batch):
        def loss(params):
            outputs, _ = model.train(params, {}, batch[0], mask, torch.zeros((), dtype=torch.int64))
            return SEQUENCE.loss(outputs, batch[1]).mean()

        return {name: carry[name] - 0.1 * slope for name, slope in grad(loss)(carry).items()}

    notes: list[str] = []
    traces = traced.Traces(notes)
    found = traces.steps("step", "training", step, {}, params, [(X, y)] * 4)
    assert not notes and [run is not None for run in traces._forms.kept.values()] == [True]
    for _ in range(4):
        params = step({}, params, (X, y))
    assert all(torch.equal(found[name], params[name]) for name in params)


@every_network
@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", "pt2"])
@pytest.mark.parametrize("per_token", [False, True], ids=["label", "labels"])
def test_files_for_other_programs(network, form: str, per_token: bool, tmp_path: Path) -> None:
    model = built(network, per_token).float()
    tokens = Tokens(VOCABULARY, per_token)
    # it is read back and compared with the model, for several sizes of batches
    assert write_portable(tmp_path / "m", form, model, (LENGTH,), {}, tokens=tokens).is_file()


def test_what_fits_is_told() -> None:
    model = Model(parse("gru", (LENGTH,), OUTPUTS, Tokens(VOCABULARY, True)))
    assert (model.feature_shape, model.has_linear_head, model.input_dtype) == ((LENGTH, 64), True, torch.int64)
    assert batchable(model)
    with pytest.raises(ConfigError, match="mlp takes numbers, and samples of whole numbers are tokens"):
        Model(parse("mlp", (LENGTH,), OUTPUTS, Tokens(VOCABULARY)))
    with pytest.raises(ConfigError, match="lstm takes tokens"):
        Model(parse("lstm", (LENGTH,), OUTPUTS))
    with pytest.raises(ConfigError, match="a width that its heads divide"):
        Model(parse("transformer:width=6:heads=4", (LENGTH,), OUTPUTS, Tokens(VOCABULARY)))
    with pytest.raises(ConfigError, match=r"sequences of tokens, \(samples, length\)"):
        Model(parse("gru", (2, LENGTH), OUTPUTS, Tokens(VOCABULARY)))


class Bag(nn.Module):
    """An operation of which torch has no batched form."""

    def __init__(self, num_outputs: int, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(vocabulary, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


def test_torchs_wish_for_an_issue_reaches_no_user() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert batchable(Model(parse(f"{__name__}:Bag", (LENGTH,), OUTPUTS, Tokens(VOCABULARY))))


class Flat(nn.Module):
    """One output where each token should have one."""

    def __init__(self, num_outputs: int, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).mean(1)


def test_a_users_network_is_given_the_vocabulary_and_must_give_a_row_for_each_token() -> None:
    assert Model(parse(f"{__name__}:Flat", (LENGTH,), OUTPUTS, Tokens(VOCABULARY))).size == VOCABULARY * OUTPUTS
    with pytest.raises(ConfigError, match=r"gives \(2, 4\) for two samples; expected \(2, 6, 4\), one row for each"):
        Model(parse(f"{__name__}:Flat", (LENGTH,), OUTPUTS, Tokens(VOCABULARY, True)))
