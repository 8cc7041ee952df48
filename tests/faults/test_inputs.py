"""Inputs that got through once: each is a row of a table, which says how the command ends and within what time.

`support.attacks` says what a row holds. Rows that take a workflow are left to `make faults`.
"""

import os
import shutil
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.attacks import (
    URL,
    Attack,
    asked,
    config,
    ended,
    files,
    planned,
    rescored,
    served,
    source,
    table,
    task,
    write,
    write_attacked,
)
from support.breaking import Note, command
from support.once import once
from support.server import Answer, Handler, serving

LINE = '{"text": "some words"}\n'
LATIN1 = "déjà vu, garçon, où êtes-vous\n".encode("latin-1")
NOT_UTF8 = os.fsdecode(b"\xff\xfe")
LINES = "".join(f'{{"text": "line {number:04} of them"}}\n' for number in range(2000)).encode()
HALF = len(LINES) // 2
ICONV = "iconv -f LATIN1"


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


MERGES = "a0: &a0 {" + ", ".join(f"k{n}: 1" for n in range(10)) + "}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 11)
)  # fmt: skip
BTM = {"kind": "branched", "averages": True}
CLASH = "is a name that the workflow also has"
GENERATE = ("generate", "model", "--tokens", "2", "--prompt")
MERGE = ("merge", "model", "--output", "merged", "--weights")
OPTIONS = {"choices": "opts"}
MANY = [1 + number / 1e5 for number in range(10_000)]
TAKEN = "took 2000 of 2000 documents"
OTHER = "results/tiny/scores/demix/fantasy.test/licenses.parquet"

