# SPDX-License-Identifier: Apache-2.0
"""The proxy before the link, with a real nginx: nodes get through, whoever would submit code does not."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from fedloom.deploy.keys import make_keys
from fedloom.deploy.processes import free_port
from fedloom.deploy.proxy import write_nginx_config

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


class Link(http.server.BaseHTTPRequestHandler):
    """Answers everything: what it does not get, the proxy kept out."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")
def test_only_the_fleet_api_is_reached_through_the_proxy(tmp_path: Path) -> None:
    assert NGINX
    keys = make_keys(tmp_path / "keys", ["0"], ["127.0.0.1", "localhost"])
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(keys / "server.pem", keys / "server.key")
    link = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Link)
    link.socket = inside.wrap_socket(link.socket, server_side=True)
    threading.Thread(target=link.serve_forever, daemon=True).start()
    port = free_port()
    config = write_nginx_config(keys, port, link.server_port)
    nginx = subprocess.Popen(
        [NGINX, "-c", str(config), "-p", str(keys), "-g", "daemon off;"], stderr=subprocess.DEVNULL
    )
    try:
        trust = ssl.create_default_context(cafile=str(keys / "ca.pem"))
        assert reached(port, "/v1/fleet/pull-messages", trust) == "/v1/fleet/pull-messages"
        for path in ("/v1/control/start-run", "/v1/runtime/push-messages", "/", "/v1/fleet/../control/start-run"):
            assert reached(port, path, trust) == 403
        other = make_keys(tmp_path / "other", ["0"], ["127.0.0.1"])
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            reached(port, "/v1/fleet/x", ssl.create_default_context(cafile=str(other / "ca.pem")))
    finally:
        nginx.terminate()
        nginx.wait(10)
        link.shutdown()
        link.server_close()


def reached(port: int, path: str, trust: ssl.SSLContext) -> str | int:
    """What the link saw, or the status with which the proxy refused."""
    for attempt in range(50):
        try:
            request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", data=b"x", method="POST")
            with urllib.request.urlopen(request, context=trust, timeout=5) as answer:
                found: str = answer.read().decode()
                return found
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except urllib.error.URLError as error:
            if attempt == 49 or not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(0.1)
    raise AssertionError("unreachable")
