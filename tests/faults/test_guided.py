"""Fuzzing that looks for new paths through our code (atheris): bytes of any kind where files and texts come in.

Properties of readers, splits, anonymizer, token shards and sealed JSON on made-up values are in tests/unit.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from demix.files import digest

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
    from demix.model.directory import load_verified
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
    documents = download(Source(path=str(path)), "d", raw)
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
    "settings": [b'{"path": "x", "parts": 2, "where": {"a": 1}}'],
    "configs": [b"run: a\ndomains: {training: {a: {source: {path: x}}}}\nmodel: {heads: 2}\n"],
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
