"""The examples of tasks: made of held-out documents or read from sources, and the prompts that ask them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from sklearn.metrics.pairwise import euclidean_distances

from demix.config.tasks import ExamplesRecipe, Task
from demix.data.cluster import Clusterer, Clustering, fit_clusters
from demix.data.examples import Example, fitted, prompts, read_examples, refuse_few, write_examples
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.evaluate.task_tables import read_scored
from demix.files import read_parquet, write_json, write_parquet
from demix.run.check import completed_run, load_run
from support.cli import demix
from support.mixing import log_mixture, log_weights
from support.tasks import SIZES, read_task, write_lines, write_prompted
from support.tokens import TRAINING

REPOSITORY = Path(__file__).parents[2]
TASKS: dict[str, dict[str, Any]] = {
    "domains": {"made": "domains", "examples": 21, "template": "{text}\nThis is {label}", "tokens": 60},
    "halves": {"made": "continuations", "examples": 20, "choice_tokens": 8, "choices": 3, "calibrated": True},
    "mixed": {"made": "continuations", "examples": 20, "choice_tokens": 8, "others": "all"},
}


@pytest.fixture(scope="module")
def tokens(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer, and the corpora cut into documents of 60 words; each third is a piece of the one before."""
    folder = tmp_path_factory.mktemp("cut")
    (folder / "tokenizer.json").symlink_to(tokens / "tokenizer.json")
    for path in tokens.glob("corpus/*/*.parquet"):
        words = [text.split(" ") for text in pq.read_table(path).column("text").to_pylist()]
        cut = [" ".join(some[start : start + 60]) for some in words for start in range(0, len(some), 60)]
        cut = list(dict.fromkeys(cut))
        origins = [str(number - (number % 3 == 2)) for number in range(len(cut))]
        write_parquet(pa.table({"id": cut, "text": cut, "origin": origins}), folder / path.relative_to(tokens))
    return folder


def documents(tokens: Path) -> dict[str, dict[str, Path]]:
    return {
        split: {domain: tokens / "corpus" / domain / f"{split}.parquet" for domain in TRAINING}
        for split in ("test", "dev")
    }


def made(tokens: Path, folder: Path, name: str, **more: object) -> list[Example]:
    task = ExamplesRecipe(**TASKS[name] | more, length=SIZES.context, seed=1)
    write_examples(name, task, documents(tokens), tokens / "tokenizer.json", folder / f"{name}.parquet")
    return read_examples(folder / f"{name}.parquet")


def squeezed(text: str) -> str:
    return " ".join(text.split())


def texts(tokens: Path, split: str, domain: str) -> list[str]:
    rows = read_parquet(tokens / "corpus" / domain / f"{split}.parquet").column("text").to_pylist()
    return [squeezed(text) for text in rows]


@pytest.mark.parametrize("name", TASKS)
def test_made_examples_are_of_held_out_documents_and_never_of_training_text(
    name: str, tokens: Path, tmp_path: Path
) -> None:
    examples = made(tokens, tmp_path, name)
    assert {one.split for one in examples} == {"test", "train"}
    training = [text for domain in TRAINING for text in texts(tokens, "train", domain)]
    seen: dict[str, int] = {}
    for one in examples:
        own = texts(tokens, "test" if one.split == "test" else "dev", one.domain)
        # Text and right choice stand side by side in one document.
        choice = one.choices[one.answer] if name != "domains" else ""
        whole = squeezed(one.text + choice)
        (place,) = [number for number, text in enumerate(own) if whole in text][:1]
        assert not any(whole in text for text in training)
        origin = f"{one.split} {one.domain} {place - (place % 3 == 2)}"
        seen[origin] = seen.get(origin, 0) + 1
    assert set(seen.values()) == {1}, "one example of a document"
    assert examples == made(tokens, tmp_path / "again", name)


def test_examples_of_domains_ask_for_each_alike(tokens: Path, tmp_path: Path) -> None:
    examples = [one for one in made(tokens, tmp_path, "domains") if one.split == "test"]
    assert [sum(one.domain == domain for one in examples) for domain in TRAINING] == [7, 7, 7]
    assert {one.choices for one in examples} == {TRAINING}
    assert all(TRAINING[one.answer] == one.domain for one in examples)
    named = made(tokens, tmp_path, "domains", labels={"scripture": "Lord"})
    assert {one.choices for one in named} == {("parliament", "Lord", "licenses")}
    with pytest.raises(DemixError, match=r"tasks\.domains\.labels: gives two labels the word licenses"):
        made(tokens, tmp_path, "domains", labels={"scripture": "licenses"})


