# SPDX-License-Identifier: Apache-2.0
"""Report pages in a real browser: what people see, with a pointer, with keys alone, on paper, and by ear."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, program
from fedloom.reports.report import write
from fedloom.reports.watch import Watch
from hostile import HOSTILE
from made import attacked, made_run, summary_of, write_rounds

pytestmark = pytest.mark.skipif(program() is None, reason="there is no Chromium that starts: apt-get install chromium")

AXE = Path(__file__).parent / "axe"
FOCUSABLE = "a[href], button, input:not([type=radio]), select, summary, [tabindex='0']"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with everything, several runs, and a run with names from hell."""
    root = tmp_path_factory.mktemp("runs")
    one = made_run(root / "one", clients=10, unseen=6, rounds=12, estimates=True)
    attacked(one)
    one.write_extra(
        "mix.json", {"round": 12, "split": "test", "client": ["0", "1"], "metric": [[1.0, 0.5], [0.4, 0.9]]}
    )
    points = [{"admission_round": n, "client": ["new 0"], "metric": [n / 10]} for n in range(4)]
    one.write_extra("admission.json", {"round": 12, "split": "test", "points": points})
    for seed in range(3):
        for method, lift in (("fedavg", 0.0), ("pfedhn", 0.1)):
            made_run(root / "several" / f"{method}-{seed}", method=method, seed=seed, lift=lift)
    made_run(root / "hostile", clients=HOSTILE, class_names=HOSTILE[:4], dataset=HOSTILE[1], estimates=True)
    for method, name in (("fedavg", HOSTILE[3]), ("pfedhn", HOSTILE[4])):
        run = made_run(root / "rivals" / method, method=method, clients=HOSTILE)
        run.write_summary({**(run.summary() or {}), "name": name})
    return {
        "one": write([one.path]),
        "several": write([root / "several"], baseline="fedavg"),
        "hostile": write([root / "hostile"]),
        "rivals": write([root / "rivals"]),
    }


@pytest.fixture
def page(browser: Browser, reports: dict[str, Path], request: pytest.FixtureRequest) -> Browser:
    """The browser with a report in it, on a wide light screen."""
    browser.resize(1280, 900)
    browser.media()
    browser.open(reports[getattr(request, "param", "one")])
    return browser


EVERY = pytest.mark.parametrize("page", ["one", "several", "hostile"], indirect=True)


@EVERY
def test_all_charts_are_drawn_and_nobody_complains(page: Browser) -> None:
    drawn = page.run(
        "[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('svg .mark-group path, svg path').length)"
    )
    assert len(drawn) >= 4 and all(drawn), drawn
    empty = page.run(
        "[...document.querySelectorAll('.plot')].filter(p => !p.querySelector("
        "'.role-mark path, .role-mark line, .role-mark rect')).map(p => p.parentElement.id)"
    )
    assert empty == []
    assert page.errors == []


@EVERY
def test_nothing_is_asked_of_a_network(page: Browser) -> None:
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in page.requests if url.startswith("file:")]) == 1


@pytest.mark.parametrize("page", ["hostile"], indirect=True)
def test_names_are_shown_and_do_nothing(page: Browser) -> None:
    assert page.run("window.hacked") is None
    page.run("document.querySelectorAll('.tools button[aria-expanded=false]').forEach(b => b.click())")
    assert page.run("window.hacked") is None
    assert page.run("document.querySelectorAll('main img, main b, main script').length") == 0
    text = page.run("document.getElementById('figure-clients').textContent")
    assert [name for name in HOSTILE if name not in text] == []
    wide = page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0
    assert page.errors == []


@pytest.mark.parametrize("width", [320, 390, 768, 1600])
def test_no_width_scrolls_sideways(page: Browser, reports: dict[str, Path], width: int) -> None:
    page.resize(width, 800)
    for path in reports.values():
        page.open(path)
        assert page.run("document.documentElement.scrollWidth") <= width


