"""A file that was cut short, or one bit of which flipped, is found before it is used, whichever stage reads it."""

import json
import math
import random
import shutil
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from demix.errors import DemixError
from demix.files import (
    read_json,
    read_json_lines,
    read_parquet,
    sha256_file,
    write_json,
    write_json_lines,
    write_parquet,
)
from demix.train.parallel import World
from demix.train.state import State, newest_state, save_state
from support.breaking import Note, command, json_value, run_tiny
from support.cli import said
from support.disturbed import TINY, printed, snakemake

RUN = "results/tiny"
SCORES = f"{RUN}/scores/demix/fantasy.test"
# Each artefact, and what the command that reads it holds.
READERS = {
    "documents": (f"{RUN}/documents/licenses/0000.parquet", "split licenses"),
    "documents, by owners": (f"{RUN}/documents/licenses/0000.parquet", "deduplicate "),
    "documents, by shared": (f"{RUN}/documents/fantasy/0000.parquet", "novel-duplicates "),
    "counts": (f"{RUN}/documents/licenses/0000.json", "split licenses"),
    "owners": (f"{RUN}/corpus/owners.parquet", "split licenses"),
    "corpus, by tokenizer": (f"{RUN}/corpus/licenses/train.parquet", "tokenizer "),
    "corpus": (f"{RUN}/corpus/licenses/dev.parquet", "tokenize ", "licenses/dev"),
    "tokenizer": (f"{RUN}/tokenizer.json", "tokenize ", "licenses/dev"),
    "tokenizer, by evaluate": (f"{RUN}/tokenizer.json", "evaluate fantasy"),
    "tokens, by train": (f"{RUN}/tokens/licenses/train.arrow", "train dense ", "models/dense "),
    "token documents, by train": (f"{RUN}/tokens/licenses/train.documents.arrow", "train dense ", "models/dense "),
    "token manifest, by train": (f"{RUN}/tokens/licenses/train.json", "train dense ", "models/dense "),
    "tokens, by score": (f"{RUN}/tokens/fantasy/test.arrow", f"score {RUN}/models {RUN}/tokens/fantasy/"),
    "tokens, by adapt": (f"{RUN}/tokens/fantasy/dev.arrow", "adapt ", "fantasy/dev"),
    "tokens, by overlap": (f"{RUN}/tokens/fantasy/test.arrow", "overlap "),
    "tokens, by audit": (f"{RUN}/tokens/licenses/train.arrow", "audit licenses"),
    "model": (f"{RUN}/models/dense/model.json", f"score {RUN}/models {RUN}/tokens/fantasy/"),
    "shared weights": (f"{RUN}/models/dense/shared.safetensors", f"score {RUN}/models {RUN}/tokens/fantasy/"),
    "expert": (f"{RUN}/models/demix/experts/licenses.safetensors", "score ", "models/demix ", "fantasy", "parliament,"),
    "lineage": (f"{RUN}/models/demix/experts/licenses.json", "score ", "models/demix ", "fantasy", "parliament,"),
    "score table": (f"{SCORES}/licenses.parquet", "evaluate fantasy"),
    "scored tokens": (f"{SCORES}/tokens.parquet", "evaluate fantasy"),
    "score table, by adapt": (f"{RUN}/scores/demix/fantasy.dev/licenses.parquet", "adapt ", "fantasy/dev"),
    "evaluation": (f"{RUN}/evaluations/fantasy.parquet", f"join {RUN}/evaluations/parliament.parquet"),
    "priors of a domain": (f"{RUN}/evaluations/fantasy.priors.parquet", "join ", "parliament.priors"),
    "priors, by audit": (f"{RUN}/evaluations/licenses.priors.parquet", "audit licenses"),
    "differences of a domain": (f"{RUN}/evaluations/fantasy.differences.parquet", "join ", "parliament.differences"),
    "posteriors of a domain": (f"{RUN}/evaluations/fantasy.posteriors.parquet", "join ", "parliament.posteriors"),
    "audit of a domain": (f"{RUN}/evaluations/licenses.audit.parquet", "join ", "audit"),
    "results": (f"{RUN}/results.parquet", "report "),
    "results, by track": (f"{RUN}/results.parquet", "track "),
    "priors": (f"{RUN}/priors.parquet", "report "),
    "differences": (f"{RUN}/differences.parquet", "report "),
    "posteriors": (f"{RUN}/posteriors.parquet", "report "),
    "overlap": (f"{RUN}/corpus/overlap.parquet", "report "),
    "audit": (f"{RUN}/audit.parquet", "report "),
    "config": (f"{RUN}/config.json", "report "),
    "metrics": (f"{RUN}/metrics/dense.jsonl", "report "),
    "metrics, by track": (f"{RUN}/metrics/dense.jsonl", "track "),
    "corpus card": (f"{RUN}/corpus/licenses/card.json", "track "),
}


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def is_same_json(path: Path, whole: bytes) -> bool:
    """Whether a JSON file holds the value of the bytes `whole`, seal included, whatever its own bytes are."""
    lines = path.suffix == ".jsonl"
    return path.suffix in (".json", ".jsonl") and json_value(path.read_bytes(), lines) == json_value(whole, lines)


