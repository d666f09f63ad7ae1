# SPDX-License-Identifier: Apache-2.0
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedloom.core.errors import ConfigError
from fedloom.progress import DISPLAYS, Headline, Json, Plain, Quiet, Rich, display

RUN = Headline(
    name="FedAvg",
    dataset="digits",
    clients=4,
    cohort=3,
    unseen=2,
    models=("mlp:hidden=8x",),
    engine="vectorised",
    device="cpu",
    engine_reason="as asked",
    notes=("class 3 is held by no participant",),
    metric="accuracy",
    round=0,
    rounds=2,
)
METRICS = {"deployed/participants/val/accuracy": 0.5, "deployed/participants/test/accuracy": 0.25}
RECORDS = [
    {"round": 1, "diagnostics": {"local_loss": 2.0}, "dropped": [{"client": "1"}]},
    {"round": 2, "diagnostics": {"local_loss": 1.0}, "dropped": [{"client": "2"}], "metrics": METRICS},
]
DIRECTORY = SimpleNamespace(path="runs/x", summary=lambda: {"finished": True, "loss": float("nan")})
FIRST_LINE = (
    "FedAvg on digits; 4 clients, 3 a round, 2 unseen; model mlp:hidden=8x; vectorised engine on cpu (as asked); "
    "note: class 3 is held by no participant"
)


def play(name, records=RECORDS):
    with display(name) as screen:
        screen.begin(RUN)
        for record in records:
            screen.update(record)
        screen.end(DIRECTORY)


def test_plain_has_a_line_per_evaluation(capsys):
    play("plain")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        FIRST_LINE,
        "round 2/2: accuracy val 0.5000 test 0.2500, local loss 1.0000, 2 dropped so far",
        "saved in runs/x",
    ]


def test_json_has_a_line_per_record_and_the_summary(capsys):
    play("json")
    out, err = capsys.readouterr()
    assert err == ""
    assert [json.loads(line) for line in out.splitlines()] == [*RECORDS, {"finished": True, "loss": None}]


def test_quiet_is_quiet(capsys):
    play("quiet")
    assert capsys.readouterr() == ("", "")


def test_rich_has_a_bar_and_the_newest_numbers(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    play("rich")
    out, err = capsys.readouterr()
    assert out == ""
    assert FIRST_LINE in err
    assert "2/2" in err
    assert "accuracy val 0.5000 test 0.2500, local loss 1.0000, 2 dropped so far" in err
    assert "saved in runs/x" in err


def test_rich_stops_when_a_run_fails(capsys):
    with pytest.raises(KeyboardInterrupt), display("rich") as screen:
        screen.begin(RUN)
        screen.update(RECORDS[0])
        raise KeyboardInterrupt
    assert "1/2" in capsys.readouterr().err


def test_numbers_that_are_not_there_are_not_shown(capsys):
    play(
        "plain",
        [{"round": 1, "diagnostics": {}, "dropped": [], "metrics": {"deployed/participants/val/accuracy": None}}],
    )
    assert capsys.readouterr().err.splitlines()[1].strip() == "round 1/2:"


def test_auto_is_rich_on_a_terminal_and_plain_elsewhere(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert isinstance(display("auto"), Plain)
    monkeypatch.setenv("TERM", "xterm")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    assert isinstance(display("auto"), Rich)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display("auto"), Plain)


@pytest.mark.parametrize("widgets", [True, False])
def test_auto_in_a_notebook_is_rich_if_widgets_are_there(monkeypatch, widgets):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if widgets else None)
    assert type(display("auto")) is (Rich if widgets else Plain)


def test_displays_by_name():
    assert {name: type(display(name)) for name in DISPLAYS} == {
        "rich": Rich,
        "plain": Plain,
        "json": Json,
        "quiet": Quiet,
    }
    with pytest.raises(ConfigError, match="Unknown progress display 'plian'; did you mean 'plain'"):
        display("plian")


def test_importing_displays_needs_no_torch():
    subprocess.run(
        [sys.executable, "-c", "import sys, fedloom.progress; assert 'torch' not in sys.modules"], check=True
    )
