"""Two whole files of a finished run that were swapped: the stage that reads one of them names it and stops."""

from pathlib import Path

import pytest

from support.breaking import command
from support.cli import said

RUN = Path("results/tiny")
SCORE = "score results/tiny/models results/tiny/tokens/fantasy/"
ADAPT, TEST, JOIN = "adapt |fantasy/dev", "scores/demix/fantasy.test", f"join {RUN}/evaluations/parliament.parquet"
# Of each swap: two files or folders (of an expert, its two files), and what the commands that read them hold.
SWAPS = {
    "documents of two parts": ("documents/scripture/0000.parquet", "documents/scripture/0001.parquet", "deduplicate "),
    "documents of two domains": ("documents/licenses", "documents/parliament", "split licenses"),
    "documents of two novel domains": ("documents/fantasy", "documents/fortunes", "split fantasy", "novel-duplicates "),
    "counts": ("documents/licenses/0000.json", "documents/parliament/0000.json", "split licenses"),
    "train and test": ("corpus/licenses/train.parquet", "corpus/licenses/test.parquet", "tokenizer "),
    "corpora": ("corpus/licenses", "corpus/parliament", "tokenizer ", "tokenize |licenses/dev"),
    "corpus cards": ("corpus/fantasy/card.json", "corpus/licenses/card.json", "report ", "card ", "track "),
    "owners and overlap": ("corpus/owners.parquet", "corpus/overlap.parquet", "split licenses"),
    "tokens": ("tokens/licenses", "tokens/parliament", "train dense |models/dense ", "audit licenses"),
    "novel tokens": ("tokens/fantasy", "tokens/fortunes", SCORE, ADAPT, "overlap "),
    "models": ("models/dense", "models/dense_unbalanced", SCORE, "adapt-dense |fantasy/dev"),
    "removal's model": ("models/demix", "models/without-licenses", "audit licenses"),
    "descriptions of models": ("models/dense/model.json", "models/dense_unbalanced/model.json", "card "),
    "experts": ("models/demix/experts/licenses", "models/demix/experts/parliament", "audit licenses", "card "),
    "added experts": ("models/demix/experts/fantasy", "models/demix/experts/fortunes", "report ", "card "),
    "metrics": ("metrics/dense.jsonl", "metrics/demix.jsonl", "report ", "track "),
    "adaptations' metrics": ("metrics/demix-dapt-fantasy.jsonl", "metrics/demix-dapt-fortunes.jsonl", "report "),
    "experts' columns": (f"{TEST}/licenses.parquet", f"{TEST}/scripture.parquet", "evaluate fantasy"),
    "models' columns": ("scores/dense/fantasy.test", "scores/dense_unbalanced/fantasy.test", "evaluate fantasy"),
    "domains' scores": ("scores/demix/fantasy.dev", "scores/demix/fortunes.dev", "evaluate fantasy", ADAPT),
    "splits' scores": ("scores/demix/fantasy.dev", "scores/demix/fantasy.test", "evaluate fantasy"),
    "evaluations": ("evaluations/fantasy.parquet", "evaluations/fortunes.parquet", JOIN),
    "priors": ("evaluations/licenses.priors.parquet", "evaluations/fantasy.priors.parquet", "audit licenses"),
    "results": ("results.parquet", "evaluations/fantasy.parquet", "report ", "card ", "track ", JOIN),
}


def swap(one: str, other: str) -> None:
    """Swap two files or folders, or the files of two experts."""
    if "/experts/" in one and not one.endswith((".json", ".safetensors")):
        for suffix in (".json", ".safetensors"):
            swap(one + suffix, other + suffix)
        return
    first, second, aside = RUN / one, RUN / other, RUN / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


@pytest.mark.faults
@pytest.mark.parametrize("what", SWAPS)
def test_swapped_files_are_refused_by_name(what: str, copied: Path) -> None:
    one, other, *readers = SWAPS[what]
    swap(one, other)
    for words in readers:
        line = said(command(copied, words))
        assert line is not None
        assert f"{RUN}/{one}" in line or f"{RUN}/{other}" in line, line
        assert f"written as {one}" in line or f"written as {other}" in line, line
