# SPDX-License-Identifier: Apache-2.0
"""Keys of a federation: a certificate authority, the link's certificate, and a key pair for every node."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedloom.core.errors import ConfigError
from fedloom.core.trees import ClientId


def clients_by_key(folder: Path) -> dict[bytes, ClientId]:
    """``{public key as the link gives it: client}`` from the files NAME.pub of a folder."""
    files = sorted(folder.glob("*.pub"))
    if not files:
        raise ConfigError(f"{folder} holds no file NAME.pub; make keys with `fedloom deploy keys`.")
    found: dict[bytes, ClientId] = {}
    for file in files:
        try:
            key = load_ssh_public_key(file.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is no public key in the form of OpenSSH; make it anew.") from error
        found[key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)] = file.stem
    return found
