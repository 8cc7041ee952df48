"""Hostile files where demix loads files: nothing in them runs, nothing is written elsewhere, nothing is rendered.

Hostile archives (links, paths that point outside, bombs, lying sizes) are in tests/unit/test_sources.py.
"""

import copy
import json
import os
import pickle
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from demix.data.shards import TokenShard, tokenize
from demix.data.sources import Source, download
from demix.data.tokenizer import Tokenizer, train_tokenizer
from demix.errors import DemixError
from demix.evaluate.score_tables import read_scores
from demix.files import read_json, read_json_lines, read_parquet, sha256_file, write_json
from demix.model.checkpoint import load_verified
from demix.report import write_report
from demix.track.client import opened
from demix.track.store import track
from demix.train.parallel import World
from demix.train.state import newest_state
from support.breaking import Note, demix, told
from support.configs import domains, written_by_hand
from support.disturbed import TINY
from support.synthetic_run import NOVEL, TRAINING, build_run, with_keys

MARKUP = "<img src=x onerror=alert(1)>"
LINK = "![a](http://evil.example) `b` **c** www.evil.example ^^5cinput"
Times = Callable[[int, int], int]


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return (os.system, (f"touch {self.mark}",))


def pickled(path: Path, mark: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(Evil(mark)))


LOADERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "weights": ("shared.safetensors", lambda path: load_verified(path, sha256_file(path))),
    "parquet": ("results.parquet", read_parquet),
    "json": ("model.json", read_json),
    "json lines": ("metrics.jsonl", read_json_lines),
    "tokenizer": ("tokenizer.json", Tokenizer.load),
    "tokens": ("d/train.arrow", TokenShard.open),
    "scores": ("x.test/tokens.parquet", lambda path: read_scores(path.parent, ["tokens"])),
    "source": ("a.parquet", lambda path: download(Source("files", str(path)), "d", path.with_name("raw"))),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_no_pickle_is_ever_loaded(kind: str, form: str, tmp_path: Path, note: Note) -> None:
    name, load = LOADERS[kind]
    path, mark = tmp_path / name, tmp_path / "executed"
    if form == "pickle":
        pickled(path, mark)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": Evil(mark)}, path)
    with note.timed(f"a pickle as {kind}", "refused, nothing ran"), pytest.raises(DemixError):
        load(path)
    assert not mark.exists()


def test_a_pickle_in_a_checkpoint_is_passed_over(tmp_path: Path, note: Note) -> None:
    mark, step = tmp_path / "executed", tmp_path / "step-00000001"
    pickled(step / "shared.safetensors", mark)
    pickled(step / "metrics.jsonl", mark)
    sha256 = {path.name: sha256_file(path) for path in step.iterdir()}
    write_json(step / "manifest.json", {"step": 1, "dev_loss": None, "sha256": sha256})
    with note.timed("a pickle as checkpoint", "passed over, nothing ran"):
        assert newest_state(tmp_path, (), World()) is None
    assert not mark.exists()


