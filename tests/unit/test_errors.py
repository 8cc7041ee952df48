"""What a first user gets wrong: each command ends in one line, and the twenty most important lines are these."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from demix.config.config import Config
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError, nearest
from demix.files import exclusive, write_json
from demix.model.device import within_memory
from demix.run.check import load_run
from demix.run.run import FORMAT, refuse_other_domains, write_run_config
from demix.train.loop import MEMORY_CURE
from support.cli import refusal, said
from support.configs import domains, small
from support.models import write_model

REPOSITORY = Path(__file__).parents[2]
SAMPLE = REPOSITORY / "config" / "sample.yaml"
MODEL, ENCODER = "results/letters/models/mine", "results/letters/tokenizer.json"
CONFIG = """\
run: mine
seed: 1
domains:
  training:
    law: {source: {path: texts/law.txt}, words: {dev: 100}}
    news: {source: {path: texts/*.csv}}
architecture: {layers: 1, width: 8, heads: 1, context: 16}
training: {tokens: 4000, sequences: 2, learning_rate: 1.0e-3}
"""
# Configs by name, each with one change.
CONFIGS = {
    "mine": ("", ""),
    "typo": ("dev: 100", "dve: 100"),
    "typed": ("seed: 1", "seed: one"),
    "twice": ("    news:", "    law:"),
    "ranks": ("sequences: 2", "sequences: 2, ranks: 3"),
}


@pytest.fixture(scope="module", autouse=True)
def place(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory: configs, the runs `letters` and `old`, a model of `letters`, and texts."""
    folder = tmp_path_factory.mktemp("errors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = Path("results/letters")
        write_run_config(run / "config.json", Config.complete(small(run="letters")))
        shutil.copy(tokens / "tokenizer.json", run)
        encoder = Tokenizer.load(run / "tokenizer.json")
        write_model(Path(MODEL), ("law", "news"), encoder.sha256, encoder.vocab_size)
        shutil.copytree(MODEL, "damaged")
        damaged = Path("damaged/shared.safetensors")
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        write_model(Path("foreign"), ("law",), "0" * 64, encoder.vocab_size)
        write_json(Path("results/old/config.json"), {"run": "old", "format": FORMAT - 1})
        Path("checkpoint").mkdir()
        Path("checkpoint/config.json").write_text('{"model_type": "gpt2", "new_key": 3}')
        for name, (old, new) in CONFIGS.items():
            Path(f"{name}.yaml").write_text(CONFIG.replace(old, new, 1))
        Path("empty").mkdir()
        Path("latin.txt").write_bytes("Große Höhe, äußere Übel\n".encode("latin-1"))
        Path("body.jsonl").write_text('{"body": "a text"}\n')
        yield folder


LINES = {
    "config typo.yaml": "typo.yaml, line 5, config key domains.training.law.words.dve: is not known; did you mean dev? "
    "known are train, dev, test, per_document",
    "config typed.yaml": "typed.yaml, line 2, config key seed: is 'one'; allowed is integer ≥ 0 ≤ 2147483647",
    "config twice.yaml": "twice.yaml, line 6: names the key domains.training.law again, which is on line 5 too; "
    "give each key one name, and name it once",
    "config ranks.yaml": "ranks.yaml, line 8, config key training.ranks: is 3, which does not fit 2 domains; "
    "use 1, 2 or 4 ranks",
    "config mine.yaml": "mine.yaml: names files that are missing: texts/law.txt (law, line 5), texts/*.csv (news, "
    "line 6); fix the paths, which begin in the folder that you run in",
    "config missing.yaml": "missing.yaml: does not exist; give the path of a config file, such as config/sample.yaml",
    "plan mine.yaml --hardware tpu": "--hardware tpu: is not known; use one of v100, a100, h100, cpu",
    "summary results/lettres": "results/lettres/config.json: is missing, so the folder holds no run; did you mean "
    "results/letters? known are results/letters, results/old",
    "summary results/old": "results/old/config.json: belongs to a run of another version of demix (format {before}, "
    "not {format}); delete or rename results/old, then run the workflow again",
    "generate results/letters/models/min --prompt a": "results/letters/models/min/model.json: is missing, so its "
    "folder is not a model; did you mean {model}? known are {model}",
    f"experts remove {MODEL} lwa": "{model}/experts/lwa.json: is missing, so the model has no such expert; "
    "did you mean law? known are law, news",
    f"generate damaged --tokenizer {ENCODER} --prompt a": "damaged/shared.safetensors: differs from its recorded "
    "sha256; train the model again: `snakemake -f` its model.json, or get the file again",
    f"generate foreign --tokenizer {ENCODER} --prompt a": f"{ENCODER}: is of another tokenizer ({{encoder}}) than the "
    "model foreign (000000000000); use the tokenizer that the model was trained with, or train the model again",
    f"eval {MODEL} empty": "empty: holds no file; name a folder with files of text",
    f"eval {MODEL} latin.txt": "latin.txt: is not UTF-8; convert it, from Latin-1 by iconv -f LATIN1 -t UTF-8 OLD > "
    "NEW",
    f"eval {MODEL} body.jsonl": "body.jsonl, row 1: has no field 'text'; fields are 'body': name the text's as "
    "source.text or --field",
    "import checkpoint --output imported": "checkpoint/config.json: new_key: is 3, and whether this changes what GPT-2 "
    "computes is not known; leave out of the file what changes nothing",
}


@pytest.mark.parametrize("words", LINES)
def test_the_line_of_a_command_names_cause_and_cure(words: str, place: Path) -> None:
    encoder = Tokenizer.load(Path(ENCODER)).sha256[:12]
    named = {"place": place, "model": MODEL, "encoder": encoder, "before": FORMAT - 1, "format": FORMAT}
    assert said(words.split()) == f"demix: error: {LINES[words].format(**named)}"


def run_of_other_domains() -> None:
    refuse_other_domains(Path("results/letters"), Config.complete(small(domains=domains(("code",)))))


def two_trainings_at_once() -> None:
    with exclusive(Path("checkpoints/lock"), "trains this run"), exclusive(Path("checkpoints/lock"), "trains this run"):
        pytest.fail("two hold one lock")


def more_memory_than_there_is() -> None:
    with within_memory("training", MEMORY_CURE):
        torch.empty(2**50, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("happens", "line"),
    [
        (
            run_of_other_domains,
            "results/letters/config.json: is that of a run of other domains (law, news, songs); give the config "
            "another `run`, or `overwrite: true` to write over that run",
        ),
        (
            two_trainings_at_once,
            "checkpoints: another process ({holder}) trains this run; wait until it ends, or end it, then rerun",
        ),
        (
            more_memory_than_there_is,
            "training: needs more memory than there is: 1125899906842624 bytes more; set micro_sequences to 1 and "
            "checkpoint_activations, with more ranks shard_optimizer, or use more ranks; `demix plan` says what a rank "
            "needs",
        ),
    ],
)
def test_the_line_of_a_job_names_cause_and_cure(happens: Callable[[], None], line: str) -> None:
    with pytest.raises(DemixError) as error:
        happens()
    assert str(error.value) == line.format(holder=f"{os.uname().nodename} {os.getpid()}")


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ("sql results/lettres count(*)", "results/letters"),
        ("eval results/letters/models/min a", MODEL),
        ("serve results/letters/models/min --port 0", MODEL),
        (f"merge {MODEL} --weights nesw=1 --output a", "news"),
        ("config fantasy.yaml", "fantasy"),
    ],
)
def test_an_unknown_name_comes_with_the_nearest_known_one(words: str, known: str) -> None:
    Path("fantasy.yaml").write_text(f"base: {SAMPLE}\nremoval: {{replacement: fantsy}}\n")
    assert known in str(said(words.split())).rpartition("; ")[2]


def test_of_many_names_the_nearest_five_are_listed() -> None:
    names = [*(f"cbtm_{number}" for number in range(20)), "dense", "demix"]
    assert re.findall(r"demix|dense|cbtm_\d+", nearest("demx", names, ""))[:2] == ["demix", "demix"]
    assert len({*re.findall(r"demix|dense|cbtm_\d+", nearest("demx", names, ""))}) == 5
    assert {*re.findall(r"demix|dense|cbtm_\d+", nearest("demx", names[-5:], ""))} == {*names[-5:]}


SCORING = """{"dev_blocks": 1, "test_tokens": null, "precision": "fp32", "threads": 1,
    "models": [{"model": "none", "experts": ["a"], "domains": ["a"], "splits": ["test"]}]}"""
TRAINED = ("--settings", "{}", "--output", "out", "--metrics", "m", "--checkpoints", "c")


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        (("tokenizer", "a.parquet", "--output", "out", "--settings", '{"vocab_size": "300"}'), "--settings.vocab_size"),
        (("tokenizer", "a.parquet", "--output", "out", "--settings", '{"a":' * 100_000), "--settings"),
        (("tokenize", "a.parquet", "--tokenizer", "missing.json", "--output", "out"), "missing.json"),
        (("track", "results", "--uri", "postgresql://me:hidden@host/demix"), "--uri"),
        (("train", "sparse", "a", *TRAINED), "--settings.tokens"),
        (("adapt", "a", "b", *TRAINED), "--settings.tokens"),
        (("score", "models", "a/test.arrow", "--output", "out", "--settings", SCORING), "models/none/model.json"),
        (
            ("score", "models", "a/test.arrow", "--output", "out", "--settings", SCORING.replace("32", "8")),
            "--settings.precision",
        ),
        (("export", "nomodel", "--expert", "a", "--tokenizer", "t", "--output", "out"), "nomodel"),
        (("report", "nowhere", "--output", "out"), "nowhere/config.json"),
        (("join", "missing.parquet", "--output", "out"), "missing.parquet"),
    ],
)
def test_bad_input_ends_in_one_line_and_leaves_nothing(
    arguments: tuple[str, ...],
    subject: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal(*arguments, of=subject)
    assert "hidden" not in line
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_process_ends_with_that_line_and_status_1() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demix", "config", "missing.yaml"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"demix: error: {LINES['config missing.yaml']}\n"


def test_an_empty_list_of_novel_domains_is_none() -> None:
    values = yaml.safe_load(CONFIG)
    values["domains"]["novel"] = None
    Path("none.yaml").write_text(yaml.safe_dump(values))
    assert load_run("none.yaml").novel == ()


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_a_port_in_use_is_refused_before_the_server_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ("make", "-o", ".venv/installed", "ui", f"PORT={port}")
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode
    assert done.stderr.startswith(f"demix: error: PORT {port}: ")
