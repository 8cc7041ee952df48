"""Tasks of the standard harness, by `demix lm-eval` and in a run: against our own scoring and Hugging Face, offline."""

import importlib.util
import json
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_parquet, write_parquet
from demix.model.directory import load_model
from demix.run.check import completed_run
from demix.run.harness import harness_files, harness_settings, harnessed
from support.cli import demix, refusal, succeeds
from support.configs import small
from support.decoding import LENGTH, in_blocks, scored_in_blocks, write_run
from support.errors import refused
from support.harness_tasks import DOCUMENTS, PASSAGE, TASKS, ran_offline, write_tasks
from support.mixing import mix
from support.models import THREE, model_of, save_model

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

NAMES = ("choice", "word", "rolling")
WEIGHTS = ("history", "average")
ASKED: dict[str, Any] = {"tasks": ["choice", "w*", "rolling"], "limit": 3, "shots": 1}


@pytest.fixture(scope="module", autouse=True)
def _local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is asked of the network, and of the machine neither what packages it has: that takes seconds."""
    import datasets
    import lm_eval.evaluator

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError(f"asks for {arguments}")

    with pytest.MonkeyPatch.context() as patch:
        # A stage sets these for its own process.
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
        yield


@pytest.fixture(scope="module")
def place(tokens: Path, tmp_path_factory: pytest.TempPathFactory, _local: None) -> Path:
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
        succeeds("contamination", documents(folder), train, "--output", output)
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


def evaluated(place: Path, tmp_path: Path, *options: object, model: Path | None = None) -> dict[str, list[dict]]:
    """The answers to each document by task, as `demix lm-eval` writes them."""
    tmp_path.mkdir(exist_ok=True)
    output = tmp_path / "out.json"
    named = ("--include-path", place / "tasks", "--output", output, "--log-samples", *options)
    done = succeeds("lm-eval", model or place / "models" / "demix", "--tasks", ",".join(TASKS), *named)
    assert done.stdout.startswith("| Tasks")
    results = json.loads(output.read_text())
    assert set(results["results"]) == set(TASKS)
    return results["samples"]


def numbers(sample: dict) -> list[float]:
    """The log-likelihoods of a sample's continuations, or of its text."""
    values = sample["filtered_resps"]
    return [float(value[0] if isinstance(value, list) else value) for value in values]


