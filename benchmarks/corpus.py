"""Growth of the data stage: seconds and peak memory for a synthetic corpus of 1, 4 and 16 times a size.

    python benchmarks/corpus.py [--megabytes 30] [--times 1 4 16] [--peer CHECKOUT] [--plain] [--cut 200]
        [--json rows.json]

A domain of 10 GB: `TMPDIR=<a place of 40 GB> python benchmarks/corpus.py --megabytes 10000 --times 1`. With `--peer`
each stage runs with the code of another checkout of demix too. With `--plain` the text is normalised, not anonymized,
and not tokenized: only duplicates and splits are measured. With `--cut` documents have at most so many bytes:
duplicates take time by their number.
The corpus is the sample's documents with their words shuffled, and exact duplicates of one document in twenty. Each
stage runs in a process of its own; memory is that process's peak ("import": the interpreter and its libraries alone).
"""

import argparse
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
from tables import show

from demix.data.anonymize import anonymize_documents
from demix.data.corpus import Budget, Splitting, split
from demix.data.duplicates import mark_duplicates
from demix.data.shards import tokenize
from demix.data.sources import SCHEMA, Source, download
from demix.data.tokenizer import gpt2_tokenizer
from demix.files.batches import write_rows

DOMAINS = ("politics", "parliament", "wiki", "packages")
HERE = Path(__file__).parents[1]
SAMPLE = HERE / "resources" / "sample"


def synthetic(path: Path, megabytes: int, cut: int | None) -> None:
    texts = []
    for domain in DOMAINS:
        raw = path.parent / f"{domain}.parquet"
        download(Source("files", str(SAMPLE / f"{domain}.jsonl.zst")), domain, raw)
        texts += [text.split() for text in pq.read_table(raw)["text"].to_pylist()]
    chance = random.Random(1)

    def rows():
        size, text = 0, ""
        while size < megabytes * 1_000_000:
            if not text or chance.random() > 0.05:
                words = chance.choice(texts)
                start = chance.randrange(len(words))
                text = " ".join([str(chance.random()), *words[start:][:cut], *words[:start][:cut]])[:cut]
            size += len(text)
            yield "", text, "{}"

    write_rows(path, SCHEMA, rows())


def stage(name: str, folder: Path) -> None:
    documents, counts, owners = folder / "documents.parquet", folder / "documents.json", folder / "owners.parquet"
    if name == "anonymize":
        anonymize_documents(folder / "raw.parquet", documents, counts)
    elif name == "plain":
        anonymize_documents(folder / "raw.parquet", documents, counts, enabled=False)
    elif name == "owners":
        mark_duplicates({"a": [documents]}, owners)
    elif name == "split":
        words = Budget(None, 100_000, 100_000)
        split("a", [documents], owners, Splitting(words=words, training=True, seed=1), folder)
    elif name == "tokenize":
        tokenize(folder / "gpt2.json", folder / "train.parquet", folder / "train.arrow")
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Not ru_maxrss, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(used.ru_utime + used.ru_stime, peak)


def measured(step: str, folder: str, code: Path) -> list[tuple[str, float]]:
    """Wall and CPU seconds and peak memory of a stage that runs with the demix of a checkout."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--stage", step, "--folder", folder]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(code)}
    )
    wall = time.perf_counter() - start
    return list(zip(("s wall", "s CPU", "MiB peak"), (wall, *map(float, done.stdout.split())), strict=True))


def main(megabytes: int, sizes: list[int], peer: Path | None, plain: bool, cut: int | None, path: Path | None) -> None:
    # As in a job of the workflow.
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for times in sizes:
        with TemporaryDirectory() as name:
            folder = Path(name)
            synthetic(folder / "raw.parquet", megabytes * times, cut)
            gpt2_tokenizer(folder / "gpt2.json")
            steps = ("plain", "owners", "split") if plain else ("import", "anonymize", "owners", "split", "tokenize")
            for step in steps:
                theirs = dict(measured(step, name, peer)) if peer else {}
                for unit, ours in measured(step, name, HERE):
                    row = {"name": f"{step} {megabytes * times} MB", "ours": ours, "peer": theirs.get(unit)}
                    rows.append({**row, "unit": unit, "ratio": ours / theirs[unit] if peer else None})
                    print(rows[-1], flush=True)
    show(rows, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=30)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--peer", type=Path, help="another checkout of demix")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--cut", type=int, help="bytes of a document at most")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        stage(arguments.stage, arguments.folder)
    else:
        main(arguments.megabytes, arguments.times, arguments.peer, arguments.plain, arguments.cut, arguments.json)
