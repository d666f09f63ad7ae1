# SPDX-License-Identifier: Apache-2.0
"""What a report file is: whole, small, without a network, and safe with any name."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedloom.core.errors import RunError
from fedloom.reports.facts import facts_of
from fedloom.reports.page import SCRIPTS, VENDOR, Page, embedded, html
from fedloom.reports.report import page, snippet, write
from hostile import HOSTILE
from made import made_run

LIMIT = 1_500_000


class Reader(HTMLParser):
    """Elements with their attributes, and the text of each script and style."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.texts.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.texts and self.cdata_elem:
            tag, attributes, text = self.texts[-1]
            self.texts[-1] = (tag, attributes, text + data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("runs") / "hostile"
    made_run(path, clients=HOSTILE, class_names=HOSTILE[:4], dataset=HOSTILE[1], estimates=True)
    return html(page([path]))


def test_nothing_in_a_page_refers_to_a_network(hostile: str) -> None:
    reader = read(hostile)
    for tag, attributes in reader.elements:
        assert not {"src", "srcset", "data", "action", "poster", "background"} & set(attributes), tag
        assert re.match(r"#|data:,$", attributes.get("href") or "#"), (tag, attributes)
        assert tag not in ("iframe", "object", "embed", "base", "form")
    policy = next(a["content"] or "" for t, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert "http" not in policy and "unsafe-eval" not in policy
    scripts_policy = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert "unsafe" not in scripts_policy
    (style,) = [text for tag, _, text in reader.texts if tag == "style"]
    assert not re.search(r"url\(|@import", style)
    assert "sourceMappingURL" not in hostile


def test_every_script_is_allowed_by_its_digest_and_no_other_is(hostile: str) -> None:
    reader = read(hostile)
    policy = next(a["content"] or "" for t, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    scripts = [text for tag, attributes, text in reader.texts if tag == "script" and not attributes.get("type")]
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts} == allowed
    assert len(scripts) == 2


def test_no_name_leaves_its_json(hostile: str) -> None:
    reader = read(hostile)
    assert sum(tag == "script" for tag, _ in reader.elements) == 3
    assert not [tag for tag, _ in reader.elements if tag in ("img", "b")]
    (content,) = [text for tag, a, text in reader.texts if a.get("id") == "data"]
    assert not set("<>&") & set(content)
    found = json.loads(content)
    (clients,) = [b for s in found["sections"] for b in s["blocks"] if b.get("id") == "clients"]
    assert set(HOSTILE) <= set(clients["data"]["client"])


def test_names_are_data_and_no_part_of_an_expression(hostile: str) -> None:
    (content,) = [text for tag, a, text in read(hostile).texts if a.get("id") == "data"]

    def expressions(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [
                str(value[k])
                for k in ("filter", "calculate", "expr", "test", "signal")
                if isinstance(value.get(k), str)
            ]
            own += [str(value["field"])] if "field" in value else []
            return own + [text for one in value.values() for text in expressions(one)]
        return [text for one in value for text in expressions(one)] if isinstance(value, list) else []

    specs = [b["specs"] for s in json.loads(content)["sections"] for b in s["blocks"] if b["type"] == "chart"]
    found = expressions(specs)
    assert found
    assert not [
        text for text in found if any(name in text for name in HOSTILE if name not in ("picked", "datum.client"))
    ]
    sorts = re.findall(r'"sort":\[', json.dumps(specs))
    assert not sorts  # Vega-Lite makes an expression of it


def test_the_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", clients=7)
    made = page([run.path])
    best = run.summary()["best"]  # type: ignore[index]
    value = f"{best['deployed/participants/test/accuracy']:.1%}"
    assert value in made.verdict[0]
    assert made.tiles[0].value == value
    scores = next(
        s for s in run.scores() if (s["round"], s["group"], s["split"]) == (best["round"], "participants", "test")
    )
    (clients,) = [b for s in made.sections for b in s.blocks if b.get("id") == "clients"]
    shown = dict(zip(clients["data"]["client"], clients["data"]["metric"]))
    assert {c: shown[c] for c in scores["client"]} == pytest.approx(dict(zip(scores["client"], scores["metric"])))


@pytest.mark.parametrize("clients", [1, 10, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_page_is_small_whatever_the_federation(tmp_path: Path, clients: int) -> None:
    run = made_run(tmp_path / "run", clients=clients, unseen=clients // 10, rounds=20)
    assert write([run.path]).stat().st_size < LIMIT


@pytest.mark.slow
def test_a_page_is_small_whatever_the_names_and_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that are called by a digest, many newcomers with estimates, many classes."""
    monkeypatch.setattr("made.CLASSES", 62)
    names = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(3_000)]
    run = made_run(tmp_path / "run", clients=names, unseen=2_000, rounds=2, estimates=True)
    assert write([run.path]).stat().st_size < LIMIT


@pytest.mark.slow
def test_a_page_of_many_runs_is_small(tmp_path: Path) -> None:
    names = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(500)]
    for seed in range(2):
        for steps in range(8):
            made_run(tmp_path / f"{steps}-{seed}", clients=names, unseen=0, rounds=60, seed=seed, local_steps=steps)
    path = write([tmp_path])
    assert path.stat().st_size < LIMIT
    assert "some are shown, evenly" in path.read_text(encoding="utf-8")


def test_a_page_repeats_no_text(tmp_path: Path) -> None:
    """A column has each of its texts once, and for each row which of them it is."""
    content = page([made_run(tmp_path / "run", clients=12).path]).as_json()
    (split,) = [b for s in content["sections"] for b in s["blocks"] if b.get("id") == "split"]
    packed = split["data"]["group"]
    assert packed["names"] == ["took part", "unseen"] and set(packed["at"]) == {0, 1}
    assert len(packed["at"]) == len(split["data"]["samples"])


def test_what_is_vendored_is_as_it_was_published() -> None:
    for line in (VENDOR / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest
    licences = (VENDOR / "LICENSES.txt").read_text()
    for name in SCRIPTS:
        assert f"== {name.removesuffix('.js').removesuffix('.min')} " in licences
    assert licences.count("Redistribution and use in source and binary forms") == len(SCRIPTS)
    assert f"/*\n{licences}*/" in html(Page("empty", ["Nothing."]))  # whoever gets a page gets the library


def test_numbers_that_json_does_not_know_are_null() -> None:
    assert embedded({"a": float("nan"), "b": [float("inf"), 0.123456789]}) == '{"a":null,"b":[null,0.123457]}'


def test_a_name_does_not_turn_a_sentence_round(tmp_path: Path) -> None:
    """ "12.5 points" must not be read as "5.21", whatever a method or a client is called."""
    for name in ("a", "b"):
        run = made_run(tmp_path / name, method=name, clients=["one\u202e", "two"])
        run.write_summary({**(run.summary() or {}), "name": f"{name}\u202e\u2066"})
    content = page([tmp_path]).as_json()
    sentences = [content["title"], *content["verdict"], *content["warnings"], *(t["label"] for t in content["tiles"])]
    assert not [text for text in sentences if "\u202e" in text or "\u2066" in text]
    assert "one\u202e" in content["clients"]  # a name by itself stays as it is
    assert "\u202e" not in html(page([tmp_path])).partition("</noscript>")[0]


def test_halves_of_characters_are_written_as_question_marks(tmp_path: Path) -> None:
    """JSON lets them through, UTF-8 does not."""
    run = made_run(tmp_path / "run", clients=["\ud800"])
    run.write_summary({**(run.summary() or {}), "name": "FedAvg\udfff"})
    assert "<title>FedAvg? on digits</title>" in write([run.path]).read_text(encoding="utf-8")
    assert "FedAvg?" in snippet(facts_of(run)).encode().decode()


def test_a_page_without_anything_is_a_page() -> None:
    assert "<h1>" in html(Page("empty", ["Nothing."]))


def test_a_run_without_records_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", rounds=2)
    (run.path / "metrics.jsonl").unlink()
    (run.path / "scores.jsonl").unlink()
    with pytest.raises(RunError, match="has no record of any round yet"):
        facts_of(run)


def test_reports_need_no_torch() -> None:
    program = "import sys, fedloom.reports.report, fedloom.reports.watch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
