"""Tasks: their examples from sources, the prompts that ask them, and scores of labels against Hugging Face."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics.pairwise import euclidean_distances
from transformers import GPT2LMHeadModel

from demix.config.tasks import Task
from demix.data.cluster import Clusterer, Clustering, fit_clusters
from demix.data.examples import SCHEMA, Example, Prompt, check_enough, fitted, prompts, read_examples
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.evaluate import fewshot
from demix.evaluate.classification import Scored, read_scored
from demix.evaluate.fewshot import TaskScoring, score_task, tokens_of
from demix.files import read_parquet, write_json, write_parquet
from demix.model.export import export_hf
from demix.settings import written
from support.cli import refusal, succeeds
from support.errors import refused
from support.mixing import log_mixture, log_weights
from support.tasks import SIZES, read_task, write_lines, write_prompted
from support.tokens import TRAINING


def test_a_longer_text_keeps_what_fits(tokens: Path) -> None:
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    long = "Zoë said – “naïve” – " * 60
    for task in (Task(test={"path": "x"}, shots=2), Task(test={"path": "x"})):
        (one,) = fitted("t", task, [Example("test", long, ("law", "other news"), 0)], tokenizer, 96)
        assert one.shortened
        assert long.startswith(one.text)
        size = len(tokenizer.encode(one.text)) + len(tokenizer.encode(" other news"))
        share = 96 if not task.shots else 32 - 2 - len(tokenizer.encode("\n\n"))
        assert share - 6 <= size <= share
    (same,) = fitted("t", Task(test={"path": "x"}), [Example("test", "Short.", ("a", "b"), 0)], tokenizer, 96)
    assert (same.text, same.shortened) == ("Short.", False)
    with refused("tasks.t.shots"):
        list(fitted("t", Task(test={"path": "x"}, shots=8), [Example("test", long, ("a", "b"), 0)], tokenizer, 96))
    with refused("tasks.t.tokens"):
        list(
            fitted("t", Task(test={"path": "x"}, tokens=4), [Example("test", long, ("a news", "b"), 0)], tokenizer, 96)
        )


def test_prompts_hold_demonstrations_others_and_permutations() -> None:
    task = Task(test={"path": "x"}, template="{text} Topic: {label}", shots=3, seeds=(1, 2), calibrated=True)
    examples = [Example("test", f"t{n}", ("a", "b"), n % 2) for n in range(4)]
    examples += [Example("train", f"d{n}", ("a", "b"), n % 2) for n in range(12)]
    asked = list(prompts(task, examples))
    drawn: dict[int, list[str]] = {}
    for seed in (1, 2):
        some = [prompt for prompt in asked if prompt.seed == seed]
        tests = [prompt for prompt in some if prompt.split == "test"]
        *before, last = tests[0].context.split("\n\n")
        drawn[seed] = before
        assert last == "t0 Topic:"
        assert tests[0].choices == (" a", " b")
        assert [prompt.context.split("\n\n")[:-1] for prompt in tests] == [before] * 4
        others = [prompt for prompt in some if prompt.split == "validation"]
        judged = [prompt.context.split("\n\n")[-1].split()[0] for prompt in others]
        assert len({*judged}) == 8
        assert not {*judged} & {line.split()[0] for line in before}
        turned = [prompt for prompt in some if prompt.split == "permutation"]
        assert len(turned) == 3
        for number, prompt in enumerate(turned):
            *rest, last = prompt.context.split("\n\n")
            assert rest == [*before[number + 1 :], *before[:number]]
            assert before[number] == last + prompt.choices[prompt.answer]
        cues = {prompt.example: prompt for prompt in some if prompt.split == "cue"}
        assert {prompt.cue for prompt in tests} == {0}, "one cue serves all"
        assert cues[0].context == "\n\n".join([*before, " Topic:"])
        assert cues[turned[0].cue].context == "\n\n".join([*before[1:], " Topic:"])
        for line in before:
            text, answer = line.split(" Topic: ")
            assert answer == "ab"[int(text[1:]) % 2]
    assert drawn[1] != drawn[2]
    assert list(prompts(task, [*examples[::-1]][8:] + examples[4:12])) != [], "any order is read"


def test_examples_of_one_file_are_tested_or_drawn_from(tokens: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": ("law", "code")[n % 2]} for n in range(40)]
    path = write_lines(tmp_path / "topics.jsonl", rows)
    found = read_task(tokens, tmp_path, test={"path": path}, shots=2, seeds=[1, 2], examples=None)
    kept = {split: {one.text for one in found if one.split == split} for split in ("test", "train")}
    assert (len(kept["test"]), len(kept["train"])) == (20, 20)
    assert not kept["test"] & kept["train"]
    labels = {row["text"]: row["label"] for row in rows}
    assert all(one.choices == ("code", "law") and one.choices[one.answer] == labels[one.text] for one in found)
    # The order of the file is none of the examples'.
    write_lines(tmp_path / "topics.jsonl", rows[::-1])
    assert read_task(tokens, tmp_path, test={"path": path}, shots=2, seeds=[1, 2], examples=None) == found
    assert (
        len([one for one in read_task(tokens, tmp_path, test={"path": path}, examples=7) if one.split == "test"]) == 7
    )
    with refused("tasks.topics"):
        read_task(tokens, tmp_path, test={"path": path}, shots=2, seeds=[1, 2, 3, 4, 5])


def test_examples_of_two_sources_have_fields_words_and_splits(tokens: Path, tmp_path: Path) -> None:
    sources = {}
    for split, count in (("train", 30), ("test", 9)):
        rows = [{"title": f"{split} {n}", "content": "is so", "label": n % 2} for n in range(count)]
        sources[split] = {"path": write_lines(tmp_path / f"{split}.jsonl", rows)}
    asked = {"text": ["title", "content"], "labels": {"0": "bad", "1": "good"}, "shots": 2}
    found = read_task(tokens, tmp_path, **sources, **asked)
    kept = {split: [one for one in found if one.split == split] for split in ("test", "train")}
    assert {split: len(some) for split, some in kept.items()} == {"test": 9, "train": 30}
    for one in found:
        title, content = one.text.split("\n")
        assert (title.split()[0], content) == (one.split, "is so")
        assert one.choices == ("bad", "good")
        assert one.answer == int(title.split()[1]) % 2


@pytest.mark.parametrize(
    ("row", "given", "subject"),
    [
        ({"label": "law"}, {"label": "topic"}, "topics: x.jsonl#"),
        ({"label": "law"}, {"labels": {"code": "code"}}, "topics: x.jsonl#"),
        ({"label": "law"}, {"text": ["text", "contnt"]}, "tasks.topics.text"),
        ({"label": "law"}, {}, "tasks.topics"),
        ({"label": "law"}, {"labels": {"law": "law", "code": "code"}}, "tasks.topics"),
        ({"label": {"b": 1}}, {}, "topics: x.jsonl#"),
    ],
)
def test_records_that_are_no_examples_are_refused(
    row: dict[str, object], given: dict[str, object], subject: str, tokens: Path, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"text": f"text {n}"} | row for n in range(30)])
    with pytest.raises(DemixError) as error:
        read_task(tokens, tmp_path, test={"path": path}, **given)
    assert subject in error.value.subject


def test_examples_that_are_left_out_are_counted_and_end_the_job(
    tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": f"text {n}", "label": ("law", "code")[n % 2]} for n in range(198)]
    lines = [json.dumps(row).encode() for row in rows] + [json.dumps(rows[0]).encode()]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join([*lines, b'{"text": " ", "label": "law"}']))
    assert len(read_task(tokens, tmp_path, test={"path": str(path)}, examples=None)) == 198
    assert "left out" in caplog.text
    latin = '{"text": "éééééééééé %d", "label": "code"}'
    path.write_bytes(b"\n".join([*lines, *((latin % n).encode("latin-1") for n in range(50))]))
    with refused("tasks.topics"):
        read_task(tokens, tmp_path, test={"path": str(path)})
    path = write_lines(tmp_path / "y.jsonl", [{"text": f"text {n}", "label": f"id {n}"} for n in range(1001)])
    with refused("tasks.topics"):
        read_task(tokens, tmp_path, test={"path": path})


def test_labels_are_all_of_a_source_whatever_is_drawn(tokens: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": "rare" if n == 7 else ("law", "code")[n % 2]} for n in range(900)]
    found = read_task(tokens, tmp_path, test={"path": write_lines(tmp_path / "x.jsonl", rows)}, examples=10)
    assert {one.choices for one in found} == {("code", "law", "rare")}


def test_no_tested_text_is_a_demonstration(tokens: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": ("law", "code")[n % 2]} for n in range(60)]
    path = write_lines(tmp_path / "x.jsonl", rows)
    source = {"path": path}
    found = read_task(tokens, tmp_path, test={"path": path}, train=source, shots=2, examples=20)
    parts = [{one.text for one in found if one.split == split} for split in ("test", "train")]
    assert [len(some) for some in parts] == [20, 40]
    assert not parts[0] & parts[1]


def ran(*words: object, given: dict[str, object], **options: object) -> None:
    """Do what `demix` with these words, settings and options does."""
    named = [word for name, value in options.items() for word in (f"--{name}", value)]
    succeeds(*words, "--settings", json.dumps(given), *named)


def test_a_run_is_classified_as_by_hand(tokens: Path, tmp_path: Path) -> None:
    """The three commands, and cluster routing by scikit-learn's distances and a loop."""
    encoder = tokens / "tokenizer.json"
    rows = [
        {"text": text[:200], "label": domain}
        for domain in TRAINING
        for text in read_parquet(tokens / "corpus" / domain / "test.parquet").column("text").to_pylist()[:12]
    ]
    task = {
        "test": {"path": write_lines(tmp_path / "x.jsonl", rows)},
        "template": "{text}\nThis is {label}",
        "tokens": 60,
    }
    tasks = {"plain": task, "bare": task | {"calibrated": True}}
    models = {"demix": TRAINING, "dense": ("dense",)}
    train = [tokens / "corpus" / domain / "train.parquet" for domain in TRAINING]
    fit_clusters(train, Clustering(method="metadata", dimensions=6), tmp_path / "clusters" / "by_domain")
    examples = [tmp_path / "examples" / f"{name}.parquet" for name in tasks]
    for (name, one), output in zip(tasks.items(), examples, strict=True):
        ran("examples", name, given=one | {"length": SIZES.context, "seed": 1}, tokenizer=encoder, output=output)
    for model, experts in models.items():
        folder = tmp_path / "models" / model
        write_prompted(folder, experts, Tokenizer.load(encoder))
        for one, path in zip(tasks.values(), examples, strict=True):
            about = {
                "experts": ",".join(experts),
                "tokenizer": encoder,
                "output": tmp_path / "tasks" / model / path.name,
            }
            ran("fewshot", folder, path, given=one | {"threads": 1}, **about)
    demix_model = {"model": "demix", "folder": "demix", "seed": 1, "mixes": True, "routing": "by_domain"}
    given = {"tasks": tasks, "models": [demix_model, {"model": "dense", "folder": "dense", "seed": 1, "mixes": False}]}
    given |= {"weights": ["history", "tempered", "cluster"], "temperature": 0.3, "top_k": [1, 2]}
    ran("classify", tmp_path, given=given, output=tmp_path / "tasks.parquet", weights=tmp_path / "weights.parquet")
    rows = pd.read_parquet(tmp_path / "tasks.parquet")
    weighted = pd.read_parquet(tmp_path / "weights.parquet")
    assert {*rows["task"]} == {*tasks}
    assert (rows.query("model == 'dense'")["routing"] == "dense").all()
    clusterer = Clusterer.open(tmp_path / "clusters" / "by_domain")
    order = [clusterer.names.index(name) for name in TRAINING]
    for name, path in zip(tasks, examples, strict=True):
        asked = list(prompts(Task(**tasks[name]), read_examples(path)))
        experts, scored = read_scored(tmp_path / "tasks" / "demix" / path.name, path, asked)
        assert experts == TRAINING
        cues = {one.prompt.example: one for one in scored if one.prompt.split == "cue"}
        tests = [one for one in scored if one.prompt.split == "test"]
        hits, weights = 0, []
        for one in tests:
            point = clusterer.embedding.points([one.prompt.context])
            squared = euclidean_distances(point, clusterer.centres, squared=True)[0, order]
            log_g = log_weights(-squared / 0.3, 0)
            weights.append(np.exp(log_g))
            totals = np.array([log_mixture(log_g, label).sum() for label in one.labels])
            if name == "bare":
                totals -= [log_mixture(log_g, label).sum() for label in cues[one.prompt.cue].labels]
            hits += int(np.argmax(totals)) == one.prompt.answer
        row = rows.query("task == @name and routing == 'cluster' and top_k.isna()").iloc[0]
        assert row["accuracy"] == hits / len(tests)
        assert row["chance"] == max(np.bincount([one.prompt.answer for one in tests])) / len(tests)
        assert (row["clustering"], row["temperature"]) == ("by_domain", 0.3)
        used = weighted.query("task == @name and routing == 'cluster' and model == 'demix'").set_index("expert")
        assert used.loc[list(TRAINING), "weight"].to_numpy() == pytest.approx(np.mean(weights, axis=0).ravel())
    # A clusterer that was fitted again has shards of other tokens than those that the experts learned from.
    write_json(tmp_path / "clusters" / "by_domain" / "shards" / TRAINING[0] / "train.json", {"sha256": "0" * 64})
    again = tmp_path / "again.parquet"
    refusal("classify", tmp_path, "--settings", json.dumps(given), "--output", again, of=f"experts/{TRAINING[0]}.json")
    assert not again.exists()


