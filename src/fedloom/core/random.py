# SPDX-License-Identifier: Apache-2.0
"""All randomness of fedloom: streams named by what they are for, never a global generator.

Two kinds, both pure functions of their name, so that a run can be stopped, resumed, reordered or spread over
machines without changing a bit:

- on the host, ``stream(seed, "partition")`` is a NumPy generator: sampling of cohorts, order of batches, initial
  values of parameters;
- inside a client program, ``uniform(key, shape)`` and ``normal(key, shape)`` hash a counter with a key. They are plain
  integer arithmetic: the same bits one client at a time, for a whole cohort under ``vmap``, and on any device.

Noise that is to hide something from whoever knows the seed must not come from it. A client on a machine of its own
has the key ``Fresh``: draws come from the operating system, and never again.
"""

import hashlib
import math
import os
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

_MASK63 = (1 << 63) - 1


class Fresh(NamedTuple):
    """In the place of a key: what is drawn with it cannot be computed from anything, nor drawn again."""

    device: torch.device
    drawn: list[int] | None = None
    """Gets the size of each draw, if there is one."""


Key = Tensor | Fresh


def seed_of(*name: int | str) -> int:
    """A 63-bit seed for the stream of that name. Names are compared by value and type: 1 and "1" differ."""
    digest = hashlib.blake2b("\x1f".join(f"{type(n).__name__}:{n}" for n in name).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") & _MASK63


def stream(*name: int | str) -> np.random.Generator:
    """The host stream of that name, e.g. ``stream(seed, round, client, "batches")``."""
    return np.random.Generator(np.random.PCG64(seed_of(*name)))


def secret_stream() -> np.random.Generator:
    """A host stream that follows from nothing: for what nobody may guess, not even who knows the seed."""
    return np.random.default_rng()


def key(*name: int | str) -> Tensor:
    """A key for draws inside a client program: a 0-d int64 tensor."""
    return torch.tensor(seed_of(*name), dtype=torch.int64)


@overload
def fold(key: Tensor, data: Tensor | int) -> Tensor: ...
@overload
def fold(key: Key, data: Tensor | int) -> Key: ...
def fold(key: Key, data: Tensor | int) -> Key:
    """A new key from a key and a number: one key per step, per layer, per purpose."""
    if isinstance(key, Fresh):
        return key
    if not isinstance(data, Tensor):
        data = torch.full((), data, dtype=torch.int64, device=key.device)
    return _mix(key + _mix(data.to(torch.int64) + _GOLDEN))


def uniform(key: Key, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform on [0, 1), one hash per element."""
    if isinstance(key, Fresh):
        if key.drawn is not None:
            key.drawn.append(math.prod(shape))
        bits = np.frombuffer(os.urandom(4 * math.prod(shape)), dtype=np.int32).copy()
        words = torch.from_numpy(bits).to(key.device).reshape(shape) >> 8
    else:
        count = torch.arange(math.prod(shape), dtype=torch.int64, device=key.device).reshape(shape)
        # the mask changes nothing, but without it torch's compiler reckons with the product as with places in memory,
        # row by row, in numbers that no int64 holds
        words = _mix(key + (count & _MASK63) * _GOLDEN) >> 39
    # 24 random bits: exact in every float type that parameters have
    return (words & 0xFFFFFF).to(dtype) / float(1 << 24)


def normal(key: Key, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal, by Box and Muller from two uniforms."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(fold(key, 1), shape, dtype)))
    return radius * torch.cos(2.0 * math.pi * uniform(fold(key, 2), shape, dtype))


def laplace(key: Key, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Laplace with scale 1, as the difference of two exponentials."""
    one, other = (torch.log1p(-uniform(fold(key, i), shape, dtype)) for i in (1, 2))
    return one - other


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_M1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_M2 = -7723592293110705685  # 0x94D049BB133111EB


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014) on int64, whose products wrap around."""
    z = (z ^ _shift(z, 30)) * _M1
    z = (z ^ _shift(z, 27)) * _M2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """A logical right shift: torch shifts the sign in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
