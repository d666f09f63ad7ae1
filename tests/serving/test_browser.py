# SPDX-License-Identifier: Apache-2.0
"""The page of examples/browser: its arithmetic is that of Python, and in a browser it does what it says."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.adaptation.trial import SIZES
from fedloom.core.errors import ConfigError
from fedloom.data.registry import load as load_data

PAGE = Path(__file__).parents[2] / "examples" / "browser"
NODE = shutil.which("node")
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
ORT = os.environ.get("ONNXRUNTIME_WEB", "")
"""The folder dist of the npm package onnxruntime-web."""


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize("number", [3, 25])
@pytest.mark.parametrize("foreign", [False, True])
def test_the_pages_arithmetic_is_that_of_python(made, tmp_path: Path, number: int, foreign: bool) -> None:
    run, _ = made("fedavg", adapt="prior", clients=12, cohort=10, rounds=25, local_steps=10, local_lr=0.05)
    arrays = load_data("digits")
    x = arrays.x[(arrays.y == 3) | (arrays.y == 8)][:number]
    if foreign:  # images of another kind, which fit no class
        x = np.random.default_rng(0).uniform(0, 3, x.shape).astype(np.float32)
    admission = run.admit(x)
    state = run.server.state
    prior = {name: getattr(state, name).tolist() for name in ("alpha", "slope", "bias")}
    prior["reference"] = {name: value.tolist() for name, value in state.reference.items()}
    prior["trial"] = {"sizes": SIZES, **{name: state.trial[name].tolist() for name in ("trust", "samples")}}
    plain = admission.model.network(torch.as_tensor(x)).tolist()
    (tmp_path / "in.json").write_text(json.dumps({"plain": plain, "prior": prior}))
    shutil.copy(PAGE / "prior.js", tmp_path / "prior.mjs")
    code = (
        "import { personal } from './prior.mjs'; import { readFileSync } from 'node:fs';"
        "const { plain, prior } = JSON.parse(readFileSync('in.json'));"
        "console.log(JSON.stringify(personal(plain, prior)));"
    )
    done = subprocess.run([str(NODE), "--input-type=module", "-e", code], cwd=tmp_path, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    report = admission.report
    assert found["decision"] == report.decision
    assert found["weight"] == pytest.approx(report.weight, rel=1e-3)
    assert found["shares"] == pytest.approx([share.share for share in report.shares], abs=1e-4)
    assert found["offset"] == pytest.approx(admission.parameters["offset"].tolist(), abs=2e-3)
    assert found["slope"] == pytest.approx(float(admission.parameters["slope"]))


def test_the_page_may_only_ask_where_it_came_from() -> None:
    text = (PAGE / "index.html").read_text()
    (policy,) = re.findall(r'content="(default-src[^"]*)"', text)
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "form-action 'none'" in policy
    assert "unsafe-inline" not in policy and "http" not in policy
    code = (PAGE / "page.js").read_text()
    assert code.count("fetch(") == 1 and "XMLHttpRequest" not in code and "sendBeacon" not in code


@pytest.mark.skipif(not HAS_ONNX, reason="needs ONNX")
@pytest.mark.parametrize(
    ("method", "options"), [("scaffold", {}), ("hyperfedzero", {"hidden": "16", "chunk_size": 64})]
)
def test_the_page_takes_whatever_has_a_global_model(made, tmp_path: Path, method: str, options: dict) -> None:
    import onnxruntime

    run, _ = made(method, adapt="prior", **options)
    runpy.run_path(str(PAGE / "prepare.py"))["prepare"](run, tmp_path)
    x = load_data("digits").x[:9]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    plain = run.admit(x).model.network(torch.as_tensor(x)).detach().numpy()
    assert session.run(None, {"x": x})[0] == pytest.approx(plain, abs=1e-5)


@pytest.mark.skipif(not HAS_ONNX, reason="needs ONNX")
def test_a_run_that_prepares_its_images_does_so_in_the_page(tmp_path: Path) -> None:
    import onnxruntime

    arrays = load_data("digits")
    data = np.round(255 * arrays.x).astype(np.uint8), arrays.y
    options = {"model": "mlp:hidden=8", "clients": 4, "rounds": 1, "local_steps": 2, "progress": "quiet"}
    path = fedloom.run("fedavg", dataset=data, out=tmp_path / "run", **options).path
    prepare = runpy.run_path(str(PAGE / "prepare.py"))["prepare"]
    run = fedloom.load(path, dataset=data, adapt="prior")
    prepare(run, tmp_path / "page")
    assert json.loads((tmp_path / "page" / "prior.json").read_text())["preparation"] == {"mean": 0, "std": 1}
    session = onnxruntime.InferenceSession(tmp_path / "page" / "model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": data[0][:9].astype(np.float32)})[0]
    plain = fedloom.load(path, dataset=data)
    assert found == pytest.approx(plain.predict("0", data[0][:9]).numpy(), abs=1e-5)
    with pytest.raises(ConfigError, match="leave out --mean and --std"):
        prepare(run, tmp_path / "page", std=0.5)


@pytest.mark.slow
@pytest.mark.skipif(
    not (BROWSER and ORT and HAS_ONNX), reason="needs Chromium, onnxruntime-web (ONNXRUNTIME_WEB) and ONNX"
)
def test_the_page_in_a_browser(made, tmp_path: Path) -> None:
    run, _ = made("fedavg", adapt="prior", clients=12, cohort=10, rounds=25, local_steps=10, local_lr=0.05)
    prepare = runpy.run_path(str(PAGE / "prepare.py"))["prepare"]
    prepare(run, tmp_path)
    (tmp_path / "ort").mkdir()
    for name in ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"):
        shutil.copy(Path(ORT) / name, tmp_path / "ort")
    from PIL import Image

    arrays = load_data("digits")
    mine = np.flatnonzero(arrays.y == 3)[:12]
    names = []
    for row in mine:
        image = Image.fromarray(np.round(255 * arrays.x[row, 0]).astype(np.uint8))
        names.append(f"{row}.png")
        image.save(tmp_path / names[-1])
    drive = (
        "const files = await Promise.all("
        + json.dumps(names)
        + ".map(async (name) => new File([await (await fetch(name))"
        ".blob()], name, { type: 'image/png' })));"
        "const input = document.getElementById('files');"
        "while (input.disabled) await new Promise((r) => setTimeout(r, 50));"
        "const chosen = new DataTransfer(); files.forEach((file) => chosen.items.add(file));"
        "input.files = chosen.files;"
        "input.dispatchEvent(new Event('change'));"
    )
    (tmp_path / "drive.js").write_text(drive)
    page = (
        (tmp_path / "index.html")
        .read_text()
        .replace("</body>", '<script type="module" src="drive.js"></script></body>')
    )
    (tmp_path / "index.html").write_text(page)
    asked: list[str] = []

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            asked.append(str(words[1]))

    Quiet.extensions_map = {**Quiet.extensions_map, ".mjs": "text/javascript", ".wasm": "application/wasm"}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000",
                   "--enable-logging=stderr",
                   "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                   f"--user-data-dir={tmp_path / 'profile'}",
                   "--dump-dom", f"http://127.0.0.1:{server.server_address[1]}/"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        server.shutdown()
        thread.join()
    cells = re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td></tr>", done.stdout)
    shares = {share.name: share.share for share in run.admit(arrays.x[mine]).report.shares}
    assert len(cells) == 10, done.stdout[-2000:] + done.stderr[-2000:]
    assert {name: float(share.rstrip("%")) / 100 for name, share in cells} == pytest.approx(shares, abs=0.01)
    assert len(re.findall(r"<tr><td>\d+\.png</td>", done.stdout)) == 12
    assert not any(line.startswith(("POST", "PUT")) for line in asked)
    assert "Content Security Policy" not in done.stderr