def test_a_switch_changes_its_chart_by_keys_alone(page: Browser) -> None:
    title = "document.querySelector('#figure-curves .plot svg').textContent"
    assert "seconds of training" not in page.run(title)
    page.run("document.querySelector('#figure-curves input').focus()")
    page.press("ArrowRight", 39)
    page.wait(f"{title}.includes('seconds of training')")
    assert page.errors == []


def test_keys_reach_everything(page: Browser) -> None:
    expected = page.run(
        f'[...document.querySelectorAll("{FOCUSABLE}")].filter(e => e.getClientRects().length).length'
        " + new Set([...document.querySelectorAll('input[type=radio]')].map(e => e.name)).size"
    )
    page.run("document.body.tabIndex = -1; document.body.focus(); window.seen = new Set()")
    for _ in range(expected + 5):
        page.press("Tab", 9)
        page.run("window.seen.add(document.activeElement); 0")
    reached = page.run("[...window.seen].filter(e => e !== document.body && e !== document.documentElement).length")
    assert reached >= expected
    hidden = page.run("[...window.seen].filter(e => !e.getClientRects().length).length")
    assert hidden == 0


def test_a_table_opens_and_has_what_the_chart_has(page: Browser) -> None:
    page.run("document.querySelector('#figure-clients .tools button').focus()")
    page.press("Enter", 13, "\r")
    rows = page.run("document.querySelectorAll('#figure-clients tbody tr').length")
    assert rows == page.run("document.querySelectorAll('#figure-clients .role-mark.mark-symbol path').length") == 16


def test_a_client_is_found_in_every_chart_and_table(page: Browser) -> None:
    page.run("document.querySelector('#figure-clients .tools button').click()")
    page.run("(b => { b.value = 'new 1'; b.dispatchEvent(new Event('change')); })(document.getElementById('client'))")
    assert page.run("document.querySelectorAll('tr.picked').length") >= 1
    marks = "[...document.querySelectorAll('#figure-clients .role-mark.mark-symbol path')]"
    page.wait(f"{marks}.filter(p => p.getBBox().width > 12).length === 1")


