"""`demix lm-eval`: local tasks, offline, against our own scoring and against the harness's own Hugging Face model."""

import importlib.util
import json
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from demix.config.architecture import architecture_from
from demix.data.tokenizer import Tokenizer
from demix.mix.mixtures import mix
from demix.model.checkpoint import load_model
from support.cli import demix, refusal
from support.decoding import LENGTH, in_blocks, scored_in_blocks, write_run
from support.harness_tasks import TASKS, ran_offline, write_tasks
from support.models import THREE, model_of, save_model

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402


@pytest.fixture(scope="module")
def place(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a model, and a folder `tasks` with a task of each kind over one local file."""
    folder = tmp_path_factory.mktemp("harness")
    write_run(folder, tokens)
    write_tasks(folder)
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
    tmp_path.mkdir(exist_ok=True)
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


@pytest.mark.parametrize("decoder", ["demix", "llama"])
def test_an_exported_expert_is_what_the_harness_makes_of_it(place: Path, tmp_path: Path, decoder: str) -> None:
    """All kinds of requests, with and without demonstrations; contexts of more than a block are cut alike."""
    from lm_eval import simple_evaluate

    model = place / "models" / decoder
    if decoder == "llama":
        encoder = Tokenizer.load(place / "tokenizer.json")
        llama = architecture_from({"preset": "llama", "layers": 2, "width": 32, "heads": 4, "context": LENGTH})
        made = model_of(THREE, torch.float32, architecture=llama, vocab_size=encoder.vocab_size)
        save_model(made, model, encoder.sha256)
    assert demix("export", model, "--expert", "news", "--output", tmp_path / "hf").exit_code == 0
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


def test_a_domain_token_model_answers_after_the_token_of_a_domain(place: Path, tmp_path: Path) -> None:
    encoder, model = Tokenizer.load(place / "tokenizer.json"), place / "models" / "domain_token"
    gpt = model_of(dtype=torch.float32, vocab_size=encoder.vocab_size, domain_tokens=THREE)
    save_model(gpt, model, encoder.sha256, "domain_token")
    refusal("lm-eval", model, "--tasks", "word", "--include-path", place / "tasks", of="--experts")
    answered = evaluated(place, tmp_path, "--experts", "code", model=model)
    for sample in answered["rolling"]:
        if ids := encoder.encode(sample["doc"]["text"]).tolist():
            expected = scored_in_blocks(gpt, [encoder.end_of_text, *ids], ("code",))[0].sum()
            assert numbers(sample) == [pytest.approx(expected, rel=1e-6)]


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
    done = demix("lm-eval", place / "models" / "demix", "--tasks", asked, *options)
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "out.json").read_text())
    assert {name: number["effective"] for name, number in results["n-samples"].items()} == dict.fromkeys(
        ("word", "other", "choice"), 2
    )
    assert (results["model_source"], results["model_name"]) == ("demix", str(place / "models" / "demix"))
    assert results["config"]["weights"] == {"rule": "tempered", "beta": 0.1, "gamma": 0.99}
    assert results["config"]["prior"] == dict.fromkeys(("code", "law", "news"), pytest.approx(1 / 3))
    assert "samples" not in results
    assert not list(tmp_path.glob("*.jsonl"))
    assert get_model("demix").__name__ == "DemixLM"


MISTAKES = {
    "--include-path nowhere": "--include-path nowhere",
    "--output {place}": "--output {place}",
    "--output nowhere/x.json": "--output nowhere/x.json",
    "--log-samples": "--log-samples",
    "--tasks wrod": "--tasks wrod",
    "--tasks nowhere.yaml": "--tasks nowhere.yaml",
    "--weights best": "--weights best",
    "--weights cluster": "{place}/models/demix",
    "--prior updating": "--prior updating",
    "--prior law=-1": "prior of law",
    "--experts law,law": "--experts",
    "--experts lawe": "experts/lawe.json",
    "--device tpu": "--device tpu",
    "--tokenizer nowhere.json": "nowhere.json",
    "--gen-kwargs num_beams=4": "generation_kwargs num_beams",
    "--gen-kwargs max_gen_toks=0": "generation_kwargs max_gen_toks",
    "--gen-kwargs temperature=-1,do_sample=True": "generation_kwargs temperature",
    "--tasks broken": "--tasks broken",
    "--tasks long": "continuation",
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


def test_a_local_task_asks_nothing_of_the_network(place: Path, tmp_path: Path) -> None:
    named = ("--tasks", "text", "--include-path", place / "tasks", "--limit", 1)
    done = ran_offline(tmp_path, "lm-eval", place / "models" / "demix", *named)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("|Tasks")
