"""Make the run that tests read: the workflow on tests/frozen/config.yaml, what is small of it packed in run.tar.xz."""

import io
import json
import lzma
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

import zstandard

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.dry_run import REPOSITORY, ran
from support.harness_tasks import write_tasks

HERE = Path(__file__).parent
ARCHIVE = HERE / "run.tar.xz"
# The words of a document in each text: short documents are many in the scored tokens, long ones few.
WORDS = {"parliament": 6, "licenses": 4, "fortunes": 6, "scripture": 35, "fantasy": 35, "songs": 12, "packages": 12}
SAMPLES = {"songs": "novels"}
TOTAL = 1300
# When all files were written, in seconds since 1970: equal files make an equal archive.
MADE = 1_700_000_000
# What tests read of a run. Weights are those of two models, score tables those of the two and of the adapted dense one.
KEPT = (
    "*.parquet", "config.json", "tokenizer.json", "benchmarks/*", "corpus/*", "tokens/*", "metrics/*",
    "harness/contamination/*", "clusters/*/clusterer.*", "clusters/*/terms.parquet", "clusters/*/assigned/*",
    "evaluations/*.losses.parquet", "evaluations/*.contexts.parquet",
    "evaluations/*.priors.parquet",
    "models/*/model.json", "models/*/mixing.json", "models/*/usual.json", "models/*/experts/*.json",
    "models/demix/*", "models/dense/*", "scores/demix/*", "scores/dense/*", "scores/dense-dapt-*",
)  # fmt: skip
LEFT_OUT = ("*/.*", "*/README.md", "models/*/clusterer/*")


def write_texts(folder: Path) -> None:
    """Write the beginnings of documents of the sample, as many as hold `TOTAL` words."""
    folder.mkdir()
    for name, words in WORDS.items():
        documents = (text.split()[:words] for text in _documents(SAMPLES.get(name, name)))
        full = (" ".join(document) for document in documents if len(document) == words)
        lines = (json.dumps({"text": text}) for text in dict.fromkeys(islice(full, 4 * TOTAL // words)))
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in islice(lines, TOTAL // words)))


def write_examples(folder: Path) -> None:
    """Write the examples of two tasks: which domain a text is of, and which half of a document it is."""
    names = ("parliament", "scripture", "licenses", "fortunes")
    documents = {name: [text.split() for text in islice(_documents(name), 12)] for name in names}
    domain = [(words[:12], name) for name in names[:3] for words in documents[name]]
    halves = [part for words in documents["fortunes"] for part in ((words[:6], "first"), (words[6:12], "second"))]
    for task, rows in (("domain", domain), ("halves", halves)):
        lines = (json.dumps({"text": " ".join(words), "label": label}) for words, label in rows)
        (folder / f"{task}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def _documents(name: str) -> Iterator[str]:
    with open(REPOSITORY / "resources" / "sample" / f"{name}.jsonl.zst", "rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8"):
            yield json.loads(line)["text"]


def is_kept(name: str) -> bool:
    """Whether the archive has the file `name` of the run."""
    patterns = KEPT[1:] if "/" in name else KEPT[:3]
    return any(fnmatch(name, one) for one in patterns) and not any(fnmatch(name, one) for one in LEFT_OUT)


def pack(run: Path) -> None:
    """Pack what is kept of the files of `run`."""
    with (
        lzma.open(ARCHIVE, "wb", preset=9 | lzma.PRESET_EXTREME) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in sorted(run.rglob("*")):
            name = path.relative_to(run).as_posix()
            if path.is_file() and is_kept(name):
                about = tarfile.TarInfo(name)
                about.size, about.mtime = path.stat().st_size, MADE
                with path.open("rb") as file:
                    tar.addfile(about, file)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_texts(Path("texts"))
        write_examples(Path("texts"))
        write_tasks(Path())
        ran(Path(), HERE / "config.yaml", "--omit-from", "report", "track")
        pack(Path("results/frozen"))
