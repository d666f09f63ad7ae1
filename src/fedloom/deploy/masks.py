# SPDX-License-Identifier: Apache-2.0
"""What a secure sum is made of: masks that cancel, shares of what they grow from, and changes as whole numbers.

All of it is from libraries: X25519, HKDF, ChaCha20 and ChaCha20-Poly1305 from ``cryptography``, Shamir's sharing from
``pycryptodome``, which Flower's own secure aggregation shares secrets by. Flower's generator of masks is not used: it
makes 32 bits of its key and is none for cryptography.

A mask grows from a seed of 16 bytes, one block of Shamir's sharing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

SEED = 16
"""Bytes of a seed."""

HALF = 2**31 - 1
"""A sum lies between this and its opposite."""

Whole = NDArray[np.uint32]
"""Whole numbers modulo 2^32."""


class Unsealed(Exception):
    """A letter that was not sealed by whom it should have been, or that was changed on its way."""


def seed() -> bytes:
    """A new one, from the operating system."""
    return secrets.token_bytes(SEED)


def commitment(seed: bytes) -> bytes:
    """What fixes a seed and does not tell it."""
    return hashlib.sha256(b"fedloom commitment" + seed).digest()


def public_key(seed: bytes) -> bytes:
    """The public half of the key pair that grows from a seed."""
    return _key(seed).public_key().public_bytes_raw()


def is_key(public: bytes) -> bool:
    """Whether there is anything to agree on with the holder of that key."""
    try:
        agreed(seed(), public, b"")
    except ValueError:
        return False
    return True


def agreed(seed: bytes, public: bytes, about: bytes) -> bytes:
    """The key that the holders of two seeds have in common, for what ``about`` says. ``ValueError``: no public key."""
    return derived(_key(seed).exchange(X25519PublicKey.from_public_bytes(public)), about)


def derived(secret: bytes, about: bytes) -> bytes:
    """A key for what ``about`` says."""
    return HKDF(hashes.SHA256(), 32, salt=None, info=b"fedloom secure sum: " + about).derive(secret)


def _key(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derived(seed, b"key pair"))


def mask(key: bytes, numbers: int) -> Whole:
    """So many numbers that nobody tells from uniform ones without the key, which is used for nothing else."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(4 * numbers)), dtype="<u4").astype(np.uint32)


def sealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """A letter that only the holder of the key can open or could have written; ``about`` goes with it in the clear."""
    nonce = secrets.token_bytes(12)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, about)


def opened(key: bytes, letter: bytes, about: bytes) -> bytes:
    """What is in a letter."""
    try:
        return ChaCha20Poly1305(key).decrypt(letter[:12], letter[12:], about)
    except (InvalidTag, ValueError) as error:
        raise Unsealed from error


def shares_of(seed: bytes, least: int, number: int) -> list[bytes]:
    """So many shares of a seed, of which ``least`` give it back and fewer tell nothing."""
    return [share for _, share in sorted(Shamir.split(least, number, seed, ssss=False))]


def joined(shares: Mapping[int, bytes]) -> bytes:
    """The seed of which these are shares, by their place from 0; another one, if not all of them are."""
    found: bytes = Shamir.combine([(place + 1, share) for place, share in shares.items()], ssss=False)
    return found


class Scale(NamedTuple):
    """How numbers of at most ``bound``, either way, become whole ones that so many clients can add without overflow."""

    bound: float
    clients: int

    @property
    def step(self) -> float:
        """What 1 stands for: a number is off by at most half of it, and so is a mean of them."""
        return self.bound / (HALF // self.clients)

    def whole(self, numbers: NDArray[np.float64]) -> Whole:
        """The nearest whole numbers."""
        found = np.rint(np.clip(numbers, -self.bound, self.bound) / self.step).astype(np.int64)
        return (found & 0xFFFFFFFF).astype(np.uint32)

    def numbers(self, total: Whole) -> NDArray[np.float64]:
        """What a sum of whole numbers stands for."""
        found: NDArray[np.float64] = total.view(np.int32).astype(np.float64) * self.step
        return found
