"""Made-up inputs for readers, splitter, JSON, weights and configs: no crash, no hang, and what must hold holds.

Properties of the anonymizer, of token shards and of sealed JSON on made-up values are in tests/unit.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demix.data.corpus import Budget, Splitting, split
from demix.data.duplicates import mark_duplicates
from demix.data.sources import Source, download
from demix.errors import DemixError
from demix.files import digest, read_json, write_json

Fuzz = Callable[..., None]


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    """Runs a check on made-up values: on 40, or on as many as asked for in `make faults`."""
    whole = bool(request.config.getoption("--all-faults", default=False))
    cases = request.config.getoption("--fuzz") if whole else 40

    def run(check: Callable[..., None], **strategies: st.SearchStrategy) -> None:
        # A case that hangs is found by its deadline.
        chosen = settings(
            max_examples=cases,
            deadline=20_000,
            derandomize=not whole,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        chosen(given(**strategies)(check))()

    return run


def refused(act: Callable[[], object]) -> str | None:
    """The line with which something is refused, None where it is not."""
    try:
        act()
    except DemixError as error:
        return str(error)
    return None


FORMS = ["jsonl", "csv", "txt", "json", "parquet", "jsonl.gz", "jsonl.zst", "zip", "tar", "tgz"]
STARTS = [
    *(b"", b'{"text": "', b'{"text": "a"}\n', b"text\n", b'text,id\n"a', b"PAR1", b"\x1f\x8b\x08\0"),
    *(b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf", b"[[[[", b"\xff\xfe"),
]


def test_readers_of_any_bytes(fuzz: Fuzz, tmp_path: Path) -> None:
    def check(form: str, start: bytes, data: bytes) -> None:
        path, raw = tmp_path / f"a.{form}", tmp_path / "raw.parquet"
        path.write_bytes(start + data)
        if line := refused(lambda: download(Source("files", str(path)), "d", raw)):
            assert "a." in line or "d.source" in line
        else:
            "".join(row["text"] + row["id"] for row in pq.read_table(raw).to_pylist()).encode()

    fuzz(check, form=st.sampled_from(FORMS), start=st.sampled_from(STARTS), data=st.binary(max_size=300))


def test_splitter(fuzz: Fuzz, tmp_path: Path) -> None:
    def check(texts: list[str], dev: int, test: int, train: int | None, seed: int, near: float | None) -> None:
        ids = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
        words = [len(text.split()) for text in texts]
        columns = {"id": ids, "text": pa.array(texts, pa.large_string()), "n_words": words, "origin": ids}
        columns["metadata"] = pa.array(["{}"] * len(texts), pa.large_string())
        documents, owners = tmp_path / "d.parquet", tmp_path / "o.parquet"
        pq.write_table(pa.table(columns), documents)
        write_json(tmp_path / "d.json", {"rejected": {}, "replacements": {}, "normalised": {}})
        mark_duplicates({"d": [documents]}, owners)
        splitting = Splitting(words=Budget(train, dev, test), near_duplicates=near, training=True, seed=seed)
        if line := refused(lambda: split("d", [documents], owners, splitting, tmp_path)):
            assert line.startswith("d.words: ")
            return
        names = ("train", "dev", "test")
        kept = {name: pq.read_table(tmp_path / f"{name}.parquet")["id"].to_pylist() for name in names}
        together = [text_id for some in kept.values() for text_id in some]
        assert len(together) == len(set(together))
        assert set(together) <= set(ids)
        card = read_json(tmp_path / "card.json")
        assert card["documents"] == {name: len(some) for name, some in kept.items()}
        counted = (*card["documents"].values(), *card["rejected"].values(), *card["duplicates"].values())
        assert sum(counted) == len(texts)
        assert kept["train"]

    text = st.lists(st.sampled_from(["a", "b", "c", "dd"]), min_size=1, max_size=16).map(" ".join)
    fuzz(
        check,
        texts=st.lists(text, max_size=25),
        dev=st.integers(1, 40),
        test=st.integers(1, 40),
        train=st.one_of(st.none(), st.integers(1, 60)),
        seed=st.integers(0, 9),
        near=st.one_of(st.none(), st.floats(0, 1)),
    )


TARGETS = """
import os
import sys
import time
from itertools import count
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["demix"]):
    from demix.data.anonymize import anonymize, normalise
    from demix.data.sources import Source, download
    from demix.errors import DemixError
    from demix.files import read_json, read_json_lines, sha256_file
    from demix.model.checkpoint import load_verified
    from demix.run.check import completed_run
    from demix.settings import settings_from

