"""Text that two runs prepare alike is made by one of them, and each run is whole without the other."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from demix.config.tokenizer import TokenizerSection
from demix.data import corpus, sources
from demix.data.shards import tokenize_splits
from demix.data.sources import Source, pinned
from demix.data.tokenizer import make_tokenizer
from demix.files import check_sealed, read_json, sha256_file, write_json
from support.dry_run import REPOSITORY

DOMAINS = ("law", "news")
STAGES = ("documents", "owners", "corpus", "tokenizer", "tokens")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the runs are in, with a source for each domain that is older than them."""
    monkeypatch.chdir(tmp_path)
    for number, domain in enumerate(DOMAINS):
        rows = [f"{domain} {row * (number + 3) % 97} says " + f"word{row % 13} " * (row % 7 + 1) for row in range(120)]
        path = Path(f"{domain}.jsonl")
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        os.utime(path, (1e9, 1e9))
    return tmp_path


def prepare(name: str, *, seed: int = 1, dev: int = 30, size: int = 300, enabled: bool = True) -> Path:
    """Prepare the text of a run as the jobs of the workflow do."""
    run = Path("results") / name
    for domain in DOMAINS:
        sources.read(
            domain,
            Source(path=f"{domain}.jsonl"),
            run / f"raw/{domain}/0000.parquet",
            run / f"documents/{domain}/0000.parquet",
            run / f"documents/{domain}/0000.json",
            enabled=enabled,
        )
    documents = {domain: run / f"documents/{domain}/0000.parquet" for domain in DOMAINS}
    corpus.deduplicate([*documents.values()], run / "corpus/owners.parquet")
    for domain, path in documents.items():
        splitting = corpus.Splitting(words=corpus.Budget(dev=dev, test=30), training=True, seed=seed)
        corpus.split_once(domain, [path], run / "corpus/owners.parquet", splitting, run / "corpus" / domain)
    trains = [run / f"corpus/{domain}/train.parquet" for domain in DOMAINS]
    make_tokenizer(trains, TokenizerSection(kind="bpe", vocab_size=size), run / "tokenizer.json")
    for domain in DOMAINS:
        splits = [run / f"corpus/{domain}/{split}.parquet" for split in ("train", "dev", "test")]
        tokenize_splits(splits, run / "tokenizer.json", run / "tokens" / domain)
    return run


def text(run: Path) -> dict[str, Path]:
    """The files of a run's text, by their places."""
    found = (path for path in sorted(run.rglob("*")) if path.is_file() and not path.is_relative_to(run / ".made"))
    return {str(path.relative_to(run)): path for path in found}


def stage_of(place: str) -> str:
    return place.partition("/")[0].partition(".")[0] if "owners" not in place else "owners"


def made_anew(one: Path, other: Path) -> set[str]:
    """The stages of which the second run has files of its own."""
    ours, theirs = text(one), text(other)
    assert ours.keys() == theirs.keys()
    return {stage_of(place) for place in ours if not ours[place].samefile(theirs[place])}


def test_a_second_run_takes_the_text_of_the_first_and_is_whole_without_it() -> None:
    one = prepare("one")
    digests = {place: sha256_file(path) for place, path in text(one).items()}
    assert {stage_of(place) for place in digests} == set(STAGES)
    two = prepare("two")
    assert made_anew(one, two) == set()
    assert not any(path.is_file() for run in (one, two) for path in (run / "raw").rglob("*"))
    shutil.rmtree(one)
    assert {place: sha256_file(path) for place, path in text(two).items()} == digests
    for path in text(two).values():
        check_sealed(path)
    # A third run finds the text with the second.
    assert made_anew(two, prepare("three")) == set()


def test_what_changes_while_it_is_read_is_taken_by_no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    download, source = sources.download, Path("law.jsonl")

    def slowly(*args: object) -> int:
        rows = download(*args)
        os.utime(source, (2e9, 2e9))
        return rows

    monkeypatch.setattr(sources, "download", slowly)
    one = prepare("one")
    notes = {path.name for path in (one / ".made").iterdir()}
    assert "documents.law.0000.parquet.json" not in notes
    assert "corpus.law.json" in notes


