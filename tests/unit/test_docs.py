"""The documentation: commands of pages and notebooks run, on a small run of the sample's config."""

import ast
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from typer.main import get_command

from demix.commands.main import command_line
from demix.config.architecture import architecture_from
from demix.config.tasks import ExamplesRecipe
from demix.data.tokenizer import Tokenizer
from demix.evaluate.classification import Classification
from demix.evaluate.domain import ContextEvaluation, Evaluation
from demix.evaluate.fewshot import TaskScoring
from demix.evaluate.memorization import Audit
from demix.evaluate.routing import Routing
from demix.settings import settings_from
from demix.train.adapt import Adaptation
from support.cli import succeeds
from support.dry_run import ENVIRONMENT, planned, ran
from support.models import write_model
from support.once import once
from support.warm import warm

pytestmark = pytest.mark.full

REPOSITORY = Path(__file__).parents[2]
TUTORIALS = REPOSITORY / "docs" / "tutorials"
DOCS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
# The demo's commands read its finished run; those of the other tutorials run from nothing.
DOCS = [page for page in DOCS if page.parent != TUTORIALS or page.stem == "demo"]
# Each of these pages goes on with the files of those before.
STAGES = [REPOSITORY / f"docs/reference/stages-{name}.md" for name in ("text", "models", "scores", "results")]
# Stages that take long: their options and settings are checked instead.
LONG = {"adapt": Adaptation, "evaluate": Evaluation, "audit": Audit, "route": Routing}
LONG |= {"contexts": ContextEvaluation, "examples": ExamplesRecipe, "fewshot": TaskScoring, "classify": Classification}
# Commands of other programs, or that need a machine that is not here.
FOREIGN = {"lm-eval", "cp", "git", "cd", "source", "python3.11", "pip", "uv", "touch", "docker", "apptainer", "sbatch"}
# The sample's config with less text, smaller models and fewer steps.
SMALL = {
    "base": str(REPOSITORY / "config" / "sample.yaml"),
    "tokenizer": {"kind": "bpe", "vocab_size": 1000},
    "architecture": {"layers": 2, "width": 16, "heads": 2, "inner": 32, "context": 32},
    "training": {"tokens": 8192, "sequences": 2, "checkpoint_every": 100, "dev_blocks": 2},
    "models": {
        "demix_seeded": {"seed_tokens": 4096},
        "flexolmo": {"kind": "anchored", "parent": "dense", "seed_tokens": 4096},
    },
    "evaluation": {"dev_blocks": 8, "test_tokens": 1024},
    "adaptation": {"tokens": 2048, "sequences": 4, "evaluate_every": 8, "dev_blocks": 2, "forgetting_blocks": 1},
}
BUDGETS = {"train": 6000, "dev": 1500, "test": 1500}


def commands(*pages: Path) -> Iterator[list[str]]:
    """The words of each command in the ```bash blocks of pages."""
    for block in re.findall(r"```bash\n(.*?)```", "".join(page.read_text() for page in pages), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                yield words[:end]
                words = words[end + 1 :]


def known(words: list[str]) -> typer.core.TyperCommand:
    """The command that `demix` words name; every option in them is one of its own."""
    command, rest = get_command(command_line(words[1])), words[1:]
    while hasattr(command, "commands"):
        assert rest[0] in command.commands, words
        command, rest = command.commands[rest[0]], rest[1:]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    asked = {word for word in rest if word.startswith("--")}
    assert asked <= options, (words, asked - options)
    required = {p.opts[-1] for p in command.params if p.required and p.opts[0].startswith("--")}
    assert required <= asked, (words, required - asked)
    return command


def run_sample(folder: Path) -> None:
    """A folder like a clone with a finished run of the sample's config, of small size."""
    for name in ("config", "resources", "profiles"):
        (folder / name).symlink_to(REPOSITORY / name)
    kinds = yaml.safe_load((REPOSITORY / "config" / "sample.yaml").read_text())["domains"]
    domains = {kind: {name: {"words": BUDGETS} for name in names} for kind, names in kinds.items()}
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL | {"domains": domains}))
    ran(folder, folder / "small.yaml")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "sample", run_sample)


@pytest.fixture
def place(sample: Path, tmp_path: Path) -> Path:
    """A copy of the run of the sample, masked models beside it, and the files that the pages name."""
    folder = tmp_path / "clone"
    shutil.copytree(sample, folder, symlinks=True)
    run = folder / "results" / "sample"
    encoder = Tokenizer.load(run / "tokenizer.json")
    masked = architecture_from({"preset": "roberta", "layers": 2, "width": 16, "heads": 2, "context": 32})
    for name, experts in (("demix_masked", ("novels", "scripture")), ("roberta", ("dense",))):
        model = folder / "results" / "variants" / "models" / name
        write_model(model, experts, encoder.sha256, encoder.vocab_size, architecture=masked)
        shutil.copy(run / "tokenizer.json", model)
    (folder / "results" / "mine").symlink_to("sample")
    shutil.copytree(run, folder / "results" / "families")
    (folder / "texts").mkdir()
    for name in ("my.txt", "unknown.txt", "texts/letters.txt", "texts/recipes.txt", "texts/diary.txt"):
        (folder / name).write_text("The committee shall examine the proposal before the end of the year. " * 100)
    (folder / "ids.bin").write_bytes(np.array([5, 6, encoder.end_of_text], np.uint16).tobytes())
    (folder / "mytasks").mkdir()
    page = (REPOSITORY / "docs" / "how-to" / "benchmarks.md").read_text()
    for suffix, language in ((".yaml", "yaml"), (".jsonl", "json")):
        (block,) = re.findall(rf"```{language}\n(.*?)```", page.split("## How")[0], re.DOTALL)
        (folder / "mytasks" / f"subject{suffix}").write_text(block)
    return folder


