"""The documentation: its commands run or are known, its commands and files are those that there are."""

import ast
import functools
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import typer
import yaml
import zstandard
from typer.main import get_command

from demix.commands.main import command_line
from demix.config.architecture import architecture_from
from demix.config.tasks import ExamplesRecipe
from demix.data.tokenizer import Tokenizer
from demix.evaluate.classification import Classification
from demix.evaluate.contexts import ContextEvaluation
from demix.evaluate.domain import Evaluation
from demix.evaluate.fewshot import TaskScoring
from demix.evaluate.memorization import Audit
from demix.evaluate.routing import Routing
from demix.evaluate.score import Scoring, score
from demix.files import read_json, write_json, write_parquet
from demix.model.checkpoint import expert_names
from demix.report.items import all_items
from demix.run.check import load_run
from demix.settings import settings_from
from demix.train.adapt import Adaptation
from support.cli import demix
from support.dry_run import ENVIRONMENT, planned
from support.models import write_model
from support.synthetic_run import build_run, with_keys
from support.warm import warm

REPOSITORY = Path(__file__).parents[2]
DOCS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SAMPLE = yaml.safe_load((REPOSITORY / "config" / "sample.yaml").read_text())["domains"]
TRAINING, NOVEL = tuple(SAMPLE["training"]), tuple(SAMPLE["novel"])
# Stages that need a finished run of the sample: their flags and settings are checked instead.
LONG = {"adapt": Adaptation, "adapt-dense": Adaptation, "evaluate": Evaluation, "audit": Audit, "route": Routing}
LONG |= {"contexts": ContextEvaluation, "examples": ExamplesRecipe, "fewshot": TaskScoring, "classify": Classification}


