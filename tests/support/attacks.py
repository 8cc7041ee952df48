"""Hostile inputs as rows of a table: what is written, which command reads it, how the command ends and in what time."""

import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from demix.data.tokenizer import Tokenizer, train_tokenizer
from demix.files import sha256_file
from support.disturbed import REPOSITORY, TINY
from support.dry_run import ENVIRONMENT, snakemake
from support.forks import FORKS
from support.models import REAL_TEXT, write_model
from support.scored import write_table
from support.server import Answer

# The address of the server that an attack has, where its command names it.
URL = "http://served"
EXPERTS = ("law", "news", "code")


@dataclass(frozen=True)
class Attack:
    """`make` writes the files of an attack to the working folder, which holds those of `write_attacked` already.

    The command (arguments of demix, or all words of `snakemake …`) ends with `status` within `seconds`, and says
    `line`: where `status` is not 0, as its last line, and the folder is then as it was. A command that takes part of
    an undisturbed run (`in_run`) is found there once `make` is done. `answer` is what a server says to it.
    """

    name: str
    make: Callable[[], object]
    command: list[str] | Callable[[], list[str]]
    line: str
    status: int = 1
    seconds: float = 30.0
    answer: Answer | None = None
    faults: bool = False
    in_run: bool = False


@dataclass(frozen=True)
class Ended:
    """The exit status of a command, None where it was killed for its time, and what it printed."""

    status: int | None
    said: str
    seconds: float

    def refuse_unless(self, attack: Attack) -> None:
        """An assertion that a command ended as the attack says."""
        assert self.status is not None, f"it had not ended after {attack.seconds} s:\n{self.said}"
        assert self.status == attack.status, f"status {self.status}, not {attack.status}:\n{self.said}"
        assert "Traceback" not in self.said
        assert attack.line in self.said, self.said
        command = attack.command
        if self.status and (callable(command) or command[0] != "snakemake"):
            last = self.said.splitlines()[-1]
            assert last.startswith("demix: error: "), self.said
            assert attack.line in last
            assert last.count("; "), "cause and cure"


def ended(command: list[str], seconds: float) -> Ended:
    """What a command did in the working folder, in a forked process that is killed when `seconds` are over."""
    with tempfile.NamedTemporaryFile("r", errors="backslashreplace") as output:
        if command[0] == "snakemake":
            process = FORKS.Process(target=snakemake, args=(Path.cwd(), command, dict(ENVIRONMENT), output.name))
        else:
            process = FORKS.Process(target=_demix, args=(Path.cwd(), command, output.name))
        process.start()
        began = time.monotonic()
        process.join(seconds)
        took = time.monotonic() - began
        if over := process.exitcode is None:
            process.kill()
            process.join()
        return Ended(None if over else process.exitcode, output.read(), took)


def _demix(folder: Path, arguments: list[str], output: str) -> None:
    """Be a `demix` in `folder`; what it prints goes to `output`. The process ends as an interpreter would."""
    from demix.commands.main import main

    os.chdir(folder)
    with open(output, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = ["demix", *arguments]
    main()


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


def write_attacked(folder: Path) -> None:
    """A tokenizer, a model of three experts that has it, and score tables of these."""
    text, tokenizer = folder / "text.parquet", folder / "tokenizer.json"
    pq.write_table(pa.table({"text": [REAL_TEXT]}), text)
    train_tokenizer([text], 300, tokenizer)
    known = Tokenizer.load(tokenizer)
    write_model(folder / "model", EXPERTS, known.sha256, known.vocab_size)
    (folder / "model" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    for split in ("dev", "test"):
        write_table(folder / "scores" / f"x.{split}", EXPERTS)
    (folder / "resources").symlink_to(REPOSITORY / "resources")


def write(name: str, content: str | bytes | Callable[[Path], object]) -> Callable[[], None]:
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


def source(
    name: str, content: str | bytes | Callable[[Path], object], line: str, *, seconds: float = 30.0, **keys: object
) -> Attack:
    """A file as the source of a domain."""
    title = f"{name!a}: {line}" + f" ({', '.join(keys)})" * bool(keys)
    return Attack(title, write(name, content), download({"kind": "files", "path": name} | keys), line, seconds=seconds)


def task(name: str, rows: bytes | list[dict[str, object]], line: str, **keys: object) -> Attack:
    """A file as the examples of a task."""
    content = rows if isinstance(rows, bytes) else "".join(json.dumps(row) + "\n" for row in rows)
    settings = json.dumps({"path": "task.jsonl", "length": 96, "seed": 1, "examples": 50} | keys)
    command = ["examples", "t", "--tokenizer", "tokenizer.json", "--settings", settings, "--output", "t.parquet"]
    return Attack(f"task of {name}", write("task.jsonl", content), command, line)


def config(line: str, text: str | dict[str, object], seconds: float = 30.0) -> Attack:
    """A config file, as text or as keys of the tiny config that take another value."""
    content = text if isinstance(text, str) else changed(text)
    return Attack(f"config: {line}", write("c.yaml", content), ["config", "c.yaml"], line, seconds=seconds)


def planned(line: str, status: int, keys: dict[str, object]) -> Attack:
    """The tiny config with other values, as `snakemake -n` takes it."""
    command = [
        "snakemake", "-n", "--snakefile", str(REPOSITORY / "workflow" / "Snakefile"), "--configfile", "c.yaml",
        "--workflow-profile", str(REPOSITORY / "profiles" / "default"),
    ]  # fmt: skip
    name = f"snakemake -n: {line}"
    return Attack(name, write("c.yaml", changed(keys)), command, line, status, 120.0, faults=True)


def asked(line: str, *command: str, make: Callable[[], object] = list, status: int = 1, seconds: float = 30) -> Attack:
    """A command that asks the model or the scores, in a state that `make` brought about."""
    return Attack(ascii(" ".join(command)), make, list(command), line, status, seconds)


def served(name: str, answer: Answer, line: str, status: int = 1, **keys: object) -> Attack:
    """A server as the source of a domain."""
    command = download({"kind": "url", "path": f"{URL}/a.jsonl"} | keys)
    return Attack(f"server: {name}", list, command, line, status, answer=answer)


def changed(keys: dict[str, object]) -> str:
    """The tiny config with other values of `keys`, whose parts dots separate; None leaves a key out."""
    made = copy.deepcopy(TINY)
    for key, value in keys.items():
        *above, last = key.split(".")
        place = made
        for part in above:
            place = place.setdefault(part, {})
        if value is None:
            del place[last]
        else:
            place[last] = value
    return yaml.safe_dump(made, sort_keys=False)


def table(path: Path, *columns: list, names: list[str], **how: object) -> None:
    # By its open file, since pyarrow takes no path that is not UTF-8.
    with path.open("wb") as file:
        pq.write_table(pa.Table.from_arrays([pa.array(column) for column in columns], names), file, **how)


def rescored(path: Path, **told: str) -> None:
    """A score table again, of which the file tells other things; the scores are better by a nat."""
    from demix.evaluate.score_tables import write_scores

    read = pq.read_table(path)
    kept = {key.decode(): value.decode() for key, value in read.schema.metadata.items() if b"sha256" in key}
    write_scores(path, [np.minimum(read["log_probability"].to_numpy() + 1, 0)], kept | told)
