"""The tests share helpers through tests/support/ alone, and lines of code are counted."""

import ast
from collections.abc import Iterator
from pathlib import Path

from support.code_lines import code_lines

TESTS = Path(__file__).parents[1]


def imported(text: str) -> Iterator[str]:
    """The name of each module that a module imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_helpers_come_from_support_alone() -> None:
    for path in TESTS.rglob("*.py"):
        parts = {part for name in imported(path.read_text()) for part in name.split(".")}
        assert not [part for part in parts if part == "conftest" or part.startswith("test_")], path
        assert path.parent.name != "support" or not path.name.startswith("test_")


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    python = '"""About."""\n\n# Why.\nx = """\n\n"""  # Three.\n\n\ndef f():\n    """What\n    it is."""\n'
    assert code_lines(python) == 4
    assert code_lines("rule all:\n    # Why.\n\n    input: 'x'\n") == 2
