# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, version, speed, and what is an error of whom."""

import subprocess
import sys

import pytest

import fedloom

HEAVY = ("torch", "numpy", "sklearn", "scipy", "matplotlib", "fedloom.api")

HELP = f"""
import sys, time
from fedloom.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
print("imported:", [name for name in {HEAVY!r} if name in sys.modules])
print(time.process_time())
"""


def after_help() -> list[str]:
    """The last two lines that the program above prints."""
    answer = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    return answer.stdout.splitlines()[-2:]


def test_help_imports_nothing_heavy():
    assert after_help()[0] == "imported: []"


def test_help_is_quick():
    """Under half a second: of the processor's time since the process began, as other tests may run beside."""
    assert min(float(after_help()[1]) for _ in range(3)) < 0.5


def test_a_command_imports_its_own_method_only():
    """Whose a flag could be is asked of other methods only if it is none of the command's own."""
    program = """
import sys
from fedloom.cli.main import main
try:
    main("run fedavg --out x --seeds 2 --json --quiet --trust --config=c --help".split())
except SystemExit as end:
    assert not end.code
print([name for name in sys.modules if name.startswith("fedloom.algorithms.")])
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "['fedloom.algorithms.fedavg']"


def test_version(cli):
    assert cli("--version").out == f"fedloom {fedloom.__version__}\n"


def test_run_is_the_first_command(cli):
    outcome = cli("--help")
    assert outcome.code == 0
    assert outcome.out.index("Train a method.") < outcome.out.index("Continue a run")


@pytest.mark.parametrize(
    "command",
    [
        *("run fedavg", "tune fedavg", "resume", "evaluate", "export", "compare"),
        *("methods", "datasets", "models", "new", "data fetch", "data show"),
    ],
)
def test_help_of_each_command_has_an_example(cli, command):
    outcome = cli(*command.split(), "--help")
    assert outcome.code == 0
    assert f"Example: fedloom {command}" in outcome.out


def test_an_unknown_flag_is_typer_s_to_refuse(cli):
    outcome = cli("run", "fedavg", "--round", "3")
    assert outcome.code == 2
    assert "--rounds" in outcome.err
    assert "Traceback" not in outcome.err


def test_an_interrupt_that_an_import_made_another_error_of_is_one(cli, monkeypatch):
    """As in torch's: what is raised while a class is made comes out as a RuntimeError."""

    class Slow:
        def __set_name__(self, owner, name):
            raise KeyboardInterrupt

    def interrupted(*_):
        type("Made", (), {"slow": Slow()})

    from fedloom.data import registry

    monkeypatch.setattr(registry, "names", interrupted)
    monkeypatch.setattr("fedloom.data.names", interrupted)
    for place in ("fedloom.cli.run.with_method", None):
        with monkeypatch.context() as patch:
            if place:
                patch.setattr(place, interrupted)
            outcome = cli("datasets")
        assert (outcome.code, "Traceback" in outcome.err) == (130, False)


def test_a_bug_keeps_its_traceback(cli, monkeypatch):
    from fedloom.data import registry

    monkeypatch.setattr(registry, "names", lambda: 1 / 0)
    monkeypatch.setattr("fedloom.data.names", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli("datasets")
