"""Databases of the data stage: bounded in memory, closed to everything outside, errors that keep their kind."""

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from demix.errors import DemixError
from demix.files import database as module
from demix.files.database import database, run_on
from support.errors import refused

ROWS = 600_000


@cache
def _numbers(rows: int = ROWS, at_once: int = 10_000) -> tuple[pa.RecordBatch, ...]:
    """Every number below `rows` once, in no order."""
    batches = []
    mixed = np.random.default_rng(1).permutation(rows)
    for start in range(0, rows, at_once):
        some = mixed[start : start + at_once]
        hashes = [hashlib.sha256(str(number).encode()).hexdigest() for number in some.tolist()]
        batches.append(pa.record_batch([pa.array(some), pa.array(hashes)], ["number", "hash"]))
    return tuple(batches)


def _sorted_in_it(output: Path) -> list[tuple[int, str]]:
    with database(output) as tables:
        tables.execute("create table numbers (number bigint, hash varchar)")
        run_on(tables, "insert into numbers from batches", _numbers())
        query = "select number, min(hash) as hash from numbers group by number order by number"
        found = tables.sql(query).to_arrow_reader(4096)
        return [row for batch in found for row in zip(*batch.to_pydict().values(), strict=True)]


@pytest.mark.parametrize(("threads", "megabytes"), [("1", 48), ("4", 500)])
def test_what_memory_does_not_hold_goes_to_the_disk_and_comes_back_in_order(tmp_path, monkeypatch, threads, megabytes):
    monkeypatch.setattr(module, "MEMORY_MB", megabytes)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    expected = sorted(row for batch in _numbers() for row in zip(*map(pa.Array.to_pylist, batch.columns), strict=True))
    assert _sorted_in_it(tmp_path / "numbers.parquet") == expected
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MEMORY_MB", 1)
    with refused("numbers.parquet"):
        _sorted_in_it(tmp_path / "numbers.parquet")
    assert list(tmp_path.iterdir()) == []


def test_memory_is_a_part_of_what_slurm_gives(monkeypatch):
    monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
    assert module.memory_mb() == module.MEMORY_MB
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "64000")
    assert module.memory_mb() == 8000
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert module.threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert module.threads() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("SLURM_MEM_PER_NODE")
    assert module.threads() * module.THREAD_MB <= module.MEMORY_MB


@pytest.mark.parametrize(
    "error", [DemixError("law.parquet", "is damaged", "rerun"), KeyboardInterrupt(), ValueError("x")]
)
def test_an_error_in_reading_keeps_its_kind(tmp_path, error):
    def damaged() -> Iterator[pa.RecordBatch]:
        yield from _numbers(30_000)
        raise error

    query = "create table numbers as from batches"
    with pytest.raises(type(error)) as raised, database(tmp_path / "numbers.parquet") as tables:
        run_on(tables, query, damaged())
    assert raised.value is error
    assert list(tmp_path.iterdir()) == []


OUTSIDE = [
    "copy (select 1) to '{0}/out.csv'",
    "select * from read_csv('{0}/secret.csv')",
    "install httpfs",
    "set memory_limit = '100GB'",
    "from secret_variable",
]


@pytest.mark.parametrize("query", OUTSIDE)
def test_a_database_is_closed(tmp_path, query):
    secret_variable = pa.table({"a": [1]})
    (tmp_path / "secret.csv").write_text("a\n1\n")
    with database(tmp_path / "numbers.parquet") as tables, pytest.raises(duckdb.Error):
        tables.execute(query.format(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"], secret_variable
