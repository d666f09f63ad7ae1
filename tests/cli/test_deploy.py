# SPDX-License-Identifier: Apache-2.0
"""`fedloom deploy`: what it writes, and what it refuses."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Cli
from fedloom import algorithms
from fedloom.core.config import fields
from fedloom.deploy.local import app_in
from fedloom.deploy.options import SHARED, DeployOptions

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="Flower is not installed: pip install 'fedloom[flower]'"
)
Refused = Callable[..., str]


@pytest.mark.parametrize("method", algorithms.names())
def test_init_writes_an_app_whose_table_is_complete_and_can_be_read(method: str, cli: Cli, tmp_path: Path) -> None:
    outcome = cli("deploy", "init", "ward", "--method", method, "--dataset", "digits", "--set", "rounds=7")
    assert (outcome.code, outcome.out) == (0, "ward\n")
    project = tomllib.loads((tmp_path / "ward" / "pyproject.toml").read_text())
    own = {field.name for field, _ in fields(algorithms.get(method).config)}
    settings = {field.name for field, _ in fields(DeployOptions)}
    table = project["tool"]["flwr"]["app"]["config"]
    assert {name.replace("-", "_") for name in table} == {"method"} | own | settings | set(SHARED)
    app = app_in(tmp_path / "ward")
    assert app.settings.run.rounds == 7 and app.settings.deploy.shape == (1, 8, 8)
    assert app.settings.deploy.num_outputs == 10 and app.settings.config == algorithms.get(method).config()
    assert app.trial.dataset == "digits"
    for file in ("LICENSE", "federation/__init__.py", "federation/client.py", "federation/server.py"):
        assert (tmp_path / "ward" / file).is_file()


@pytest.mark.parametrize("method", ["mh_pfedhn", "mh_pfedhn_gd"])
def test_a_preset_that_is_chosen_in_the_apps_table_is_in_force(method: str, cli: Cli, tmp_path: Path) -> None:
    assert cli("deploy", "init", "ward", "--method", method, "--dataset", "digits", "--set", "local-lr=0.5").code == 0
    file = tmp_path / "ward" / "pyproject.toml"
    file.write_text(file.read_text().replace('preset = "text"', 'preset = "code"'))
    config = app_in(tmp_path / "ward").settings.config
    code = algorithms.get(method).config.PRESETS["code"]
    assert (config.local_epochs, config.weight_decay) == (code["local_epochs"], code["weight_decay"]) == (1, 5e-4)
    assert config.local_lr == 0.5  # what was given wins


def test_names_in_an_app_do_not_clash() -> None:
    for method in algorithms.names():
        own = {field.name for field, _ in fields(algorithms.get(method).config)}
        assert not own & ({field.name for field, _ in fields(DeployOptions)} | set(SHARED) | {"method"})


def test_init_refuses(refused: Refused, cli: Cli, tmp_path: Path) -> None:
    assert "did you mean 'pfedme' or 'pfedhn'" in refused("deploy", "init", "ward", "--method", "pfedhm")
    assert "Unknown setting" in refused("deploy", "init", "ward", "--method", "pfedhn", "--set", "round=3")
    assert "NAME=VALUE" in refused("deploy", "init", "ward", "--method", "pfedhn", "--set", "rounds")
    assert "'nosuch'" in refused("deploy", "init", "ward", "--method", "pfedhn", "--model", "mlp,nosuch")
    assert "'foo" in refused("deploy", "init", "ward", "--method", "pfedhn", "--partition", "foo:1")
    assert "--rounds is 'x'" in refused("deploy", "init", "ward", "--method", "pfedhn", "--set", "rounds=x")
    cli("deploy", "init", "full", "--method", "pfedhn")
    assert "full is not empty" in refused("deploy", "init", "full", "--method", "pfedhn")
    (tmp_path / "file").write_text("mine")
    assert "file is a file" in refused("deploy", "init", "file", "--method", "pfedhn")
    assert "Cannot make file/ward" in refused("deploy", "init", "file/ward", "--method", "pfedhn")
    for name in ("Ward 3", "ward_3", "3-ward", 'w"x', "w" * 33):
        assert "cannot be an app's name" in refused("deploy", "init", name, "--method", "pfedhn")
        assert not (tmp_path / name).exists()


@needs_flower
def test_local_refuses(refused: Refused, cli: Cli, tmp_path: Path) -> None:
    assert "not that of a fedloom app" in refused("deploy", "local", "nothing")
    cli("deploy", "init", "bare", "--method", "pfedhn")
    assert "give the shape of a sample" in refused("deploy", "local", "bare")
    cli("deploy", "init", "ward", "--method", "pfedhn", "--dataset", "digits")
    assert "holds no trial yet; begin one with `fedloom deploy local" in refused("deploy", "resume", "ward")
    (tmp_path / "ward" / "local" / "run").mkdir(parents=True)
    assert "holds a run; go on with `fedloom deploy resume`" in refused("deploy", "local", "ward")
    assert "begin again with `fedloom deploy local`" in refused("deploy", "resume", "ward")


@needs_flower
@pytest.mark.parametrize(
    ("method", "reason"),
    [("pfedhn", "on their labelled samples"), ("local", "has no model for clients that took no part")],
)
def test_local_refuses_newcomers_whom_the_method_cannot_serve_before_anything_starts(
    method: str, reason: str, refused: Refused, cli: Cli, tmp_path: Path
) -> None:
    cli("deploy", "init", "ward", "--method", method, "--dataset", "digits")
    assert reason in refused("deploy", "local", "ward", "--newcomers", 1)
    assert not (tmp_path / "ward" / "local").exists()


@needs_flower
def test_keys_are_made_once_added_to_and_are_whose_they_say(refused: Refused, cli: Cli, tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

    from fedloom.deploy.keys import clients_by_key

    cli("deploy", "init", "ward", "--method", "pfedhn")
    assert "Say whose keys" in refused("deploy", "keys", "ward")
    assert "holds no app" in refused("deploy", "keys", "nosuch", "--nodes", "2") and not (tmp_path / "nosuch").exists()
    outcome = cli("deploy", "keys", "ward", "--nodes", 2, "--node", "clinic", "--host", "link.example.org")
    keys = tmp_path / "ward" / "keys"
    assert (outcome.code, outcome.out) == (0, "ward/keys\n")
    by_key = clients_by_key(keys / "clients")
    assert sorted(by_key.values()) == ["0", "1", "clinic"]
    private = load_ssh_private_key((keys / "nodes" / "clinic").read_bytes(), None)
    assert by_key[private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)] == "clinic"
    certificate, root = (x509.load_pem_x509_certificate((keys / f).read_bytes()) for f in ("server.pem", "ca.pem"))
    certificate.verify_directly_issued_by(root)
    hosts = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["link.example.org", "localhost"]
    assert all((keys / f).stat().st_mode & 0o77 == 0 for f in ("ca.key", "server.key", "nodes/0"))
    assert "return 403" in (keys / "nginx.conf").read_text()
    before = {file: file.read_bytes() for file in keys.rglob("*") if file.is_file()}
    assert "cannot be called '../../evil'" in refused("deploy", "keys", "ward", "--node", "../../evil")
    assert cli("deploy", "keys", "ward", "--node", "clinic", "--node", "second").code == 0
    assert all(file.read_bytes() == data for file, data in before.items())
    assert sorted(clients_by_key(keys / "clients").values()) == ["0", "1", "clinic", "second"]
