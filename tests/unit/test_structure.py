"""The tests share helpers through tests/support/ alone, and no file is long."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FILES = sorted((REPOSITORY / "tests").rglob("*.py"))
LONGEST = 450


def imported(text: str) -> Iterator[str]:
    """The name of each module that a module imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield node.module or "."
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def of_tests(text: str) -> list[str]:
    """The test modules and conftests among what a module imports."""
    return [name for name in imported(text) if any(p == "conftest" or p.startswith("test_") for p in name.split("."))]


def test_imports_of_test_modules_are_seen() -> None:
    for line in (
        "from test_model import SMALL",
        "import conftest",
        "from tests.unit import test_model",
        "def f():\n import test_x",
    ):
        assert of_tests(line)
    assert not of_tests("from support.models import SMALL\nimport pytest\nfrom demix import test")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_helpers_come_from_support_alone(path: Path) -> None:
    assert not of_tests(path.read_text())
    assert path.parent.name != "support" or not path.name.startswith("test_")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_of_tests_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST
