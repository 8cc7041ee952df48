"""Which rule of the workflow makes a file, and what happens where Snakemake finds none because of an error."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from snakemake.common.prefix_lookup import PrefixLookup

if TYPE_CHECKING:
    from snakemake.io import _IOFile
    from snakemake.rules import Rule


class Producers:
    """What Snakemake's `OutputIndex` is, in less time: a file without wildcards is found by its path.

    Snakemake compares each file that a job reads with all outputs of a rule, one regular expression after the other.
    Rules that score have one output for each expert and domain, so the time grows with the third power of the domains.
    Of outputs with wildcards only those are compared whose last part, after the last slash, is that of the file or
    holds a wildcard itself.
    """

    def __init__(self, rules: "Iterable[Rule]"):
        self._named: dict[str, set[Rule]] = {}
        patterns: dict[str, list[tuple[str, tuple[Rule, _IOFile]]]] = {}
        for rule in rules:
            for product in rule.products():
                if product.contains_wildcard():
                    last = _last_part(str(product.constant_suffix()))
                    patterns.setdefault(last, []).append((str(product.constant_prefix()), (rule, product)))
                else:
                    self._named.setdefault(str(product), set()).add(rule)
        self._found: dict[str, frozenset[Rule]] = {}
        self._patterns = {last: PrefixLookup(entries=entries) for last, entries in patterns.items()}

    def match_producers(self, targetfile: str) -> "frozenset[Rule]":
        """The rules that have the given file as an output or a log."""
        # Many jobs read the same file.
        if targetfile not in self._found:
            matching = {
                rule
                for last in {_last_part(targetfile), ""} & self._patterns.keys()
                for _, (rule, product) in self._patterns[last].match_iter(targetfile)
                if product.match(targetfile)
            }
            self._found[targetfile] = frozenset(matching | self._named.get(targetfile, set()))
        return self._found[targetfile]


def _last_part(path: str) -> str:
    """What follows the last slash; nothing for a path without one."""
    return path.rpartition("/")[2] if "/" in path else ""


def find_by_name() -> None:
    """Let Snakemake find the rules that make a file by `Producers`."""
    # This module cannot be the first of Snakemake's that is imported.
    from snakemake import dag

    dag.OutputIndex = Producers


def end_at_loops() -> None:
    """Let an error in finding out how a file is made end Snakemake, of a file that is there already, too.

    Snakemake by itself warns and takes such a file as it is: the run ends well, with old results.
    """
    from snakemake import dag
    from snakemake.exceptions import RuleException

    def end(error: Exception, *_: object) -> None:
        # Snakemake catches all errors but this one where the file is there.
        raise RuleException(str(error), rule=getattr(error, "rule", None)) from error

    dag.print_exception_warning = end
