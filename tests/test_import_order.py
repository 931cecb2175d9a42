"""A module imports only names to its left; `pipeline --help` loads click and no more."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ORDER = (
    *(
        "models",
        "errors",
        "durable",
        "parent",
        "tree",
        "memo",
        "rerun",
        "config",
        "geometry",
        "keys",
        "pages",
        "jobs",
        "journal",
        "store",
        "checkpoint",
    ),
    *("families", "encode", "plan", "engines", "report", "run", "results", "emit", "needs"),
    *("parity", "golden", "nightly", "doctor", "plugin", "scale", "cli"),
)
PACKAGE = Path(__file__).parents[1] / "pipeline"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imported_names(path: Path) -> set[str]:
    """First names below `pipeline` that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("pipeline.")} - {"__version__"}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_imports_only_names_to_its_left(module: Path) -> None:
    name = module.parts[0].removesuffix(".py")
    if name in ("__init__", "__main__", "models"):
        return
    left = set(ORDER[: ORDER.index(name) + 1])
    assert imported_names(PACKAGE / module) <= left


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_file_has_at_most_300_lines(module: Path) -> None:
    assert len((PACKAGE / module).read_text().splitlines()) <= 300


def test_help_loads_click_and_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); from pipeline.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "found = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "found -= set(sys.stdlib_module_names)\n"
        "print(sorted(name for name in found if not name.startswith('_')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage:" in done.stdout
    assert done.stderr.strip() == "['click', 'pipeline']"
