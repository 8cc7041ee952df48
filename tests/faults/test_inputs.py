"""Inputs that got through once: each is a row of a table, and ends in one line that names it, soon, or is read."""

import copy
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from demix.files import sha256_file
from support.attacks import write_attacked
from support.cli import refusal, said
from support.dry_run import TINY
from support.once import once
from support.server import Answer, Handler, serving

LINE = '{"text": "some words"}\n'
LATIN1 = "déjà vu, garçon, où êtes-vous\n".encode("latin-1")
NOT_UTF8 = os.fsdecode(b"\xff\xfe")
LINES = "".join(f'{{"text": "line {number:04} of them"}}\n' for number in range(2000)).encode()
HALF = len(LINES) // 2
# The address of the server that an attack has, where its command names it.
URL = "http://served"
Content = str | bytes | Callable[[Path], object]


@dataclass(frozen=True)
class Attack:
    """`make` writes the files of an attack to the working folder, which holds those of `write_attacked` already.

    The command is refused by the name `of` what is wrong, and the folder is then as it was; with None it succeeds.
    `answer` is what a server says to it.
    """

    name: str
    make: Callable[[], object]
    command: list[str]
    of: str | None
    answer: Answer | None = None


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
    command = download({"kind": "files", "path": name} | keys)
    return Attack(f"source {name!a}", write(name, content), command, of or name)


def task(name: str, rows: bytes | list[dict[str, object]], **keys: object) -> Attack:
    """A file as the examples of a task."""
    content = rows if isinstance(rows, bytes) else "".join(json.dumps(row) + "\n" for row in rows)
    settings = json.dumps({"path": "task.jsonl", "length": 96, "seed": 1, "examples": 50} | keys)
    command = ["examples", "t", "--tokenizer", "tokenizer.json", "--settings", settings, "--output", "t.parquet"]
    return Attack(f"task of {name}", write("task.jsonl", content), command, "t")


def config(of: str, text: str | dict[str, object]) -> Attack:
    """A config file, as text or as keys of the tiny config that take another value."""
    content = text if isinstance(text, str) else yaml.safe_dump(changed(text), sort_keys=False)
    return Attack(f"config: {of}", write("c.yaml", content), ["config", "c.yaml"], of)


def changed(keys: dict[str, object]) -> dict:
    """The tiny config with other values of `keys`, whose parts dots separate."""
    made = copy.deepcopy(TINY)
    for key, value in keys.items():
        *above, last = key.split(".")
        place = made
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return made


def asked(of: str | None, *command: str, make: Callable[[], object] = list) -> Attack:
    """A command that asks the model or the scores, in a state that `make` brought about."""
    return Attack(ascii(" ".join(command)), make, list(command), of)


def served(name: str, answer: Answer, of: str | None, **keys: object) -> Attack:
    """A server as the source of a domain."""
    return Attack(f"server: {name}", list, download({"kind": "url", "path": f"{URL}/a.jsonl"} | keys), of, answer)


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


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def wide(columns: int) -> str:
    """CSV whose first and last columns have one name."""
    names = ["text", *(f"c{number}" for number in range(columns - 2)), "text"]
    return f"{','.join(names)}\n{','.join('x' for _ in names)}\n"


def domain(**keys: object) -> dict[str, object]:
    """Keys of a source of the tiny config."""
    return {f"domains.novel.fantasy.source.{key}": value for key, value in keys.items()}


def new_domain(name: str) -> dict[str, object]:
    return {f"domains.novel.{name}": {"source": {"kind": "files", "path": "resources/sample/novels.jsonl.zst"}}}


def pipe() -> None:
    """A pipe that gives text in Latin-1, as `<(cat FILE)` does."""
    os.mkfifo("pipe.txt")
    threading.Thread(target=lambda: Path("pipe.txt").write_bytes(LATIN1 * 9), daemon=True).start()


def inside() -> None:
    Path("texts").mkdir()
    Path("texts", NOT_UTF8).write_text("some words")


def labelled(*labels: object, **keys: object) -> list[dict[str, object]]:
    return [{"text": f"text {number}", "label": label} | keys for number, label in enumerate(labels)]


def cut_then(rest: bytes, total: object) -> Answer:
    """Half of the file, then for its other half the bytes `rest` as a range of `total`, then the whole file."""

    def answer(handler: Handler, number: int) -> None:
        if number == 2:
            handler.send(rest, 206, Content_Range=f"bytes {HALF}-{HALF + len(rest) - 1}/{total}")
        else:
            handler.send(LINES, stop=HALF if number == 1 else None)

    return answer


def wait(handler: Handler, number: int) -> None:
    if number == 1:
        handler.send(b"", 503, Retry_After="soon")
    else:
        handler.send(LINES)


def endless(handler: Handler, number: int) -> None:
    handler.send(LINES * 9, Content_Length=None)


MERGES = f"a0: &a0 {{{', '.join(f'k{n}: 1' for n in range(10))}}}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 11)
)
BTM = {"kind": "branched", "averages": True}
GENERATE = ("generate", "model", "--tokens", "2", "--prompt")
MERGE = ("merge", "model", "--output", "merged", "--weights")
HUGE = int("9" * 4000)

