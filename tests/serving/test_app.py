# SPDX-License-Identifier: Apache-2.0
"""The service over HTTP: what it answers, to whom, and what it refuses."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import http.client
import ipaddress
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.errors import ConfigError, RunError
from fedloom.core.tensors import read_tensors, read_with_metadata, write_tensors
from fedloom.models.load import load_model
from fedloom.serving.app import Service
from fedloom.serving.bundle import Bundle, make_bundle
from fedloom.serving.counters import Counters, Limiter
from fedloom.serving.openapi import description
from fedloom.serving.protocol import protocol
from fedloom.serving.settings import Settings
from fedloom.serving.tokens import Identity, identity_of, make_key, make_token, read_key
from serving_process import process


class Got(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(url: str, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Got:
    """One request on a connection of its own."""
    parts = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)) as connection:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return Got(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key(tmp_path / "key")
    return tmp_path / "key"


def bearer(key: Path, role: Any, name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {make_token(read_key(key), Identity(role, name))}"}


def test_a_participant_gets_its_own_model_by_its_token(made, serve, key, tmp_path) -> None:
    run, path = made("pfedhn")
    at = serve(path, key=key)
    for client in run.clients:
        got = ask(at.url, f"/v1/clients/{client}/model", **bearer(key, "client", client))
        assert got.status == 200
        found, metadata = read_with_metadata(got.body)
        wanted = run.parameters(client)["params"]
        assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert metadata["form"] == "model" and metadata["model"] == "mlp:hidden=8"
        sha = base64.b64encode(hashlib.sha256(got.body).digest()).decode()
        assert got.headers["content-digest"] == f"sha-256=:{sha}:"
        file = tmp_path / "model.safetensors"
        file.write_bytes(got.body)
        x = torch.as_tensor(run.simulation.federation.x[:5])
        assert torch.equal(load_model(file, "mlp:hidden=8", (1, 8, 8), 10)(x), run.predict(client, x))


def test_nobody_gets_anothers_model(made, serve, key) -> None:
    run, path = made("pfedhn")
    at = serve(path, key=key)
    url = "/v1/clients/0/model"
    assert ask(at.url, url).status == 401
    for role, name in (("client", "1"), ("newcomer", "0"), ("operator", "0"), ("client", "00")):
        assert ask(at.url, url, **bearer(key, role, name)).status == 403
    assert ask(at.url, "/v1/clients/nobody/model", **bearer(key, "client", "nobody")).status == 404
    unseen = run.server.unseen[0]
    assert ask(at.url, f"/v1/clients/{unseen}/model", **bearer(key, "client", unseen)).status == 404
    good = make_token(read_key(key), Identity("client", "0"))
    version, body, mac = good.split(".")
    other = base64.urlsafe_b64encode(b'{"client": "0", "until": 9999999999}').rstrip(b"=").decode()
    forged = [f"{version}.{other}.{mac}", f"{version}.{body}.", f"{version}.{body}", good[:-1], "", "é", "x" * 4000,
              f"..{mac}", make_token(b"k" * 32, Identity("client", "0")),
              make_token(read_key(key), Identity("client", "0"), days=-1)]  # fmt: skip
    for token in forged:
        got = ask(at.url, url, Authorization=f"Bearer {token}".encode("utf-8", "replace").decode("latin-1"))
        assert got.status == 401 and got.headers["www-authenticate"] == "Bearer"
    assert ask(at.url, url, Authorization="Basic abc").status == 401
    assert ask(at.url, url, Authorization=f"bearer {good}").status == 200


def test_without_a_key_there_are_no_participants(made, serve) -> None:
    _, path = made("pfedhn")
    at = serve(path)
    assert ask(at.url, "/v1/clients/0/model").status == 401
    assert ask(at.url, "/v1/clients/0/model", Authorization="Bearer fl1.e30.x").status == 401
    assert ask(at.url, "/v1").json["tokens"] is False


def test_with_a_key_newcomers_need_tokens_too(made, serve, key, newcomer, tmp_path) -> None:
    _run, path = made("it_pfl_hn", finetune_after=1)
    at = serve(path, key=key)
    x, _ = newcomer
    with pytest.raises(Exception, match="Say who you are"):
        fedloom.join(at.url, x, cache=tmp_path)
    token = make_token(read_key(key), Identity("newcomer", "ward-7"))
    assert fedloom.join(at.url, x, token=token, cache=tmp_path).way == "service"
    (part, *_) = at.service.card()["parts"].values()
    got = ask(at.url, part["url"], **bearer(key, "newcomer", "ward-7"))
    assert got.headers["cache-control"].startswith("private, ")  # a cache in between would ask nobody for a token
    assert ask(at.url, "/metrics").status == 401
    assert ask(at.url, "/metrics", **bearer(key, "newcomer", "ward-7")).status == 403
    text = ask(at.url, "/metrics", **bearer(key, "operator", "me")).body.decode()
    assert 'fedloom_requests_total{route="POST /v1/models",status="200"} 1' in text
    assert 'fedloom_request_seconds_count{route="POST /v1/models"} 1' in text
    assert "ward-7" not in text


def test_what_a_client_keeps_is_named(made, serve, key) -> None:
    _run, path = made("fedper")
    got = ask(serve(path, key=key).url, "/v1/clients/0/model", **bearer(key, "client", "0"))
    found, metadata = read_with_metadata(got.body)
    assert metadata["form"] == "sent" and metadata["missing"] == "own"
    assert all(name.startswith("shared/params/") for name in found)
    assert not any("own" in name for name in found)


def test_unchanged_models_are_not_sent_again(made, serve, key) -> None:
    _, path = made("pfedhn")
    at, token = serve(path, key=key), bearer(key, "client", "0")
    whole = ask(at.url, "/v1/clients/0/model", **token)
    tag = whole.headers["etag"]
    for condition in (tag, f'"x", {tag}', f"W/{tag}", "*"):
        again = ask(at.url, "/v1/clients/0/model", If_None_Match=condition, **token)
        assert again.status == 304 and not again.body and again.headers["etag"] == tag
    assert ask(at.url, "/v1/clients/0/model", If_None_Match='"x"', **token).status == 200
    other = ask(at.url, "/v1/clients/1/model", **bearer(key, "client", "1"))
    assert other.headers["etag"] != tag and other.body != whole.body


def test_ranges_are_pieces_of_the_whole(made, serve) -> None:
    _, path = made("pfedhn")
    at = serve(path)
    (part, *_) = at.service.card()["parts"].values()
    whole = ask(at.url, part["url"])
    assert whole.status == 200 and hashlib.sha256(whole.body).hexdigest() == part["sha256"]
    assert whole.headers["cache-control"].startswith("public, ") and "immutable" in whole.headers["cache-control"]
    size = len(whole.body)
    for asked, expected in (
        ("bytes=0-9", whole.body[:10]), ("bytes=5-", whole.body[5:]), ("bytes=-7", whole.body[-7:]),
        ("bytes=10-999999999", whole.body[10:]), (f"bytes=-{10 * size}", whole.body),
    ):  # fmt: skip
        got = ask(at.url, part["url"], Range=asked)
        assert got.status == 206 and got.body == expected and "content-digest" not in got.headers
        assert got.headers["content-range"].endswith(f"/{size}")
    for asked in (f"bytes={size}-", "bytes=9-3", "bytes=-0"):
        got = ask(at.url, part["url"], Range=asked)
        assert got.status == 416 and got.headers["content-range"] == f"bytes */{size}"
    for asked in ("bytes=0-1,4-5", "lines=1-2", "bytes=a-b", "bytes=" + "9" * 99 + "-"):
        assert ask(at.url, part["url"], Range=asked).status == 200
    assert ask(at.url, part["url"], Range="bytes=0-1", If_Range='"other"').status == 200
    assert ask(at.url, part["url"], Range="bytes=0-1", If_Range=whole.headers["etag"]).status == 206
    head = ask(at.url, part["url"], "HEAD")
    assert head.status == 200 and not head.body and head.headers["content-length"] == str(size)


def test_only_what_is_got_has_ranges(made, serve) -> None:
    _, path = made("pfedhn")
    at = serve(path)
    (part, *_) = at.service.card()["parts"].values()
    head = ask(at.url, part["url"], "HEAD", Range="bytes=0-9")
    assert head.status == 200 and head.headers["content-length"] == str(part["bytes"])
    vector = write_tensors({"vector": torch.zeros(at.service.weaver.size)})
    assert ask(at.url, "/v1/models", "POST", vector, Range="bytes=0-9").status == 200


def test_parts_that_stay_are_not_handed_out(made, serve) -> None:
    _, path = made("pfedhn")
    at = serve(path)
    for name, part in at.service.bundle.manifest["parts"].items():
        public = name in ("model.safetensors", "loom.safetensors")
        assert ask(at.url, f"/v1/parts/{part['sha256']}.safetensors").status == (200 if public else 404)
    for odd in ("..%2f..%2fetc%2fpasswd", "%00", "model", "a" * 5000, "..", "%2e%2e"):
        assert ask(at.url, f"/v1/parts/{odd}.safetensors").status == 404
    for odd in ("/..%2f..%2fetc/passwd", "//etc/passwd", "/v1/parts/", "/v1/../v1/card/../../x", "/V1", "/v1/"):
        assert ask(at.url, odd).status == 404


def test_names_of_clients_are_only_ever_looked_up(made, serve, key, tmp_path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    names = ["a/b", "../../etc/passwd", "ä b%2f", "x\ny", ".", "a"]
    client = np.repeat(names, 10)
    np.savez(tmp_path / "own.npz", x=x, y=np.tile([0, 1], 30), client=client)
    run = fedloom.run("pfedhn", dataset=str(tmp_path / "own.npz"), model="mlp:hidden=4", rounds=1, progress="quiet",
                      out=tmp_path / "run")  # fmt: skip
    at = serve(make_bundle(run), key=key)
    assert set(run.clients) == set(names)
    bodies = set()
    for name in names:
        got = ask(at.url, f"/v1/clients/{quote(name, safe='')}/model", **bearer(key, "client", name))
        assert got.status == 200, name
        bodies.add(got.body)
    assert len(bodies) == len(names)


def test_models_are_woven_from_vectors(made, serve) -> None:
    run, path = made("pfedhn", model="mlp:hidden=8,mlp:hidden=12", admit_rounds=4)
    at = serve(path)
    size = at.service.weaver.size
    vectors = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    for name, architecture in (
        ("mlp:hidden=8", "mlp:hidden=8"),
        ("mlp:hidden=12", "mlp:hidden=12"),
        ("", "mlp:hidden=8"),
    ):
        query = f"?architecture={quote(name)}" if name else ""
        many = read_tensors(ask(at.url, f"/v1/models{query}", "POST", write_tensors({"vector": vectors})).body)
        loom = at.service.weaver._loom
        expected = loom.unflatten(loom(run.server.state.loom, vectors, architecture), architecture)
        assert len(many) == 3 * len(expected)
        assert all(torch.equal(many[f"{row}/{part}"], expected[part][row]) for row in range(3) for part in expected)
        one = ask(at.url, f"/v1/models{query}", "POST", write_tensors({"vector": vectors[1]}))
        for part, value in read_tensors(one.body).items():
            torch.testing.assert_close(value, expected[part][1])
        again = ask(at.url, f"/v1/models{query}", "POST", write_tensors({"vector": vectors[1]}))
        assert again.body == one.body


def bodies(size: int) -> Iterator[tuple[bytes, int]]:
    good = torch.zeros(size)
    yield b"", 400
    yield b"\x80\x04K\x01.", 400  # a pickle
    yield b"PK\x03\x04" + bytes(30), 400
    yield write_tensors({"vectors": good}), 400
    yield write_tensors({"vector": good, "more": good}), 400
    yield write_tensors({"vector": good.double()}), 400
    yield write_tensors({"vector": torch.zeros(size + 1)}), 400
    yield write_tensors({"vector": torch.zeros(0, size)}), 400
    yield write_tensors({"vector": torch.full((size,), torch.nan)}), 400
    yield write_tensors({"vector": torch.full((size,), torch.inf)}), 400
    yield write_tensors({"vector": good}) + b"more", 400
    yield write_tensors({"vector": good})[:-1], 400
    yield (1 << 62).to_bytes(8, "little") + b"{}", 400
    yield (10).to_bytes(8, "little") + b"[[[[[[[[[[", 400
    header = b'{"vector":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}'
    yield len(header).to_bytes(8, "little") + header + bytes(4), 400
    header = b'{"vector":{"dtype":"F32","shape":[99999999999,9999999999],"data_offsets":[0,4]}}'
    yield len(header).to_bytes(8, "little") + header + bytes(4), 400
    one = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b'{"vector":' + one + b',"more":' + one + b"}"
    yield len(header).to_bytes(8, "little") + header + bytes(4), 400
    deep = b"[" * 9000
    yield len(deep).to_bytes(8, "little") + deep, 400
    yield bytes(1 << 20), 413


def test_bodies_that_are_wrong_are_refused_in_a_sentence(made, serve) -> None:
    _, path = made("pfedhn")
    at = serve(path)
    for body, status in bodies(at.service.weaver.size):
        for target in ("/v1/models", "/v1/gradients"):
            got = ask(at.url, target, "POST", body)
            assert got.status == status, body[:60]
            assert got.headers["content-type"] == "application/problem+json"
            detail = got.json["detail"]
            assert detail.endswith(".") and "\n" not in detail and "Traceback" not in detail
    good = write_tensors({"vector": torch.zeros(at.service.weaver.size)})
    assert ask(at.url, "/v1/models", "POST", good, Content_Type="application/json").status == 415
    assert ask(at.url, "/v1/models?architecture=vgg", "POST", good).status == 400
    _, other = made("fedavg")
    assert ask(serve(other).url, "/v1/models", "POST", good).status == 404
    assert ask(at.url, "/v1/models").status == 405 and ask(at.url, "/v1/models").headers["allow"] == "POST"
    assert ask(at.url, "/v1", "DELETE").status == 405


def test_a_vector_for_another_bundle_is_refused(made, serve) -> None:
    """Or else a join that meets another bundle halfway would end with a model of both."""
    _, path = made("pfedhn")
    at = serve(path)
    vector = write_tensors({"vector": torch.zeros(at.service.weaver.size)})
    assert ask(at.url, "/v1/models", "POST", vector, Fedloom_Bundle=at.service.bundle.digest).status == 200
    got = ask(at.url, "/v1/models", "POST", vector, Fedloom_Bundle="0" * 64)
    assert got.status == 409 and "another bundle by now" in got.json["detail"]


def test_a_failure_within_is_no_traceback(made, serve, monkeypatch) -> None:
    _, path = made("pfedhn")
    at = serve(path)
    monkeypatch.setattr(at.service.weaver, "weave", lambda *_: 1 / 0)
    got = ask(at.url, "/v1/models", "POST", write_tensors({"vector": torch.zeros(at.service.weaver.size)}))
    assert got.status == 500 and b"ZeroDivision" not in got.body and b"Traceback" not in got.body
    assert got.headers["x-request-id"] in got.json["detail"]


def test_who_asks_too_often_waits(made, serve, key) -> None:
    _, path = made("pfedhn")
    at = serve(path, key=key, rate=5)
    one, other = (bearer(key, "client", client) for client in "01")
    assert [ask(at.url, "/v1/clients/0/model", **one).status for _ in range(7)] == [200] * 5 + [429] * 2
    got = ask(at.url, "/v1/clients/0/model", **one)
    assert 1 <= int(got.headers["retry-after"]) <= 13
    assert ask(at.url, "/v1/clients/1/model", **other).status == 200
    assert ask(at.url, "/healthz").status == 200


def test_the_limit_is_a_rate() -> None:
    """60 a minute: 60 at once, then one a second."""
    limiter = Limiter(60)
    assert [limiter.wait("a", now=0.0) == 0 for _ in range(61)] == [True] * 60 + [False]
    assert limiter.wait("a", now=0.5) == pytest.approx(0.5)
    assert limiter.wait("a", now=1.0) == 0 and limiter.wait("a", now=1.0) > 0
    assert limiter.wait("b", now=1.0) == 0
    assert all(Limiter(0).wait("a", now=0.0) == 0 for _ in range(1000))


def test_counters_of_workers_are_added_up() -> None:
    counters = Counters(["GET /v1"], workers=2)
    for worker in (0, 1, 1):
        counters.worker = worker
        counters.add("GET /v1", 200, 0.02, 3, 5)
    text = counters.text()
    assert 'fedloom_requests_total{route="GET /v1",status="200"} 3' in text
    assert 'fedloom_request_seconds_bucket{route="GET /v1",le="0.01"} 0' in text
    assert 'fedloom_request_seconds_bucket{route="GET /v1",le="0.025"} 3' in text
    assert 'fedloom_sent_bytes_total{route="GET /v1"} 15' in text


def test_cards_and_description(made, serve) -> None:
    _run, path = made("pfedhn")
    at = serve(path)
    card = ask(at.url, "/v1").json
    assert card["method"] == "pfedhn" and card["bundle"] == at.service.bundle.digest
    assert set(card["parts"]) == {"model.safetensors", "loom.safetensors"}
    assert ask(at.url, "/v1/card").json == at.service.bundle.card
    text = ask(at.url, "/v1/card", Accept="text/markdown")
    assert text.headers["content-type"].startswith("text/markdown") and text.body.startswith(b"# pFedHN on digits")
    assert ask(at.url, "/v1/card", If_None_Match=text.headers["etag"]).status == 200  # that of the other form
    listed = ask(at.url, "/v1/architectures").json["architectures"]
    assert listed == [{"name": "mlp:hidden=8", "parameters": 610, "clients": 4, "woven": True}]
    described = ask(at.url, "/openapi.json").json
    assert described["openapi"].startswith("3.1")
    for endpoint in at.service.endpoints:
        path_shown = endpoint.path.replace(":path", "")
        operation = described["paths"][path_shown][endpoint.method.lower()]
        assert {one["name"] for one in operation["parameters"]} >= set(re.findall(r"{(\w+)}", path_shown))
        assert "200" in operation["responses"] and "default" in operation["responses"]
    for headers in (ask(at.url, "/v1").headers, ask(at.url, "/nothing").headers):
        assert (
            headers["x-content-type-options"] == "nosniff"
            and "default-src 'none'" in headers["content-security-policy"]
        )
        assert "access-control-allow-origin" not in headers and "server" not in headers


def test_the_description_is_true(made, serve, key) -> None:
    """It names what is there, who must say who they are, and which answers come in pieces or not again."""
    _, path = made("pfedhn")
    for settings in ({}, {"key": key}):
        at = serve(path, **settings)
        described = ask(at.url, "/openapi.json").json["paths"]
        assert sum(map(len, described.values())) == len(at.service.endpoints)
        for endpoint in at.service.endpoints:
            operation = described[endpoint.path.replace(":path", "")][endpoint.method.lower()]
            where = endpoint.path.replace("{digest}", next(iter(at.service.parts))).replace("{client:path}", "0")
            assert (ask(at.url, where, endpoint.method).status == 401) == ("security" in operation), endpoint.route
            who = bearer(key, "operator" if endpoint.access == "operator" else "client", "0") if settings else {}
            if ask(at.url, where, endpoint.method, **who).status == 200:
                again = ask(at.url, where, If_None_Match="*", **who).status == 304
                part = ask(at.url, where, Range="bytes=0-3", **who).status == 206
                assert (again, part) == ("304" in operation["responses"], "206" in operation["responses"])
    _, other = made("fedavg")
    assert not any(
        where in ask(serve(other).url, "/openapi.json").json["paths"] for where in ("/v1/models", "/v1/gradients")
    )


def test_the_description_says_where_certificates_are_asked_for(made, authority: Path) -> None:
    _, path = made("pfedhn")
    files = {"tls_cert": authority / "server.pem", "tls_key": authority / "server.key"}
    found = description(Service(Bundle(path), Settings(client_ca=authority / "ca.pem", **files)))
    assert found["components"]["securitySchemes"]["certificate"] == {"type": "mutualTLS"}
    assert found["paths"]["/healthz"]["get"]["security"] == [{"certificate": []}]
    assert found["paths"]["/metrics"]["get"]["security"] == [{"certificate": [], "token": []}]


def test_logs_have_no_bodies(made, serve, key, caplog) -> None:
    _, path = made("pfedhn")
    at = serve(path)
    vector = torch.full((at.service.weaver.size,), 0.123456)
    with caplog.at_level("INFO", "fedloom.serving"):
        ask(at.url, "/v1/models?architecture=evil%0Aline", "POST", write_tensors({"vector": vector}))
        ask(at.url, "/nothing%7f%0a%0dfake", Authorization="Bearer secret-token")
        time.sleep(0.1)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and all(json.loads(line)["request"] for line in lines)
    text = "".join(lines)
    assert "evil" not in text and "secret-token" not in text and "fake" not in text and "0.123" not in text


def test_settings_are_checked(tmp_path: Path, key: Path) -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::", "models.example.org"):
        with pytest.raises(ConfigError, match="can be reached from other machines"):
            Settings(host=host)
        assert Settings(host=host, insecure=True).host == host
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        assert Settings(host=host).host == host
    with pytest.raises(ConfigError, match="belong together"):
        Settings(tls_cert=key)
    with pytest.raises(ConfigError, match="takes TLS"):
        Settings(client_ca=key)
    with pytest.raises(ConfigError, match="There is no file"):
        Settings(key=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="--timeout is nan"):
        Settings(timeout=float("nan"))
    (tmp_path / "bad").write_text("short")
    with pytest.raises(ConfigError, match="holds no key"):
        read_key(tmp_path / "bad")


def test_a_key_is_for_this_user_alone_and_stays(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    before = (tmp_path / "key").read_text()
    make_key(tmp_path / "key")
    assert (tmp_path / "key").read_text() == before and (tmp_path / "key").stat().st_mode & 0o77 == 0


def test_tokens_end(key: Path) -> None:
    token = make_token(read_key(key), Identity("client", "ä/3"), days=1, now=1000)
    assert identity_of(read_key(key), token, now=1000 + 86399) == Identity("client", "ä/3")
    assert identity_of(read_key(key), token, now=1000 + 86402) is None
    for days in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="give a number of days"):
            make_token(read_key(key), Identity("client", "0"), days=days)
    with pytest.raises(ConfigError, match="too long"):
        make_token(read_key(key), Identity("client", "x" * 2000))


# TLS and certificates


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority with certificates: of the service, of client 0, of a newcomer; and a stranger's."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    folder, now = tmp_path_factory.mktemp("keys"), datetime.datetime.now(datetime.UTC)

    def certificate(stem: str, name: str, issuer: Any, signer: Any, *, ca: bool = False) -> tuple[Any, Any]:
        own = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        hosts = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        signed = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(issuer or subject).public_key(own.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True).add_extension(hosts, False)
            .sign(signer or own, hashes.SHA256())
        )  # fmt: skip
        (folder / f"{stem}.pem").write_bytes(signed.public_bytes(Encoding.PEM))
        (folder / f"{stem}.key").write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return subject, own

    root = certificate("ca", "authority", None, None, ca=True)
    for stem, name in (("server", "server"), ("client", "0"), ("newcomer", "ward-7")):
        certificate(stem, name, *root)
    certificate("stranger", "0", *certificate("other", "other authority", None, None, ca=True))
    return folder


def over_tls(url: str, path: str, folder: Path, own: str | None) -> Got:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if own:
        context.load_cert_chain(folder / f"{own}.pem", folder / f"{own}.key")
    parts = urlsplit(url)
    connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, context=context, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return Got(answer.status, dict(answer.getheaders()), answer.read())


def test_clients_are_known_by_their_certificates(made, serve, authority: Path, newcomer, tmp_path) -> None:
    run, path = made("pfedhn", admit_rounds=4)
    files = {"tls_cert": authority / "server.pem", "tls_key": authority / "server.key"}
    at = serve(path, client_ca=authority / "ca.pem", **files)
    got = over_tls(at.url, "/v1/clients/0/model", authority, "client")
    assert got.status == 200 and torch.equal(
        next(iter(read_tensors(got.body).values())), next(iter(run.parameters("0")["params"].values()))
    )
    assert over_tls(at.url, "/v1/clients/1/model", authority, "client").status == 403
    assert over_tls(at.url, "/v1/clients/0/model", authority, "newcomer").status == 403
    for own in (None, "stranger"):
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            over_tls(at.url, "/v1", authority, own)
    x, y = newcomer
    joined = fedloom.join(at.url, x, y, way="service", ca=authority / "ca.pem", cert=authority / "newcomer.pem",
                          cert_key=authority / "newcomer.key", cache=tmp_path)  # fmt: skip
    assert torch.equal(joined.predict(x), run.admit(x, y).predict(x))
    with pytest.raises(RunError, match="its certificate is not trusted"):
        fedloom.join(at.url, x, y, ca=authority / "other.pem", cache=tmp_path)


def test_who_never_begins_with_tls_is_let_go(made, serve, authority: Path) -> None:
    _, path = made("pfedhn")
    at = serve(path, tls_cert=authority / "server.pem", tls_key=authority / "server.key", timeout=1.0)
    parts = urlsplit(at.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        assert not connection.recv(1)  # asyncio's own patience is a minute


def test_without_httptools_it_serves_alike(made, serve, monkeypatch) -> None:
    """As the extra `serve` alone installs it."""
    monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    assert "h11" in protocol(1.0).__mro__[1].__module__
    _, path = made("pfedhn")
    at = serve(path, timeout=0.3)
    vector = write_tensors({"vector": torch.zeros(at.service.weaver.size)})
    woven = b"".join(map(bytes, at.service.weaver.weave(vector, "")))
    assert ask(at.url, "/v1/models", "POST", vector).body == woven
    (part, *_) = at.service.card()["parts"].values()
    whole = ask(at.url, part["url"]).body
    assert hashlib.sha256(whole).hexdigest() == part["sha256"]
    assert ask(at.url, part["url"], Range="bytes=5-9").body == whole[5:10]
    assert ask(at.url, "/v1", "HEAD").body == b"" and ask(at.url, "/v1", If_None_Match="*").status == 304
    parts = urlsplit(at.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        connection.sendall(b"GET /v1 HTTP/1.1\r\nhost: x\r\n")
        assert not connection.recv(1)  # a head that never ends


def test_a_certificate_is_not_a_name_that_a_header_can_say(made, serve) -> None:
    _, path = made("pfedhn")
    at = serve(path)
    for header in ("fedloom.certificate", "X-Forwarded-User", "X-SSL-Client-CN", "X-Forwarded-For"):
        assert ask(at.url, "/v1/clients/0/model", **{header: "0"}).status == 401


# processes


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.slow
def test_workers_share_limits_and_metrics_and_are_started_again(made, key) -> None:
    _, path = made("pfedhn")
    with process(path, "--workers", "2", "--key", str(key)) as (running, url):
        token = bearer(key, "client", "0")
        for _ in range(40):
            assert ask(url, "/v1/clients/0/model", **token).status == 200
        text = ask(url, "/metrics", **bearer(key, "operator", "me")).body.decode()
        assert 'route="GET /v1/clients/{client:path}/model",status="200"} 40' in text
        before = children(running.pid)
        assert len(before) == 2
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        for _ in range(100):
            with contextlib.suppress(OSError, http.client.HTTPException):
                if ask(url, "/v1/clients/0/model", **token).status == 200:
                    break
            time.sleep(0.1)
        after = children(running.pid)
        assert len(after) == 2 and not set(before) & set(after)
        text = ask(url, "/metrics", **bearer(key, "operator", "me")).body.decode()
        assert 'route="GET /v1/clients/{client:path}/model",status="200"} 41' in text
        running.terminate()
        assert running.wait(30) == 0


@pytest.mark.slow
def test_workers_end_when_the_process_over_them_is_killed(made) -> None:
    _, path = made("pfedhn")
    with process(path, "--workers", "2") as (running, url):
        workers = children(running.pid)
        running.kill()
        running.wait()
        for _ in range(200):
            if not any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers):
                break
            time.sleep(0.05)
        with pytest.raises(ConnectionRefusedError):
            ask(url, "/healthz")


SIGNALLED = """
import os, signal, time
from types import SimpleNamespace
from fedloom.serving import run

