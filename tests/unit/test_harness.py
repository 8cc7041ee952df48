"""`demix lm-eval`: local tasks, offline, against our own scoring and against the harness's own Hugging Face model."""

import json
import math
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.evaluate.mix.mixtures import mix
from demix.model.checkpoint import load_model
from demix.model.scoring import trunk_log_probabilities
from support.cli import demix, said
from support.decoding import LENGTH, in_blocks, write_run
from support.models import write_trunks

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")

PASSAGE = "And it came to pass in those days, that he went out into a mountain to pray, and continued all night."
DOCUMENTS = [
    {"text": "The house divided.", "choices": [" The house", " a mountain", " the committee"], "gold": 0},
    {"text": PASSAGE, "choices": [" And he called", " the committee", "."], "gold": 1},
    {"text": "Zoë’s naïve café – 東京", "choices": [" is open", " 東京", " the the"], "gold": 2},
    {"text": "", "choices": ["The law", "shall", "a"], "gold": 0},
]
TASKS = {
    "choice": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"},
    "word": {"output_type": "loglikelihood", "doc_to_target": "{{choices[gold]}}"},
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    "text": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["zz", "\n"], "max_gen_toks": 7, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}
TASKS["word"]["metric_list"] = [{"metric": "perplexity"}, {"metric": "acc"}]
TASKS["rolling"]["metric_list"] = [{"metric": "bits_per_byte"}]


@pytest.fixture(scope="module")
def place(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a model, and a folder `tasks` with a task of each kind over one local file."""
    folder = tmp_path_factory.mktemp("harness")
    write_run(folder, tokens)
    (folder / "tasks").mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    files = {"test": str(folder / "data.jsonl")}
    for name, task in TASKS.items():
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        text = yaml.safe_dump(
            common | {"doc_to_text": "{{text}}", "target_delimiter": "", "fewshot_split": "test"} | task
        )
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is asked of the network, and of the machine neither what packages it has: that takes seconds."""
    import datasets
    import lm_eval.evaluator

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError(f"asks for {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)


def evaluated(place: Path, tmp_path: Path, *options: object, model: Path | None = None) -> dict[str, list[dict]]:
    """The answers to each document by task, as `demix lm-eval` writes them."""
    output = tmp_path / "out.json"
    named = ("--include-path", place / "tasks", "--output", output, "--log-samples", *options)
    done = demix("lm-eval", model or place / "models" / "demix", "--tasks", ",".join(TASKS), *named)
    assert done.exit_code == 0, (done.exception, done.output)
    assert done.stdout.startswith("| Tasks")
    assert set(json.loads(output.read_text())["results"]) == set(TASKS)
    return {name: answers(tmp_path / f"out.{name}.jsonl") for name in TASKS}


def answers(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    sequence = np.zeros(-(-len(ids) // LENGTH) * LENGTH + 1, np.int64)
    sequence[: len(ids) + 1] = [before, *ids]
    mask = np.arange(len(sequence) - 1) < len(ids)
    shape = (-1, LENGTH)
    blocks = sequence[:-1].reshape(shape), sequence[1:].reshape(shape), mask.reshape(shape)
    table, mask = in_blocks(trunk_log_probabilities([load_model(model)], *blocks))
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
    from lm_eval.tasks import TaskManager

    model = place / "models" / "demix"
    assert demix("export", model, "--expert", "news", "--output", tmp_path / "hf").exit_code == 0
    manager = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
    for shots in (0, 2):
        ours, theirs = evaluated(place, tmp_path, "--experts", "news", "--num-fewshot", shots), {}
        # With a token before contexts, the harness scores that token as part of a text, too.
        for tasks, begins in ((["choice", "word", "text"], True), (["rolling"], False)):
            theirs |= simple_evaluate(
                "hf", model_args={"pretrained": str(tmp_path / "hf"), "add_bos_token": begins, "dtype": "float32"},
                tasks=tasks, task_manager=manager, num_fewshot=shots, device="cpu", fewshot_random_seed=1234,
                batch_size=1,
            )["samples"]  # fmt: skip
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