DAMAGES = {"cut short": cut, "one bit flipped": flip}
Times = Callable[[int, int], int]


@pytest.mark.faults
@pytest.mark.parametrize("artefact", READERS)
def test_every_artefact_is_checked_by_who_reads_it(
    artefact: str, copied: Path, times: Times, chance: random.Random, note: Note
) -> None:
    name, *words = READERS[artefact]
    path, arguments = Path(name), command(copied, *words)
    whole = path.read_bytes()
    undetected = []
    for what, damage in DAMAGES.items():
        for number in range(times(2, 20)):
            path.write_bytes(damage(whole, chance))
            start = time.monotonic()
            line = said(arguments)
            seconds = time.monotonic() - start
            found = line is not None and name in line
            outcome = "refused, file named" if found else f"NOT SEEN: {line}"
            if is_same_json(path, whole):
                found, outcome = line is None, "the same JSON value, read"
            note.add(f"{artefact}: {what}", outcome, seconds)
            if not found:
                undetected.append((what, number, line))
    path.write_bytes(whole)
    assert undetected == []


@pytest.mark.faults
def test_raw_text_is_checked_when_it_is_anonymized(
    copied: Path, times: Times, chance: random.Random, note: Note
) -> None:
    raw = Path(RUN, "raw/licenses/0000.parquet")
    source = {"kind": "files", "path": "resources/sample/licenses.jsonl.zst"}
    assert said(["download", "licenses", "--settings", json.dumps(source), "--output", str(raw)]) is None
    anonymize = ["anonymize", str(raw), "--output", "documents.parquet", "--counts", "counts.json"]
    whole = raw.read_bytes()
    for what, damage in DAMAGES.items():
        for _ in range(times(2, 20)):
            raw.write_bytes(damage(whole, chance))
            with note.timed(f"raw text: {what}", "refused, file named"):
                assert str(raw) in str(said(anonymize))


def _parquet(folder: Path) -> Path:
    columns = {"domain": ["news", "law"] * 300, "nll": np.linspace(0, 9, 600), "text": ["ab" * 40] * 600}
    table = pa.table(columns).replace_schema_metadata({"tokens_sha256": "0" * 64})
    write_parquet(table, folder / "a.parquet", row_group_size=250)
    return folder / "a.parquet"


def _json(folder: Path) -> Path:
    write_json(folder / "a.json", {"architecture": {"heads": 2}, "steps": 12, "loss": 1.25e-9, "name": "ü"})
    return folder / "a.json"


def _lines(folder: Path) -> Path:
    write_json_lines(folder / "a.jsonl", [{"step": n, "loss": 2.5e-7 / n, "é": math.nan} for n in (1, 2, 4)])
    return folder / "a.jsonl"


@pytest.mark.parametrize(("make", "read"), [(_json, read_json), (_lines, read_json_lines)], ids=["json", "lines"])
def test_a_bit_of_a_json_file_may_flip_only_where_its_value_stays(
    make: Callable, read: Callable, tmp_path: Path, note: Note
) -> None:
    """Every bit, and every length."""
    path = make(tmp_path)
    whole = path.read_bytes()
    before, same = repr(read(path)), []
    for place, bit in product(range(len(whole)), range(8)):
        changed = bytearray(whole)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        if is_same_json(path, whole):
            with note.timed(f"sealed {path.suffix}: any bit", "the same JSON value, read"):
                assert repr(read(path)) == before
            same.append(chr(whole[place]))
        else:
            with (
                note.timed(f"sealed {path.suffix}: any bit", "refused, file named"),
                pytest.raises(DemixError, match=path.name),
            ):
                read(path)
    # The case of an exponent, and of the escapes of ü and é.
    assert set(same) == ({"e"} if path.suffix == ".jsonl" else {"e", "f", "c"})
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DemixError, match=path.name):
            read(path)
    path.write_bytes(whole[:-1])
    assert repr(read(path)) == before


