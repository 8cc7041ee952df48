"""The tests share helpers through tests/support/ alone, no file or function is long, and lines of code are counted."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.code_lines import code_lines, of_functions

REPOSITORY = Path(__file__).parents[2]
FILES = sorted((REPOSITORY / "tests").rglob("*.py"))
PRODUCT = sorted((REPOSITORY / "demix").rglob("*.py"))
# The most lines of a file, and lines of code of a function of the product.
LONGEST, LONGEST_FUNCTION = 450, 60


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


def test_no_file_is_long() -> None:
    assert not [path for path in [*FILES, *PRODUCT] if len(path.read_text().splitlines()) > LONGEST]


def test_no_function_of_the_product_is_long() -> None:
    lines = {f"{path.name}: {name}": lines for path in PRODUCT for name, lines in of_functions(path.read_text())}
    assert {name: number for name, number in lines.items() if number > LONGEST_FUNCTION} == {}


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    assert (
        code_lines('"""About."""\n\n# Why.\nx = """\n\n"""  # Three.\n\n\ndef f():\n    """What\n    it is."""\n') == 4
    )
    assert [*of_functions('def f():\n    """What."""\n\n    def g():\n        return 1\n    return g\n')] == [
        ("f", 4),
        ("g", 2),
    ]
    assert code_lines("rule all:\n    # Why.\n\n    input: 'x'\n") == 2