# Commands that other programs give, or that take a machine that is not here.
FOREIGN = {"lm-eval", "cp", "git", "cd", "source", "python3.11", "pip", "uv", "touch", "docker", "apptainer", "sbatch"}


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in the ```bash blocks of a page."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                yield words[:end]
                words = words[end + 1 :]


EVERY = [(page, words) for page in DOCS for words in commands(page)]
OURS = [words for page, words in EVERY if words[0] == "demix"]


def known(words: list[str]) -> typer.core.TyperCommand:
    """The command that `demix` words name; every option in them is one of its own."""
    command, rest = get_command(command_line()), words[1:]
    while hasattr(command, "commands"):
        assert rest[0] in command.commands, words
        command, rest = command.commands[rest[0]], rest[1:]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    asked = {word for word in rest if word.startswith("--")}
    assert asked <= options, (words, asked - options)
    required = {p.opts[-1] for p in command.params if p.required and p.opts[0].startswith("--")}
    assert required <= asked, (words, required - asked)
    return command


@pytest.fixture(scope="module")
def place(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a clone with a finished run of the sample, but for models of a small size that know nothing."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("config", "resources", "profiles"):
        (folder / name).symlink_to(REPOSITORY / name)
    run = folder / "results" / "sample"
    made = build_run(run, training=TRAINING, novel=NOVEL, retrained=("licenses", "scripture"))
    keys = made.keys | {
        "tracking": {"uri": "sqlite:///results/mlflow.db"}, "adaptation": {"tokens": 131072, "sequences": 4},
    }  # fmt: skip
    with_keys(run, keys)
    shutil.copy(tokens / "tokenizer.json", run)
    encoder = Tokenizer.load(run / "tokenizer.json")
    shutil.rmtree(run / "models" / "demix")
    write_model(run / "models" / "demix", TRAINING + NOVEL, encoder.sha256, encoder.vocab_size)
    modern = architecture_from({"preset": "modern", "layers": 2, "width": 16, "heads": 2, "context": 16})
    write_model(run / "models" / "demix_seeded", TRAINING, encoder.sha256, encoder.vocab_size, architecture=modern)
    masked = architecture_from({"preset": "roberta", "layers": 2, "width": 16, "heads": 2, "context": 32})
    for name, experts in (("demix_masked", TRAINING), ("roberta", ("dense",))):
        model = folder / "results" / "variants" / "models" / name
        write_model(model, experts, encoder.sha256, encoder.vocab_size, architecture=masked)
        shutil.copy(run / "tokenizer.json", model)
    shutil.copytree(tokens / "tokens" / "fantasy", run / "tokens" / "wiki")
    for path in (run / "tokens" / "wiki").glob("*.json"):
        write_json(path, read_json(tokens / "tokens" / "fantasy" / path.name))
    # What makes a router: some dev text of every expert's domain.
    for domain in {*TRAINING, *NOVEL} - {"wiki"}:
        (run / "tokens" / domain).mkdir()
        for path in (tokens / "tokens" / "parliament").glob("dev*.arrow"):
            shutil.copy(path, run / "tokens" / domain)
        write_json(run / "tokens" / domain / "dev.json", read_json(tokens / "tokens" / "parliament" / "dev.json"))
    shards = [run / "tokens" / "wiki" / f"{split}.arrow" for split in ("dev", "test")]
    shards.append(tokens / "tokens" / "parliament" / "dev.arrow")
    score(
        run / "models" / "demix", TRAINING + NOVEL, shards, Scoring(5, 500, "fp32", threads=1), run / "scores" / "demix"
    )
    priors = [
        {"model": "demix", "experts": "training", "weights": "history", "domain": "wiki", "kind": "novel",
         "expert": expert, "prior": 1 / len(TRAINING)}
        for expert in TRAINING
    ]  # fmt: skip
    write_parquet(pa.Table.from_pylist(priors), run / "evaluations" / "wiki.priors.parquet")
    shutil.copytree(run, folder / "results" / "families")
    with_keys(folder / "results" / "families", keys | {"run": "families", "threads": 2})
    (folder / "texts").mkdir()
    for name in ("my.txt", "unknown.txt", "texts/letters.txt", "texts/recipes.txt", "texts/diary.txt"):
        (folder / name).write_text("The committee shall examine the proposal before the end of the year. " * 100)
    (folder / "ids.bin").write_bytes(np.array([5, 6, encoder.end_of_text], np.uint16).tobytes())
    (folder / "mytasks").mkdir()
    told = (REPOSITORY / "docs" / "tasks.md").read_text()
    for suffix, language in ((".yaml", "yaml"), (".jsonl", "json")):
        (block,) = re.findall(rf"```{language}\n(.*?)```", told.split("### How")[0], re.DOTALL)
        (folder / "mytasks" / f"subject{suffix}").write_text(block)
    return folder


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_commands_run(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page; what is long, or never ends, is held against `--help`."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", place / "cache")
    # A stage sets them for its own process.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    if page.name == "own-data.md":
        (place / "results" / "mine").symlink_to("sample")
    for words in commands(page):
        if words[0] == "cp" and not words[-1].startswith("config/"):
            subprocess.run(words, check=True)
        elif words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=REPOSITORY, check=True, capture_output=True)
        elif words[0] == "snakemake":
            asked = {word for word in words if re.fullmatch(r"--?[a-zA-Z].*", word)}
            assert asked <= options_of("snakemake"), words
        elif words[0] == "pytest":
            assert all((REPOSITORY / word).is_file() for word in words[1:]), words
        elif words[0] != "demix":
            assert words[0] in FOREIGN, words
        elif words[1:3] == ["experts", "train"]:
            known(words)
        elif words[1] in ("playground", "serve"):
            known(words)
            assert "--port" in words or len(words) == 3
            assert expert_names(Path(words[2]))
        elif words[1] in LONG:
            known(words)
            settings_from(LONG[words[1]], words[words.index("--settings") + 1])
        else:
            known(words)
            # What the page has the reader put there.
            words = ["config/paper-125m.yaml" if word == "config/mine.yaml" else word for word in words]
            words, file = (words[:-2], words[-1]) if ">" in words else (words, None)
            done = demix(*words[1:])
            assert done.exit_code == 0, (words, done.exception, done.output)
            if file:
                Path(file).write_text(done.stdout)
            output = words[words.index("--output") + 1] if "--output" in words else "."
            assert (place / output).exists(), words


def shown_by(notebook: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each cell of code of a notebook shows."""
    cells = json.loads((REPOSITORY / "docs" / "notebooks" / notebook).read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    monkeypatch.setenv("DEMIX_RUN", str(place / "results" / "sample"))
    names: dict[str, object] = {}
    # The last line of a cell is what a notebook shows.
    return [shows(ast.parse("".join(cell["source"])), names) for cell in code]


def test_the_notebook_runs(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("results.ipynb", place, monkeypatch)
    assert set(shown[1].index) == {*TRAINING, *NOVEL}
    assert shown[1].notna().all(axis=None)
    chart = shown[2].to_dict()
    assert [len(rows) for rows in chart["datasets"].values()] == [len(TRAINING + NOVEL)]
    assert re.search(r"novels less politics on wiki: [+-]\d\.\d{4} nats per token \(", capsys.readouterr().out)


def test_the_notebook_of_python_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, figures, scores, weights, following, _, results, counts, figure = shown_by(
        "python.ipynb", place, monkeypatch
    )
    assert {*model.experts} == {*TRAINING}
    assert {line.name for line in figures.experts} == {*TRAINING}
    assert len(scores) == 5
    assert [len(rows) for rows in weights.to_dict()["datasets"].values()] == [len(TRAINING) * (figures.tokens - 1)]
    assert {name for name, weight in zip(following.experts, following.weights, strict=True) if weight} == {
        "scripture", "novels",
    }  # fmt: skip
    assert {*results["domain"]} == {*TRAINING, *NOVEL}
    assert "dense" in list(counts["model"])
    assert figure.to_dict()["title"]["text"]
    assert len(capsys.readouterr().out) > 10


def shows(cell: ast.Module, names: dict[str, object]) -> Any:
    """The value of the last line of a cell, if it is an expression, after all lines have run with `names`."""
    last = cell.body.pop() if isinstance(cell.body[-1], ast.Expr) else None
    exec(compile(cell, "cell", "exec"), names)
    return last and eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@functools.cache
def options_of(program: str) -> set[str]:
    """Every option in the help of `program`."""
    path = Path(sys.executable).with_name(program)
    told = subprocess.run([path, "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", told))


def test_a_run_that_a_command_reads_is_made_by_another() -> None:
    """By a target of make, by own-data.md, or by a command of the same page."""
    targets = re.findall(r"--configfile config/(\w+)\.yaml", (REPOSITORY / "Makefile").read_text())
    for page in DOCS:
        lines = [" ".join(words) for words in commands(page)]
        made = {*targets, "mine", *re.findall(r"\brun=(\w+)", "\n".join(lines))}
        read = {run for line in lines if line.startswith("demix ") for run in re.findall(r"results/(\w+)", line)}
        assert read <= made, page.name


def test_the_site_lists_a_page_once() -> None:
    pages = re.findall(r"[\w/-]+\.md", (REPOSITORY / "mkdocs.yml").read_text())
    assert len(pages) == len({*pages})


def test_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 130


def test_every_page_is_in_the_site() -> None:
    """The site's pages are those in docs/, and each package of the library has its API page."""
    listed = set(re.findall(r"[\w/-]+\.md", (REPOSITORY / "mkdocs.yml").read_text()))
    docs = REPOSITORY / "docs"
    assert listed == {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    shown = set(re.findall(r"^::: (demix\.\w+)$", "".join(p.read_text() for p in docs.glob("api/*.md")), re.MULTILINE))
    library = [
        path for path in (REPOSITORY / "demix").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    ]
    assert shown == {f"demix.{path.stem}" for path in library if not path.stem.startswith("__")}


def test_every_command_is_documented_and_no_other() -> None:
    page = REPOSITORY / "docs" / "commands.md"
    sections = re.findall(r"^### ([a-z-]+)\n\n(.*?)(?=^##|\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert {name for name, _ in sections} == set(get_command(command_line()).commands)
    assert len(sections) == len(set(get_command(command_line()).commands))
    for name, text in sections:
        assert f"```bash\ndemix {name} " in text, f"{name} has no example"
    used = {words[1] for words in OURS}
    assert used == set(get_command(command_line()).commands)