def test_no_bit_of_a_sealed_parquet_file_may_flip(
    tmp_path: Path, times: Times, chance: random.Random, note: Note
) -> None:
    """Every byte that Parquet's page checksums leave out, too: one bit of each, and all lengths but the whole."""
    path, read = _parquet(tmp_path), read_parquet
    whole = path.read_bytes()
    before = read(path)
    every = len(whole) if len(whole) < 4000 else times(400, 4000)
    for place in chance.sample(range(len(whole)), min(every, len(whole))):
        changed = bytearray(whole)
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        with (
            note.timed(f"sealed {path.suffix}: any byte", "refused, file named"),
            pytest.raises(DemixError, match=path.name),
        ):
            read(path)
    for length in chance.sample(range(len(whole)), min(times(100, 1000), len(whole))):
        path.write_bytes(whole[:length])
        with (
            note.timed(f"sealed {path.suffix}: any length", "refused, file named"),
            pytest.raises(DemixError, match=path.name),
        ):
            read(path)
    path.write_bytes(whole)
    assert read(path) == before


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, times: Times, chance: random.Random, note: Note) -> None:
    """Whichever of its files it is, training goes on from the one before."""
    for step in (1, 2):
        shared, expert = {"a": torch.full((40,), float(step))}, {"news": {"b": torch.full((2, 9), float(step))}}
        save_state(tmp_path, State(step, shared, expert, [{"step": step, "loss": 0.5, "tokens": 9}]), World(), keep=2)
    newest = tmp_path / "step-00000002"
    assert newest_state(tmp_path, ("news",), World()).step == 2
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        for what, damage in DAMAGES.items():
            for _ in range(times(5, 20)):
                path.write_bytes(damage(whole, chance))
                with note.timed(f"checkpoint: {what}", "passed over for the one before"):
                    found = newest_state(tmp_path, ("news",), World())
                assert found.step == 1, path
                assert found.shared["a"].unique().tolist() == [1.0]
        path.write_bytes(whole)
    assert newest_state(tmp_path, ("news",), World()).step == 2


def test_parquet_without_a_seal_is_read(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"tokens_sha256": ["x"]}), tmp_path / "a.parquet")
    assert read_parquet(tmp_path / "a.parquet").to_pylist() == [{"tokens_sha256": "x"}]


# A file of each kind; what was made of it stays.
REBUILT = (
    "documents/licenses/0000.parquet", "corpus/owners.parquet", "corpus/licenses/dev.parquet", "tokenizer.json",
    "tokens/licenses/train.arrow", "tokens/licenses/train.json", "scores/demix/fantasy.test/licenses.parquet",
    "evaluations/fantasy.parquet", "priors.parquet", "results.parquet",
)  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize("name", REBUILT)
def test_after_the_cure_a_rerun_rebuilds_just_that_file(name: str, finished: Path, tmp_path: Path, note: Note) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder, symlinks=True)
    run = folder / RUN
    files = [path for kind in ("models", "metrics", "scores") for path in (run / kind).rglob("*") if path.is_file()]
    # A scoring that runs again finds the columns of before there.
    files = [path for path in files if ".kept" not in path.parts]
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in files if path != run / name}
    sha256 = sha256_file(run / name)
    # The workflow knows a column of scores by the table of its tokens.
    known = (run / name).with_name("tokens.parquet") if name.startswith("scores/") else run / name
    for path in {run / name, known}:
        path.unlink()
    with note.timed("a damaged file deleted, then a rerun", "rebuilt with the same bytes, nothing trained again"):
        assert snakemake(folder, TINY, str(known.relative_to(folder)), profile="default").wait() == 0, printed(folder)
        assert sha256_file(run / name) == sha256
        assert run_tiny(folder).wait() == 0, printed(folder)
    again = [path for path, was in before.items() if (path.stat().st_mtime_ns, path.stat().st_ino) != was]
    assert [path for path in again if sha256_file(path) != sha256_file(finished / path.relative_to(folder))] == []
    # A job scores both splits of a domain and makes the tables of all experts in one pass.
    same_job = (run / name).parent.with_suffix("")
    assert [str(path.relative_to(run)) for path in again if path.parent.with_suffix("") != same_job] == []


def test_texts_that_quote_a_seal_are_no_damage(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    for text in ("demix~", "demix~digest~", "digest~", f"demix~digest~\x18@{'0' * 64}x", " \t" * 64):
        pq.write_table(pa.table({"text": [text]}), tmp_path / "theirs.parquet")
        write_parquet(pa.table({"text": [text]}), tmp_path / "ours.parquet")
        write_json(tmp_path / "a.json", {text: text})
        assert read_parquet(tmp_path / "ours.parquet")["text"].to_pylist() == [text]
        assert read_json(tmp_path / "a.json") == {text: text}
        if "\x18" not in text:
            assert read_parquet(tmp_path / "theirs.parquet")["text"].to_pylist() == [text]
