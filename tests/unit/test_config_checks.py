"""Configs as people write them: made by `demix init`, checked by `demix config`, with the lines of what is wrong."""

import io
import json
import logging
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from hypothesis import given, strategies
from rich.console import Console
from snakemake.io import PeriodicityDetector

import snakemake_logger_plugin_demix as display
from demix.config.keys import read_keys
from demix.config.names import refuse_name
from demix.run.check import completed_run, load_run
from demix.settings import _distinct
from support.cli import demix, said

REPOSITORY = Path(__file__).parents[2]
TWO = """run: mine
domains:
  training:
    law:
      source: {kind: files, path: mine/law.txt}
    news:
      source:
        kind: files
        path: [mine/*.csv, mine/news.txt]
architecture: {layers: 1, width: 8, heads: 1, context: 16}
training: {tokens: 4000, sequences: 2, learning_rate: 1.0e-3}
"""


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the text of nine domains, in as many formats."""
    monkeypatch.chdir(tmp_path)
    pieces = [" ".join(f"w{number}x{place}" for place in range(30)) for number in range(60)]
    records = [{"title": f"the page {number}", "body": piece} for number, piece in enumerate(pieces)]
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    Path("Büro [1].txt").write_text(" ".join(pieces))
    Path("büro 1.txt").write_text(" ".join(pieces))
    Path("2024.jsonl.zst").write_bytes(zstandard.compress(lines))
    Path("tokens.csv").write_text("id,text\n" + "".join(f"{number},{piece}\n" for number, piece in enumerate(pieces)))
    pq.write_table(pa.table({"n": range(60), "doc": [{"parts": [piece]} for piece in pieces]}), "a.parquet")
    Path("b.json").write_text(json.dumps([{"id": number, "text": piece} for number, piece in enumerate(pieces)]))
    with tarfile.open("c.tar.gz", "w:gz") as archive:
        for number, piece in enumerate(pieces):
            entry = tarfile.TarInfo(f"{number}.txt")
            entry.size = len(piece)
            archive.addfile(entry, io.BytesIO(piece.encode()))
    for name in ("letters/1.txt", "letters/old/2.txt", "letters/notes.md", "more/1.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(" ".join(pieces))
    return tmp_path


def test_init_writes_a_valid_config_of_any_files(texts: Path) -> None:
    given = [
        "Büro [1].txt",
        "büro 1.txt",
        "2024.jsonl.zst",
        "tokens.csv",
        "a.parquet",
        "b.json",
        "c.tar.gz",
        "letters/",
    ]
    done = demix("init", *given, "--novel", "more/*.txt")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == demix("init", *given, "--novel", "more/*.txt").stdout
    (texts / "mine.yaml").write_text(done.stdout)
    config = load_run(texts / "mine.yaml").config.values
    sources = {
        name: {key: value for key, value in domain["source"].items() if key in ("path", "text", "json", "piece_words")}
        for domains in config["domains"].values()
        for name, domain in domains.items()
    }
    usual = {"text": "text", "json": "lines", "piece_words": None}
    assert sources == {
        "buro_1": usual | {"path": "Büro [[]1].txt", "piece_words": 50},
        "buro_1_2": usual | {"path": "büro 1.txt", "piece_words": 50},
        "2024": usual | {"path": "2024.jsonl.zst", "text": "body"},
        "tokens_text": usual | {"path": "tokens.csv"},
        "a": usual | {"path": "a.parquet", "text": "doc.parts[]"},
        "b": usual | {"path": "b.json", "json": "values"},
        "c": usual | {"path": "c.tar.gz"},
        "letters": usual | {"path": "letters/**/*.txt", "piece_words": 50},
        "more": usual | {"path": "more/*.txt", "piece_words": 50},
    }
    assert list(config["domains"]["novel"]) == ["more"]
    assert {tuple(one["words"].values()) for one in config["domains"]["training"].values()} == {(180, 180, None)}
    told = demix("config", "mine.yaml")
    assert told.exit_code == 0
    assert "mine.yaml is valid" in told.stdout
    first, schema = done.stdout.splitlines()[0].split("$schema=")
    assert first == "# yaml-language-server: "
    assert Path(schema).samefile(REPOSITORY / "workflow" / "schemas" / "config.schema.yaml")


def test_init_names_a_run_that_is_not_there(texts: Path) -> None:
    def named(*more: str, output: str | None = None) -> str:
        command = [sys.executable, "-m", "demix", "init", "a.parquet", "b.json", *more]
        with open(output or "printed", "w") as file:
            subprocess.run(command, stdout=file, check=True)
        return str(yaml.safe_load(Path(file.name).read_text())["run"])

    assert named(output="über uns.yaml") == "ber-uns"
    Path("results/mine").mkdir(parents=True)
    Path("results/mine-2").mkdir()
    assert named() == "mine-3"
    assert named("--run", "mine", output="other.yml") == "mine"
    # As long as the name of a run may be, with and without a number.
    long = named(output=f"{'a' * 150}.yaml")
    load_run(f"{'a' * 150}.yaml")
    Path("results", long).mkdir()
    assert named(output=f"{'a' * 150}.yaml") == f"{long}-2"
    load_run(f"{'a' * 150}.yaml")
    line = said(["init", "a.parquet", "b.json", "--run", "../mine"])
    assert line is not None
    assert "--run ../mine: is no name of a run; use one of at most 100 letters, digits" in line


def test_config_warns_of_many_passes(texts: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = demix("init", "a.parquet", "b.json", "--novel", "more/*.txt").stdout
    tokens = int(re.search(r"tokens: (\d+)", text)[1])
    (texts / "mine.yaml").write_text(text)
    adaptation = load_run(texts / "mine.yaml").config.adaptation
    assert (adaptation.tokens, adaptation.passes) == (tokens // 2, 4)
    # 1,800 words of which dev and test have 180 each, at 1.5 tokens a word.
    passing = "adaptation: {tokens: %d, "
    for passes, warned in ((9, False), (11, True)):
        (texts / "mine.yaml").write_text(text.replace("adaptation: {", passing % (passes * 1.5 * 1440)))
        assert load_run(texts / "mine.yaml").config.adaptation.passes is None
        caplog.clear()
        assert demix("config", "mine.yaml").exit_code == 0
        told = "adaptation.tokens: adapts to more in about 11 passes over its 1,440 words; lower it, or add passes: 4"
        assert (told in caplog.text) == warned


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("tokens: 100000000", "tokens: adapts to more in about 4,219 passes over its 15,800 words; lower it, or add"),
        ("tokens: 10000000, passes: 50", "passes: adapts to more in about 50 passes over its 15,800 words; lower it"),
        ("tokens: 284400, passes: 50", "passes: adapts to more in about 12 passes over its 15,800 words; lower it"),
        ("tokens: 100000000, passes: 10", None),
    ],
)
def test_the_warning_of_many_passes_is_one_line(
    given: str, told: str | None, texts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the passes that are made, however many tokens are asked for; that a file ends before a bound is no news."""
    (texts / "more" / "1.txt").write_text(" ".join(f"w{number}" for number in range(19_600)))
    text = demix("init", "a.parquet", "b.json", "--novel", "more/*.txt").stdout
    assert "words: {dev: 1900, test: 1900}" in text
    (texts / "mine.yaml").write_text(text.replace("adaptation: {", f"adaptation: {{{given}, "))
    caplog.clear()
    assert demix("config", "mine.yaml").exit_code == 0
    assert len(caplog.messages) == (told is not None)
    assert (told or "") in caplog.text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["büro 1.txt"], "training domains: 1 is given, and experts are mixed from 2 training domains on; name a file"),
        (["büro 1.txt", "little.txt"], "little.txt: has 2 words in 1 documents; give a domain 1,000 words or more"),
        (["büro 1.txt", "nothere.txt"], "nothere.txt: is no file, and no folder of files that can be read; mend"),
        (["büro 1.txt", "büro 1.txt"], "büro 1.txt: is given twice; name each text once"),
        (["büro 1.txt", "letters/notes.md"], "letters/notes.md: is of an unknown format; known are .parquet"),
        (["büro 1.txt", "two.jsonl"], "plainly the text: question (3 words), answer (2 words); name it with --field"),
        (["büro 1.txt", "utf16.txt"], "utf16.txt: is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 OLD"),
        (
            ["büro 1.txt", "latin.txt"],
            "has 0 words in 0 documents, and 1 not in UTF-8; give a domain 1,000 words or more; convert",
        ),
    ],
)
def test_init_refuses_in_one_line(words: list[str], told: str, texts: Path) -> None:
    (texts / "little.txt").write_text("two words")
    (texts / "two.jsonl").write_text('{"question": "what is that", "answer": "a question"}\n')
    (texts / "utf16.txt").write_text("one text\n" * 2000, encoding="utf-16")
    (texts / "latin.txt").write_text("été déjà vu\n" * 2000, encoding="latin-1")
    line = said(["init", *words])
    assert line is not None
    assert told in line
    assert "\n" not in line


