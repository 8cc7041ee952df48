"""Bytes of any kind where files and texts come in: what is wrong with them is said in one line.

Properties of readers, splits, anonymizer, token shards and sealed JSON on made-up values are in tests/unit; flipped
bits of sealed files are in test_damage.py.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from demix.data.sources import Source, download
from demix.errors import DemixError
from demix.run.check import completed_run
from demix.settings import settings_from

FORMS = ("jsonl", "csv", "tsv", "txt", "json", "jsonl.gz", "jsonl.zst", "zip", "tar", "tgz")
READ = (
    *(b'{"text": "a", "id": 1}\n', b'text,id\n"a",1\n', b"text\tid\na\t1\n", b"words\n", b'[{"text": "a"}]'),
    *(b"\x1f\x8b\x08\0", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"a.txt" + b"\0" * 507, b"\x1f\x8b\x08\0"),
)


def documents(data: bytes, folder: Path) -> None:
    path, raw = folder / f"a.{FORMS[data[0] % len(FORMS)]}" if data else folder / "a.txt", folder / "raw.parquet"
    path.write_bytes(data[1:])
    assert download(Source(path=str(path)), "d", raw) == pq.read_metadata(raw).num_rows


def config(data: bytes, _: Path) -> None:
    try:
        found = yaml.safe_load(data.decode("utf-8", "replace"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    completed_run(found if isinstance(found, dict) else {"run": found})


# What reads bytes, and bytes that lead far into it.
READERS: dict[str, tuple[Callable[[bytes, Path], object], list[bytes]]] = {
    "sources": (documents, [bytes([form]) + some for form, some in enumerate(READ)]),
    "settings": (
        lambda data, _: settings_from(Source, data.decode("utf-8", "replace")),
        [b'{"path": "x", "parts": 2, "where": {"a": 1}}'],
    ),
    "config": (config, [b"run: a\ndomains: {training: {a: {source: {path: x}}}}\nmodel: {heads: 2}\n"]),
}


def mangled(seeds: list[bytes], chance: random.Random) -> bytes:
    """One of `seeds`, of which some parts are left out, of another seed, or made up."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.randrange(8)):
        other, at = chance.choice([chance.choice(seeds), chance.randbytes(8)]), chance.randrange(len(data) + 1)
        start = chance.randrange(len(other))
        data[at : at + chance.randrange(9)] = other[start : start + chance.randrange(9)]
    return bytes(data)


@pytest.mark.parametrize("reader", READERS)
def test_what_is_wrong_with_bytes_is_said_in_one_line(
    reader: str, tmp_path: Path, times: Callable[[int, int], int], chance: random.Random
) -> None:
    read, seeds = READERS[reader]
    for _ in range(times(100, 10_000)):
        data, said = mangled(seeds, chance), "one line"
        try:
            read(data, tmp_path)
        except DemixError as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(data) from error
        assert len(said.splitlines()) == 1, data