def requests_of(document: dict, task: str, encoder: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """The tokens before, and those asked for, of each request of a document. Spaces are at the start of choices."""
    wanted = document["choices"] if task == "choice" else [document["choices"][document["gold"]]]
    before = encoder.encode(document["text"]).tolist()
    whole = [encoder.encode(document["text"] + choice).tolist() for choice in wanted]
    return [([encoder.end_of_text, *before], ids[len(before) :]) for ids in whole]


def mixed(model: Path, before: int, ids: list[int], method: str, weights: str, **how: object) -> np.ndarray:
    """log p of `ids` after the token `before`, by the code that scores a run and mixes its tables."""
    table, mask = in_blocks(scored_in_blocks(load_model(model), [before, *ids]))
    return mix(table, mask, method, weights, **how)[mask]


@pytest.mark.parametrize(
    ("options", "method", "weights", "how"),
    [
        ((), "uniform", "tempered(0.1,0.99)", {}),
        (("--weights", "history"), "updating", "history", {"decay": 0.3}),
        (("--weights", "history", "--prior", "uniform", "--top-k", 2), "uniform", "history", {"top_k": 2}),
        (("--weights", "average", "--batch-size", 1), "average", "history", {}),
        (
            ("--weights", "switching(0.3)", "--prior", "law=1,code=3", "--batch-size", 3, "--device", "cpu"),
            "fitted",
            "switching(0.3)",
            {"log_prior": np.log([0.75, 0.25, 1e-300])},
        ),
    ],
    ids=lambda value: "",
)
def test_log_likelihoods_are_those_of_an_evaluation(place, tmp_path, options, method, weights, how) -> None:
    model, encoder = place / "models" / "demix", Tokenizer.load(place / "tokenizer.json")
    found = evaluated(place, tmp_path, *options)
    lengths = []
    for task in ("choice", "word"):
        for sample in found[task]:
            document = sample["doc"]
            for value, (before, ids) in zip(numbers(sample), requests_of(document, task, encoder), strict=True):
                lengths.append(len(before) + len(ids))
                before = before[-(LENGTH + 1 - len(ids)) :]
                expected = mixed(model, before[0], [*before[1:], *ids], method, weights, **how)[len(before) - 1 :].sum()
                assert value == pytest.approx(expected, rel=1e-6)
    assert min(lengths) < LENGTH + 1 < max(lengths)
    for sample in found["rolling"]:
        ids = encoder.encode(sample["doc"]["text"]).tolist()
        expected = mixed(model, encoder.end_of_text, ids, method, weights, **how).sum() if ids else 0.0
        assert numbers(sample) == [pytest.approx(expected, rel=1e-6)]
    for sample in found["choice"]:
        likeliest = int(np.argmax(numbers(sample)))
        assert sample["acc"] == (likeliest == sample["doc"]["gold"])


def test_an_exported_expert_is_what_the_harness_makes_of_it(place: Path, tmp_path: Path) -> None:
    """All kinds of requests, with and without demonstrations; contexts of more than a block are cut alike."""
    from lm_eval import simple_evaluate

    model = place / "models" / "demix"
    succeeds("export", model, "--expert", "news", "--output", tmp_path / "hf")
    manager = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
    for shots in (0, 2):
        asked = ("--experts", "news", "--num-fewshot", shots)
        ours, theirs = evaluated(place, tmp_path, *asked, model=model), {}
        # With a token before contexts, the harness scores that token as part of a text, too.
        for tasks, begins in ((["choice", "word", "text"], True), (["rolling"], False)):
            theirs |= simple_evaluate(
                "hf",
                model_args={"pretrained": str(tmp_path / "hf"), "add_bos_token": begins, "dtype": "float32"},
                tasks=tasks,
                task_manager=manager,
                num_fewshot=shots,
                device="cpu",
                fewshot_random_seed=1234,
                batch_size=1,
            )["samples"]
        for task in TASKS:
            for our, their in zip(ours[task], theirs[task], strict=True):
                assert our["doc"] == their["doc"]
                if task == "text":
                    assert our["filtered_resps"] == their["filtered_resps"]
                elif task == "rolling":
                    if len(our["doc"]["text"]) < LENGTH:
                        assert numbers(our) == pytest.approx([their["filtered_resps"][0]], abs=1e-4)
                else:
                    values = [value for value, _ in their["filtered_resps"]]
                    assert numbers(our) == pytest.approx(values, abs=1e-4, rel=1e-5)
                    greedy = [str(value) for _, value in their["filtered_resps"]]
                    assert [str(value) for _, value in our["filtered_resps"]] == greedy
    assert len({sample["filtered_resps"][0] for sample in ours["text"]}) > 1


def test_a_domain_token_model_is_refused(place: Path) -> None:
    encoder, model = Tokenizer.load(place / "tokenizer.json"), place / "models" / "domain_token"
    gpt = model_of(dtype=torch.float32, vocab_size=encoder.vocab_size, domain_tokens=THREE)
    save_model(gpt, model, encoder.sha256, "domain_token")
    refusal("lm-eval", model, "--tasks", "word", "--include-path", place / "tasks", of=model)


def test_texts_are_those_of_generate(place: Path, tmp_path: Path) -> None:
    """Where the prompt fits; a stop sequence ends them; samples depend on the seed and on nothing else."""
    model = place / "models" / "demix"
    answered = evaluated(place, tmp_path, "--weights", "history", "--gen-kwargs", "until=never")["text"]
    done = demix("generate", model, "--prompt", "", "--weights", "history", "--tokens", 7, "--temperature", 0)
    assert answered[3]["filtered_resps"] == [done.stdout.removesuffix("\n")]
    whole = answered[3]["filtered_resps"][0]
    assert len(whole) > 4
    stopped = evaluated(place, tmp_path, "--weights", "history", "--gen-kwargs", f"until={whole[2:4]}")["text"]
    assert stopped[3]["filtered_resps"] == [whole[: whole.index(whole[2:4])]]
    drawn = {}
    for seed, batch in ((1, 1), (1, 4), (2, 4)):
        how = "until=never,do_sample=True,temperature=2.0,max_gen_toks=20"
        answered = evaluated(place, tmp_path, "--seed", seed, "--batch-size", batch, "--gen-kwargs", how)["text"]
        drawn[seed, batch] = [sample["filtered_resps"][0] for sample in answered]
    assert drawn[1, 1] == drawn[1, 4] != drawn[2, 4]
    assert min(map(len, drawn[1, 1])) > 0


def test_tasks_are_found_by_name_pattern_and_file(place: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "more").mkdir()
    text = (place / "tasks" / "choice.yaml").read_text().replace("task: choice", "task: other")
    (tmp_path / "more" / "other.yaml").write_text(text)
    asked = f"w*d,{tmp_path}/more/other.yaml,choice"
    options = ("--include-path", place / "tasks", "--limit", 2, "--output", tmp_path / "out.json")
    succeeds("lm-eval", place / "models" / "demix", "--tasks", asked, *options)
    results = json.loads((tmp_path / "out.json").read_text())
    assert {name: number["effective"] for name, number in results["n-samples"].items()} == dict.fromkeys(
        ("word", "other", "choice"), 2
    )
    assert results["config"]["model_args"]["pretrained"] == str(place / "models" / "demix")
    assert results["config"]["weights"] == {"rule": "tempered", "beta": 0.1, "gamma": 0.99}
    assert results["config"]["prior"] == dict.fromkeys(("code", "law", "news"), pytest.approx(1 / 3))
    assert "samples" not in results
    assert get_model("demix").__name__ == "DemixLM"


MISTAKES = {
    "--include-path nowhere": "include_path nowhere",
    "--output {place}": "--output {place}",
    "--output nowhere/x.json": "--output nowhere/x.json",
    "--log-samples": "--log-samples",
    "--tasks wrod": "task wrod",
    "--tasks nowhere.yaml": "task nowhere.yaml",
    "--weights best": "--weights best",
    "--weights cluster": "{place}/models/demix",
    "--experts lawe": "experts/lawe.json",
    "--device tpu": "--device tpu",
    "--tokenizer nowhere.json": "nowhere.json",
    "--gen-kwargs num_beams=4": "generation_kwargs num_beams",
    "--gen-kwargs max_gen_toks=0": "max_gen_toks",
    "--gen-kwargs temperature=-1,do_sample=True": "temperature",
    "--tasks broken": "task broken",
    "--tasks long": "continuation",
    "--tasks faulty": "tasks/faulty.yaml",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(place: Path, tmp_path: Path, monkeypatch, mistake: str) -> None:
    class Few(TaskManager):
        def __init__(self, include_path: str | None = None, include_defaults: bool = True) -> None:
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Few)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "tasks", tmp_path / "tasks")
    text = (place / "tasks" / "word.yaml").read_text()
    (tmp_path / "tasks" / "broken.yaml").write_text(text.replace("data.jsonl", "none.jsonl").replace("word", "broken"))
    long = text.replace("task: word", "task: long").replace("{{choices[gold]}}", " the" * 300)
    (tmp_path / "tasks" / "long.yaml").write_text(long)
    if mistake.endswith("faulty"):
        (tmp_path / "tasks" / "faulty.yaml").write_text("task: faulty\n  doc_to_text: text\n")
    asked = {"--tasks": "text", "--include-path": "tasks", "--limit": "1"}
    option, *value = mistake.format(place=place).split(" ", 1)
    asked |= {option: "".join(value)}
    words = [word for pair in asked.items() for word in pair if word]
    before = sorted(tmp_path.rglob("*"))
    refusal("lm-eval", place / "models" / "demix", *words, of=MISTAKES[mistake].format(place=place))
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_model_or_the_harness_it_is_refused(place: Path, monkeypatch) -> None:
    refusal("lm-eval", place / "models" / "nothing", "--tasks", "word", of="nothing/model.json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refusal("lm-eval", place / "models" / "demix", "--tasks", "word", of="lm-eval")


MARKUP = "<script>alert(1)<script>"
# Names of tasks that would be paths, markup and code for the terminal.
NAMED = ("../../outside", "/tmp/outside", MARKUP, "\x1b[2Jclear")


def test_a_name_of_a_task_is_no_path_and_no_code_for_the_terminal(place: Path, tmp_path: Path) -> None:
    tasks, output, model = tmp_path / "tasks", tmp_path / "out" / "out.json", place / "models" / "demix"
    for folder in (tasks, output.parent):
        folder.mkdir()
    text = (place / "tasks" / "choice.yaml").read_text()
    for number, name in enumerate(NAMED):
        (tasks / f"{number}.yaml").write_text(text.replace("task: choice", f"task: {json.dumps(name)}"))
    named = ("--include-path", tasks, "--output", output, "--log-samples", "--limit", 1)
    shown = succeeds("lm-eval", model, "--tasks", ",".join(NAMED), *named)
    assert "\x1b" not in shown.stdout
    assert "\\x1b[2Jclear" in shown.stdout
    assert MARKUP in shown.stdout
    assert [*output.parent.iterdir()] == [output]
    assert json.loads(output.read_text())["samples"].keys() == {*NAMED}


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
        succeeds(*words, "--output", output, "--limit", 3, "--num-fewshot", 1, *options)
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


def test_a_task_without_documents_is_one_line(place: Path, tmp_path: Path) -> None:
    text = (place / "tasks" / "word.yaml").read_text()
    (tmp_path / "word.yaml").write_text(f"{text}process_docs: !function chosen.none\n")
    (tmp_path / "chosen.py").write_text("def none(documents):\n    return documents.select([])\n")
    given, output = {"tasks": ["word"], "include_path": str(tmp_path)}, tmp_path / "documents.parquet"
    with refused("task word"):
        done("harness-documents", "--output", output, given=given)
    assert not output.exists()


@pytest.mark.full
def test_a_local_task_and_one_without_data_ask_no_network(place: Path, tmp_path: Path) -> None:
    named = ("--tasks", "text", "--include-path", place / "tasks", "--limit", 1)
    done = ran_offline(tmp_path, "lm-eval", place / "models" / "demix", *named)
    assert done.stdout.startswith("|Tasks"), done.stderr
    (tmp_path / "tasks").mkdir()
    text = (place / "tasks" / "word.yaml").read_text().replace("dataset_path: json", "dataset_path: nobody/nothing")
    (tmp_path / "tasks" / "word.yaml").write_text(text)
    settings = json.dumps({"tasks": ["word"], "include_path": str(tmp_path / "tasks")})
    output = tmp_path / "documents.parquet"
    ended = ran_offline(tmp_path, "harness-documents", "--settings", settings, "--output", output)
    assert ended.returncode == 1
    assert [line for line in ended.stderr.splitlines() if line.startswith("demix: error: task word")]
    assert not output.exists()


SECTION = {"tasks": ["choice"], "weights": ["tempered", "average", "cluster"]}
BY_DOMAIN = {"by_domain": {"method": "metadata"}}


def test_the_models_of_a_run_that_do_tasks_and_what_mixes_them() -> None:
    rows = {"btm": {"kind": "branched"}, "masked": {"kind": "dense", "architecture": {"objective": "mlm"}}}
    run = completed_run(small(models=rows, clusterings=BY_DOMAIN, lm_eval=SECTION))
    assert [model.name for model in harnessed(run)] == ["demix", "dense", "dense_unbalanced", "btm"]
    assert harness_settings(run, harnessed(run)[0])["weights"] == ["tempered", "average", "cluster(0.1)"]
    few = completed_run(small(lm_eval={"tasks": ["choice"], "models": ["dense"]}))
    assert [model.name for model in harnessed(few)] == ["dense"]


def test_a_changed_file_of_the_folder_is_an_input(place: Path) -> None:
    section = {"tasks": ["choice"], "include_path": str(place / "tasks")}
    (place / "tasks" / "__pycache__").mkdir(exist_ok=True)
    (place / "tasks" / "__pycache__" / "code.pyc").touch()
    files = harness_files(completed_run(small(lm_eval=section)))
    assert [Path(file).name for file in files] == ["choice.yaml", "rolling.yaml", "text.yaml", "word.yaml"]