def header(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


def tensor(**changes: object) -> dict:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


HEADERS = {
    "nothing": b"",
    "short": b"\x01",
    "header of 2^63": header(b"{}", 1 << 63),
    "header of 2^40": header(b"{}", 1 << 40),
    "no JSON": header(b"{" * 1000),
    "a list": header(b"[]") + b"\0" * 8,
    "no tensors but bytes": header(b"{}") + b"\0" * 8,
    "beyond the end": header(json.dumps(tensor(data_offsets=[0, 1 << 40])).encode()) + b"\0" * 8,
    "backwards": header(json.dumps(tensor(data_offsets=[8, 0])).encode()) + b"\0" * 8,
    "negative": header(json.dumps(tensor(data_offsets=[-8, 0])).encode()) + b"\0" * 8,
    "huge shape": header(json.dumps(tensor(shape=[1 << 62, 1 << 62])).encode()) + b"\0" * 8,
    "negative shape": header(json.dumps(tensor(shape=[-2])).encode()) + b"\0" * 8,
    "unknown type": header(json.dumps(tensor(dtype="PICKLE")).encode()) + b"\0" * 8,
    "one over another": header(json.dumps(tensor() | {"b": tensor()["a"]}).encode()) + b"\0" * 8,
    "a hole": header(json.dumps(tensor(data_offsets=[8, 16])).encode()) + b"\0" * 16,
}


@pytest.mark.parametrize("name", HEADERS)
def test_safetensors_with_bad_headers(name: str, tmp_path: Path, note: Note) -> None:
    """With the right sha256 beside them, as who made them would write it."""
    path = tmp_path / "expert.safetensors"
    path.write_bytes(HEADERS[name])
    with (
        note.timed("safetensors with a bad header", "refused"),
        pytest.raises(DemixError, match="is not a safetensors"),
    ):
        load_verified(path, sha256_file(path))


# A process of its own, since a crash or endless memory is what is looked for.
READER = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
import numpy as np
from demix.data.shards import TokenShard
from demix.data.sources import Source, download
from demix.files.batches import read_batches
from demix.errors import DemixError
from demix.files import read_parquet

def parquet(path):
    read_parquet(path)

def source(path):
    download(Source("files", str(path)), "d", path.with_name("raw") / "raw.parquet")

def tokens(path):
    shard = TokenShard.open(path)
    int(shard.read(0, len(shard)).astype(np.int64).sum()), shard.offsets.sum()

kind, *paths = sys.argv[1:]
for path in map(Path, paths):
    try:
        globals()[kind](path)
        print("read", flush=True)
    except DemixError as error:
        print("refused", flush=True)
"""


def outcomes(kind: str, paths: list[Path]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", READER, kind, *map(str, paths)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:], len(done.stdout.splitlines()))
    return done.stdout.splitlines()


def enlarged(content: bytes, chance: random.Random, start: int) -> bytes:
    """With an absurd number in place of some bytes from `start` on: lengths, counts and offsets are among them."""
    changed = bytearray(content)
    size = chance.choice([1, 2, 4, 8])
    at = chance.randrange(start, len(changed) - size)
    changed[at : at + size] = chance.choice([b"\xff" * 8, b"\x7f" * 8, struct.pack("<q", 1 << 40), b"\0" * 8])[:size]
    return bytes(changed)


def test_parquet_with_absurd_lengths(tmp_path: Path, times: Times, chance: random.Random, note: Note) -> None:
    """Page headers and footer; written without checksums and seal, as somebody else would write it."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"words {number}" for number in range(50)], "n": range(50)}), path)
    whole = path.read_bytes()
    for kind in ("parquet", "source"):
        paths = []
        for number in range(times(40, 500)):
            # The footer holds most of the lengths.
            start = chance.choice([4, len(whole) - int.from_bytes(whole[-8:-4], "little") - 8])
            paths.append(tmp_path / f"{kind}{number}.parquet")
            paths[-1].write_bytes(enlarged(whole, chance, start))
        with note.timed(f"Parquet with absurd lengths, {len(paths)} files ({kind})", "no crash, memory bounded"):
            found = outcomes(kind, paths)
        assert len(found) == len(paths)
        assert found.count("refused") > len(paths) / 5


def test_arrow_with_absurd_lengths(tmp_path: Path, times: Times, chance: random.Random, note: Note) -> None:
    texts = [f"some words {number} of text" for number in range(60)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "text.parquet")
    train_tokenizer([tmp_path / "text.parquet"], 300, tmp_path / "tokenizer.json")
    tokenize(tmp_path / "tokenizer.json", tmp_path / "text.parquet", tmp_path / "d" / "train.arrow")
    paths = []
    for number in range(times(40, 500)):
        folder = tmp_path / f"d{number}"
        folder.mkdir()
        for name in ("train.arrow", "train.documents.arrow", "train.json"):
            content = (tmp_path / "d" / name).read_bytes()
            (folder / name).write_bytes(enlarged(content, chance, 8) if name == "train.arrow" else content)
        paths.append(folder / "train.arrow")
    with note.timed(f"Arrow with absurd lengths, {len(paths)} files", "no crash, memory bounded"):
        found = outcomes("tokens", paths)
    assert len(found) == len(paths)
    # Those in the tokens themselves can only be told by the sha256, which train and score verify.
    assert "refused" in found
    for path in paths:
        if path.read_bytes() != (tmp_path / "d" / "train.arrow").read_bytes():
            with pytest.raises(DemixError):
                TokenShard.open(path, verify=True)


def test_markup_in_names_is_shown_as_text(tmp_path: Path, note: Note) -> None:
    """The config allows no such domain; here they come from files of a run that somebody else made."""
    run = build_run(tmp_path / "run")
    for name, parent in zip(NOVEL, (f"{MARKUP} {LINK}", "<script>alert(2);"), strict=True):
        path = run.path / "models" / "demix" / "experts" / f"{name}.json"
        write_json(path, read_json(path) | {"parent": parent})
    with note.timed("markup in names of parents", "shown as text in the report"):
        write_report(run.run, tmp_path / "report")
    pages = [path for path in (tmp_path / "report").rglob("*") if path.suffix in (".html", ".svg", ".md", ".tex")]
    assert len([path for path in pages if path.suffix == ".html"]) > 5
    shown = 0
    for path in pages:
        text = path.read_text()
        if path.suffix == ".tex":
            assert "^^" not in text, path
            continue
        assert not re.search(r"<img[^>]+onerror", text, re.IGNORECASE), path
        assert "<script>alert" not in text, path
        if path.suffix == ".md":
            assert not re.search(r"(?<!\\)`|(?<!\\)\]\(|:(?=//)|www(?=\.)", text), path
        shown += "&lt;img" in text
    assert shown
    for name in (MARKUP, LINK, "<script>alert(2);"):
        written_by_hand(run.path, domains=domains((name, *TRAINING), NOVEL))
        with note.timed("markup in domain names", "common error"):
            line = told(demix("report", run.path, "--output", tmp_path / "refused"))
        assert "is not a usable domain name" in line
    assert not (tmp_path / "refused").exists()


def test_free_texts_of_a_config_are_text_in_pages_cards_and_mlflow(
    tmp_path: Path, note: Note, capsys: pytest.CaptureFixture[str]
) -> None:
    """Licences, instructions, paths and the experiment may be anything."""
    text = f"{MARKUP} {LINK} <script>alert(2)</script>\n# x\x1b[2J"
    run, uri = build_run(tmp_path / "results" / "run"), f"sqlite:///{tmp_path}/mlflow.db"
    for one in (one for kind in run.keys["domains"].values() for one in kind.values()):
        one |= {"licence": text, "source": one["source"] | {"instructions": text, "path": text}}
    made = with_keys(run.path, run.keys | {"tracking": {"uri": uri, "experiment": text}})
    with note.timed("markup in free texts of a config", "text in pages and figures, values in MLflow"):
        write_report(made, run.path / "report")
        track(made, uri, text)
    pages = [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".svg", ".md")]
    assert {path.suffix for path in pages} == {".html", ".svg", ".md"}
    for path in pages:
        assert not re.search(r"<img[^>]+onerror|<script>alert", path.read_text(), re.IGNORECASE), path
    assert "\x1b" not in capsys.readouterr().out
    client, _ = opened(uri)
    experiment = client.get_experiment_by_name(text)
    shown = client.search_runs([experiment.experiment_id])
    parent = next(one for one in shown if "domains.training.law.licence" in one.data.params)
    assert parent.data.params["domains.training.law.licence"] == text
    # MLflow's pages render this tag alone as Markdown.
    assert not any("mlflow.note.content" in one.data.tags for one in shown)