@pytest.mark.parametrize(
    ("change", "anew"),
    [
        ({"seed": 2}, {"corpus", "tokenizer", "tokens"}),
        ({"dev": 60}, {"corpus", "tokenizer", "tokens"}),
        ({"size": 290}, {"tokenizer", "tokens"}),
        # Of the same bytes, and as new as the files that they are made of.
        ({"enabled": False}, set(STAGES)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_setting_changes_is_not_shared(change: dict, anew: set[str]) -> None:
    one, two = prepare("one"), prepare("two", **change)
    assert made_anew(one, two) == anew
    if anew == set(STAGES):
        assert sha256_file(two / "tokenizer.json") == sha256_file(one / "tokenizer.json")


def test_a_changed_source_is_not_shared() -> None:
    one, source = prepare("one"), Path("law.jsonl")
    before = source.stat()
    source.write_text(source.read_text().replace("says", "said", 1))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source.stat().st_size == before.st_size
    two = prepare("two")
    documents = "documents/law/0000.parquet"
    assert sha256_file(two / documents) != sha256_file(one / documents)
    assert (two / "documents/news/0000.parquet").samefile(one / "documents/news/0000.parquet")


def test_other_code_shares_nothing() -> None:
    prepare("one")
    shutil.copytree(REPOSITORY / "demix", "code/demix", ignore=shutil.ignore_patterns("__pycache__"))

    def owners(name: str) -> Path:
        output = Path("results", name, "corpus", "owners.parquet")
        documents = [Path("results/one/documents", domain, "0000.parquet") for domain in DOMAINS]
        copies = [output.parents[1] / path.relative_to("results/one") for path in documents]
        for path, copy in zip(documents, copies, strict=True):
            copy.parent.mkdir(parents=True)
            os.link(path, copy)
        command = [sys.executable, "-m", "demix", "deduplicate", *map(str, copies), "--output", str(output)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(Path("code").absolute())})
        return output

    assert owners("two").samefile("results/one/corpus/owners.parquet")
    with open("code/demix/data/corpus.py", "a") as file:
        file.write("# later\n")
    assert not owners("three").samefile("results/one/corpus/owners.parquet")


def test_a_damaged_file_is_not_taken() -> None:
    one = prepare("one")
    path = one / "corpus/law/train.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    two = prepare("two")
    assert (two / "corpus/law/train.parquet").read_bytes() == whole
    assert made_anew(one, two) == {"corpus", "tokenizer", "tokens"}


def test_a_note_reaches_no_file_but_those_of_its_job() -> None:
    one = prepare("one")
    note = one / ".made/corpus.owners.parquet.json"
    (one.parent / "mine").write_text("mine")
    write_json(note, read_json(note) | {"files": {"../mine": sha256_file(one / "corpus/owners.parquet")}})
    two = prepare("two")
    assert (one.parent / "mine").read_text() == "mine"
    assert not (two / "corpus/owners.parquet").samefile(one / "corpus/owners.parquet")


def test_text_older_than_its_source_is_made_again() -> None:
    """Snakemake would refuse it, or touch it and with it the file of the first run."""
    one = prepare("one")
    times = {place: path.stat().st_mtime_ns for place, path in text(one).items()}
    os.utime("law.jsonl")
    two = prepare("two")
    assert {place: path.stat().st_mtime_ns for place, path in text(one).items()} == times
    assert {place: sha256_file(path) for place, path in text(two).items()} == {
        place: sha256_file(path) for place, path in text(one).items()
    }
    source = Path("law.jsonl").stat().st_mtime_ns
    assert all(path.stat().st_mtime_ns >= source for place, path in text(two).items() if "law" in place)


def test_raw_text_that_was_fetched_again_is_anonymized_once() -> None:
    for name in ("one", "two"):
        run = Path("results") / name
        raw, output = run / "raw/law/0000.parquet", run / "documents/law/0000.parquet"
        sources.download(Source(path="law.jsonl"), "law", raw)
        sources.anonymize_once(raw, output, output.with_suffix(".json"))
        # Or Snakemake refuses the documents as older than what they are made of.
        assert raw.stat().st_mtime_ns <= output.stat().st_mtime_ns
    assert output.samefile("results/one/documents/law/0000.parquet")


def test_without_hard_links_a_run_has_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    one = prepare("one")
    monkeypatch.setattr(os, "link", refused)
    two = prepare("two")
    assert made_anew(one, two) == set(STAGES)
    ours, theirs = ({place: sha256_file(path) for place, path in text(run).items()} for run in (one, two))
    assert ours == theirs


def test_only_the_files_of_the_job_are_there_afterwards() -> None:
    prepare("one")
    corpus.deduplicate([Path("results/one/documents/law/0000.parquet")], Path("owners.parquet"))
    assert Path("owners.parquet").stat().st_nlink == 1, "files outside of a run are simply made"
    assert not [*Path().glob("**/.made/owners*")]


def test_what_a_source_is_pinned_by() -> None:
    digest, many = "0" * 64, ("https://a.example/x.txt", "https://a.example/y.txt")
    Path("local").mkdir()
    for source, part, files in (
        (Source(path="*.jsonl"), 0, [Path("law.jsonl"), Path("news.jsonl")]),
        (Source(path="*.jsonl", parts=2), 1, [Path("news.jsonl")]),
        (Source(path="law.jsonl", parts=2), 1, [Path("law.jsonl")]),
        (Source(path=many, sha256={"x.txt": digest}), 0, None),
        (Source(path=many, sha256=dict.fromkeys(("x.txt", "y.txt"), digest)), 0, []),
        (Source(path="hf://a/b"), 0, None),
        (Source(path="hf://a/b", revision="main"), 0, None),
        (Source(path="hf://a/b", revision="0" * 40), 0, []),
        (Source(path="hf://local", revision="0" * 40), 0, None),
    ):
        assert pinned(source, part) == files, source


def test_a_source_that_is_not_pinned_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("one")
    read = []
    download = sources.download
    monkeypatch.setattr("demix.data.sources.pinned", lambda *_: None)
    monkeypatch.setattr("demix.data.sources.download", lambda *given: (read.append(given[1]), download(*given)))
    two, three = prepare("two"), prepare("three")
    assert read == 2 * [*DOMAINS]
    assert made_anew(two, three) == set()