@EVERY
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(page: Browser, scheme: str) -> None:
    for line in (AXE / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((AXE / name).read_bytes()).hexdigest() == digest
    page.media(scheme=scheme)
    page.run("document.querySelectorAll('.tools button[aria-expanded=false]').forEach(b => b.click())")
    # by the debugger, which the page's policy does not concern
    page.run((AXE / "axe.min.js").read_text(encoding="utf-8") + ";0")
    found = page.run(
        "axe.run(document).then(r => r.violations.map(v => [v.id, v.impact, v.nodes.map(n => n.html.slice(0, 200))]))"
    )
    assert [one for one in found if one[1] in ("serious", "critical")] == []


def test_dark_and_light_differ_and_the_switch_wins(page: Browser) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    page.media(scheme="dark")
    dark = page.run(colour)
    assert light != dark
    page.run("(s => { s.value = 'light'; s.dispatchEvent(new Event('change')); })(document.getElementById('theme'))")
    assert page.run(colour) == light
    line = "getComputedStyle(document.querySelector('#figure-loss .mark-line path')).stroke"
    before = page.run(line)
    page.run("(s => { s.value = 'dark'; s.dispatchEvent(new Event('change')); })(document.getElementById('theme'))")
    assert page.run(line) != before  # charts too, without being drawn anew


def test_print_is_light_whole_and_without_controls(page: Browser) -> None:
    page.media(scheme="dark", kind="")  # as it is printed: what stands in for a screen would be printed so
    printed = page.pdf()
    assert printed.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", printed)) >= 3
    page.media(scheme="dark", kind="print")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("getComputedStyle(document.querySelector('.bar')).display") == "none"
    assert page.run("[...document.querySelectorAll('button, .tools')].every(e => !e.getClientRects().length)")
    assert page.run("document.querySelector('#figure-curves fieldset').innerText.split(/\\s+/)") == [
        "against",
        "rounds",
    ]


def test_an_exported_chart_stands_by_itself(page: Browser) -> None:
    """The SVG button's text has real colours and parses."""
    page.run("window.saved = null; URL.createObjectURL = (blob) => { window.saved = blob.text(); return '#'; }")
    page.run("document.querySelectorAll('#figure-curves .tools button')[2].click()")
    svg = page.run("window.saved")
    assert svg.startswith("<svg") and "var(--" not in svg and "#2f62c4" in svg
    assert page.run(
        f"new DOMParser().parseFromString({json.dumps(svg)}, 'image/svg+xml').querySelector('parsererror') === null"
    )


@pytest.mark.parametrize(("clients", "seconds"), [(10, 2.0), pytest.param(10_000, 5.0, marks=pytest.mark.slow)])
def test_pages_open_quickly(browser: Browser, tmp_path: Path, clients: int, seconds: float) -> None:
    """Once in ten times, as other work may be on the machine."""
    path = write([made_run(tmp_path / "run", clients=clients, unseen=clients // 10, rounds=20).path])
    assert any(browser.open(path) < seconds for _ in range(10))
    assert browser.errors == []


def test_whoever_reads_a_live_page_is_left_where_they_are(tmp_path: Path) -> None:
    """What was opened stays open, at its row, with the keys there; what looks wrong is said; so is a server's end."""
    run = made_run(tmp_path / "run", clients=40, rounds=4, finished=False)
    run.update_config(rounds=8)
    with Watch([run.path]) as served, Browser(offline=False) as browser:
        thread = threading.Thread(target=served.serve, daemon=True)
        thread.start()
        try:
            browser.open(served.url)
            browser.run("document.querySelector('#figure-loss .tools button').click()")
            browser.run("document.querySelector('#figure-who .scroll').scrollTop = 200; 0")
            browser.run("document.querySelector('#figure-loss .scroll').focus()")
            browser.run("(s => { s.value = 'dark'; s.dispatchEvent(new Event('change')); })(theme)")
            rows = "document.querySelectorAll('#figure-loss tbody tr').length"
            assert browser.run(rows) == 4
            last, reason = run.records()[-1], "replied with NaN or Inf"
            client = last["cohort"]["client"][0]
            run.append({**last, "round": 5, "dropped": [{"client": client, "program": "train", "reason": reason}]})
            browser.wait(f"{rows} === 5")
            assert browser.run("document.activeElement === document.querySelector('#figure-loss .scroll')")
            assert browser.run("document.querySelector('#figure-who .scroll').scrollTop") == 200
            assert browser.run("document.querySelector('#figure-who tbody td:nth-child(2)').textContent") == "dropped"
            browser.wait("news.textContent.includes('NaN or Inf were refused')")
            assert browser.run("theme.value") == "dark"
            assert browser.errors == []
            (run.path / "summary.json").write_text("{")
            browser.wait("connection.textContent.includes('is damaged')")
            (run.path / "summary.json").unlink()
            browser.wait("connection.textContent === ''")
        finally:
            served.close()
            thread.join()
            served._server.server_close()
        browser.wait("connection.textContent.includes('does not answer')")


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", rounds=4, finished=False)
    run.config["rounds"] = 8
    run.update_config(rounds=8)
    with Watch([run.path]) as served, Browser(offline=False) as browser:
        thread = threading.Thread(target=served.serve, daemon=True)
        thread.start()
        try:
            browser.open(served.url)
            assert browser.run("document.querySelector('progress').value") == 4
            assert browser.run("document.querySelector('progress').max") == 8
            best = write_rounds(run, range(5, 9))
            browser.wait("document.querySelector('progress').value === 8")
            ticks = "[...document.querySelectorAll('#figure-curves .role-axis-label text')].map(t => t.textContent)"
            browser.wait(f"{ticks}.includes('8')")
            browser.wait(
                f"document.getElementById('title-clients').textContent === 'Every client at round {best['round']}'"
            )
            run.write_summary(summary_of(run, best))
            browser.wait("document.querySelector('.badges').textContent.includes('finished')")
            assert browser.errors == []
            with urllib.request.urlopen(served.url) as answer:
                assert answer.status == 200
        finally:
            served.close()
            thread.join()