def test_markup_in_ids_and_texts_goes_no_further_than_it_may(tmp_path: Path, note: Note) -> None:
    source = tmp_path / "a.jsonl"
    row = {"id": f"../../{MARKUP}", "text": f"{MARKUP} some words", "title": MARKUP}
    source.write_text(json.dumps(row) + "\n")
    raw, documents = tmp_path / "raw.parquet", tmp_path / "documents.parquet"
    settings = json.dumps({"kind": "files", "path": str(source), "id": "id", "metadata": ["title"]})
    with note.timed("markup and paths in document ids", "ids go no further than raw text"):
        assert demix("download", "d", "--settings", settings, "--output", raw).returncode == 0
        done = demix("anonymize", raw, "--output", documents, "--counts", tmp_path / "counts.json")
        assert done.returncode == 0
    (kept,) = read_parquet(documents).to_pylist()
    assert re.fullmatch("[0-9a-f]{64}", kept["id"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl", "counts.json", "documents.parquet", "raw.parquet",
    ]  # fmt: skip
    assert MARKUP not in (tmp_path / "counts.json").read_text()


@pytest.mark.parametrize("name", ["../../outside", "a/b", "<b>", "..", ""])
def test_domains_cannot_name_places_outside(name: str, tmp_path: Path, note: Note) -> None:
    config = copy.deepcopy(TINY)
    config["domains"]["novel"][name] = config["domains"]["training"]["licenses"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with note.timed("a domain's name that is a path or markup", "refused"):
        line = told(demix("config", tmp_path / "config.yaml"))
    assert "is not a usable domain name" in line
    assert np.size(list(tmp_path.iterdir())) == 1
