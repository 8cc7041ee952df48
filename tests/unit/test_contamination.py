"""How much of what tasks ask occurs in a training text, against sets of 13 words each."""

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demix.data import leakage
from demix.data.contamination import contamination
from demix.evaluate.harness_run import DOCUMENTS
from demix.files import write_parquet

WORDS = st.lists(st.sampled_from(["a", "naïve", "the", "of"]), max_size=18).map(" ".join)
# By task, the texts of each document.
TASKS = st.dictionaries(st.sampled_from(["one", "two"]), st.lists(st.lists(WORDS, min_size=1, max_size=2), min_size=1))


def grams(texts: list[str]) -> set[tuple[str, ...]]:
    split = [text.split() for text in texts]
    return {tuple(words[at : at + 13]) for words in split for at in range(len(words) - 12)}


def counted(folder: Path, tasks: dict[str, list[list[str]]], train: list[str]) -> pd.DataFrame:
    rows = [
        {"task": task, "version": "1", "document": number, "text": text, "n_words": len(text.split())}
        | {"task_sha256": ""}
        for task, documents in tasks.items()
        for number, texts in enumerate(documents)
        for text in texts
    ]
    write_parquet(pa.Table.from_pylist(rows, DOCUMENTS), folder / "documents.parquet")
    text = pa.table({"text": pa.array(train, pa.large_string())})
    (folder / "law").mkdir(exist_ok=True)
    write_parquet(text, folder / "law" / "train.parquet")
    contamination(folder / "documents.parquet", folder / "law" / "train.parquet", folder / "found.parquet")
    return pd.read_parquet(folder / "found.parquet")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(tasks=TASKS, train=st.lists(WORDS, max_size=4))
def test_counts_are_those_of_sets(tmp_path: Path, tasks: dict[str, list[list[str]]], train: list[str]) -> None:
    found = counted(tmp_path, tasks, train)
    known = grams(train)
    assert list(found["task"]) == list(tasks)
    for row in found.itertuples():
        documents = [grams(texts) for texts in tasks[row.task]]
        distinct = set().union(*documents)
        assert (row.domain, row.documents, row.one_in) == ("law", len(documents), 1)
        assert row.long_documents == sum(map(bool, documents))
        assert row.found_documents == sum(bool(one & known) for one in documents)
        assert (row.ngrams, row.found_ngrams) == (len(distinct), len(distinct & known))


def test_of_many_words_a_sample_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[" ".join(f"w{number}x{word}" for word in range(60))] for number in range(60)]
    train = [text for (text,) in documents[::2]]
    whole = counted(tmp_path, {"one": documents}, train).iloc[0]
    assert (whole["found_documents"], whole["long_documents"]) == (30, 60)
    monkeypatch.setattr(leakage, "MOST_GRAMS", 1000)
    sampled = counted(tmp_path, {"one": documents}, train).iloc[0]
    assert sampled["one_in"] == 4
    assert 0.1 < sampled["ngrams"] / whole["ngrams"] < 0.4
    assert 20 < sampled["found_documents"] <= 30
