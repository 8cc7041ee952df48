"""Finding the rule that makes a file, against Snakemake's own search."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from snakemake.io import IOFile
from snakemake.output_index import OutputIndex
from snakemake.rules import Rule

from demix.launch.producers import Producers

PART = st.sampled_from(["a", "ab", "b", "{x}", "{y,[ab]+}", "a.b", "a+"])
NAMES = st.lists(PART, min_size=1, max_size=3).map("/".join).filter(lambda name: name.count("{y") < 2)
WHOLE = st.lists(st.sampled_from(["a", "ab", "b", "a.b", "axb", "aa", "a+"]), min_size=1, max_size=3).map("/".join)


class MadeRule:
    """A rule with nothing but its outputs."""

    def __init__(self, number: int, outputs: list[str]):
        self.number, self.outputs = number, outputs

    def products(self) -> list[Any]:
        return [IOFile(name) for name in self.outputs]

    def is_producer(self, requested: str) -> bool:
        return bool(Rule.is_producer(self, requested))


@given(st.lists(st.lists(NAMES, max_size=4), max_size=4), st.lists(WHOLE, max_size=6))
def test_the_same_rules_make_a_file_as_by_snakemakes_search(outputs: list[list[str]], files: list[str]) -> None:
    rules = [MadeRule(number, names) for number, names in enumerate(outputs)]
    ours, theirs = Producers(rules), OutputIndex(rules)
    for file in [*files, *(name for names in outputs for name in names if "{" not in name)]:
        assert {rule.number for rule in ours.match_producers(file)} == {
            rule.number for rule in theirs.match_producers(file)
        }