@pytest.mark.parametrize("name", ["halves", "mixed"])
def test_choices_are_equally_long_and_the_wrong_ones_are_real(name: str, tokens: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    examples = [one for one in made(tokens, tmp_path, name) if one.split == "test"]
    assert len(examples) == 20
    foreign = 0
    for one in examples:
        assert len({*one.choices}) == len(one.choices) == (3 if name == "halves" else 4)
        assert {len(tokenizer.encode(choice)) for choice in one.choices} == {8}
        assert all(choice[0].isspace() for choice in one.choices)
        for choice in one.choices:
            of = [d for d in TRAINING if any(squeezed(choice) in text for text in texts(tokens, "test", d))]
            foreign += one.domain not in of
    assert (foreign > 0) == (name == "mixed")
    assert len({one.answer for one in examples}) > 1, "the right choice has no place of its own"


def test_a_longer_text_keeps_what_fits(tokens: Path) -> None:
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    long = "Zoë said – “naïve” – " * 60
    for task, part in (
        (Task(path="x", shots=2), "start"),
        (Task(path="x", keep="end"), "end"),
        (Task(path="x"), "start"),
    ):
        (one,) = fitted("t", task, [Example("test", long, ("law", "other news"), 0)], tokenizer, 96)
        assert one.shortened
        assert (long.startswith if part == "start" else long.rstrip().endswith)(one.text)
        size = len(tokenizer.encode(one.text)) + len(tokenizer.encode(" other news"))
        share = 96 if not task.shots else 32 - 2 - len(tokenizer.encode("\n\n"))
        assert share - 6 <= size <= share
    (same,) = fitted("t", Task(path="x"), [Example("test", "Short.", ("a", "b"), 0)], tokenizer, 96)
    assert (same.text, same.shortened) == ("Short.", False)
    with pytest.raises(DemixError, match=r"tasks\.t\.shots: leave \d tokens for a text.*; lower shots"):
        list(fitted("t", Task(path="x", shots=8), [Example("test", long, ("a", "b"), 0)], tokenizer, 96))
    with pytest.raises(DemixError, match=r"tasks\.t\.tokens: leave 0 tokens"):
        list(fitted("t", Task(path="x", tokens=4), [Example("test", long, ("a news", "b"), 0)], tokenizer, 96))


def test_prompts_hold_demonstrations_others_and_permutations() -> None:
    task = Task(path="x", template="{text} Topic: {label}", shots=3, seeds=(1, 2), calibrated=True, separator="\n")
    examples = [Example("test", f"t{n}", ("a", "b"), n % 2) for n in range(4)]
    examples += [Example("train", f"d{n}", ("a", "b"), n % 2) for n in range(12)]
    asked = list(prompts(task, examples))
    drawn: dict[int, list[str]] = {}
    for seed in (1, 2):
        some = [prompt for prompt in asked if prompt.seed == seed]
        tests = [prompt for prompt in some if prompt.split == "test"]
        *before, last = tests[0].context.split("\n")
        drawn[seed] = before
        assert last == "t0 Topic:"
        assert tests[0].choices == (" a", " b")
        assert [prompt.context.split("\n")[:-1] for prompt in tests] == [before] * 4
        others = [prompt for prompt in some if prompt.split == "validation"]
        judged = [prompt.context.split("\n")[-1].split()[0] for prompt in others]
        assert len({*judged}) == 8
        assert not {*judged} & {line.split()[0] for line in before}
        turned = [prompt for prompt in some if prompt.split == "permutation"]
        assert len(turned) == 3
        for number, prompt in enumerate(turned):
            *rest, last = prompt.context.split("\n")
            assert rest == [*before[number + 1 :], *before[:number]]
            assert before[number] == last + prompt.choices[prompt.answer]
        cues = {prompt.example: prompt for prompt in some if prompt.split == "cue"}
        assert {prompt.cue for prompt in tests} == {0}, "one cue serves all"
        assert cues[0].context == "\n".join([*before, " Topic:"])
        assert cues[turned[0].cue].context == "\n".join([*before[1:], " Topic:"])
        for line in before:
            text, answer = line.split(" Topic: ")
            assert answer == "ab"[int(text[1:]) % 2]
    assert drawn[1] != drawn[2]
    assert list(prompts(task, [*examples[::-1]][8:] + examples[4:12])) != [], "any order is read"


def test_without_a_text_white_space_belongs_to_the_label() -> None:
    examples = [Example("test", "One.", ("\ntwo", " three"), 0), *[Example("train", "x", (" a", " b"), 0)] * 8]
    first, cue = (
        next(p for p in prompts(Task(made="continuations", calibrated=True), examples) if p.split == split)
        for split in ("test", "cue")
    )
    assert (first.context, first.choices) == ("One.", ("\ntwo", " three"))
    assert (cue.context, cue.choices) == ("", ("\ntwo", " three"))


def test_examples_of_one_file_are_tested_or_drawn_from(tokens: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": ("law", "code")[n % 2]} for n in range(40)]
    path = write_lines(tmp_path / "topics.jsonl", rows)
    found = read_task(tokens, tmp_path, path=path, shots=2, seeds=[1, 2], examples=None)
    kept = {split: {one.text for one in found if one.split == split} for split in ("test", "train")}
    assert (len(kept["test"]), len(kept["train"])) == (20, 20)
    assert not kept["test"] & kept["train"]
    labels = {row["text"]: row["label"] for row in rows}
    assert all(one.choices == ("code", "law") and one.choices[one.answer] == labels[one.text] for one in found)
    # The order of the file is none of the examples'.
    write_lines(tmp_path / "topics.jsonl", rows[::-1])
    assert read_task(tokens, tmp_path, path=path, shots=2, seeds=[1, 2], examples=None) == found
    assert len([one for one in read_task(tokens, tmp_path, path=path, examples=7) if one.split == "test"]) == 7
    with pytest.raises(DemixError, match=r"tasks\.topics: has no example to test"):
        read_task(tokens, tmp_path, path=path, shots=2, seeds=[1, 2, 3, 4, 5])


def test_examples_of_a_data_set_have_fields_words_and_splits(tokens: Path, tmp_path: Path) -> None:
    """A folder of Parquet files, as the hub has them."""
    for split, count in (("train", 30), ("test", 9), ("validation", 12)):
        rows = {
            "title": [f"{split} {n}" for n in range(count)],
            "content": ["is so"] * count,
            "label": [n % 2 for n in range(count)],
        }
        (tmp_path / "set" / "data").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(rows), tmp_path / "set" / "data" / f"{split}-0.parquet")

    def source(split: str) -> dict[str, object]:
        return {"kind": "hub", "path": str(tmp_path / "set"), "data_files": [f"data/{split}-*.parquet"]}

    found = read_task(
        tokens,
        tmp_path,
        test=source("test"),
        train=source("train"),
        validation=source("validation"),
        text=["title", "content"],
        labels={"0": "bad", "1": "good"},
        shots=2,
    )
    kept = {split: [one for one in found if one.split == split] for split in ("test", "train", "validation")}
    assert {split: len(some) for split, some in kept.items()} == {"test": 9, "train": 30, "validation": 12}
    for one in found:
        title, content = one.text.split("\n")
        assert (title.split()[0], content) == (one.split, "is so")
        assert one.choices == ("bad", "good")
        assert one.answer == int(title.split()[1]) % 2


def test_examples_may_have_choices_of_their_own(tokens: Path, tmp_path: Path) -> None:
    rows = [{"text": f"q {n}", "options": [f"a{n}", f"b{n}"], "label": f"b{n}" if n % 2 else 0} for n in range(12)]
    found = read_task(tokens, tmp_path, path=write_lines(tmp_path / "x.jsonl", rows), choices="options")
    assert all(one.choices == tuple(rows[int(one.text[2:])]["options"]) for one in found)
    assert all(one.answer == int(one.text[2:]) % 2 for one in found)
    rows[3]["options"] = ["same", "same"]
    with pytest.raises(
        DemixError, match=r"topics: x\.jsonl#4: has options .*, no list of two or more different labels"
    ):
        read_task(tokens, tmp_path, path=write_lines(tmp_path / "x.jsonl", rows), choices="options")
    with pytest.raises(DemixError, match=r"topics: x\.jsonl#1: has the label 'law', which is none of 'code'"):
        read_task(
            tokens,
            tmp_path,
            path=write_lines(tmp_path / "x.jsonl", [{"text": "t", "label": "law"}]),
            labels={"code": "code"},
        )


def test_what_a_source_lacks_is_refused(tokens: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "topic": ("law", "code")[n % 2], "kind": "all"} for n in range(30)]
    path = write_lines(tmp_path / "x.jsonl", rows)
    for given, said in (
        ({"label": "label"}, r"topics: x\.jsonl#1: has no field label; mend label or choices"),
        ({"label": "kind"}, "topics: has the one label 'all'; name the field of the right label"),
        ({"label": "topic", "text": ["text", "contnt"]}, r"topics\.text: no example has the field contnt"),
    ):
        with pytest.raises(DemixError, match=said):
            read_task(tokens, tmp_path, path=path, **given)