PAGES = [[page] for page in DOCS if page not in STAGES and any(commands(page))]


@pytest.mark.parametrize("pages", [*PAGES, STAGES], ids=lambda pages: "/".join(pages[0].parts[-2:]))
def test_commands_run(pages: list[Path], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the pages; what is long, or never ends, is held against `--help`."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", place / "cache")
    # A stage sets them for its own process.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    for words in commands(*pages):
        if words[0] == "cp" and not words[-1].startswith("config/"):
            subprocess.run(words, check=True)
        elif words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=REPOSITORY, check=True, capture_output=True)
        elif words[0] == "snakemake":
            asked = {word for word in words if re.fullmatch(r"--?[a-zA-Z].*", word)}
            assert asked <= options_of("snakemake"), words
        elif words[0] == "pytest":
            assert all((REPOSITORY / word).exists() for word in words[1:] if "/" in word), words
        elif words[0] != "demix":
            assert words[0] in FOREIGN | {"python"}, words
        elif words[1:3] == ["experts", "train"] or words[1] == "serve":
            known(words)
        elif words[1] in LONG:
            known(words)
            settings_from(LONG[words[1]], words[words.index("--settings") + 1])
        else:
            known(words)
            # What the page has the reader put there.
            words = ["config/one-gpu.yaml" if word == "config/mine.yaml" else word for word in words]
            words, file = (words[:-2], words[-1]) if ">" in words else (words, None)
            done = succeeds(*words[1:])
            if file:
                Path(file).write_text(done.stdout)
            output = words[words.index("--output") + 1] if "--output" in words else "."
            assert (place / output).exists(), words


@functools.cache
def options_of(program: str) -> set[str]:
    """Every option in the help of `program`."""
    path = Path(sys.executable).with_name(program)
    printed = subprocess.run([path, "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", printed))


@pytest.mark.parametrize("notebook", ["results.ipynb", "python.ipynb"])
def test_a_notebook_runs(notebook: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell runs after those before it, and the last line of some is a table or a chart."""
    monkeypatch.setenv("DEMIX_RUN", str(place / "results" / "sample"))
    cells = json.loads((REPOSITORY / "docs" / "notebooks" / notebook).read_text())["cells"]
    names: dict[str, object] = {}
    shown = [shows(ast.parse("".join(cell["source"])), names) for cell in cells if cell["cell_type"] == "code"]
    tables = [value for value in shown if hasattr(value, "columns")]
    charts = [value.to_dict() for value in shown if hasattr(value, "to_dict") and not hasattr(value, "columns")]
    assert tables
    assert charts
    assert all(table.notna().to_numpy().any() for table in tables)


def shows(cell: ast.Module, names: dict[str, object]) -> Any:
    """The value of the last line of a cell, if it is an expression, after all lines have run with `names`."""
    last = cell.body.pop() if isinstance(cell.body[-1], ast.Expr) else None
    exec(compile(cell, "cell", "exec"), names)
    return last and eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def in_a_clone(folder: Path) -> Path:
    """`folder` as a clone in which nothing has run yet, with a config of the user's own."""
    for name in ("workflow", "resources", "profiles", "docs"):
        (folder / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "config", folder / "config")
    shutil.copy(folder / "config" / "paper-125m.yaml", folder / "config" / "mine.yaml")
    page = (REPOSITORY / "docs" / "how-to" / "own-text.md").read_text()
    (folder / "mine.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    return folder


PLANNED = sorted({tuple(words) for words in commands(*DOCS) if words[0] == "snakemake"})


@pytest.mark.parametrize("words", [w for w in PLANNED if "--report" not in w], ids=" ".join)
def test_snakemake_takes_these_arguments(words: tuple[str, ...], tmp_path: Path) -> None:
    command = [*words, *([] if "-n" in words else ["-n"]), "--quiet", "rules"]
    shown = planned(in_a_clone(tmp_path), command)
    assert re.search(r"^total +[1-9]", shown, re.MULTILINE), shown


@pytest.mark.parametrize("pages", [["own-files", "add-and-remove"], ["pretrained"]], ids=str)
def test_a_tutorial_runs(pages: list[str], tmp_path: Path) -> None:
    """In a clone, as written but for the number of words; the files that the pages name are then there."""
    folder, text = in_a_clone(tmp_path), "".join((TUTORIALS / f"{page}.md").read_text() for page in pages)
    said = ""
    for block in re.findall(r"```bash\n(.*?)```", text.replace("five_texts.py 20000", "five_texts.py 3000"), re.DOTALL):
        shell = ["bash", "-euo", "pipefail", "-c", block]
        done = subprocess.run(shell, cwd=folder, env=warm(ENVIRONMENT), capture_output=True, text=True, check=False)
        assert done.returncode == 0, (block, done.stdout + done.stderr)
        said += done.stdout
    assert "\nscripture is " in said
    named = re.findall(r"`((?:results|texts|config)/[\w./-]+|[\w-]+\.txt|(?:with|without|tiny)-[\w./-]+)`", text)
    assert [name for name in named if not (folder / name).exists()] == []


def test_links_of_pages_outside_of_the_site_lead_somewhere() -> None:
    """`make docs` ends with an error where a link of the site is broken."""
    for page in DOCS[:2]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), (page.name, link)


def test_the_marked_numbers_of_pages_are_those_of_the_code() -> None:
    """`make pages` has nothing to change of what follows from configs."""
    script = REPOSITORY / "docs" / "pages.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
