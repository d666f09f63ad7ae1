# SPDX-License-Identifier: Apache-2.0
"""Who may see a run that is watched, and that nobody can do more than see it."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.core.errors import ConfigError
from fedloom.reports.watch import Watch
from made import made_run, write_rounds


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Watch, Path]]:
    path = tmp_path / "run"
    made_run(path, rounds=4, finished=False)
    with Watch([path]) as served:
        thread = threading.Thread(target=served.serve, daemon=True)
        thread.start()
        yield served, path
        served.close()
        thread.join()


def ask(
    served: Watch, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def token(served: Watch) -> str:
    return served.url.partition("?")[2]


def test_the_page_and_its_content_need_the_token(watched) -> None:
    served, _ = watched
    status, content, headers = ask(served, f"/?{token(served)}")
    assert status == 200 and content.startswith(b"<!doctype html>")
    assert b"connect-src 'self'" in content.replace(b"&#x27;", b"'")
    assert headers["X-Frame-Options"] == "DENY" and headers["Cache-Control"] == "no-store"
    for path in ("/", "/model", "/?token=", "/?token=wrong", "/model?token=%C3%BC"):
        status, content, _ = ask(served, path)
        assert status == 403 and b"doctype" not in content


def test_another_hosts_name_is_refused(watched) -> None:
    """A page of somebody else, whose name leads here, must not read the run."""
    served, _ = watched
    for host in ("evil.example", f"evil.example:{served.port}", "127.0.0.1:1"):
        assert ask(served, f"/?{token(served)}", headers={"Host": host})[0] == 421
    assert ask(served, f"/?{token(served)}", headers={"Host": f"localhost:{served.port}"})[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(watched, method: str) -> None:
    served, path = watched
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert ask(served, f"/model?{token(served)}", method)[0] == 501
    ask(served, f"/?{token(served)}")
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_no_other_file_can_be_had(watched) -> None:
    served, _ = watched
    for path in ("/config.yaml", "/../config.yaml", "/%2e%2e/config.yaml", "//etc/passwd", "/model/x"):
        assert ask(served, f"{path}?{token(served)}")[0] == 404


def test_content_comes_again_only_when_it_is_new(watched) -> None:
    served, path = watched
    address = f"/model?{token(served)}"
    _, content, headers = ask(served, address)
    assert json.loads(content)["progress"]["done"] == 4
    from fedloom.runs.directory import RunDirectory

    write_rounds(RunDirectory.open(path), range(5, 6))
    status, content, fresh = ask(served, address, headers={"If-None-Match": headers["ETag"]})
    assert status == 200 and json.loads(content)["progress"]["done"] == 5
    assert fresh["ETag"] != headers["ETag"]


def test_a_finished_run_is_not_sent_twice(tmp_path: Path) -> None:
    made_run(tmp_path / "run")
    with Watch([tmp_path / "run"]) as served:
        thread = threading.Thread(target=served.serve, daemon=True)
        thread.start()
        _, _, headers = ask(served, f"/model?{token(served)}")
        status, content, _ = ask(served, f"/model?{token(served)}", headers={"If-None-Match": headers["ETag"]})
        served.close()
        thread.join()
    assert (status, content) == (304, b"")


def test_damaged_records_are_said_until_they_are_mended(watched, capfd: pytest.CaptureFixture[str]) -> None:
    served, path = watched
    file = path / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b"{nonsense\n")
    for _ in range(2):
        status, content, _ = ask(served, f"/model?{token(served)}")
        assert status == 503 and b"metrics.jsonl is not a JSON object; remove it to use the others.\n" in content
    file.write_bytes(whole)
    assert ask(served, f"/model?{token(served)}")[0] == 200
    shutil.rmtree(path)
    status, content, _ = ask(served, f"/?{token(served)}")
    assert status == 503 and b"is not a run directory" in content
    assert "Traceback" not in capfd.readouterr().err


def test_a_browser_that_goes_away_is_no_fault(watched, capfd: pytest.CaptureFixture[str]) -> None:
    served, _ = watched
    served._server.RequestHandlerClass._send = lambda *_: (_ for _ in ()).throw(BrokenPipeError())
    with pytest.raises(http.client.RemoteDisconnected):
        ask(served, f"/?{token(served)}")
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_that_is_taken_is_said(watched) -> None:
    served, path = watched
    with pytest.raises(ConfigError, match=rf"Cannot listen on port {served.port}: .* give another --port"):
        Watch([path], served.port)


def test_it_listens_on_this_machine_alone(watched) -> None:
    served, _ = watched
    assert served.url.startswith("http://127.0.0.1:")
    assert served._server.server_address[0] == "127.0.0.1"


def test_records_of_another_form_are_said(watched, capfd: pytest.CaptureFixture[str]) -> None:
    served, path = watched
    file = path / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"round": 5}\n')
    status, content, _ = ask(served, f"/model?{token(served)}")
    assert status == 503 and b"records are not what this fedloom writes" in content
    assert "Traceback" not in capfd.readouterr().err


def test_what_is_no_address_is_refused(watched, capfd: pytest.CaptureFixture[str]) -> None:
    served, _ = watched
    assert ask(served, "x://[")[0] == 400
    assert "Traceback" not in capfd.readouterr().err
