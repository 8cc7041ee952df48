"""The section `lm_eval`: what a run's jobs make of tasks of the standard harness, against `demix lm-eval` itself."""

import json
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import torch

from demix.config.harness import HarnessTasks
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.evaluate.harness_run import write_documents
from demix.files import read_parquet, write_parquet
from demix.report import report_files
from demix.report.material import Material
from demix.report.read import read_tasks
from demix.run.check import completed_run
from demix.run.harness import harness_files, harness_settings, harnessed
from demix.run.kept import config_fingerprint
from demix.run.rules import RunRules
from demix.settings import settings_from
from support.cli import demix
from support.configs import domains, small, small_run
from support.decoding import write_run
from support.errors import refused
from support.harness_tasks import DOCUMENTS, PASSAGE, ran_offline, write_tasks
from support.models import THREE, model_of, save_model
from support.report import table_of

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

NAMES = ("choice", "word", "rolling")
WEIGHTS = ("history", "average")
ASKED: dict[str, Any] = {"tasks": ["choice", "w*", "rolling"], "limit": 3, "shots": 1}


@pytest.fixture(scope="module", autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import lm_eval.evaluator

    with pytest.MonkeyPatch.context() as patch:
        # A stage sets these for its own process.
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        # Which packages a machine has takes seconds to find out.
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
        yield


@pytest.fixture(scope="module")
def place(tokens: Path, tmp_path_factory: pytest.TempPathFactory, _offline: None) -> Path:
    """A run with a model of experts and a dense one, a folder `tasks`, and what the stages make of them."""
    folder = tmp_path_factory.mktemp("harness_run")
    write_run(folder, tokens)
    write_tasks(folder)
    encoder = Tokenizer.load(folder / "tokenizer.json")
    dense = model_of(dtype=torch.float32, vocab_size=encoder.vocab_size)
    save_model(dense, folder / "models" / "dense", encoder.sha256, "dense")
    done("harness-documents", "--output", documents(folder), given=asked(folder))
    for domain in THREE:
        train = folder / "corpus" / domain / "train.parquet"
        text = pa.array([f"{PASSAGE} Amen." if domain == "law" else domain], pa.large_string())
        write_parquet(pa.table({"text": text}), train)
        output = folder / "harness" / "contamination" / f"{domain}.parquet"
        assert demix("contamination", documents(folder), train, "--output", output).exit_code == 0
    files = []
    for model, experts in (("demix", THREE), ("dense", ())):
        files += ["--harness", folder / "harness" / "models" / f"{model}.parquet"]
        scored(folder, files[-1], {"model": model, "experts": list(experts)})
    none = {"tasks": {}, "models": [], "weights": ["history"], "temperature": 0.1}
    done("classify", folder, "--output", folder / "tasks.parquet", *files, given=none)
    return folder


def asked(folder: Path) -> dict[str, Any]:
    return ASKED | {"include_path": str(folder / "tasks")}


def documents(folder: Path) -> Path:
    return folder / "harness" / "documents.parquet"


def scored(folder: Path, output: Path, about: dict[str, Any]) -> None:
    """Put a model to the tasks by both rules of weights."""
    given = asked(folder) | {"seed": 1, "weights": list(WEIGHTS), "threads": 1} | about
    model = folder / "models" / about["model"]
    done("harness", model, "--documents", documents(folder), "--output", output, given=given)


def done(command: str, *words: object, given: dict[str, Any]) -> None:
    ended = demix(command, *words, "--settings", json.dumps(given))
    if isinstance(ended.exception, DemixError):
        raise ended.exception
    assert ended.exit_code == 0, (ended.exception, ended.output)


def test_rows_are_the_values_of_the_harness_with_its_versions(place: Path, tmp_path: Path) -> None:
    rows = pd.read_parquet(place / "tasks.parquet")
    assert list(rows["model"].unique()) == ["demix", "dense"]
    assert set(rows["task"]) == set(NAMES)
    assert rows[["shots", "examples", "seed"]].drop_duplicates().to_numpy().tolist() == [[1, 3, 1]]
    assert set(rows["harness_version"]) == {version("lm_eval")}
    assert rows["accuracy"].isna().all()
    how = {("demix", rule): ("--weights", rule) for rule in WEIGHTS} | {("dense", "dense"): ()}
    for (model, rule), options in how.items():
        own = rows[(rows["model"] == model) & (rows["routing"] == rule)]
        assert set(own["n_experts"]) == {3 if model == "demix" else 1}
        output = tmp_path / "out.json"
        words = ("lm-eval", place / "models" / model, "--tasks", ",".join(NAMES), "--include-path", place / "tasks")
        told = demix(*words, "--output", output, "--limit", 3, "--num-fewshot", 1, *options)
        assert told.exit_code == 0, told.output
        found = json.loads(output.read_text())
        expected = {
            (task, key.removesuffix(",none")): (value, found["results"][task][f"{metric}_stderr,none"])
            for task in NAMES
            for key, value in found["results"][task].items()
            for metric in [key.partition(",")[0]]
            if "," in key and not metric.endswith("_stderr")
        }
        assert {(row.task, row.metric) for row in own.itertuples()} == set(expected)
        for row in own.itertuples():
            value, error = expected[row.task, row.metric]
            assert row.value == pytest.approx(value, rel=1e-6)
            assert (row.stderr == pytest.approx(error, rel=1e-6)) if error != "N/A" else pd.isna(row.stderr)
            assert row.task_version == str(found["versions"][row.task])
            assert row.higher_is_better == found["higher_is_better"][row.task][row.metric]


def test_the_documents_are_those_that_are_asked(place: Path) -> None:
    rows = pd.DataFrame(read_parquet(documents(place)).to_pylist())
    assert list(rows["task"].unique()) == list(NAMES)
    assert rows[rows["task"] == "word"][["document", "text"]].to_numpy().tolist() == [
        [number, text] for number, one in enumerate(DOCUMENTS[:3]) for text in (one["text"], *one["choices"])
    ]
    assert rows["n_words"].tolist() == [len(text.split()) for text in rows["text"]]
    # All tasks have the same file.
    assert rows["task_sha256"].nunique() == 1


def test_other_documents_than_those_of_the_run_are_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "run")
    for task in (tmp_path / "run" / "tasks").glob("*.yaml"):
        task.write_text(task.read_text().replace(str(place / "data.jsonl"), str(tmp_path / "data.jsonl")))
    lines = (place / "data.jsonl").read_text()
    (tmp_path / "data.jsonl").write_text(lines)
    output = tmp_path / "out.parquet"
    scored(tmp_path / "run", output, {"model": "dense"})
    (tmp_path / "data.jsonl").write_text(lines.replace("The house divided.", "The house united."))
    output.unlink()
    with refused("documents.parquet"):
        scored(tmp_path / "run", output, {"model": "dense"})
    assert not output.exists()


