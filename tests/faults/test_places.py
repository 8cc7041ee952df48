"""Every stage on a full disk, on one that may not be written, without permission, without its input."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from demix.files import sha256_file, write_parquet
from support.breaking import command, commands, demix, refused
from support.cli import said

RUN = "results/tiny"
# A command of each stage, by what it holds.
STAGES = {
    "read": "read licenses",
    "deduplicate": "deduplicate ",
    "split": "split licenses",
    "tokenizer": "tokenizer ",
    "tokenize": "tokenize |licenses/dev",
    "overlap": "overlap ",
    "train": "train dense |models/dense ",
    "score": 'score results/tiny/models results/tiny/tokens/fantasy/dev.arrow|"model": "demix"',
    "score-ngrams": "score-ngrams ",
    "choose-mixing": "choose-mixing results/tiny/scores/demix",
    "adapt": "adapt |fantasy/dev|--scores",
    "adapt dense": "adapt |dense-dapt-fantasy",
    "evaluate": "evaluate fantasy",
    "join": "join |parliament.priors",
    "audit": "audit licenses",
    "run-config": "run-config ",
    "report": "report ",
    "card": "card ",
    "track": "track ",
}
WITHOUT_POWERS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all")
UNPRIVILEGED = WITHOUT_POWERS if os.geteuid() == 0 else ()


@pytest.fixture
def disk(mounted: Callable[[str], Path]) -> Path:
    return mounted("size=256m")


@pytest.fixture
def on_disk(finished: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The undisturbed run on a disk of its own, in which the process stands."""
    shutil.copytree(finished, disk / "copy", symlinks=True)
    monkeypatch.chdir(disk / "copy")
    yield disk / "copy"
    monkeypatch.undo()


def artefacts(folder: Path) -> dict[str, str]:
    """What lies below the run, but for checkpoints, logs, MLflow's own, and the notes of what other runs may share."""
    kept = (".made", "checkpoints", "logs", "mlartifacts", "mlflow.db", ".mlflow.db.lock", ".lock")
    # A lock names the process that held it.
    files = [path for path in (folder / RUN).rglob("*") if path.is_file() and path.name != ".lock"]
    return {
        str(path): sha256_file(path) for path in files if not path.relative_to(folder / RUN).as_posix().startswith(kept)
    }


def fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return ballast


def refusal(stage: str, arguments: list[str]) -> str:
    """The line in which a stage ends."""
    # MLflow keeps what it once opened in a process.
    line = refused(demix(*arguments)) if stage == "track" else said(arguments)
    assert line is not None
    assert line.startswith("demix: error: ")
    return line


@pytest.mark.faults
@pytest.mark.parametrize("stage", STAGES)
def test_a_full_disk_at_every_stage(stage: str, on_disk: Path) -> None:
    arguments = command(on_disk, STAGES[stage])
    if stage == "track":
        shutil.rmtree(on_disk / RUN / "mlartifacts")
        (on_disk / RUN / "mlflow.db").unlink()
        (on_disk / RUN / "tracked.json").unlink()
    if stage == "score":
        # Columns that are whole are not written.
        for column in (on_disk / RUN / "scores" / "demix").glob("fantasy.*/*.parquet"):
            column.unlink()
    before = artefacts(on_disk)
    ballast = fill(on_disk)
    line = refusal(stage, arguments)
    assert "No space left on device" in line or "disk" in line
    assert artefacts(on_disk) == before, "something is half-written"
    ballast.unlink()
    assert (demix(*arguments).returncode == 0) if stage == "track" else said(arguments) is None
    after = artefacts(on_disk)
    # Metrics hold the speed; PDFs list their objects in any order.
    changed = {path for path, sha256 in before.items() if after.get(path) != sha256}
    assert {path for path in changed if "/metrics/" not in path and not path.endswith(".pdf")} == set()


@pytest.mark.faults
def test_a_full_disk_as_clusters_are_fitted(disk: Path) -> None:
    """A stage that the tiny run has not: of its three files the first has most of the bytes."""
    words = [f"word{number % 97} of text {number} and text {number % 13}" for number in range(600)]
    documents, output = disk / "licenses" / "train.parquet", disk / "clusters"
    write_parquet(pa.table({"id": [str(number) for number in range(600)], "text": words}), documents)
    settings = '{"clusters": 3, "dimensions": 8}'
    arguments = ["fit-clusters", str(documents), "--settings", settings, "--output", str(output)]
    ballast = fill(disk)
    assert "No space left on device" in refusal("fit-clusters", arguments)
    assert [path for path in output.rglob("*") if path.is_file()] == []
    ballast.unlink()
    assert said(arguments) is None
    assert (output / "clusterer.json").is_file()


@pytest.mark.faults
@pytest.mark.parametrize("stage", STAGES)
def test_no_permission(stage: str, copied: Path) -> None:
    """Folders that may not be written; root gives up the powers that let it write there."""
    arguments = command(copied, STAGES[stage])
    before = artefacts(copied)
    folders = [path for path in [copied / RUN, *(copied / RUN).rglob("*")] if path.is_dir()]
    for folder in folders:
        folder.chmod(0o500)
    try:
        line = refused(demix(*arguments, before=UNPRIVILEGED))
        assert "Permission denied" in line or "readonly" in line or "unable to open" in line
    finally:
        for folder in folders:
            folder.chmod(0o700)
    assert artefacts(copied) == before


@pytest.mark.faults
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "evaluate"])
def test_every_input_that_vanishes_is_named(stage: str, copied: Path) -> None:
    """Each file that a command reads is taken away, one after the other."""
    arguments = command(copied, STAGES[stage])
    options = [place for place, word in enumerate(arguments) if word.startswith("--")]
    inputs = [word for word in arguments[1 : min(options or [len(arguments)])] if Path(word).is_file()]
    named = ("--owners", "--tokenizer", "--priors")
    inputs += [arguments[place + 1] for place in options if arguments[place] in named]
    for name in dict.fromkeys(inputs):
        hidden = Path(name).rename(f"{name}.hidden")
        assert name in refusal("", arguments)
        hidden.rename(name)


@pytest.mark.faults
def test_all_commands_of_a_run_have_a_case(finished: Path) -> None:
    assert {words[0] for words in commands(finished)} == {name.split()[0] for name in STAGES}


def test_unreadable_inputs_are_named(tmp_path: Path) -> None:
    source, output = tmp_path / "a.jsonl", tmp_path / "raw" / "0000.parquet"
    source.write_text('{"text": "words"}\n')
    source.chmod(0o000)
    settings = f'{{"path": "{source}"}}'
    line = refused(demix("download", "d", "--settings", settings, "--output", output, before=UNPRIVILEGED))
    assert str(source) in line
    assert [*output.parent.iterdir()] == []