def own_config() -> str:
    text = (REPOSITORY / "docs" / "own-data.md").read_text()
    return re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1]


def test_the_config_of_own_data_is_that_of_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    texts = [f"texts/{name}.txt" for name in ("letters", "recipes", "diary")]
    for text in texts:
        Path(text).write_text("word " * 9000)
    assert yaml.safe_load(demix("init", *texts).stdout) == yaml.safe_load(own_config())


def in_a_clone(folder: Path) -> Path:
    """`folder` as a clone in which nothing has run yet."""
    for name in ("workflow", "resources", "profiles"):
        (folder / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "config", folder / "config")
    shutil.copy(folder / "config" / "paper-125m.yaml", folder / "config" / "mine.yaml")
    (folder / "mine.yaml").write_text(own_config())
    return folder


@pytest.mark.parametrize("page", ["README.md", "docs/cluster.md"])
def test_a_copy_of_the_papers_config_lacks_a_partition_and_an_account(page: str, tmp_path: Path) -> None:
    (added,) = re.findall(r"# then add `(cluster: .*)`$", (REPOSITORY / page).read_text(), re.MULTILINE)
    file = in_a_clone(tmp_path) / "config" / "mine.yaml"
    given, cluster = load_run(file).config.cluster, added.replace("…", "gpu", 1).replace("…", "us", 1)
    assert (given.partition, given.account) == (None, None)
    file.write_text(f"{file.read_text()}\n{cluster}\n")
    assert load_run(file).config.cluster == replace(given, partition="gpu", account="us")
    # What docs/cluster.md says that it has.
    assert (given.gpus, given.ranks_per_node, given.memory_mb, given.downloads) == (1, 8, 32000, "login")