real, forks = os.fork, 0

def fork():
    global forks
    forks += 1
    pid = real()
    if pid and forks == 3 or not pid and forks == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return pid

os.fork = fork
run._run = lambda *_: time.sleep(60 * (forks > 1))  # the first worker ends at once
run._supervise(SimpleNamespace(counters=SimpleNamespace()), None, 1, lambda: None)
"""


@pytest.mark.slow
def test_a_signal_at_the_moment_of_a_fork_is_not_lost() -> None:
    """The second worker is told to stop before it does anything, and the supervisor when it has started the third."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED], timeout=50, check=False)
    assert done.returncode == 0


def test_a_port_in_use_and_a_bad_bundle_are_one_sentence(made, tmp_path, capsys) -> None:
    from fedloom.cli.main import main

    _, path = made("pfedhn")
    (tmp_path / "bad.pem").write_text("no certificate")
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 1, 8, 8)))
    bad, data = str(tmp_path / "bad.pem"), str(tmp_path / "new.npz")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for words in (
            ["serve", str(path), "--port", str(taken.getsockname()[1])],
            ["serve", str(tmp_path / "nothing")],
            ["serve", str(path), "--host", "0.0.0.0"],
            ["serve", str(path), "--port", "0", "--workers", "2", "--tls-cert", bad, "--tls-key", bad],
            ["token", str(tmp_path / "key")],
            ["token", str(tmp_path / "key"), "--client", "0", "--days", "nan"],
            ["join", "http://127.0.0.1:x", "--data", data],
            ["join", "http://[::1", "--data", data],
            ["join", "https://127.0.0.1:9", "--data", data, "--ca", bad],
            ["join", "http://127.0.0.1:9", "--data", data, "--token", __file__],
            ["bundle"],
        ):
            with pytest.raises(SystemExit) as end:
                main(words)
            told = capsys.readouterr().err
            assert end.value.code == 2 and told.startswith("fedloom: ") and told.count("\n") == 1
