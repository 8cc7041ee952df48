"""Inputs that got through once: each is a row of a table, and ends in one line that names it, soon, or is read."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from demix.data.tokenizer import Tokenizer, train_tokenizer
from demix.files import sha256_file
from support.cli import refusal, said
from support.dry_run import TINY, changed
from support.models import REAL_TEXT, THREE, write_model
from support.once import once
from support.scored import write_table


def write_attacked(folder: Path) -> None:
    """A tokenizer, a model of three experts that has it, and score tables of these."""
    text, tokenizer = folder / "text.parquet", folder / "tokenizer.json"
    pq.write_table(pa.table({"text": [REAL_TEXT]}), text)
    train_tokenizer([text], 300, tokenizer)
    known = Tokenizer.load(tokenizer)
    write_model(folder / "model", THREE, known.sha256, known.vocab_size)
    (folder / "model" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    for split in ("dev", "test"):
        write_table(folder / "scores" / f"x.{split}", THREE)


LINE = '{"text": "some words"}\n'
LATIN1 = "déjà vu, garçon, où êtes-vous\n".encode("latin-1")
NOT_UTF8 = os.fsdecode(b"\xff\xfe")
Content = str | bytes | Callable[[Path], object]


@dataclass(frozen=True)
class Attack:
    """`make` writes the files of an attack to the working folder, which holds those of `write_attacked` already.

    The command is refused by the name `of` what is wrong, and the folder is then as it was; with None it succeeds.
    """

    name: str
    make: Callable[[], object]
    command: list[str]
    of: str | None


def write(name: str, content: Content) -> Callable[[], None]:
    """What writes the file `name`: its content, or by a function of its path."""

    def make() -> None:
        path = Path(name)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def download(settings: dict[str, object]) -> list[str]:
    return ["download", "d", "--settings", json.dumps(settings), "--output", "raw.parquet"]


def source(name: str, content: Content, of: str = "", **keys: object) -> Attack:
    """A file as the source of a domain."""
    command = download({"path": name} | keys)
    return Attack(f"source {name!a}", write(name, content), command, of or name)


def config(of: str, text: str | dict[str, object]) -> Attack:
    """A config file, as text or as keys of the tiny config that have another value."""
    content = text if isinstance(text, str) else yaml.safe_dump(changed(TINY, text), sort_keys=False)
    return Attack(f"config: {of}", write("c.yaml", content), ["config", "c.yaml"], of)


def asked(of: str | None, *command: str, make: Callable[[], object] = list) -> Attack:
    """A command that asks the model or the scores, in a state that `make` brought about."""
    return Attack(ascii(" ".join(command)), make, list(command), of)


def table(path: Path, *columns: list, names: list[str]) -> None:
    # By its open file, since pyarrow takes no path that is not UTF-8.
    with path.open("wb") as file:
        pq.write_table(pa.Table.from_arrays([pa.array(column) for column in columns], names), file)


def one_value_for_each_row(path: Path) -> None:
    indices = pa.array([0] * 20_000, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * (1 << 20)]))
    how = {"dictionary_pagesize_limit": 1 << 30, "compression": "zstd", "write_statistics": False}
    pq.write_table(pa.table({"text": column}), path, **how)
    assert path.stat().st_size < 2000


def beyond_9999(path: Path) -> None:
    table(path, ["a"], pa.array([1 << 50], pa.timestamp("ms")), names=["text", "when"])


def wide(columns: int) -> str:
    """CSV whose first and last columns have one name."""
    names = ["text", *(f"c{number}" for number in range(columns - 2)), "text"]
    return f"{','.join(names)}\n{','.join('x' for _ in names)}\n"


def pipe() -> None:
    """A pipe that gives text in Latin-1, as `<(cat FILE)` does."""
    os.mkfifo("pipe.txt")
    threading.Thread(target=lambda: Path("pipe.txt").write_bytes(LATIN1 * 9), daemon=True).start()


def inside() -> None:
    Path("texts").mkdir()
    Path("texts", NOT_UTF8).write_text("some words")


HUGE = int("9" * 4000)

ATTACKS = [
    source("inside.jsonl", '{"text": "one", "m": {"a": 1, "a": 2}}\n'),
    source("wide.csv", wide(60_002)),
    source("quoted.csv", f'"a\nb",{wide(9)}'),
    source("header.csv", f'"{"a,b" * 50_000}'),
    source("lines.csv", "text," + '"\n",' * (3 << 20)),
    source("bomb.parquet", one_value_for_each_row),
    source("late.parquet", beyond_9999, where={"when": "x"}),
    source("pipe.jsonl", os.mkfifo),
    source("meta.jsonl", f'{{"text": "a", "m": {"[" * 900}{"]" * 900}}}\n', where={"m": "x"}),
    source("digits.jsonl", f'{{"text": "a", "n": {"9" * 4000}}}\n', "d.source", where={"n": {"max": 5}}),
    source("range.jsonl", LINE, "where", where={"n": {"min": HUGE}}),
    source(f"{NOT_UTF8}.jsonl", LINE, ".jsonl"),
    source(f"{NOT_UTF8}.parquet", lambda path: table(path, ["a"], names=["text"]), ".parquet", path="*.parquet"),
    config("config key base", 'base: "a\\0b"\n'),
    config("c.yaml", 'run: a\nbase: "\\ud800"\n'),
    config("where", {"domains.novel.fantasy.source.where": {"n": {"max": HUGE}}}),
    config("config key", f"seed: 0x{'f' * 5000}\nrun: a\n"),
    asked("latin1.txt", "eval", "model", "latin1.txt", make=write("latin1.txt", LATIN1 * 9)),
    asked(None, "eval", "model", "few.txt", make=write("few.txt", b"caf\xe9 and " + b"words " * 9)),
    asked("pipe.txt", "eval", "model", "pipe.txt", make=pipe),
    asked("a.txt", "eval", "model", "a.txt", make=lambda: Path("a.txt").symlink_to("nowhere")),
    asked(".txt", "eval", "model", f"{NOT_UTF8}.txt", make=write(f"{NOT_UTF8}.txt", "some words")),
    asked("texts", "eval", "model", "texts", make=inside),
]


def files() -> dict[str, str]:
    """What lies below the working folder: the sha256 of files, the kind of all else.

    What a download has fetched stays on purpose: the next one goes on from there.
    """
    found = {}
    for folder, folders, names in os.walk("."):
        folders[:] = [name for name in folders if not name.endswith(".fetched")]
        for name in (*folders, *names):
            path = Path(folder, name)
            whole = path.is_file() and not path.is_symlink()
            found[os.fsencode(path).hex()] = sha256_file(path) if whole else str(path.lstat().st_mode)
    return found


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "attacked", write_attacked)


@pytest.mark.timeout(30, func_only=True)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_input_ends_as_it_should(
    attack: Attack, attacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(attacked, tmp_path / "here")
    monkeypatch.chdir(folder)
    attack.make()
    before = files()
    if attack.of is None:
        assert said(attack.command) is None
        return
    refusal(*attack.command, of=attack.of)
    assert files() == before