ATTACKS = [
    source("twice.jsonl", '{"text": "one", "text": "two"}\n'),
    source("inside.jsonl", '{"text": "one", "m": {"a": 1, "a": 2}}\n'),
    source("twice.csv", "text,text\none,two\n"),
    source("wide.csv", wide(60_002)),
    source("quoted.csv", f'"a\nb",{wide(9)}'),
    source("header.csv", f'"{"a,b" * 50_000}'),
    source("lines.csv", "text," + '"\n",' * (3 << 20)),
    source("twice.parquet", lambda path: table(path, ["a"], ["b"], names=["text", "text"])),
    source("bomb.parquet", one_value_for_each_row),
    source("late.parquet", beyond_9999, metadata=["when"]),
    source("pipe.jsonl", os.mkfifo),
    source("link.jsonl", lambda path: path.symlink_to("nowhere")),
    source("deep.jsonl", f'{{"text": {nested(900)}}}\n'),
    source("meta.jsonl", f'{{"text": "a", "m": {nested(900)}}}\n', metadata=["m"]),
    source("digits.jsonl", f'{{"text": "a", "n": {"9" * 4000}}}\n', "d.source", where={"n": {"max": 5}}),
    source("number.jsonl", LINE, "where", where={"n": HUGE}),
    source("range.jsonl", LINE, "where", where={"n": {"min": HUGE}}),
    source("cut.jsonl", LINE + LINE[:-5]),
    source(f"{NOT_UTF8}.jsonl", LINE, ".jsonl"),
    source(f"{NOT_UTF8}.parquet", lambda path: table(path, ["a"], names=["text"]), ".parquet", path="*.parquet"),
    # PyYAML merges each key once from 6.0.4 on, so that `a0` is refused as a key; before, the bound ends it.
    config("", MERGES),
    config("config key base", 'base: "a\\0b"\n'),
    config("c.yaml", 'run: a\nbase: "\\ud800"\n'),
    config("where", domain(where={"n": {"max": HUGE}})),
    config("config key clusterings.k.clusters", {"clusterings.k.clusters": 10**12}),
    config("config key training.sequences", {"training.sequences": 9_999_999_999}),
    config("config key models.r.capacity", {"models.r": {"kind": "routed", "capacity": 1e308}}),
    config("config key seed", f"seed: 0x{'f' * 5000}\nrun: a\n"),
    config("config key evaluation.temperatures", {"evaluation.temperatures": [1 + n / 1e5 for n in range(10_000)]}),
    config("config key seeds", {"seeds": [*range(1001)]}),
    config("config key tracking.experiment", {"tracking.experiment": "x" * 501}),
    config("config key run", {"run": "r" * 300}),
    config(f"config key domains.novel.{'ha' * 30}", new_domain("ha" * 30)),
    config("config key domains.novel.name_of_10", new_domain("name_of_10" * 6 + "and_more_9")),
    config("config key models.dense_seed2", {"seeds": [2], "models.dense_seed2": {"kind": "dense"}}),
    config("config key models.without_licenses", {"models.without_licenses": {"kind": "demix"}}),
    config("config key models.btm__uniform", {"models": {"btm": BTM, "btm__uniform": BTM}}),
    task("Latin-1", b"".join(b'{"text": "%d %s", "label": "a"}\n' % (n, LATIN1[:-1]) for n in range(100))),
    task("choices against labels", labelled(*[2] * 60, opts=[1, 2, 3, 4]), choices="opts"),
    task("true among choices", labelled(*[True] * 60, opts=["a", "b"]), choices="opts"),
    task("one label", labelled(*["a"] * 90)),
    task("100,000 labels", labelled(*map(str, range(100_000)))),
    served("no length", endless, f"{URL}/a.jsonl"),
    served("no end", endless, f"{URL}/a.jsonl", bytes={"a.jsonl": 80}),
    served("a range of any total", cut_then(LINES[HALF:][:950], "*"), None),
    served("a range that sends more", cut_then(LINES[HALF:] + LINES[:950], len(LINES)), None),
    served("Retry-After: soon", wait, None),
    asked("--prompt", *GENERATE, NOT_UTF8),
    asked("prior", *GENERATE, "a", "--prior", "law=1e308,news=1e308"),
    asked("tokens", "mix", "scores/x.test", "--experts", "tokens"),
    asked("weights", *MERGE, "law=1e308,news=1e308"),
    asked("weight of law", *MERGE, "law=nan,news=1"),
    asked("", *MERGE, "law=0.5,law=0.5"),
    asked("latin1.txt", "eval", "model", "latin1.txt", make=write("latin1.txt", LATIN1 * 9)),
    asked(None, "eval", "model", "few.txt", make=write("few.txt", b"caf\xe9 and " + b"words " * 9)),
    asked("pipe.txt", "eval", "model", "pipe.txt", make=pipe),
    asked("a.txt", "eval", "model", "a.txt", make=lambda: Path("a.txt").symlink_to("nowhere")),
    asked(".txt", "eval", "model", f"{NOT_UTF8}.txt", make=write(f"{NOT_UTF8}.txt", "some words")),
    asked(".jsonl", "eval", "model", f"{NOT_UTF8}.jsonl", make=write(f"{NOT_UTF8}.jsonl", LINE)),
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


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """An assertion that what is done ends in time."""

    def end(*_: object) -> None:
        raise AssertionError(f"it had not ended after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_input_ends_as_it_should(
    attack: Attack, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    shutil.copytree(once(tmp_path_factory, "attacked", write_attacked), folder)
    monkeypatch.chdir(folder)
    attack.make()
    before = files()
    with within(30), serving(attack.answer) as site:
        words = [word.replace(URL, site.address) for word in attack.command]
        if attack.of is None:
            assert said(words) is None
            return
        refusal(*words, of=attack.of.replace(URL, site.address))
    assert files() == before


def test_what_does_not_end_is_found(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    # It waits for somebody to write.
    with pytest.raises(AssertionError), within(0.2):
        (tmp_path / "pipe").read_bytes()
