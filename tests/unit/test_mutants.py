"""The faults that `make mutants` puts into code: their names are unique and outlive a new format."""

import ast
from pathlib import Path

import pytest

from mutants.mutation import mutants

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("path", ["demix/mix/priors.py", "demix/files/atomic.py"])
def test_names_are_unique_and_outlive_another_format(path: str) -> None:
    text = (REPOSITORY / path).read_text()
    found = mutants(path, text)
    assert len({mutant.key for mutant in found}) == len({mutant.text for mutant in found}) == len(found) > 100
    for mutant in found:
        compile(mutant.text, path, "exec")
    again = mutants(path, "# A line.\n\n" + ast.unparse(ast.parse(text)))
    assert [mutant.key for mutant in again] == [mutant.key for mutant in found]
