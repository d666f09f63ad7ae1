# SPDX-License-Identifier: Apache-2.0
"""Keys of a federation: a certificate authority, the link's certificate, and a key pair for every node::

KEYS/
  ca.key, ca.pem            the authority: ca.key signs, and stays where it was made; everybody gets ca.pem
  server.key, server.pem    the link's
  nodes/NAME                a node's private key, as OpenSSH writes it: to be carried to that node, and nowhere else
  clients/NAME.pub          its public key: the server's list of who is who
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from fedloom.core.errors import ConfigError, RunError
from fedloom.core.trees import ClientId
from fedloom.deploy.options import check_name
from fedloom.deploy.store import write_private
from fedloom.runs.files import file_name, read_file, write_file

DAYS = 365
"""For which certificates hold. Nodes' keys are bare keys, and hold until they are taken off the server's list."""


def make_keys(folder: Path, clients: Sequence[ClientId], hosts: Sequence[str]) -> Path:
    """Make all keys of a federation whose link is reached under ``hosts``: names or addresses.

    Where they are there already, only the keys of clients that have none are made; all others stay.
    """
    for client in clients:
        check_name(client)
    if folder.exists() and any(folder.iterdir()):
        _check_link(folder, hosts)
    else:
        _make_authority(folder, hosts)
    for client in clients:
        add_node(folder, client)
    return folder


def _check_link(folder: Path, hosts: Sequence[str]) -> None:
    """Keys to which more can be added: whole ones, for these hosts."""
    if not all((folder / part).exists() for part in ("ca.pem", "server.key", "server.pem", "nodes", "clients")):
        raise RunError(f"{folder} holds something, but no keys of a whole federation; remove it to make new ones.")
    link = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = link.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    for host in hosts:
        if _host(host) not in list(names):
            raise RunError(
                f"The link's certificate in {folder} is not for {host}; leave --host out to add nodes, or make all "
                "keys anew in another folder."
            )


def _make_authority(folder: Path, hosts: Sequence[str]) -> None:
    """An authority of this federation alone, and a certificate by it for the link under these names."""
    for part in ("nodes", "clients"):
        (folder / part).mkdir(parents=True, mode=0o700)
    authority, name = ec.generate_private_key(ec.SECP384R1()), _name("fedloom certificate authority")
    root = _certificate(name, authority.public_key(), name, authority, x509.BasicConstraints(ca=True, path_length=0))
    link = ec.generate_private_key(ec.SECP384R1())
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    leaf = _certificate(_name(hosts[0]), link.public_key(), name, authority, names)
    for stem, key, certificate in (("ca", authority, root), ("server", link, leaf)):
        _write_private(folder / f"{stem}.key", key, PrivateFormat.PKCS8)
        write_file(folder / f"{stem}.pem", certificate.public_bytes(Encoding.PEM))


def add_node(folder: Path, client: ClientId) -> None:
    """A key pair for a node that has none; its private half may have been carried away."""
    private, listed = folder / "nodes" / file_name(client), folder / "clients" / f"{file_name(client)}.pub"
    if listed.exists():
        return
    if not private.exists():
        _write_private(private, ec.generate_private_key(ec.SECP384R1()), PrivateFormat.OpenSSH)
    key = load_ssh_private_key(private.read_bytes(), None)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_file(listed, public + b"\n")


def clients_by_key(folder: Path) -> dict[bytes, ClientId]:
    """``{public key as the link gives it: client}`` from the files NAME.pub of a folder."""
    files = sorted(folder.glob("*.pub"))
    if not files:
        raise ConfigError(f"{folder} holds no file NAME.pub; make keys with `fedloom deploy keys`.")
    found: dict[bytes, ClientId] = {}
    for file in files:
        try:
            key = load_ssh_public_key(read_file(file))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is no public key in the form of OpenSSH; make it anew.") from error
        found[key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)] = file.stem
    return found


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _certificate(
    subject: x509.Name,
    public: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> x509.Certificate:
    """A certificate for ``public`` that ``key``, the issuer's, signs; ``extension`` says whether it is an authority's.

    It holds from five minutes ago, since clocks of machines differ.
    """
    now = datetime.datetime.now(datetime.UTC)
    is_root = isinstance(extension, x509.BasicConstraints)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(extension, critical=is_root)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    if is_root:
        usage = dict.fromkeys(
            ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
        )
        signs = x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False)
        builder = builder.add_extension(signs, critical=True)
    return builder.sign(key, hashes.SHA384())


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> None:
    """A key that only its owner can read, never over one that is there."""
    if not write_private(path, key.private_bytes(Encoding.PEM, form, NoEncryption())):
        raise RunError(f"{path} was made by somebody else at this moment; try again.")