def test_few_examples_besides_tests_are_refused_or_judge_no_expert(tokens: Path, tmp_path: Path) -> None:
    rows = [Example("test", "t", ("a", "b"), 0), *[Example("train", f"d{n}", ("a", "b"), 1) for n in range(7)]]
    with refused("tasks.x"):
        check_enough("x", Task(test={"path": "x"}, shots=8), rows)
    check_enough("x", Task(test={"path": "x"}, shots=7), rows)
    assert "validation" not in {prompt.split for prompt in prompts(Task(test={"path": "x"}), rows)}


EXPERTS = ("law", "news", "code")
WORDS = ("law", "a story in the news", "naïve code")
TASK = Task(test={"path": "x.jsonl"}, template="{text} It is {label}", shots=2, seeds=(1, 2), calibrated=True)
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
    """A model, examples of a task, and its scores."""
    folder = tmp_path_factory.mktemp("fewshot")
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    write_prompted(folder / "demix", EXPERTS, tokenizer)
    made = [Example("train" if number < 10 else "test", text, WORDS, number % 3) for number, text in enumerate(TEXTS)]
    write_examples_of(made, folder / "examples" / "topics.parquet")
    scored(folder, "demix", tokens)
    return folder


def write_examples_of(made: list[Example], path: Path) -> None:
    fields = ("split", "text", "choices", "answer", "shortened")
    write_parquet(SCHEMA.empty_table().from_pylist([{f: getattr(e, f) for f in fields} for e in made], SCHEMA), path)


def scored(folder: Path, model: str, tokens: Path, task: Task = TASK, experts: tuple[str, ...] = EXPERTS) -> None:
    score_task(
        folder / model,
        experts,
        folder / "examples" / "topics.parquet",
        tokens / "tokenizer.json",
        TaskScoring(**written(task), threads=1),
        folder / "tasks" / model / "topics.parquet",
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
    scores_of = fewshot.continuation_scores

    def overflowing(*arguments: object) -> list[np.ndarray]:
        context, *labels = scores_of(*arguments)
        labels[1][1] = np.nan
        return [context, *labels]

    monkeypatch.setattr(fewshot, "continuation_scores", overflowing)
    for name in ("demix", "examples"):
        (tmp_path / name).symlink_to(place / name)
    with refused("expert news"):
        scored(tmp_path, "demix", tokens)
