# SPDX-License-Identifier: Apache-2.0
"""Joining over HTTP gives what ``Run.admit`` gives in process, to the last bit, and says what was sent."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.errors import ConfigError, DataError, FedloomError, NeedsError, RunError
from fedloom.core.tensors import read_tensors, write_tensors
from fedloom.core.trees import flatten
from fedloom.data.registry import load as load_data
from fedloom.models.load import load_model
from fedloom.runs.checkpoint import digest
from fedloom.serving.bundle import make_bundle
from fedloom.serving.join import Service, versions
from fedloom.serving.remote import Access

WAYS = [
    ("fedavg", {}, "home", []),
    ("fedavg", {"adapt": "prior"}, "home", []),
    ("fedavg", {"model": "testnets:Normed"}, "home", []),
    ("hypergenfl", {}, "home", []),
    ("hyperfedzero", {"hidden": "16", "chunk_size": 64}, "home", []),
    ("pfedhn", {"admit_rounds": 4}, "home", []),
    ("pfedhn", {"admit_rounds": 4}, "service", ["vector of 2 numbers", "change of the model, 610 numbers"]),
    ("pfedhn", {"model": "testnets:Normed", "admit_rounds": 3}, "service", None),
    ("pfedhn", {"descriptor": "class_shares"}, "service", ["vector of 10 numbers"]),
    ("pfedhn", {"descriptor": "class_shares"}, "home", []),
    ("pfedhn_pc", {"admit_rounds": 3}, "service", None),
    ("it_pfl_hn", {"finetune_after": 1}, "service", ["vector of 2 numbers"]),
    ("it_pfl_hn", {"finetune_after": 1, "preset": "standardised"}, "service", ["vector of 2 numbers"]),
    ("it_pfl_hn", {"finetune_after": 1}, "home", []),
    ("mh_pfedhn", {"admit_rounds": 3}, "home", []),
    ("fedavg", {"adapt": "tune"}, "home", []),
    ("pfedlhn", {"admit_rounds": 3}, "service", None),
    ("pefll", {}, "service", ["vector of 2 numbers"]),
]


def equal(one: Any, other: Any) -> bool:
    a, b = flatten(one), flatten(other)
    return list(a) == list(b) and all(torch.equal(a[path], b[path]) for path in a)


@pytest.mark.parametrize(("method", "options", "way", "told"), WAYS)
def test_a_join_is_an_admission(made, serve, newcomer, tmp_path, method, options, way, told) -> None:
    run, path = made(method, **options)
    x, y = newcomer
    labels = y if run.for_newcomers.server.algorithm.needs_labels(run.server.config) else None
    at = serve(path, trust=True)
    joined = fedloom.join(at.url, x, labels, way=way, cache=tmp_path, trust=True)
    ours = run.admit(x, labels)
    assert equal(joined.parameters, ours.parameters) and joined.way == way
    assert torch.equal(joined.predict(x), ours.predict(x))
    assert joined.report == ours.report
    fields = list(dict.fromkeys(field for one in joined.exchanges for field in one.fields))
    if told is not None:
        assert fields == told
    assert ("Sent: nothing" in joined.sent) == (way == "home")
    sent = sum(one.sent for one in joined.exchanges)
    assert (sent == 0) == (way == "home") and joined.bytes[0] == sent


@pytest.mark.parametrize("kind", ["bytes", "table"])
def test_who_joins_gives_raw_samples_where_the_run_prepares_them(serve, tmp_path, kind) -> None:
    arrays = load_data("digits")
    if kind == "bytes":
        data: Any = np.round(255 * arrays.x).astype(np.uint8), arrays.y
        x, wrong, options = data[0][:20], arrays.x[:20], {"clients": 4}
    else:
        columns = {"age": arrays.x[:200, 0, 2, 2], "tall": arrays.y[:200] % 3, "ill": arrays.y[:200] > 4}
        lines = ["age,tall,ill", *(f"{age},{'abc'[tall]},{ill}" for age, tall, ill in zip(*columns.values()))]
        data, wrong, options = tmp_path / "data.csv", np.zeros((5, 4), np.float32), {"clients": 4, "target": "ill"}
        data.write_text("\n".join(lines))
        x = {"tall": np.array(["a", "b", ""]), "age": np.array(["0.1", "", "0.9"])}
    run = fedloom.run("fedavg", dataset=data, out=tmp_path / "run", model="mlp:hidden=8", rounds=1, local_steps=2,
                      progress="quiet", **options)  # fmt: skip
    at = serve(make_bundle(run, tmp_path / "bundle"))
    joined = fedloom.join(at.url, x, cache=tmp_path / "cache")
    assert equal(joined.parameters, run.admit(x).parameters)
    assert torch.equal(joined.predict(x), run.admit(x).predict(x))
    with pytest.raises(DataError, match="Got samples of type float32"):
        fedloom.join(at.url, wrong, cache=tmp_path / "cache")


def test_some_labels_are_counted(made, serve, newcomer, tmp_path) -> None:
    run, path = made("fedavg", adapt="prior")
    x, y = newcomer
    some = np.where(np.arange(len(y)) < 10, y, -1)
    joined = fedloom.join(serve(path).url, x, some, cache=tmp_path)
    assert joined.report == run.admit(x, some).report and joined.report.labelled == 10
    assert "10 labelled and 20 unlabelled" in joined.report.sentence


def test_without_a_choice_fewer_bytes_are_moved(made, serve, newcomer, tmp_path) -> None:
    """A model of 610 numbers has 2440 bytes. A descriptor moves one model; 4 rounds move it nine times."""
    x, y = newcomer
    _, path = made("it_pfl_hn", finetune_after=1)
    service = Service(serve(path).url, cache=tmp_path)
    assert service.moved()["service"] == 2440 < service.moved()["home"]
    assert service.join(x).way == "service"
    _, path = made("pfedhn", admit_rounds=4)
    service = Service(serve(path).url, cache=tmp_path)
    loom = service.card["parts"]["loom.safetensors"]["bytes"]
    assert service.moved() == {"home": loom, "service": 9 * 2440}
    assert service.join(x, y).way == "service"
    _, two = made("pfedhn", model="mlp:hidden=8,mlp:hidden=12", admit_rounds=4)
    other = Service(serve(two).url, cache=tmp_path)
    assert (other.moved()["service"], other.moved("mlp:hidden=12")["service"]) == (9 * 2440, 9 * 3640)
    service.join(x, y, way="home")
    assert service.moved()["home"] == 0 and service.join(x, y).way == "home"  # it is here by now


def test_a_loom_that_stays_is_not_handed_out(made, serve, newcomer, tmp_path) -> None:
    x, y = newcomer
    run, path = made("pfedhn", admit_rounds=4)
    at = serve(path, keep_loom=True)
    joined = fedloom.join(at.url, x, y, cache=tmp_path)
    assert joined.way == "service" and equal(joined.parameters, run.admit(x, y).parameters)
    with pytest.raises(NeedsError, match="does not serve pFedHN by way of home; it does by service"):
        fedloom.join(at.url, x, y, way="home", cache=tmp_path)
    assert not any(
        run.server.state.loom["trunk.0.bias"].numpy().tobytes() in f.read_bytes() for f in tmp_path.iterdir()
    )
    _, other = made("fedavg")
    with pytest.raises(NeedsError, match="--keep-loom is for methods"):
        serve(other, keep_loom=True)


def test_a_private_descriptor_is_another_one_every_time(made, serve, newcomer, tmp_path) -> None:
    x, _ = newcomer
    _, path = made("it_pfl_hn", finetune_after=1, descriptor_epsilon=2.0)
    at = serve(path)
    one, other = (fedloom.join(at.url, x, cache=tmp_path) for _ in range(2))
    assert not equal(one.parameters, other.parameters)
    noisier = fedloom.join(at.url, x, epsilon=0.5, cache=tmp_path)
    assert noisier.newcomer.home.config.descriptor_epsilon == 0.5
    with pytest.raises(ConfigError, match="at most the service's, 2"):
        fedloom.join(at.url, x, epsilon=3, cache=tmp_path)
    _, open_one = made("it_pfl_hn", finetune_after=1)
    with pytest.raises(ConfigError, match="this one's are not"):
        fedloom.join(serve(open_one).url, x, epsilon=1, cache=tmp_path)


def test_no_sample_and_no_label_crosses(made, serve, newcomer, tmp_path, monkeypatch) -> None:
    x, y = newcomer
    heard: list[bytes] = []
    from fedloom.serving import app

    original = app.Asked.body

    async def listening(self: Any, largest: int) -> bytes:
        heard.append(await original(self, largest))
        return heard[-1]

    monkeypatch.setattr(app.Asked, "body", listening)
    for method, options in (("pfedhn", {"admit_rounds": 4}), ("it_pfl_hn", {"finetune_after": 1})):
        _, path = made(method, **options)
        joined = fedloom.join(serve(path).url, x, y if method == "pfedhn" else None, way="service", cache=tmp_path)
        assert sum(map(len, heard)) == joined.bytes[0] > 0
        assert not any(sample.tobytes() in body for body in heard for sample in x)
        assert not any(y.tobytes() in body or y.astype(np.uint8).tobytes() in body for body in heard)
        heard.clear()


def test_a_join_is_repeated_without_downloading_again(made, serve, newcomer, tmp_path) -> None:
    run, path = made("fedavg", adapt="prior")
    x, _ = newcomer
    first = fedloom.join(serve(path).url, x[:10], cache=tmp_path)
    again = first.again(x)
    assert again.bytes == (0, 0) and equal(again.parameters, run.admit(x).parameters)
    assert again.report.samples == 30


def test_a_damaged_cache_is_not_used(made, serve, newcomer, tmp_path) -> None:
    run, path = made("fedavg")
    at = serve(path)
    fedloom.join(at.url, newcomer[0], cache=tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-4] + b"evil")
    joined = fedloom.join(at.url, newcomer[0], cache=tmp_path)
    assert joined.bytes[1] > 1000 and digest(kept.read_bytes()) == kept.stem
    assert equal(joined.parameters, run.admit(newcomer[0]).parameters)


def test_the_command_writes_a_model_and_says_what_was_sent(
    made, serve, newcomer, tmp_path, capsys, monkeypatch
) -> None:
    from fedloom.cli.main import main

    run, path = made("fedavg", adapt="prior")
    x, _ = newcomer
    monkeypatch.chdir(tmp_path)
    np.savez("new.npz", x=x)
    with pytest.raises(SystemExit) as end:
        main(["join", serve(path).url, "--data", "new.npz", "--cache", "cache"])
    out = capsys.readouterr().out
    assert not end.value.code and out.splitlines()[-1] == "joined/client-new.safetensors"
    assert "Sent: nothing" in out and "Label shares" in out
    written = json.loads(Path("joined/client-new.json").read_text())
    assert written["report"]["samples"] == 30 and written["way"] == "home"
    assert {one["request"] for one in written["exchanges"]} <= {"GET /v1"} | {
        f"GET /v1/parts/{file.name}" for file in Path("cache").iterdir()
    }
    model = load_model("joined/client-new.safetensors", "mlp:hidden=8", (1, 8, 8), 10)
    assert torch.equal(model(torch.as_tensor(x)), run.admit(x).predict(x))


def test_a_file_that_grows_is_followed(made, serve, newcomer, tmp_path) -> None:
    run, path = made("fedavg", adapt="prior")
    x, _ = newcomer
    service = Service(serve(path).url, cache=tmp_path / "cache")
    data = tmp_path / "stream.npz"
    data.write_bytes(b"PK")
    with pytest.raises(DataError):
        next(versions(data, every=0.05))
    np.savez(data, x=x[:10])
    seen = versions(data, every=0.05)
    assert service.join(*next(seen)).report.samples == 10

    def more() -> None:
        np.savez(tmp_path / "more.npz", x=x)
        whole = (tmp_path / "more.npz").read_bytes()
        data.write_bytes(whole[: len(whole) // 2])  # as a program leaves it that still writes
        time.sleep(0.2)
        data.write_bytes(whole)

    timer = threading.Timer(0.2, more)
    timer.start()
    grown = service.join(*next(seen))
    timer.join()
    assert grown.report.samples == 30 and equal(grown.parameters, run.admit(x).parameters)


def test_another_bundle_is_noticed(made, serve, tmp_path) -> None:
    _, path = made("fedavg")
    _, other = made("pfedhn")
    at = serve(path)
    service = Service(at.url, cache=tmp_path)
    assert not service.refresh()
    service.remote = Service(serve(other).url, cache=tmp_path).remote
    assert service.refresh() and service.card["method"] == "pfedhn"


def test_a_stream_goes_on_after_a_version_that_does_not_fit(
    made, serve, newcomer, tmp_path, capsys, monkeypatch
) -> None:
    from fedloom.cli.main import main

    _, path = made("fedavg", adapt="prior")
    x, _ = newcomer
    given = [(x[:10], None), (x[:10, :, :3], None), (x, None)]
    monkeypatch.setattr("fedloom.serving.join.versions", lambda data, every: iter(given))
    words = ["join", serve(path).url, "--data", "x.npz", "--follow", "--cache", str(tmp_path), "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        main(words)
    told = capsys.readouterr()
    assert not end.value.code and told.out.count("Sent: nothing") == 2
    assert "Got samples of shape" in told.err and "Waiting for x.npz to change." in told.err
    assert "There is no file x.npz yet; waiting for it." in told.err
    given[:] = given[1:]
    with pytest.raises(SystemExit) as end:  # but what does not fit at first is an error
        main(words)
    assert end.value.code == 2


def test_a_service_with_another_bundle_is_asked_anew(made, serve, newcomer, tmp_path) -> None:
    _, old = made("it_pfl_hn", finetune_after=1)
    run, new = made("it_pfl_hn", finetune_after=1, seed=1)
    x, _ = newcomer
    at, other = serve(old), serve(new)
    joined = fedloom.join(at.url, x, way="service", cache=tmp_path)
    joined.service.remote._port = int(other.url.rpartition(":")[2])
    with pytest.raises(RunError, match="another bundle by now"):
        joined.service.join(x, way="service")
    assert equal(joined.again(x).parameters, run.admit(x).parameters)


def test_the_reason_of_a_refused_card_is_told(made, serve, tmp_path) -> None:
    from fedloom.serving.tokens import make_key

    make_key(tmp_path / "key")
    _, path = made("fedavg")
    at = serve(path, key=tmp_path / "key")
    with pytest.raises(NeedsError, match="The token is not one of this service"):
        Service(at.url, Access("fl1.e30.x"))
    with pytest.raises(ConfigError, match="as `fedloom token` printed it"):
        Service(at.url, Access("fl1.e30.x\nevil: header"))


def test_a_token_is_taken_as_it_was_printed(tmp_path) -> None:
    from fedloom.cli.serving import _token_in

    file = tmp_path / "token"
    for text in ("newcomer ward 7 fl1.a.b\n", "fl1.a.b"):
        file.write_text(text)
        assert _token_in(file) == "fl1.a.b"
    for text in ("", "newcomer a fl1.a.b\nnewcomer b fl1.c.d\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="expected one, with one token"):
            _token_in(file)


def told_by(monkeypatch, card: Any, parts: Any = ()) -> str:
    """The address of a service whose connection is a fake: it says this card and hands out these parts."""
    from fedloom.serving.remote import Remote

    def asked(self: Remote, method: str, target: str, body: bytes, fields: Any, largest: int) -> bytes:
        if target == "/v1":
            return json.dumps(card).encode()
        return dict(parts)[target.rpartition("/")[2].partition(".")[0]]

    monkeypatch.setattr(Remote, "_asked", asked)
    return "http://127.0.0.1:9"


def test_a_hostile_card_does_no_harm(made, serve, newcomer, tmp_path, monkeypatch) -> None:
    """Neither does it fill the memory, nor speak to the terminal, nor end in a traceback."""
    _, path = made("fedavg", adapt="prior")
    card = serve(path).service.card()
    form, (architecture,), part = card["form"], card["architectures"], card["parts"]["model.safetensors"]
    huge = [
        {"architectures": [{**architecture, "name": "mlp:hidden=2000000000"}]},
        {
            "architectures": [{**architecture, "name": "vit:depth=2000000000"}],
            "form": {**form, "input_shape": [3, 8, 8]},
        },
        {"form": {**form, "input_shape": [1, 100_000, 100_000]}},
        {"form": {**form, "num_outputs": 10**12}},
        {"parts": {"model.safetensors": {**part, "bytes": 10**15}}},
        {"parts": {"model.safetensors": {**part, "bytes": -5}}},
    ]
    for change in huge:
        with pytest.raises(FedloomError, match=r"at most an 8th of its memory|at most 1,000"):
            fedloom.join(told_by(monkeypatch, {**card, **change}), newcomer[0], cache=tmp_path)
    evil = {**card, "form": {**form, "class_names": ["\x1b]0;evil\x07"] * 10}}
    with pytest.raises(RunError, match="control characters"):
        fedloom.join(told_by(monkeypatch, evil), newcomer[0], cache=tmp_path)


@pytest.mark.parametrize("name", ["newcomer", "ways", "layout", "parts", "form", "name", "bundle", "round"])
def test_a_card_that_lacks_something_is_told_in_a_sentence(made, serve, newcomer, tmp_path, monkeypatch, name) -> None:
    _, path = made("fedavg", adapt="prior")
    service = serve(path).service
    card = {key: value for key, value in service.card().items() if key != name}
    for given in (card, {**card, name: 7}):
        url = told_by(monkeypatch, given, service.parts.items())
        with contextlib.suppress(FedloomError):
            fedloom.join(url, newcomer[0], cache=tmp_path)


@pytest.mark.parametrize("change", [lambda v: v[..., None], lambda v: torch.empty(0, dtype=v.dtype), torch.zeros_like])
def test_parts_that_do_not_fit_are_told_in_a_sentence(made, serve, newcomer, tmp_path, monkeypatch, change) -> None:
    _, path = made("fedavg", adapt="prior")
    service = serve(path).service
    card, (data,) = service.card(), service.parts.values()
    tensors = read_tensors(data)
    for name in tensors:
        changed = write_tensors({**tensors, name: change(tensors[name])})
        part = {"bytes": len(changed), "sha256": digest(changed)}
        url = told_by(monkeypatch, {**card, "parts": {"model.safetensors": part}}, {part["sha256"]: changed})
        with contextlib.suppress(FedloomError):
            fedloom.join(url, newcomer[0], cache=tmp_path)


def test_a_date_to_try_again_is_no_number_of_seconds(monkeypatch) -> None:
    """As proxies send it; the service is asked again, at a pace of our own."""
    import http.server

    class Busy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.send_header("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setattr("fedloom.serving.remote.PATIENCE", 0.2)
    with http.server.HTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with pytest.raises(RunError, match="it answers 503"):
            Service(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        thread.join()


def test_refusals(made, serve, newcomer, tmp_path) -> None:
    x, _ = newcomer
    _, fedper = made("fedper")
    with pytest.raises(NeedsError, match="no model for clients that took no part"):
        fedloom.join(serve(fedper).url, x, cache=tmp_path)
    _, path = made("pfedhn", admit_rounds=4)
    at = serve(path)
    with pytest.raises(NeedsError, match="labelled samples; got none"):
        fedloom.join(at.url, x, cache=tmp_path)
    with pytest.raises(DataError, match="Got samples of shape"):
        fedloom.join(at.url, x[:, :, :3], np.zeros(30, int), cache=tmp_path)
    with pytest.raises(ConfigError, match="Unknown way 'rounds'"):
        fedloom.join(at.url, x, np.zeros(30, int), way="rounds", cache=tmp_path)  # type: ignore[arg-type]
    for bad in ("models.example.org", "ftp://a/b", "http://user:pw@127.0.0.1"):
        with pytest.raises(ConfigError, match="no address of a service"):
            fedloom.join(bad, x, cache=tmp_path)
    with pytest.raises(ConfigError, match="without TLS"):
        Service("http://models.example.org", Access("token"))


def test_a_service_that_is_none_is_told(tmp_path, monkeypatch) -> None:
    import http.server

    from fedloom.serving import remote

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with pytest.raises(RunError, match="no service of fedloom"):
            Service(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        thread.join()
    monkeypatch.setattr(remote, "FIRST_PATIENCE", 0.2)  # for an address that may be wrong nobody waits long
    start = time.monotonic()
    with pytest.raises(RunError, match=r"cannot be reached.*later\.$"):
        Service("http://127.0.0.1:9")
    with pytest.raises(RunError, match="give one of its authority: --cert and --cert-key"):
        Service("https://127.0.0.1:9")
    assert time.monotonic() - start < 5