ATTACKS = [
    source("twice.jsonl", '{"text": "one", "text": "two"}\n', "the key 'text' stands twice"),
    source("inside.jsonl", '{"text": "one", "m": {"a": 1, "a": 2}}\n', "the key 'a' stands twice"),
    source("twice.csv", "text,text\none,two\n", "has two columns 'text'"),
    source("wide.csv", wide(60_002), "has two columns 'text'"),
    source("quoted.csv", f'"a\nb",{wide(9)}', "has two columns 'text'"),
    source("header.csv", f'"{"a,b" * 50_000}', "is not valid CSV (field larger"),
    source("lines.csv", "text," + '"\n",' * (3 << 20), "has a header of over 8 MiB"),
    source("twice.parquet", lambda path: table(path, ["a"], ["b"], names=["text", "text"]), "has two columns 'text'"),
    source("bomb.parquet", one_value_for_each_row, "expands to over 200 times its"),
    source("late.parquet", beyond_9999, "holds a value", metadata=["when"]),
    source("pipe.jsonl", os.mkfifo, "is a pipe or a device"),
    source("link.jsonl", lambda path: path.symlink_to("nowhere"), "is a link to nowhere, which is missing"),
    source("deep.jsonl", f'{{"text": {nested(900)}}}\n', "is nested deeper than 100 levels"),
    source("meta.jsonl", f'{{"text": "a", "m": {nested(900)}}}\n', "is nested deeper than 100 levels", metadata=["m"]),
    source("digits.jsonl", f'{{"text": "a", "n": {"9" * 4000}}}\n', "keeps none of 1", where={"n": {"max": 5}}),
    source("number.jsonl", LINE, "where", where={"n": int("9" * 4000)}),
    source("range.jsonl", LINE, "where", where={"n": {"min": int("9" * 4000)}}),
    source("cut.jsonl", LINE + LINE[:-5], "cut.jsonl, line 2: is not valid JSON"),
    source(f"{NOT_UTF8}.jsonl", LINE, "has a name that is not UTF-8; rename the file"),
    source(f"{NOT_UTF8}.parquet", lambda path: table(path, ["a"], names=["text"]), "is not UTF-8", path="*.parquet"),
    # PyYAML merges each key once from 6.0.4 on, so that `a0` is refused as a key; before, the bound ends it.
    config("c.yaml", MERGES),
    config("config key base", 'base: "a\\0b"\n'),
    config("where", domain(where={"n": {"max": int("9" * 4000)}})),
    config("clusterings.k.clusters: is 1000000000000; allowed is", {"clusterings.k.clusters": 10**12}),
    config("training.sequences: is 9999999999; allowed is", {"training.sequences": 9_999_999_999}),
    config("capacity: is 1e+308; allowed is", {"models.r": {"kind": "routed", "capacity": 1e308}}),
    config("seed: is a whole number of more than 64 bits", f"seed: 0x{'f' * 5000}\nrun: a\n"),
    config("temperatures: holds 10000 values; name at most", {"evaluation.temperatures": MANY}),
    config("seeds: holds 1001 values; name at most 1000", {"seeds": [*range(1001)]}),
    config("holds half a character", 'run: a\nbase: "\\ud800"\n'),
    config("allowed is string of 1 to 500 characters", {"tracking.experiment": "x" * 501}),
    config("run: is 'rrr", {"run": "r" * 300}),
    config("ends in 'ha' over and over", new_domain("ha" * 30)),
    config("has a name of 70 characters; use at most 64", new_domain("name_of_10" * 6 + "and_more_9")),
    config(f"dense_seed2: {CLASH} for dense-seed2", {"seeds": [2], "models.dense_seed2": {"kind": "dense"}}),
    config(f"without_licenses: {CLASH} for without-licenses", {"models.without_licenses": {"kind": "demix"}}),
    config(f"models.btm__uniform: {CLASH} for btm-uniform", {"models": {"btm": BTM, "btm__uniform": BTM}}),
    planned("over and over", 1, new_domain("ha" * 30)),
    planned("Job stats", 0, domain(instructions="{x} {domain}") | {
        "tasks.t": {"path": "{x}.jsonl", "template": "{text} Topic: {label}"},
        "domains.novel.fantasy.licence": "CC BY {x}",
    }),
    task("Latin-1", b"".join(b'{"text": "%d %s", "label": "a"}\n' % (n, LATIN1[:-1]) for n in range(100)), ICONV),
    task("choices against labels", labelled(*[2] * 60, opts=[1, 2, 3, 4]), "one of its choices", **OPTIONS),
    task("true among choices", labelled(*[True] * 60, opts=["a", "b"]), "the label 'true', which", **OPTIONS),
    task("one label", labelled(*["a"] * 90), "has the one label 'a'"),
    task("100,000 labels", labelled(*map(str, range(100_000))), "labels"),
    served("no length", endless, "is sent without its length"),
    served("no end", endless, "bytes, not 80", bytes={"a.jsonl": 80}),
    served("a range of any total", cut_then(LINES[HALF:][:950], "*"), TAKEN, 0),
    served("a range that sends more", cut_then(LINES[HALF:] + LINES[:950], len(LINES)), TAKEN, 0),
    served("Retry-After: soon", wait, TAKEN, 0),
    asked("--prompt: is not UTF-8", *GENERATE, NOT_UTF8),
    asked("prior: has weights whose sum is more", *GENERATE, "a", "--prior", "law=1e308,news=1e308"),
    asked("tokens", "mix", "scores/x.test", "--experts", "tokens"),
    asked("weights: sum to inf", *MERGE, "law=1e308,news=1e308"),
    asked("weight of law: is nan", *MERGE, "law=nan,news=1"),
    asked("is no weight", *MERGE, "law=0.5,law=0.5"),
    asked(ICONV, "eval", "model", "latin1.txt", make=write("latin1.txt", LATIN1 * 9)),
    asked(ICONV, "eval", "model", "few.txt", make=write("few.txt", b"caf\xe9 and " + b"words " * 9), status=0),
    asked("pipe.txt: is not UTF-8; convert it", "eval", "model", "pipe.txt", make=pipe),
    asked("is a link to nowhere", "eval", "model", "a.txt", make=lambda: Path("a.txt").symlink_to("nowhere")),
    asked("not UTF-8; rename", "eval", "model", f"{NOT_UTF8}.txt", make=write(f"{NOT_UTF8}.txt", "some words")),
    asked("not UTF-8; rename", "eval", "model", f"{NOT_UTF8}.jsonl", make=write(f"{NOT_UTF8}.jsonl", LINE)),
    asked("not UTF-8; rename", "eval", "model", "texts", make=inside),
    Attack("a score table of another model", lambda: rescored(Path(OTHER), expert_sha256="0" * 64),
           lambda: command(Path(), "evaluate fantasy"), "was scored with other weights (expert_sha256)", faults=True,
           in_run=True),
]  # fmt: skip


@pytest.mark.parametrize(
    "attack",
    [pytest.param(one, id=one.name, marks=[pytest.mark.faults] if one.faults else []) for one in ATTACKS],
)
def test_an_input_ends_as_it_should(
    attack: Attack, request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch, note: Note,
) -> None:  # fmt: skip
    if attack.in_run:
        request.getfixturevalue("copied")
    else:
        folder = tmp_path / "here"
        shutil.copytree(once(tmp_path_factory, "attacked", write_attacked), folder, symlinks=True)
        monkeypatch.chdir(folder)
    attack.make()
    words = attack.command() if callable(attack.command) else attack.command
    before = files()
    with note.timed("hostile input", "one line"), serving(attack.answer) as site:
        end = ended([word.replace(URL, site.address) for word in words], attack.seconds)
        end.refuse_unless(attack)
    if attack.status:
        assert files() == before


def test_a_command_that_does_not_end_is_killed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    model = once(tmp_path_factory, "attacked", write_attacked) / "model"
    # It waits for somebody to write.
    end = ended(["eval", str(model), str(pipe)], 4.0)
    assert end.status is None
    assert 4.0 <= end.seconds < 20.0
    with pytest.raises(AssertionError, match="had not ended"):
        end.refuse_unless(asked("", "eval", seconds=4.0))
