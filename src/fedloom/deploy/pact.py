# SPDX-License-Identifier: Apache-2.0
"""What the clients of a secure sum agree on: whose keys count, who is left in the end, and who has signed for it.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: Practical secure aggregation for
privacy-preserving machine learning. CCS 2017. A sum is made in messages of the server to each client; those who do not
answer one are left out of the next:

    keys      each client makes two key pairs and the seed of a mask of its own; tells both public keys
    shares    gets everybody's keys; tells shares of its second key and of its seed, each sealed for one other
    train     gets the shares that are for it; tells its change under a mask for each pair, and under its own
    agree     gets the names of those whose changes came; signs for them (with ``signed``)
    unmask    tells shares of the own masks of those, and of the second keys of the others; never both of one

``docs/how-to-sum-securely.md`` says against whom this holds. Of n clients more than two thirds must stay to the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedloom.core.trees import ClientId
from fedloom.deploy.options import NAME
from fedloom.deploy.store import Refusal
from fedloom.runs.files import file_name, read_file

SUM = "query.sum"
"""Flower's type of the messages but that to train."""

FEWEST = 3
"""Clients of a sum, whatever else is set: of two, each would know the other's change."""

LOSS = 100.0
"""The largest loss, either way, that enters the sum of losses."""

ADVERT, SIGNATURE, LETTER = 64, 300, 200
"""Hexadecimal digits: of a key or a commitment; at most of a signature, and of a letter."""


class Advert(NamedTuple):
    """What a client tells of its keys, as hexadecimal digits."""

    seal: str
    """The public key by which letters to it are sealed."""
    mask: str
    """The public key from which masks for pairs follow."""
    own: str
    """The commitment to the seed of the mask of its own."""
    signature: str = ""


class Sum(NamedTuple):
    """Which sum this is."""

    run: str
    round: int
    number: int
    """Never given twice, and greater than those before."""


def threshold(clients: int) -> int:
    """How many of so many clients must stay to the end: more than two thirds."""
    return 2 * clients // 3 + 1


def digest(one: Sum, adverts: Mapping[ClientId, Advert]) -> bytes:
    """Stands for a sum and the keys of all its clients."""
    keys = [[client, *adverts[client][:3]] for client in sorted(adverts)]
    return hashlib.sha256(json.dumps(["fedloom pact", *one, keys]).encode()).digest()


def advertised(one: Sum, client: ClientId, advert: Advert) -> bytes:
    """What a client signs of its keys."""
    return json.dumps(["fedloom keys", *one, client, *advert[:3]]).encode()


def counted(pact: bytes, clients: Collection[ClientId]) -> bytes:
    """What clients sign when they agree on whose changes are in the sum."""
    return json.dumps(["fedloom clients", pact.hex(), sorted(clients)]).encode()


def addressed(pact: bytes, sender: ClientId, receiver: ClientId) -> bytes:
    """What goes with a letter in the clear."""
    return json.dumps(["fedloom letter", pact.hex(), sender, receiver]).encode()


def paired(pact: bytes, one: ClientId, other: ClientId) -> bytes:
    """What the mask of a pair is for."""
    return json.dumps(["fedloom mask", pact.hex(), *sorted([one, other])]).encode()


def adverts_in(text: Any) -> dict[ClientId, Advert]:
    """Keys by client, as they travel. ``ValueError``: they are none."""
    return {client: advert_in(found) for client, found in _mapping(text).items()}


def advert_in(found: Any) -> Advert:
    """A client's keys, as they travel. ``ValueError``: they are none."""
    if not (isinstance(found, list) and len(found) == 4 and all(isinstance(part, str) for part in found)):
        raise ValueError
    advert = Advert(*found)
    if any(len(bytes.fromhex(part)) != ADVERT // 2 for part in advert[:3]) or len(advert.signature) > SIGNATURE:
        raise ValueError
    bytes.fromhex(advert.signature)
    return advert


def words_in(text: Any, most: int = LETTER) -> dict[ClientId, bytes]:
    """Bytes by client, as they travel: at most so many digits each. ``ValueError``: they are none."""
    found = _mapping(text)
    if any(not isinstance(word, str) or len(word) > most for word in found.values()):
        raise ValueError
    return {client: bytes.fromhex(word) for client, word in found.items()}


def names_in(text: Any) -> set[ClientId]:
    """Names of clients, as they travel. ``ValueError``: they are none."""
    found = json.loads(str(text))
    if not isinstance(found, list) or len(set(map(_checked, found))) != len(found):
        raise ValueError
    return set(found)


def as_text(words: Mapping[ClientId, bytes]) -> str:
    """Bytes by client, to travel."""
    return json.dumps({client: word.hex() for client, word in words.items()})


def _mapping(text: Any) -> dict[ClientId, Any]:
    found = json.loads(str(text))
    if not isinstance(found, dict):
        raise ValueError
    return {_checked(client): value for client, value in found.items()}


def _checked(name: Any) -> ClientId:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError
    return name


class Identity:
    """A node's own key, and the public keys of all clients, as this node got them: not from the server."""

    def __init__(self, key: str, peers: str) -> None:
        self._peers = Path(peers)
        try:
            found = load_ssh_private_key(read_file(Path(key)), None)
        except (OSError, ValueError) as error:
            raise Refusal("cannot read its own identity, a private key in the form of OpenSSH.") from error
        if not isinstance(found, EllipticCurvePrivateKey):
            raise Refusal("has an identity of another kind than `fedloom deploy keys` makes.")
        self._key = found

    def sign(self, text: bytes) -> str:
        """This node's signature."""
        return self._key.sign(text, ECDSA(SHA384())).hex()

    def is_of(self, client: ClientId) -> bool:
        """Whether this node is that client."""
        key = self._key_of(client)
        return key is not None and key.public_numbers() == self._key.public_key().public_numbers()

    def has_signed(self, client: ClientId, signature: str, text: bytes) -> bool:
        """Whether that client signed the text."""
        key = self._key_of(client)
        if key is None:
            return False
        try:
            key.verify(bytes.fromhex(signature), text, ECDSA(SHA384()))
        except (InvalidSignature, ValueError):
            return False
        return True

    def _key_of(self, client: ClientId) -> EllipticCurvePublicKey | None:
        try:
            found = load_ssh_public_key(read_file(self._peers / f"{file_name(client)}.pub"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, EllipticCurvePublicKey) else None
