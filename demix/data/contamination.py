"""How much of what tasks ask occurs in a training text: 13-grams of words, as between splits (`demix.data.leakage`).

A document is held to be contaminated if the training text has one of its 13-grams, as in Brown et al. 2020, appendix C.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from demix.data.leakage import Grams, grams_of, sampling, seen_in
from demix.files.batches import read_batches, write_rows

SCHEMA = pa.schema(
    [
        *(("task", pa.string()), ("domain", pa.string()), ("documents", pa.int64()), ("long_documents", pa.int64())),
        *(("found_documents", pa.int64()), ("ngrams", pa.int64()), ("found_ngrams", pa.int64())),
        ("one_in", pa.int64()),
    ]
)


def contamination(documents: Path, train: Path, output: Path) -> None:
    """Write how many documents of each task, and of its 13-grams, occur in `train`, corpus/<domain>/train.parquet.

    `documents` has a row for each text of a document, with the columns task, document, text and n_words. Rows of the
    output: task, domain, documents, long_documents (those with a 13-gram), found_documents (those with one that the
    training text has), ngrams (distinct ones), found_ngrams, one_in (only one in so many 13-grams is looked at).
    """
    words = sum(int(batch.column(0).to_numpy().sum()) for batch in read_batches(documents, ["n_words"]))
    one_in = sampling(words)
    # The number of each document, and the hashes of its 13-grams.
    numbers: dict[tuple[str, int], int] = {}
    owners, hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for batch in read_batches(documents, ["task", "document", "text"]):
        keys = zip(batch.column("task").to_pylist(), batch.column("document").to_pylist(), strict=True)
        own = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
        for found, text in grams_of(batch.column("text"), one_in):
            hashes.append(found)
            owners.append(own[text])
    tasks = list(dict.fromkeys(task for task, _ in numbers))
    task_of = np.array([tasks.index(task) for task, _ in numbers], np.int64)
    grams = Grams.of(np.concatenate(hashes), one_in)
    # Each document with each of its 13-grams, by their numbers.
    owner, place = np.concatenate(owners), np.searchsorted(grams.hashes, np.concatenate(hashes))
    held, width = seen_in(train, grams)[place], max(len(grams.hashes), 1)

    def by_task(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By task, the documents and the distinct 13-grams among the chosen pairs."""
        of_task = task_of[np.unique(owner[chosen])]
        pairs = np.unique(task_of[owner[chosen]] * width + place[chosen])
        return np.bincount(of_task, minlength=len(tasks)), np.bincount(pairs // width, minlength=len(tasks))

    counts = [np.bincount(task_of, minlength=len(tasks)), *by_task(np.ones(len(owner), bool)), *by_task(held)]
    rows = [
        (task, train.parent.name, int(every), int(long), int(found), int(ngrams), int(found_ngrams), one_in)
        for task, every, long, ngrams, found, found_ngrams in zip(tasks, *counts, strict=True)
    ]
    write_rows(output, SCHEMA, rows)
