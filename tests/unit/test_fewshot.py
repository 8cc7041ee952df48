"""Scores of labels, against Hugging Face on what `demix export` writes."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import GPT2LMHeadModel

from demix.config.tasks import Task
from demix.data.examples import SCHEMA, Example, Prompt, prompts, read_examples
from demix.data.tokenizer import Tokenizer
from demix.evaluate import fewshot
from demix.evaluate.fewshot import TaskScoring, score_tasks, tokens_of
from demix.evaluate.task_tables import Scored, read_scored
from demix.files import write_parquet
from demix.model.export import export_hf
from support.errors import refused
from support.models import write_trunks
from support.tasks import SIZES, write_prompted

EXPERTS = ("law", "news", "code")
WORDS = ("law", "a story in the news", "naïve code")
TASK = Task(path="x.jsonl", template="{text} It is {label}", shots=2, seeds=(1, 2), calibrated=True)
TEXTS = (
    "The house divided.",
    "Zoë’s café – 東京",
    "In the beginning was the word.",
    "if x: return y",
    "Permission is hereby granted",
    "The minister said",
    "for i in range(3):",
    "The court held",
    "Item 4",
    "A speech was made",
    "Line one\nline two",
    "He was not there.",
    "No warranty",
    "Section 2 applies",
)


@pytest.fixture(scope="module")
def place(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the same with whole models, examples of a task, and its scores under both."""
    folder = tmp_path_factory.mktemp("fewshot")
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    write_prompted(folder / "demix", EXPERTS, tokenizer)
    write_trunks(folder / "demix", folder / "btm")
    made = [Example("train" if number < 10 else "test", text, WORDS, number % 3) for number, text in enumerate(TEXTS)]
    write_examples_of(made, folder / "examples" / "topics.parquet")
    for model in ("demix", "btm"):
        scored(folder, model, tokens)
    return folder


def write_examples_of(made: list[Example], path: Path) -> None:
    fields = ("split", "id", "text", "choices", "answer", "domain", "shortened")
    write_parquet(SCHEMA.empty_table().from_pylist([{f: getattr(e, f) for f in fields} for e in made], SCHEMA), path)


def scored(folder: Path, model: str, tokens: Path, task: Task = TASK, experts: tuple[str, ...] = EXPERTS) -> None:
    score_tasks(
        folder / model,
        experts,
        [folder / "examples" / "topics.parquet"],
        tokens / "tokenizer.json",
        TaskScoring(tasks={"topics": task}, threads=1),
        folder / "tasks" / model,
    )


def read(folder: Path, model: str) -> tuple[list[Prompt], list[Scored]]:
    examples = folder / "examples" / "topics.parquet"
    asked = list(prompts(TASK, read_examples(examples)))
    experts, found = read_scored(folder / "tasks" / model / "topics.parquet", examples, asked)
    assert experts == EXPERTS
    return asked, found


def test_every_token_has_the_log_probability_of_hugging_face(place: Path, tokens: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    asked, found = read(place, "demix")
    assert {prompt.split for prompt in asked} == {"test", "validation", "permutation", "cue"}
    for column, expert in enumerate(EXPERTS):
        export_hf(place / "demix", expert, tokens / "tokenizer.json", tmp_path / expert)
        gpt = GPT2LMHeadModel.from_pretrained(tmp_path / expert).eval()
        for one in found[:: 7 if column else 1]:
            context = tokenizer.encode(one.prompt.context).tolist()
            for label, choice in zip(one.labels, one.prompt.choices, strict=True):
                ids = torch.tensor([[tokenizer.end_of_text, *context, *tokenizer.encode(choice).tolist()]])
                with torch.no_grad():
                    logs = gpt(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[0, :, 0].numpy()
                assert label[:, column] == pytest.approx(logs[len(context) :], abs=1e-4)
                assert one.context[:, column] == pytest.approx(logs[: len(context)], abs=1e-4)


def test_experts_that_are_whole_models_score_alike(place: Path) -> None:
    for one, other in zip(*(read(place, model)[1] for model in ("demix", "btm")), strict=True):
        assert one.context == pytest.approx(other.context, abs=1e-5)
        for label, same in zip(one.labels, other.labels, strict=True):
            assert label == pytest.approx(same, abs=1e-5)


def test_a_table_holds_one_row_per_token_of_context_and_label(place: Path, tokens: Path) -> None:
    table = pq.read_table(place / "tasks" / "demix" / "topics.parquet")
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    asked, _ = read(place, "demix")
    expected = [
        (prompt.split, prompt.seed, prompt.example, label, token)
        for prompt in asked
        for label, text in enumerate([prompt.context, *prompt.choices], -1)
        for token in tokenizer.encode(text).tolist()
    ]
    columns = [table.column(name).to_pylist() for name in ("split", "seed", "example", "label", "token")]
    assert list(zip(*columns, strict=True)) == expected
    assert {len(row) for row in table.column("log_probability").to_pylist()} == {3}


def test_scores_of_other_examples_are_refused(place: Path, tmp_path: Path) -> None:
    made = read_examples(place / "examples" / "topics.parquet")
    write_examples_of(made[::-1], tmp_path / "topics.parquet")
    with refused("topics.parquet"):
        read_scored(place / "tasks" / "demix" / "topics.parquet", tmp_path / "topics.parquet", [])
    asked = list(prompts(TASK, made))
    unknown = Prompt("test", 9, 0, "x", ("a",))
    with refused("topics.parquet"):
        read_scored(
            place / "tasks" / "demix" / "topics.parquet", place / "examples" / "topics.parquet", [*asked, unknown]
        )


def test_context_and_longest_label_fit_together_or_are_refused(tokens: Path) -> None:
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    prompt = Prompt("test", 1, 0, "word " * 9, (" law", " code and more"))
    length = len(tokenizer.encode(prompt.context)) + len(tokenizer.encode(prompt.choices[1]))
    context, labels = tokens_of("topics", prompt, tokenizer, length)
    assert len(context) + len(labels[1]) == length
    for one, most in ((prompt, length - 1), (Prompt("test", 1, 0, "word", (" law", "")), SIZES.context)):
        with refused("tasks.topics"):
            tokens_of("topics", one, tokenizer, most)


def test_an_expert_without_finite_scores_is_refused(
    place: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label_scores = fewshot.label_scores

    def overflowing(*arguments: object) -> tuple[np.ndarray, list[np.ndarray]]:
        context, labels = label_scores(*arguments)
        labels[1][1] = np.nan
        return context, labels

    monkeypatch.setattr(fewshot, "label_scores", overflowing)
    for name in ("demix", "examples"):
        (tmp_path / name).symlink_to(place / name)
    with refused("expert news"):
        scored(tmp_path, "demix", tokens)