import pyarrow.parquet as pq
import yaml

FORMS = ("jsonl", "csv", "tsv", "txt", "json", "jsonl.gz", "jsonl.zst", "zip", "tar", "tgz")
kind, folder, cases = sys.argv.pop(1), Path(sys.argv.pop(1)), int(sys.argv.pop(1))
numbers = count(1)


def anonymizer(data):
    text = normalise(data.decode("utf-8", "replace"))[0]
    once, _ = anonymize(text)
    again, more = anonymize(once)
    assert again == once
    assert not any(more.values())


def readers(data):
    path, raw = folder / f"a.{FORMS[data[0] % len(FORMS)]}" if data else folder / "a.txt", folder / "raw.parquet"
    path.write_bytes(data[1:])
    documents = download(Source("files", str(path)), "d", raw)
    assert pq.read_metadata(raw).num_rows == documents


def sealed_json(data):
    (folder / "a.json").write_bytes(data)
    read_json(folder / "a.json")


def sealed_lines(data):
    (folder / "a.jsonl").write_bytes(data)
    read_json_lines(folder / "a.jsonl")


def safetensors(data):
    (folder / "a.safetensors").write_bytes(data)
    load_verified(folder / "a.safetensors", sha256_file(folder / "a.safetensors"))


def settings(data):
    settings_from(Source, data.decode("utf-8", "replace"))


def configs(data):
    try:
        config = yaml.safe_load(data.decode("utf-8", "replace"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    completed_run(config if isinstance(config, dict) else {"run": config})


def one(data):
    start = time.monotonic()
    try:
        globals()[kind](data)
    except DemixError as error:
        assert len(str(error).splitlines()) == 1, str(error)
    assert time.monotonic() - start < 60
    if next(numbers) == cases:
        # libFuzzer's alarm strikes who is slow to end.
        print("all cases done", flush=True)
        os._exit(0)


atheris.Setup(sys.argv, one)
atheris.Fuzz()
"""

READ = (
    *(b'{"text": "a", "id": 1}\n', b'text,id\n"a",1\n', b"text\tid\na\t1\n", b"words\n", b'[{"text": "a"}]'),
    *(b"\x1f\x8b\x08\0", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"a.txt" + b"\0" * 507, b"\x1f\x8b\x08\0"),
)
VALUES = ({}, {"a": [1, 2.5, None, "x"]}, {"a": {"b": "ü"}})
ROWS = ([], [{"step": 1, "loss": 2.5}], [{"a": float("nan")}, {"b": []}])


def lines(rows: list[dict]) -> bytes:
    """JSON lines with the seal that belongs to them."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in [*rows, {"rows": len(rows), "seal": digest(rows)}])


SEEDS = {
    "anonymizer": [b"a@b.org @user_1 +44 20 7946 0958", b"4111 1111 1111 1111 219-09-9998", "@[123456:7:Zoë]".encode()],
    "readers": [bytes([form]) + some for form, some in enumerate(READ)],
    "sealed_json": [json.dumps(value | {"seal": digest(value)}).encode() for value in VALUES],
    "sealed_lines": [lines(rows) for rows in ROWS],
    "safetensors": [b'\x08\0\0\0\0\0\0\0{"a":{}}', b"\x02\0\0\0\0\0\0\0{}"],
    "settings": [b'{"kind": "files", "path": "x", "parts": 2, "where": {"a": 1}}'],
    "configs": [b"run: a\ndomains: {training: {a: {source: {kind: files, path: x}}}}\nmodel: {heads: 2}\n"],
}


@pytest.mark.faults
@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="needs atheris: make faults installs it")
@pytest.mark.parametrize("kind", SEEDS)
def test_bytes_that_find_new_paths_through_our_code(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seeds, place, cases = tmp_path / "seeds", tmp_path / "place", request.config.getoption("--fuzz")
    seeds.mkdir()
    place.mkdir()
    for number, seed in enumerate(SEEDS[kind]):
        (seeds / str(number)).write_bytes(seed)
    limits = ["-timeout=60", "-rss_limit_mb=4096", "-max_len=2048", "-seed=1"]
    command = [sys.executable, "-c", TARGETS, kind, place, str(cases), *limits, seeds]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=7200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all cases done\n"), done.stderr[-2000:]
