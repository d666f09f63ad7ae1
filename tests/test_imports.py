# SPDX-License-Identifier: Apache-2.0
"""Data flows one way: a folder imports only from folders before it, and importing fedloom is light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "fedloom"
ORDER = ["core", "data", "clients", "models", "programs", "privacy", "robust", "looms", "adaptation", "engines",
         "algorithms", "metrics", "runs", "progress", "training", "reports", "deploy", "api", "audit", "serving",
         "tables", "cli", "__main__"]  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The parts of fedloom that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {name.split(".")[1] for name in names if name.startswith("fedloom.")}
    return found & set(ORDER)


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_every_part_has_its_place() -> None:
    assert {part(path) for path in FILES} - {"__init__"} <= set(ORDER)


@pytest.mark.parametrize("folder", ORDER)
def test_imports_go_from_later_to_earlier(folder: str) -> None:
    later = {*ORDER[ORDER.index(folder) + 1 :], *({"engines", "data", "cli"} if folder == "algorithms" else ())}
    own = [path for path in FILES if part(path) == folder]
    wrong = {str(path.relative_to(SOURCE)): found for path in own if (found := imported(path) & later)}
    assert own and not wrong


def test_nothing_outside_an_engine_writes_into_it() -> None:
    written = re.compile(r"\bengine\.\w+(\[[^]]*\])?( *[-+|*/]?=[^=]|, .* = )")
    assert written.search("        trainer.engine.before_ask = tell") and not written.search("if engine.name == 'ray':")
    others = [path for path in FILES if part(path) != "engines"]
    assert not [(path.name, line) for path in others for line in path.read_text().splitlines() if written.search(line)]


def test_what_is_slow_to_import_is_imported_where_it_is_used() -> None:
    """A process starts for every ask of a deployed client."""
    slow = {"scipy", "sklearn"}
    at_once = {
        (path.name, name)
        for path in FILES
        for node in ast.parse(path.read_text()).body
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else
                     [alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        if name and name.partition(".")[0] in slow
    }  # fmt: skip
    assert not at_once


def test_torchvision_is_never_imported() -> None:
    assert not [path for path in FILES if "import torchvision" in path.read_text()]


def test_importing_fedloom_does_not_import_torch() -> None:
    code = "import sys, fedloom; sys.exit(int('torch' in sys.modules or 'numpy' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
