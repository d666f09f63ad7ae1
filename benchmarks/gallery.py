# SPDX-License-Identifier: Apache-2.0
"""The reports of the gallery, and their pictures: ``python benchmarks/gallery.py`` (minutes; needs Chromium).

Runs go to ``runs/gallery``, reports to ``docs/gallery``, pictures to ``docs/img``. Settings are those of
``scripts/demo``; its report is the README's picture.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image

import fedloom
from fedloom.reports.report import write

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from browser import Browser  # noqa: E402

OUT, REPORTS, PICTURES = Path("runs/gallery"), Path("docs/gallery"), Path("docs/img")
WIDTH, HEIGHT = 1200, 1500
MOST_BYTES = 200 * 1024
FEDERATION: dict[str, Any] = {
    "dataset": "digits", "partition": "dirichlet:0.3", "clients": 30, "unseen": 6, "model": "mlp", "device": "cpu",
    "local_steps": 20, "cohort": 10, "rounds": 40, "progress": "quiet",
}  # fmt: skip
LOOM = {"cohort": 5, "rounds": 80, "server_step": "cohort_mean", "server_lr": 0.05}
COMPARED: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("local", {}),
    "fedavg": ("fedavg", {}),
    "fedavg-prior": ("fedavg", {"adapt": "prior"}),
    "fedper": ("fedper", {}),
    "pfedhn": ("pfedhn", LOOM),
}


def main() -> None:
    os.chdir(ROOT)  # a report names its runs, which are nowhere else on the reader's machine
    shutil.rmtree(OUT, ignore_errors=True)
    REPORTS.mkdir(exist_ok=True)
    for name, (method, own) in COMPARED.items():
        for seed in range(3):
            run = fedloom.run(method, out=OUT / "compared" / f"{name}-{seed}", seed=seed, **{**FEDERATION, **own})
            print(run.path, flush=True)
    loom = fedloom.load(OUT / "compared" / "pfedhn-0")
    loom.mix()
    loom.admission_curve()
    weights = {"start": "alive", "embed_init": "random", "server_lr": 0.05}
    aggregated = fedloom.run("hypergenfl", out=OUT / "hypergenfl", **{**FEDERATION, **weights})
    demo = [path for path in sorted((OUT / "compared").iterdir()) if not path.name.startswith("fedper")]
    reports = {
        "loom": (write([loom.path], REPORTS / "loom.html"), "light", 0),
        "hypergenfl": (write([aggregated.path], REPORTS / "hypergenfl.html"), "light", "#method"),
        "demo": (write(demo, OUT / "demo.html", "fedavg"), "light", 0),
        "comparison": (write([OUT / "compared"], REPORTS / "comparison.html", "fedavg"), "light", 0),
        "dark": (REPORTS / "comparison.html", "dark", 0),
    }
    with Browser(WIDTH, HEIGHT) as browser:
        for name, (page, scheme, at) in reports.items():
            browser.media(scheme=scheme)
            browser.open(page)
            if at:
                browser.run(f"document.documentElement.style.scrollBehavior = 'auto'; location.hash = '{at}'; 0")
            keep(browser.picture(), PICTURES / f"report-{name}.png")


def keep(picture: bytes, path: Path) -> None:
    """Write a picture with as many colours as its size allows."""
    for colours in (256, 128, 64, 32, 16):
        made = io.BytesIO()
        Image.open(io.BytesIO(picture)).convert("RGB").quantize(colours).save(made, "png", optimize=True)
        if made.tell() < MOST_BYTES:
            break
    path.write_bytes(made.getvalue())
    print(path, f"{made.tell() / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