@pytest.mark.full
def test_a_task_without_data_is_one_line_and_asks_no_network(place: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    text = (place / "tasks" / "word.yaml").read_text().replace("dataset_path: json", "dataset_path: nobody/nothing")
    (tmp_path / "tasks" / "word.yaml").write_text(text)
    settings = json.dumps({"tasks": ["word"], "include_path": str(tmp_path / "tasks")})
    output = tmp_path / "documents.parquet"
    ended = ran_offline(tmp_path, "harness-documents", "--settings", settings, "--output", output)
    assert ended.returncode == 1
    assert [
        line for line in ended.stderr.splitlines() if line.startswith("demix: error: config key lm_eval.tasks: word")
    ]
    assert not output.exists()


def test_mistakes_name_the_key(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "tasks", tmp_path / "tasks")
    text = (place / "tasks" / "word.yaml").read_text().replace("data.jsonl", "none.jsonl")
    (tmp_path / "tasks" / "broken.yaml").write_text(text.replace("task: word", "task: broken"))
    for given, subject in (
        ({"include_path": str(tmp_path / "none")}, f"lm_eval.include_path: {tmp_path}/none"),
        ({"tasks": ["broken"]}, "lm_eval.tasks: broken"),
    ):
        with refused(subject):
            write_documents(settings_from(HarnessTasks, asked(tmp_path) | given), tmp_path / "documents.parquet")


SECTION = {"tasks": ["choice"], "weights": ["tempered", "average", "cluster"]}
BY_DOMAIN = {"by_domain": {"method": "metadata"}}


def test_the_models_of_a_run_that_do_tasks_and_what_mixes_them() -> None:
    rows = {"btm": {"kind": "branched"}, "masked": {"kind": "dense", "architecture": {"attention": "bidirectional"}}}
    rows["masked"]["architecture"]["objective"] = "mlm"
    run = completed_run(small(models=rows, clusterings=BY_DOMAIN, lm_eval=SECTION))
    assert [model.name for model in harnessed(run)] == ["demix", "dense", "dense_unbalanced", "btm"]
    told = harness_settings(run, harnessed(run)[0])
    assert told["weights"] == ["tempered", "average", "cluster(0.1)"]
    assert (told["experts"], told["model"]) == (["law", "news"], "demix")
    assert harness_settings(run, harnessed(run)[1])["experts"] == []
    assert RunRules(run).harness_mixing("demix") == [
        "results/x/models/demix/mixing.json",
        "results/x/clusters/by_domain/clusterer.json",
    ]
    assert RunRules(run).harness_mixing("dense") == []
    few = completed_run(small(lm_eval={"tasks": ["choice"], "models": ["dense"]}))
    assert [model.name for model in harnessed(few)] == ["dense"]


def test_a_config_without_the_section_is_as_before() -> None:
    run = completed_run(small())
    assert "lm_eval" not in run.config.values
    assert (harnessed(run), harness_files(run), RunRules(run).harness_mixing("demix")) == ((), [], [])
    whole = completed_run(small(lm_eval={"tasks": ["choice"]}))
    assert config_fingerprint(run.config) != config_fingerprint(whole.config)
    assert completed_run(whole.config.values).config.values == whole.config.values


def test_a_changed_file_of_the_folder_is_an_input(place: Path) -> None:
    section = {"tasks": ["choice"], "include_path": str(place / "tasks")}
    (place / "tasks" / "__pycache__").mkdir(exist_ok=True)
    (place / "tasks" / "__pycache__" / "code.pyc").touch()
    files = harness_files(completed_run(small(lm_eval=section)))
    assert [Path(file).name for file in files] == ["choice.yaml", "rolling.yaml", "text.yaml", "word.yaml"]


def test_the_table_has_all_values(place: Path) -> None:
    sections = {"domains": domains(THREE), "lm_eval": {"tasks": list(NAMES), "weights": list(WEIGHTS)}}
    run = small_run(place, **sections)
    table, rows = table_of("harness", Material(run)), pd.read_parquet(place / "tasks.parquet")
    systems = ["DEMix (history)", "DEMix (average)", "Dense (Balanced)"]
    assert list(table.frame.columns) == ["Documents", "Demonstrations", *systems]
    for row in rows.itertuples():
        system = systems[2] if row.model == "dense" else f"DEMix ({row.routing})"
        assert table.frame.loc[f"{row.task}, {row.metric}", system] == row.value
    assert set(table.frame["Documents"]) == {3}
    for line in table.frame.index:
        values, task, metric = table.frame.loc[line, systems], *line.split(", ")
        higher = rows[(rows["task"] == task) & (rows["metric"] == metric)]["higher_is_better"].iloc[0]
        best = values == (values.max() if higher else values.min())
        assert table.bold().loc[line, systems].tolist() == best.tolist()
    assert any("choice law 1 (of 1); word law 1 (of 1); rolling law 1 (of 1)" in note for note in table.notes)
    assert "tables/harness.html" in report_files(run)
    assert "tables/harness.html" not in report_files(small_run(place, domains=domains(THREE)))
    assert len(read_tasks(place / "tasks.parquet")) == 0
