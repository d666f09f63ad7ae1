# SPDX-License-Identifier: Apache-2.0
"""Chromium without a screen, spoken to in its own protocol over two pipes: no driver, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
    "--disable-dev-shm-usage",
)  # fmt: skip
SECONDS = 60.0


@cache
def program() -> str | None:
    """Where a Chromium is, if there is one that starts."""
    found = filter(None, map(shutil.which, PROGRAMS))
    return next((path for path in found if _starts(path)), None)


def _starts(path: str) -> bool:
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class Browser:
    """One page of a browser. ``offline``: no name is resolved, so that whatever is asked for fails and is seen."""

    def __init__(self, width: int = 1280, height: int = 900, *, offline: bool = True) -> None:
        self.errors: list[str] = []
        """What the page's console complained of."""
        self.requests: list[str] = []
        """Every address that was asked for."""
        self._number, self._rest = 0, b""
        self._events: list[dict[str, Any]] = []
        self._home = tempfile.TemporaryDirectory()
        found = program()
        assert found is not None
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        # the browser reads from 3 and writes to 4; from above, so that none of them is in another's place
        high = [fcntl.fcntl(one, fcntl.F_DUPFD, 20) for one in (theirs_in, theirs_out)]

        def place() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        rules = ["--host-resolver-rules=MAP * ~NOTFOUND"] if offline else []
        words = [found, *FLAGS, *rules, f"--user-data-dir={self._home.name}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            # not as ``pass_fds``: what is at 3 and 4 before, e.g. a font of matplotlib's, may be closed by the fork
            words,
            close_fds=False,
            preexec_fn=place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for one in (theirs_in, theirs_out, *high):
            os.close(one)
        self._out, self._in = ours_out, ours_in
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for _ in range(20):  # its children may still be writing
            try:
                self._home.cleanup()
                break
            except OSError:
                time.sleep(0.1)

    def open(self, address: str | Path) -> float:
        """Go to a report and wait until it is drawn; the seconds that took."""
        self.errors.clear()
        self.requests.clear()
        start = time.monotonic()
        url = address if isinstance(address, str) else address.absolute().as_uri()
        self.call("Page.navigate", {"url": url})
        self.wait("document.documentElement && document.documentElement.dataset.drawn !== undefined")
        return time.monotonic() - start

    def wait(self, condition: str, seconds: float = SECONDS) -> None:
        """Until a condition of the page holds."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} never held; the console said {self.errors}")
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        given = {"expression": script, "awaitPromise": True, "returnByValue": True}
        found = self.call("Runtime.evaluate", given)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            given: dict[str, Any] = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", {**given, **({"text": text} if text and kind == "keyDown" else {})})

    def resize(self, width: int, height: int) -> None:
        """The size of the page on the screen."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)

    def media(self, *, scheme: str = "light", kind: str = "screen") -> None:
        """Light or dark; screen, print, or "" for what the browser is about to do."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", {"media": kind, "features": features})

    def picture(self, *, whole: bool = False) -> bytes:
        """What is seen, as PNG; ``whole``: the page from top to bottom."""
        return base64.b64decode(self.call("Page.captureScreenshot", {"captureBeyondViewport": whole})["data"])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", {"printBackground": False})["data"])

    def call(self, method: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
        """A command of the protocol to the page."""
        return self._call(method, given or {}, self._session)

    def _call(self, method: str, given: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": given, **({"sessionId": session} if session else {})}
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._out, rest) :]
        end = time.monotonic() + SECONDS
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            came = os.read(self._in, 1 << 20)
            if not came:
                raise RuntimeError("the browser is gone")
            self._rest += came
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(given["exceptionDetails"])[:500])
        elif event.get("method") == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in given["args"]))
        elif event.get("method") == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(given["entry"]["text"])
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog: {given['message']}")
            self._call("Page.handleJavaScriptDialog", {"accept": False}, event.get("sessionId"))
