"""The faults that `make mutants` puts into code: what they are, and that their names outlive a new format."""

import ast
from pathlib import Path

import pytest

from mutants.mutation import mutants

REPOSITORY = Path(__file__).parents[2]


def others(line: str) -> set[str]:
    """What becomes of a line of a function."""
    before = f"def f(a, b, c):\n    {line}\n"
    found = set()
    for mutant in mutants("x.py", before):
        (body,) = ast.parse(mutant.text).body[0].body
        found.add(" ".join(ast.unparse(body).split()))
        assert (mutant.where, mutant.function, mutant.lines) == ("f", "f", {2})
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a = b <= c", {"a = b < c"}),
        ("a = b == c", {"a = b != c"}),
        ("a = b + c", {"a = b - c", "pass"}),
        ("a += b", {"a -= b", "pass"}),
        ("d = b and c", {"d = b or c", "d = b", "d = c"}),
        ("d = not b", {"d = b"}),
        ("d = True", {"d = False"}),
        ("d = 3", {"d = 4", "d = 2"}),
        ("d = -1", {"d = -2", "d = 0"}),
        ("d = 0.5", {"d = 1.5", "d = 0.0"}),
        ("d = a[b:]", {"d = a[:]", "d = a[b + 1:]"}),
        ("d = a[:b]", {"d = a[:]", "d = a[:b - 1]"}),
        ("d = max(a, b)", {"d = min(a, b)"}),
        ("d = a.sum(axis=b)", {"d = a.sum()", "d = a.mean(axis=b)"}),
        ("a(b)", {"pass"}),
        ("a.b = c", {"pass"}),
        ("d = a if b else c", {"d = a if True else c", "d = a if False else c"}),
        ("if a: b = c", {"if True: b = c", "if False: b = c", "if a: pass"}),
        ("raise ValueError(1, a + b)", {"pass"}),
        ("with a(b): c = 1", {"with __import__('contextlib').nullcontext(): c = 1"}),
        ("d = f'{a + 1}'", set()),
    ],
)
def test_each_line_has_its_faults(line: str, expected: set[str]) -> None:
    found = others(line)
    assert expected <= found
    assert len(found - expected) <= 3, "of statements and numbers inside"


@pytest.mark.parametrize("path", ["demix/mix/priors.py", "demix/files/atomic.py"])
def test_names_are_unique_and_outlive_another_format(path: str) -> None:
    text = (REPOSITORY / path).read_text()
    found = mutants(path, text)
    assert len({mutant.key for mutant in found}) == len({mutant.text for mutant in found}) == len(found) > 100
    for mutant in found:
        compile(mutant.text, path, "exec")
    again = mutants(path, "# A line.\n\n" + ast.unparse(ast.parse(text)))
    assert [mutant.key for mutant in again] == [mutant.key for mutant in found]