def test_labels_are_all_of_a_source_whatever_is_drawn(tokens: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": "rare" if n == 7 else ("law", "code")[n % 2]} for n in range(900)]
    found = read_task(tokens, tmp_path, path=write_lines(tmp_path / "x.jsonl", rows), examples=10)
    assert {one.choices for one in found} == {("code", "law", "rare")}


def test_no_tested_text_is_a_demonstration(tokens: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": ("law", "code")[n % 2]} for n in range(60)]
    path = write_lines(tmp_path / "x.jsonl", rows)
    source = {"kind": "files", "path": path}
    found = read_task(tokens, tmp_path, path=path, train=source, validation=source, shots=2, examples=20)
    parts = [{one.text for one in found if one.split == split} for split in ("test", "train", "validation")]
    assert [len(some) for some in parts] == [20, 40, 0]
    assert not parts[0] & parts[1]


def test_examples_without_documents_are_refused(tokens: Path, tmp_path: Path) -> None:
    task = ExamplesRecipe(**TASKS["domains"], length=SIZES.context, seed=1)
    only = {"test": documents(tokens)["test"]}
    with pytest.raises(DemixError, match=r"tasks\.domains: is made of documents of dev, and none are given"):
        write_examples("domains", task, only, tokens / "tokenizer.json", tmp_path / "domains.parquet")
    assert not (tmp_path / "domains.parquet").exists()


WRONG = {
    "no examples": ({}, "tasks.x: has no examples"),
    "two sources": ({"path": "a", "made": "domains"}, "has several of path, made and test"),
    "template": ({"path": "a", "template": "{label}: {text}"}, "template: does not hold {text} once and end with"),
    "seeds": ({"path": "a", "seeds": [1, 2]}, "seeds: has 2 seeds, which draw demonstrations, for 0 shots"),
    "choices": ({"path": "a", "choices": 3}, "choices: is 3; name a field"),
    "one choice": ({"made": "continuations", "choices": 1}, "choices: is 1; give at least 2"),
    "train beside made": (
        {"made": "domains", "train": {"kind": "files", "path": "a"}},
        "train: is given beside made",
    ),
    "foreign label": ({"made": "domains", "labels": {"laws": "law"}}, "labels.laws: is no training domain"),
    "labels of halves": ({"made": "continuations", "labels": {"a": "b"}}, "labels: is given beside made"),
    "equal words": ({"path": "a", "labels": {"a": "b", "c": "b"}}, "labels: gives two labels the word b"),
    "a word that is a domain's": (
        {"made": "domains", "labels": {"parliament": "scripture"}},
        "labels: gives two labels the word scripture",
    ),
    "address": ({"path": "https://me:word@there/x.jsonl"}, "path: is an address; give test: {kind: url"),
    "cue without words": (
        {"path": "a", "shots": 1, "calibrated": True},
        "calibrated: needs words before the label",
    ),
    "moving": (
        {"test": {"kind": "hub", "path": "a/b", "revision": "main", "data_files": ["*.parquet"]}},
        "tasks.x.test.revision: is main, which is no commit",
    ),
    "name": (None, "is not a usable name of a task"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tasks_are_refused_by_key(name: str) -> None:
    task, said = WRONG[name]
    config = yaml.safe_load((REPOSITORY / "config" / "sample.yaml").read_text())
    config["tasks"] = {"x": task} if task is not None else {"X y": {"made": "domains"}}
    with pytest.raises(DemixError) as refused:
        completed_run(config)
    assert said in str(refused.value)


def test_a_config_without_tasks_is_as_before_there_were_any() -> None:
    config = load_run(REPOSITORY / "config" / "sample.yaml").config
    assert "tasks" not in config.values
    assert completed_run(config.values | {"tasks": {}}).config.values == config.values


def test_a_run_is_classified_as_by_hand(tokens: Path, tmp_path: Path) -> None:
    """The three commands, and cluster routing by scikit-learn's distances and a loop."""
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    write_prompted(tmp_path / "models" / "demix", TRAINING, tokenizer)
    write_prompted(tmp_path / "models" / "dense", ("dense",), tokenizer)
    train = {domain: tokens / "corpus" / domain / "train.parquet" for domain in TRAINING}
    fit_clusters(train, Clustering(method="metadata", dimensions=6), 1, tmp_path / "clusters" / "by_domain")
    encoder = ("--tokenizer", tokens / "tokenizer.json")
    for name, task in TASKS.items():
        files = [path for some in documents(tokens).values() for path in some.values()]
        settings = json.dumps(task | {"length": SIZES.context, "seed": 1})
        done = demix(
            "examples",
            name,
            *files,
            *encoder,
            "--settings",
            settings,
            "--output",
            tmp_path / "examples" / f"{name}.parquet",
        )
        assert done.exit_code == 0, done.output
    examples = [tmp_path / "examples" / f"{name}.parquet" for name in TASKS]
    for model, experts in (("demix", TRAINING), ("dense", ("dense",))):
        settings = json.dumps({"tasks": TASKS, "threads": 1})
        done = demix(
            "fewshot",
            tmp_path / "models" / model,
            *examples,
            "--experts",
            ",".join(experts),
            *encoder,
            "--settings",
            settings,
            "--output",
            tmp_path / "tasks" / model,
        )
        assert done.exit_code == 0, done.output
    models = [
        {"model": "demix", "folder": "demix", "seed": 1, "mixes": True, "routing": "by_domain"},
        {"model": "dense", "folder": "dense", "seed": 1, "mixes": False},
    ]
    given = {
        "tasks": TASKS,
        "models": models,
        "weights": ["history", "tempered", "cluster"],
        "temperature": 0.3,
        "top_k": [1, 2],
    }
    done = demix(
        "classify",
        tmp_path,
        "--settings",
        json.dumps(given),
        "--output",
        tmp_path / "tasks.parquet",
        "--weights",
        tmp_path / "weights.parquet",
    )
    assert done.exit_code == 0, done.output
    rows = pd.read_parquet(tmp_path / "tasks.parquet")
    weighted = pd.read_parquet(tmp_path / "weights.parquet")
    assert {*rows["task"]} == {*TASKS}
    assert (rows.query("model == 'dense'")["routing"] == "dense").all()
    assert rows["accuracy"].between(0, 1).all()
    clusterer = Clusterer.open(tmp_path / "clusters" / "by_domain")
    order = [clusterer.names.index(name) for name in TRAINING]
    for name, path in zip(TASKS, examples, strict=True):
        asked = list(prompts(Task(**TASKS[name]), read_examples(path)))
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
            if one.prompt.cue >= 0:
                totals -= [log_mixture(log_g, label).sum() for label in cues[one.prompt.cue].labels]
            hits += int(np.argmax(totals)) == one.prompt.answer
        row = rows.query("task == @name and routing == 'cluster' and top_k.isna()").iloc[0]
        assert row["accuracy"] == hits / len(tests)
        assert row["chance"] == pytest.approx(1 / len(tests[0].labels))
        assert (row["clustering"], row["temperature"]) == ("by_domain", 0.3)
        used = weighted.query("task == @name and routing == 'cluster' and model == 'demix'").set_index("expert")
        assert used.loc[list(TRAINING), "weight"].to_numpy() == pytest.approx(np.mean(weights, axis=0).ravel())
    # A clusterer that was fitted again has shards of other tokens than those that the experts learned from.
    write_json(tmp_path / "clusters" / "by_domain" / "shards" / TRAINING[0] / "train.json", {"sha256": "0" * 64})
    done = demix("classify", tmp_path, "--settings", json.dumps(given), "--output", tmp_path / "again.parquet")
    assert f"learned from another cluster than {TRAINING[0]}" in str(done.exception)
    assert not (tmp_path / "again.parquet").exists()


def test_few_examples_besides_tests_are_refused_or_judge_no_expert(tokens: Path, tmp_path: Path) -> None:
    rows = [Example("test", "t", ("a", "b"), 0), *[Example("train", f"d{n}", ("a", "b"), 1) for n in range(7)]]
    with pytest.raises(
        DemixError, match=r"tasks\.x: has 7 examples besides those that are tested, of 8 demonstrations"
    ):
        refuse_few("x", Task(path="x", shots=8), rows)
    refuse_few("x", Task(path="x", shots=7), rows)
    assert "validation" not in {prompt.split for prompt in prompts(Task(path="x"), rows)}
