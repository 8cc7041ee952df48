"""The list of edits that tests should see is true of the code and of the tests."""

import ast
import importlib.util
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@cache
def named_in(path: Path) -> frozenset[str]:
    """The names of the tests in a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_")


def is_there(test: str) -> bool:
    """Whether there is a file `tests/….py`, and the test that may be named behind it with `::`."""
    name, _, function = test.partition("::")
    path = REPOSITORY / name
    return path.is_file() and (not function or function in named_in(path))


def test_tests_that_are_not_there_are_seen() -> None:
    own = f"tests/unit/{Path(__file__).name}"
    assert is_there(own)
    assert is_there(f"{own}::test_tests_that_are_not_there_are_seen")
    assert not is_there(f"{own}::test_tests")
    assert not is_there(f"{own}::is_there")
    assert not is_there("tests/unit/test_nothing.py")


def test_every_edit_can_be_made_and_its_tests_are_there() -> None:
    spec = importlib.util.spec_from_file_location("mutants", REPOSITORY / "tests" / "mutants" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    edits = mutants.edits()
    assert len(edits) >= 200
    assert [fault for edit in edits if (fault := edit.fault())] == []
    assert [f"{edit}: no {test}" for edit in edits for test in edit.tests if not is_there(test)] == []
    assert all(edit.tests and edit.old != edit.new for edit in edits)
    assert len({(edit.path, edit.old, edit.new) for edit in edits}) == len(edits)
