"""Texts that several domains hold: which training domain keeps each, and how many the novel domains share.

Ids go through files in buckets (`demix.data.buckets`): memory holds one bucket at a time, however many texts there are.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from demix.data.buckets import bucket_count, gathered, order_of, place, scattering
from demix.data.documents import as_bytes, as_hexadecimal, digest_of, document_batches, document_count
from demix.files import scratch, write_json
from demix.files.batches import counted, write_batches

OWNERS_SCHEMA = pa.schema([("id", pa.string()), ("domain", pa.string())])
# Rows of a row group of the owners.
OWNERS_ROWS = 1 << 16

_HELD = np.dtype([("hash", "S32"), ("domain", np.uint16)])


def mark_duplicates(inputs: dict[str, list[Path]], output: Path) -> None:
    """Decide which training domain keeps each text: Parquet `id`, `domain`, one row per distinct id, sorted by id.

    Of the domains that hold a text the one with the smallest sha256 of domain and id keeps it, so that neither the
    order of the domains nor that of their documents and parts matters.
    """
    domains = sorted(inputs)

    def batches() -> Iterator[pa.RecordBatch]:
        for held in _held(inputs, output):
            single = _single(held)
            names = pa.DictionaryArray.from_arrays(held["domain"][single], domains).cast(pa.string()).to_pylist()
            rows = dict(zip(single.tolist(), names, strict=True))
            for start, end in _groups(held):
                text_id = as_hexadecimal(held["hash"][start : start + 1])[0].as_py()
                candidates = [domains[index] for index in held["domain"][start:end]]
                rows[start] = min(candidates, key=lambda domain: digest_of(domain, text_id))
            first = np.array(sorted(rows), np.int64)
            for start in range(0, len(first), OWNERS_ROWS):
                some = first[start : start + OWNERS_ROWS]
                names = pa.array([rows[row] for row in some.tolist()], pa.string())
                yield pa.record_batch([as_hexadecimal(held["hash"][some]), names], schema=OWNERS_SCHEMA)

    write_batches(output, OWNERS_SCHEMA, batches())


def count_shared(inputs: dict[str, list[Path]], output: Path) -> None:
    """Write how many texts each two domains share as JSON `{"shared": {"a": {"b": number}}}`, a before b, no zeros.

    For the novel domains, whose duplicates among one another are reported and not dropped.
    """
    domains = sorted(inputs)
    shared: Counter[tuple[str, str]] = Counter()
    for held in _held(inputs, output):
        for start, end in _groups(held):
            names = [domains[index] for index in held["domain"][start:end]]
            shared.update((one, other) for place, one in enumerate(names) for other in names[place + 1 :])
    table: dict[str, dict[str, int]] = {}
    for (one, other), number in shared.items():
        table.setdefault(one, {})[other] = number
    write_json(output, {"shared": table})


def _held(inputs: dict[str, list[Path]], output: Path) -> Iterator[np.ndarray]:
    """Which domain holds which text (once each), a bucket at a time, sorted by both."""
    count = bucket_count(sum(document_count(paths) for paths in inputs.values()))
    with scratch(output) as temporary:
        with scattering(temporary, "held", count) as scatter:
            for index, domain in enumerate(sorted(inputs)):
                for batch in counted(document_batches(inputs[domain], ["id"]), f"{domain}: documents", inputs[domain]):
                    rows = np.zeros(batch.num_rows, _HELD)
                    rows["hash"], rows["domain"] = as_bytes(batch.column(0)), index
                    scatter(rows, place(rows["hash"], count))
        for rows in gathered(temporary, "held", count, _HELD):
            # Stable, and domains were written one after the other.
            rows = rows[order_of(rows["hash"])]
            yield rows[np.concatenate([[True], rows[1:] != rows[:-1]])[: len(rows)]]


def _starts(held: np.ndarray) -> np.ndarray:
    hashes = held["hash"]
    return np.concatenate(
        [np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(held)]), [len(held)]]
    )


def _single(held: np.ndarray) -> np.ndarray:
    starts = _starts(held)
    single: np.ndarray = starts[:-1][np.diff(starts) == 1]
    return single


def _groups(held: np.ndarray) -> Iterator[tuple[int, int]]:
    """First row and one after the last of each text that several domains hold."""
    starts = _starts(held)
    several = np.flatnonzero(np.diff(starts) > 1)
    return zip(starts[several].tolist(), starts[several + 1].tolist(), strict=True)
