"""The tests share helpers through tests/support/ alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

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
