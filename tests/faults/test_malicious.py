"""Hostile files where demix loads files: nothing in them runs, nothing is written elsewhere, nothing is rendered.

Hostile archives (links, paths that point outside, bombs, lying sizes) are in tests/unit/test_sources.py.
"""

import os
import pickle
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from demix.data.shards import TokenShard, tokenize
from demix.data.sources import Source, download
from demix.data.tokenizer import Tokenizer, train_tokenizer
from demix.errors import DemixError
from demix.evaluate.score_tables import read_scores
from demix.files import read_json, read_json_lines, read_parquet, sha256_file, write_json
from demix.model.directory import load_verified
from demix.report import write_report
from demix.run.run import Run
from demix.track.client import opened
from demix.track.store import track
from demix.train.parallel import World
from demix.train.state import newest_state
from support.cli import refusal
from support.configs import written_by_hand
from support.frozen import with_models

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
    "source": ("a.parquet", lambda path: download(Source(path=str(path)), "d", path.with_name("raw"))),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_no_pickle_is_ever_loaded(kind: str, form: str, tmp_path: Path) -> None:
    name, load = LOADERS[kind]
    path, mark = tmp_path / name, tmp_path / "executed"
    if form == "pickle":
        pickled(path, mark)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": Evil(mark)}, path)
    with pytest.raises(DemixError):
        load(path)
    assert not mark.exists()


def test_a_pickle_in_a_checkpoint_is_passed_over(tmp_path: Path) -> None:
    mark, step = tmp_path / "executed", tmp_path / "step-00000001"
    pickled(step / "shared.safetensors", mark)
    pickled(step / "metrics.jsonl", mark)
    sha256 = {path.name: sha256_file(path) for path in step.iterdir()}
    write_json(step / "manifest.json", {"step": 1, "dev_loss": None, "sha256": sha256})
    assert newest_state(tmp_path, (), World()) is None
    assert not mark.exists()


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
    download(Source(path=str(path)), "d", path.with_name("raw") / "raw.parquet")

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
    command = [sys.executable, "-c", READER, kind, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:], len(done.stdout.splitlines()))
    found = done.stdout.splitlines()
    assert len(found) == len(paths)
    return found


def enlarged(content: bytes, chance: random.Random, start: int) -> bytes:
    """With an absurd number in place of some bytes from `start` on: lengths, counts and offsets are among them."""
    changed = bytearray(content)
    size = chance.choice([1, 2, 4, 8])
    at = chance.randrange(start, len(changed) - size)
    changed[at : at + size] = chance.choice([b"\xff" * 8, b"\x7f" * 8, struct.pack("<q", 1 << 40), b"\0" * 8])[:size]
    return bytes(changed)


@pytest.mark.parametrize("kind", ["parquet", "source"])
def test_parquet_with_absurd_lengths(kind: str, tmp_path: Path, times: Times, chance: random.Random) -> None:
    """Page headers and footer; written without checksums and seal, as somebody else would write it."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"words {number}" for number in range(50)], "n": range(50)}), path)
    whole = path.read_bytes()
    # The footer holds most of the lengths.
    starts = 4, len(whole) - int.from_bytes(whole[-8:-4], "little") - 8
    paths = [tmp_path / f"{number}.parquet" for number in range(times(40, 500))]
    for path in paths:
        path.write_bytes(enlarged(whole, chance, chance.choice(starts)))
    assert outcomes(kind, paths).count("refused") > len(paths) / 5


def test_arrow_with_absurd_lengths(tmp_path: Path, times: Times, chance: random.Random) -> None:
    pq.write_table(pa.table({"text": [f"some words {number} of text" for number in range(60)]}), tmp_path / "t.parquet")
    train_tokenizer([tmp_path / "t.parquet"], 300, tmp_path / "tokenizer.json")
    tokenize(tmp_path / "tokenizer.json", tmp_path / "t.parquet", tmp_path / "d" / "train.arrow")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()}
    paths = [tmp_path / f"d{number}" / "train.arrow" for number in range(times(40, 500))]
    for path in paths:
        path.parent.mkdir()
        for name, content in whole.items():
            path.with_name(name).write_bytes(enlarged(content, chance, 8) if name == path.name else content)
    # Those in the tokens themselves can only be told by the sha256, which train and score verify.
    assert "refused" in outcomes("tokens", paths)
    for path in paths:
        if path.read_bytes() != whole[path.name]:
            with pytest.raises(DemixError):
                TokenShard.open(path, verify=True)


def test_markup_is_text_in_pages_cards_and_mlflow(
    frozen: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In names of parents, which come from files of a run that somebody else made, and in free texts of a config."""
    text, uri = f"{MARKUP} {LINK} <script>alert(2)</script>\n# x\x1b[2J", f"sqlite:///{tmp_path}/mlflow.db"
    folder = with_models(frozen, tmp_path / "results" / "run", "demix", "dense").folder
    for name, parent in zip(frozen.novel, (f"{MARKUP} {LINK}", "<script>alert(2);"), strict=True):
        path = folder / "models" / "demix" / "experts" / f"{name}.json"
        write_json(path, read_json(path) | {"parent": parent})
    domains = read_json(folder / "config.json")["domains"]
    for one in (one for kind in domains.values() for one in kind.values()):
        one |= {"licence": text, "source": one["source"] | {"instructions": text, "path": text}}
    written_by_hand(folder, domains=domains, tracking={"uri": uri})
    run = Run.read(folder)
    write_report(run, folder / "report")
    track(run, uri, text)
    pages = [path for path in (folder / "report").rglob("*") if path.suffix in (".html", ".svg", ".md", ".tex")]
    assert {path.suffix for path in pages} == {".html", ".svg", ".md", ".tex"}
    for path in pages:
        wrong = r"\^\^" if path.suffix == ".tex" else r"<img[^>]+onerror|<script>alert"
        assert not re.search(wrong, path.read_text(), re.IGNORECASE), path
    assert any("&lt;img" in path.read_text() for path in pages)
    for path in (folder / "report" / "tables").glob("*.md"):
        assert not re.search(r"(?<!\\)`|(?<!\\)\]\(|:(?=//)|www(?=\.)", path.read_text()), path
    assert "\x1b" not in capsys.readouterr().out
    client, _ = opened(uri)
    shown = client.search_runs([client.get_experiment_by_name(text).experiment_id])
    licences = {one.data.params.get("domains.training.licenses.licence") for one in shown}
    assert text in licences
    # MLflow's pages render this tag alone as Markdown.
    assert not any("mlflow.note.content" in one.data.tags for one in shown)
    # The names of domains are parts of paths: a run that has others is refused.
    for name in (MARKUP, LINK, "../../outside", ""):
        training = {name: domains["training"]["licenses"]} | domains["training"]
        written_by_hand(folder, domains=domains | {"training": training})
        refusal("report", folder, "--output", tmp_path / "refused", of="config")
    assert not (tmp_path / "refused").exists()
