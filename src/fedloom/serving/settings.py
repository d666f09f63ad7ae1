# SPDX-License-Identifier: Apache-2.0
"""How a service is run."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path

from fedloom.core.errors import ConfigError

PORT = 8470


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `fedloom serve` was told."""

    host: str = "127.0.0.1"
    port: int = PORT
    workers: int = 1
    key: Path | None = None
    """The file that signs tokens; without one nobody can prove to be a participant."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    """The authority whose certificates clients must have."""
    insecure: bool = False
    rate: int = 600
    """Requests a minute, for each token or, without tokens, each address; 0: any number."""
    timeout: float = 20.0
    """Seconds within which a request has come, and every piece of an answer is taken."""
    keep_loom: bool = False
    """Newcomers' models are woven here; the loom is not handed out."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key belong together: a certificate and its private key. Give both.")
        if self.client_ca and not self.tls_cert:
            raise ConfigError(
                "--client-ca asks clients for certificates, which takes TLS; give --tls-cert and --tls-key."
            )
        if not is_loopback(self.host) and not self.tls_cert and not self.insecure:
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, and without TLS anybody on the way reads "
                "tokens and models. Give --tls-cert and --tls-key, or --insecure if something before it does TLS."
            )
        if not math.isfinite(self.timeout):
            raise ConfigError(f"--timeout is {self.timeout}; give a number of seconds.")
        for file in (self.key, self.tls_cert, self.tls_key, self.client_ca):
            if file and not file.is_file():
                raise ConfigError(f"There is no file {file}; give one that is there.")

    @property
    def closed(self) -> bool:
        """Whether newcomers too must show who they are."""
        return self.key is not None or self.client_ca is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
