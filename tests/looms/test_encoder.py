# SPDX-License-Identifier: Apache-2.0
"""The deep-set encoder: pooling by hand, padding left out, and the whole against plain torch modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import play, small_federation
from fedloom.algorithms import it_pfl_hn
from fedloom.core.trees import PerClient
from fedloom.looms.encoder import Encoder, describe, describe_program, pool, read_out, rows_of
from tiny import Ears

CPU = torch.device("cpu")


def plain(shape: tuple[int, ...], params: dict[str, Tensor], linear: bool = False) -> nn.ModuleDict:
    """App. C written down with plain modules, for images of at least 16 x 16 pixels."""
    hidden = [] if linear else [nn.Linear(200, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    left = (((shape[1] - 4) // 2) - 4) // 2
    made = nn.ModuleDict(
        {
            "phi": nn.Sequential(
                nn.Conv2d(shape[0], 16, 5), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                nn.Linear(32 * left * left, 200), nn.ReLU(),
            ),
            "psi": nn.Sequential(*hidden, nn.Linear(200 if linear else 84, 7)),
        }
    ).double()  # fmt: skip
    with torch.no_grad():
        for own, value in zip(made.parameters(), params.values()):
            own.copy_(value)
    return made


def encoder(shape=(3, 20, 20), dim=7, linear=False) -> dict[str, Tensor]:
    return Encoder(shape, dim, linear).init(3, CPU, torch.float64)


def samples(number: int, shape=(3, 20, 20)) -> Tensor:
    return torch.randn(number, *shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def test_half_is_averaged_and_of_half_the_maximum_is_taken() -> None:
    """Units (1, 3 | -5, 2) and (3, 5 | -7, 0): means 2 and 4, maxima -5 and 2. The third row is padding."""
    rows = torch.tensor([[1.0, 3, -5, 2], [3, 5, -7, 0], [100, 100, 100, 100]])
    assert pool(rows, torch.tensor([True, True, False])).tolist() == [2, 4, -5, 2]


@pytest.mark.parametrize("linear", [False, True], ids=["deep", "linear"])
def test_a_descriptor_is_that_of_plain_modules(linear: bool) -> None:
    params = encoder(linear=linear)
    x, module = samples(9), plain((3, 20, 20), params, linear)
    units = module["phi"](x)
    expected = module["psi"](torch.cat([units[:, :100].mean(0), units[:, 100:].max(0).values]))
    found = describe(params, x, torch.ones(9, dtype=torch.bool), False)
    assert found.shape == (7,)
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)


def test_a_private_descriptor_is_a_mean_of_points_on_the_unit_sphere() -> None:
    params = encoder()
    x, module = samples(9), plain((3, 20, 20), params)
    rows = F.normalize(module["psi"](module["phi"](x)), dim=1).detach()
    torch.testing.assert_close(rows_of(params, x, True), rows, rtol=0, atol=1e-12)
    found = describe(params, x, torch.ones(9, dtype=torch.bool), True)
    torch.testing.assert_close(found, rows.mean(0), rtol=0, atol=1e-12)
    # Lemma 7.1 with L = B = 1: one sample of nine moves it by at most 2/9
    for row in range(9):
        other = x.clone()
        other[row] = -x[row]
        moved = describe(params, other, torch.ones(9, dtype=torch.bool), True) - found
        assert float(moved.norm()) <= 2 / 9


def test_a_sample_that_overflows_moves_a_private_descriptor_no_more_than_another() -> None:
    """Whoever chooses the encoder chooses which do, and NaN shows through any noise."""
    params, x, mask = encoder(), samples(9), torch.ones(9, dtype=torch.bool)
    other = x.clone()
    params["psi.0.weight"] *= 1e100
    other[4] *= 1e250
    assert read_out(params, rows_of(params, other, False)).isnan().any()
    moved = describe(params, other, mask, True) - describe(params, x, mask, True)
    assert float(moved.norm()) <= 2 / 9


@pytest.mark.parametrize("private", [False, True])
def test_the_order_of_samples_does_not_matter(private: bool) -> None:
    params = encoder()
    x, mask = samples(9), torch.ones(9, dtype=torch.bool)
    back = describe(params, x.flip(0), mask, private)
    torch.testing.assert_close(back, describe(params, x, mask, private), rtol=0, atol=1e-12)


@pytest.mark.parametrize("private", [False, True])
def test_padding_does_not_count(private: bool) -> None:
    params = encoder()
    x = samples(9)
    padded = torch.cat([x, 50 * samples(4)])
    mask = torch.arange(13) < 9
    found = describe(params, padded, mask, private)
    torch.testing.assert_close(found, describe(params, x, mask[:9], private), rtol=0, atol=1e-12)
    assert not torch.allclose(found, describe(params, padded, torch.full((13,), True), private))


@pytest.mark.parametrize(("shape", "units"), [((5,), 500), ((3, 2), 500), ((2, 30), 200), ((1, 8, 8), 200)])
def test_every_shape_of_samples_has_an_encoder(shape: tuple[int, ...], units: int) -> None:
    params = encoder(shape, 4)
    assert params["units.bias"].shape == (units,) and params["psi.0.weight"].shape == (
        120 if units == 200 else 500,
        units,
    )
    assert describe(params, samples(3, shape), torch.full((3,), True), False).shape == (4,)


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "loopback"])
def test_batches_count_once_each_and_with_privacy_samples_do(engine: str) -> None:
    """Nine samples in batches of 4, 4 and 1."""
    for epsilon in (0.0, 1.0):
        federation, ears = small_federation(sizes=(9, 4)), Ears()
        played = play(it_pfl_hn.ALGORITHM, federation, engine, rounds=1, descriptor_epsilon=epsilon)
        params, private = played.state.encoder, epsilon > 0
        program = describe_program(played.setup.config.batch_size)
        ears(played.session("describe").ask)(program, {"encoder": params}, PerClient.empty(["0", "1"]))
        batches = [federation.x[torch.as_tensor(rows)] for rows in ears.plans[0]["0"].rows]
        assert [len(b) for b in batches] == [4, 4, 1]
        each = [describe(params, b, torch.full((len(b),), True), private) for b in batches]
        expected = (4 * each[0] + 4 * each[1] + each[2]) / 9 if private else sum(each) / 3
        torch.testing.assert_close(ears.replies[0]["0"]["descriptor"], expected, rtol=0, atol=1e-12)