PLANNED = sorted({tuple(words) for _, words in EVERY if words[0] == "snakemake"})


@pytest.mark.workflow
@pytest.mark.parametrize("words", [w for w in PLANNED if "--report" not in w], ids=" ".join)
def test_snakemake_takes_these_arguments(words: tuple[str, ...], tmp_path: Path) -> None:
    command = [*words, *([] if "-n" in words else ["-n"]), "--quiet", "rules"]
    shown = planned(in_a_clone(tmp_path), command)
    assert re.search(r"^total +[1-9]", shown, re.MULTILINE), shown


@pytest.mark.workflow
def test_own_data_is_run_and_a_text_gets_its_posterior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = in_a_clone(tmp_path)
    texts = {}
    (folder / "texts").mkdir()
    for name, domain in (("letters", "novels"), ("recipes", "licenses"), ("diary", "scripture")):
        texts[name] = " ".join(words_of(domain)[:9000])
        (folder / "texts" / f"{name}.txt").write_text(texts[name])
    (folder / "texts" / "diary.txt").rename(folder / "texts" / "diary_1.txt")
    (folder / "texts" / "diary_2.txt").write_bytes("été déjà vu à la façon du garçon près de là".encode("latin-1"))
    monkeypatch.chdir(folder)
    (folder / "unknown.txt").write_text(" ".join(words_of("scripture")[9000:10000]))
    init, *ran = [words for words in commands(REPOSITORY / "docs" / "own-data.md") if words[1] != "playground"]
    assert [words[:2] for words in ran] == [["demix", "config"], ["snakemake", "--configfile"], ["demix", "eval"]]
    config = demix(*["texts/diary_*.txt" if word == "texts/diary.txt" else word for word in init[1:-2]]).stdout
    assert "tokens: 200000" in config
    # Two of the four models serve: nothing below reads the others.
    fewer = "models: {dense_unbalanced: null, domain_token: null}\n"
    (folder / "mine.yaml").write_text(config.replace("tokens: 200000", "tokens: 46080") + fewer)
    # Pages and tracking are shown of other runs.
    ran[1][1:1] = ["results/mine/results.parquet", "results/mine/config.json"]
    ran[2] = [*ran[2], "--json"]
    told = ""
    for words in ran:
        done = subprocess.run(words, cwd=folder, env=warm(ENVIRONMENT), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        told += done.stderr
    assert "diary: left out: 1 document not in UTF-8 (convert: iconv -f LATIN1 -t UTF-8 OLD > NEW)" in told
    posterior = {line["name"]: line["posterior"] for line in json.loads(done.stdout)["experts"]}
    assert posterior.keys() == texts.keys()
    assert sum(posterior.values()) == pytest.approx(1)
    assert max(posterior, key=posterior.__getitem__) == "diary"


def words_of(domain: str) -> list[str]:
    """The words of a domain of the sample."""
    with zstandard.open(REPOSITORY / "resources" / "sample" / f"{domain}.jsonl.zst", "rt", encoding="utf-8") as file:
        return [word for line in file for word in json.loads(line)["text"].split()]


def test_links_lead_somewhere() -> None:
    for page in DOCS:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            file, _, heading = link.partition("#")
            if file.startswith("http"):
                continue
            target = page.parent / file if file else page
            assert target.exists(), (page.name, link)
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if heading else []
            assert not heading or heading in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_what_the_papers_have_names_items_that_exist() -> None:
    """In the last section of concepts.md no right column is empty, and what is in backticks is there."""
    text = (REPOSITORY / "docs" / "concepts.md").read_text().split("## What the papers have, and where it is here")[1]
    rows = re.findall(r"^\| (.+?) \| (.*?) \|$", text, re.MULTILINE)
    assert len(rows) >= 25
    assert all(there.strip() for _, there in rows)
    named = {word for _, there in rows for word in re.findall(r"`([^`]+)`", there)}
    config = (REPOSITORY / "config" / "README.md").read_text()
    for word in named:
        if word.startswith("demix."):
            assert importlib.util.find_spec(word), word
        elif word.startswith("demix "):
            assert word.split()[1] in get_command(command_line()).commands, word
        else:
            assert word in all_items() or word.split(":")[0] in config, word
    # Each item that shows a table or figure of a paper is named.
    assert {name for name in all_items() if re.fullmatch(r"(table|figure)\d+", name)} <= named