def test_a_field_that_is_named_is_taken(texts: Path) -> None:
    (texts / "two.jsonl").write_text('{"question": "what is that", "answer": "a question"}\n' * 2)
    line = said(["init", "2024.jsonl.zst", "two.jsonl", "--field", "answer"])
    assert line is not None
    assert "two.jsonl: has 2 words in 1 documents" in line


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "    news:",
            "    law:",
            "mine.yaml, line 6: names the key domains.training.law again, which is on line 4 too;",
        ),
        ("run: mine", "run: mine\nrun: other", "mine.yaml, line 2: names the key run again, which is on line 1 too;"),
        (
            "tokens: 4000",
            "tokens: 63",
            "line 11, config key training.tokens: is 63, less than the 64 tokens of one step",
        ),
        ("kind: files\n", "kind: file\n", "mine.yaml, line 8, config key domains.training.news.source.kind: is 'file'"),
        (", learning_rate: 1.0e-3", "", "mine.yaml, line 11, config key training.learning_rate: is missing;"),
        ("run", "rum", "mine.yaml, line 1, config key rum: is not known; did you mean run?"),
        ("run", "run", "missing: mine/law.txt (law, line 5), mine/*.csv (news, line 9), mine/news.txt (news, line 9);"),
        ("run: mine", "run: &a [*a]", "mine.yaml, line 1, config key run: is [[...]]"),
    ],
)
def test_config_names_the_line(old: str, new: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(TWO.replace(old, new, 1))
    line = said(["config", "mine.yaml"])
    assert line is not None
    assert told in line
    assert "\n" not in line


def test_a_key_twice_in_a_base_is_told_too(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text(TWO + "seed: 1\nseed: 2\n")
    (tmp_path / "mine.yaml").write_text("base: below.yaml\n")
    line = said(["config", str(tmp_path / "mine.yaml")])
    assert line is not None
    assert "below.yaml, line 13: names the key seed again, which is on line 12 too" in line


def test_what_yaml_and_snakemake_read_is_not_refused(tmp_path: Path) -> None:
    tabs, merged = tmp_path / "tabs.json", tmp_path / "merged.yaml"
    tabs.write_text(json.dumps(yaml.safe_load(TWO), indent="\t"))
    assert read_keys(tabs)[0] == yaml.safe_load(TWO)
    merged.write_text("a: &a {b: 1}\nc: &c {d: 2}\ne:\n  <<: *a\n  <<: *c\n")
    assert read_keys(merged)[0] == yaml.safe_load(merged.read_text())


def test_config_says_what_will_run() -> None:
    sample = REPOSITORY / "config" / "sample.yaml"
    told = demix("config", sample).stdout
    for part in (
        "training domains  8: parliament, ",
        "novel domains     8: wiki, ",
        "7 of 1,000,000 tokens in 488 updates: demix, dense, ",
    ):
        assert part in told
    assert "16 of 65,536 tokens at most" in told
    assert yaml.safe_load(demix("config", "--values", sample).stdout) == load_run(sample).config.values


@pytest.mark.parametrize("chosen", [[], ["--logger", "demix"]])
def test_a_missing_config_is_one_line_of_snakemake(chosen: list[str]) -> None:
    command = [Path(sys.executable).parent / "snakemake", "--configfile", "no.yaml", *chosen]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    cause, cure = "No such file or directory: 'no.yaml'", "give the path of a config file, such as config/sample.yaml"
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [f"error: --configfile: {cause}; {cure}"]


def test_the_display_shows_warnings() -> None:
    handler = display.LogHandler(SimpleNamespace(dryrun=False), None)
    handler.console = Console(file=io.StringIO(), width=200)
    handler.emit(logging.makeLogRecord({"msg": "law: left out: 1 documents", "levelno": logging.WARNING}))
    handler.emit(logging.makeLogRecord({"msg": "rule law", "levelno": logging.INFO}))
    assert handler.console.file.getvalue().splitlines() == ["law: left out: 1 documents"]


LONG = "a_name_of_" + "0123456789" * 6
BTM = "{kind: branched, averages: true}"
NOVEL = "  novel:\n    code: {source: {kind: files, path: mine/code.txt}}\n"
REMOVAL = "removal: {retrain_without: [law], replacement: code}\nmodels: {without_law: {kind: demix}}\n"


HUGE = f"0x{'f' * 5000}"
TRAIN = "training: {"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("run: mine", f"run: {'r' * 101}", "key run: is 'rrr"),
        ("run: mine", f"run: mine\nseed: {HUGE}", "key seed: is a whole number of more than 64 bits; give a small"),
        ("tokens: 4000", f"tokens: {HUGE}", "key training.tokens: is a whole number of more than"),
        ("2, learning_rate: 1.0e-3", f"2, learning_rate: {HUGE}", "rate: is a whole number of more than 64"),
        ("sequences: 2", "sequences: 9999999999", "sequences: is 9999999999; allowed is integer ≥ 1 ≤ 1000000"),
        ("sequences: 2", "sequences: 2, ranks: 9999999999", "ranks: is 9999999999; allowed is integer ≥ 1 ≤ 100000"),
        (
            TRAIN,
            f"clusterings: {{k: {{clusters: 1000000000000}}}}\n{TRAIN}",
            "k.clusters: is 1000000000000; allowed is",
        ),
        (TRAIN, f"models: {{r: {{kind: routed, capacity: 1.0e+308}}}}\n{TRAIN}", "capacity: is 1e+308; allowed is"),
        ("    law:", f"    {LONG}:", f"key domains.training.{LONG}: has a name of 70 characters; use at most 64"),
        (
            "    law:",
            f"    {'ha' * 30}:",
            "has a name that ends in 'ha' over and over, which Snakemake takes for a loop;",
        ),
        (TRAIN, f"models: {{{'x' * 20}: {{kind: dense}}}}\n{TRAIN}", "has a name that ends in 'x' over and over"),
        (
            TRAIN,
            f"seeds: [2]\nmodels: {{dense_seed2: {{kind: dense}}}}\n{TRAIN}",
            "dense_seed2: is a name that the workflow also has for dense-seed2 (rule join_dense_seed2); rename the row",
        ),
        (
            TRAIN,
            f"models: {{btm: {BTM}, btm__uniform: {BTM}}}\n{TRAIN}",
            "models.btm__uniform: is a name that the workflow also has for btm-uniform (rule average_btm__uniform); rename",
        ),
        (
            TRAIN,
            f"models: {{btm: {{kind: branched}}, btm__law: {{kind: dense}}}}\n{TRAIN}",
            "models.btm__law: is a name that the workflow also has for btm/law (rule train_btm__law); rename the row",
        ),
        (
            "architecture:",
            NOVEL + REMOVAL + "architecture:",
            "models.without_law: is a name that the workflow also has for without-law",
        ),
        (
            "architecture:",
            NOVEL + "models: {known_dense: {kind: dense}}\narchitecture:",
            "known_dense: is a name that the workflow also has",
        ),
    ],
)
def test_what_would_hang_or_fail_later_is_refused(
    old: str, new: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert TWO.count(old) == 1
    Path("mine.yaml").write_text(TWO.replace(old, new))
    line = said(["config", "mine.yaml"])
    assert line is not None
    assert told in line
    assert "\n" not in line


def test_rows_that_only_look_alike_are_taken() -> None:
    names = ("dense_seed3", "without_news", "btm__posterior", "others", "ab" * 8 + "c" * 19)
    rows = {name: {"kind": "dense"} for name in names} | {"btm": {"kind": "branched", "averages": True}}
    run = completed_run(yaml.safe_load(TWO) | {"seeds": [1, 2], "models": rows})
    assert run.rows.keys() >= {*names}


@given(strategies.text("ab_", min_size=1, max_size=4), strategies.integers(1, 60), strategies.text("ab_", max_size=4))
def test_no_name_that_is_taken_is_a_loop_for_snakemake(part: str, number: int, before: str) -> None:
    name = (before + part * number)[:64]
    if PeriodicityDetector().is_periodic(name) is None:
        refuse_name(name)
    else:
        with pytest.raises(ValueError, match="takes for a loop"):
            refuse_name(name)


class Counted(int):
    """A number that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_values_of_a_long_list_are_not_compared_two_by_two() -> None:
    distinct = tuple(map(Counted, range(3000)))
    assert _distinct(distinct) == distinct
    assert Counted.compared < 3 * len(distinct)
    with pytest.raises(ValueError, match="holds one value twice"):
        _distinct((*distinct, distinct[7]))
    assert _distinct((1, 1.0, "1")) == (1, 1.0, "1")


def test_a_character_that_json_writes_as_two_escapes_is_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"licence": "CC 🄯 BY"}))
    assert "\\ud83c" in path.read_text()
    assert read_keys(path)[0] == {"licence": "CC 🄯 BY"}
