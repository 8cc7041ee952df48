"""The examples of a task, from sources or made of a run's held-out documents, and the prompts that ask a model.

`examples/<task>.parquet` has one row per example: a text that fits a model's context, the labels to choose from, and
which of them is right. `prompts` is a function of this file and the task's settings, so that scoring and routing see
the same prompts. Few-shot classification follows Gururangan et al. 2023, section 5 and appendix A.7.
"""

import hashlib
import heapq
import json
import logging
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from demix.config.domains import SourceSection
from demix.config.tasks import LEFT_OUT, MOST_LABELS, OTHERS, ExamplesRecipe, Task, refuse_count, refuse_equal
from demix.data.making import continuations, of_domains
from demix.data.readers import TO_UTF8
from demix.data.sources import Omitted, Source, records
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_parquet, seed_for, write_parquet

SCHEMA = pa.schema(
    [
        pa.field("split", pa.string(), False),
        pa.field("id", pa.string(), False),
        pa.field("text", pa.large_string(), False),
        pa.field("choices", pa.list_(pa.string()), False),
        pa.field("answer", pa.int16(), False),
        pa.field("domain", pa.string(), False),
        pa.field("shortened", pa.bool_(), False),
    ]
)
# A template that leaves fewer tokens for the text has no use.
FEWEST_TOKENS = 8
# Tokens that two texts may take more side by side than each by itself.
_JOINT = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """A text, the labels to choose from and the number of the right one.

    `split` is test, train (demonstrations) or validation. `domain` is that of the document of a made example. `id` is
    the sha256 of the content. `shortened` says that the text was longer.
    """

    split: str
    text: str
    choices: tuple[str, ...]
    answer: int
    domain: str = ""
    shortened: bool = False

    @property
    def id(self) -> str:
        """The sha256 of text, labels and answer."""
        return hashlib.sha256(json.dumps([self.text, self.choices, self.answer]).encode()).hexdigest()


@dataclass(frozen=True)
class Prompt:
    """What a model is asked: to go on after `context` with one of `choices`, of which number `answer` is right.

    `split` says what for: `test`, `validation` (other examples, after the same demonstrations), `permutation` (the last
    demonstration after the others) or `cue` (the same without the text). `example` is the number among the prompts of
    this split and `seed`; `cue` is that of the prompt that calibrates this one, -1 without one.
    """

    split: str
    seed: int
    example: int
    context: str
    choices: tuple[str, ...]
    answer: int = -1
    domain: str = ""
    cue: int = -1


def write_examples(
    name: str, task: ExamplesRecipe, documents: Mapping[str, Mapping[str, Path]], tokenizer: Path, output: Path
) -> None:
    """Write the examples of the task `name` for models with blocks of `task.length` tokens.

    `documents` are the corpus files of the training domains by split, `test` and `dev`, for tasks that are made of
    them. A text is shortened to `task.tokens`, by default to its share of a block. Raises DemixError for a task without
    enough examples, with a label that is no choice, and for a template that leaves no room for texts.
    """
    encoder = Tokenizer.load(tokenizer)
    drawn = _drawn(name, task, documents, encoder, output)
    examples = list(fitted(name, task, drawn, encoder, task.length))
    found = {split: sum(one.split == split for one in examples) for split in ("test", "train", "validation")}
    _log.info(
        "%s: %d examples to test (%d shortened), %d for demonstrations, %d for validation",
        name, found["test"], sum(one.shortened for one in examples if one.split == "test"),
        found["train"], found["validation"],
    )  # fmt: skip
    refuse_few(name, task, examples)
    rows = [{"id": one.id, **asdict(one)} for one in examples]
    write_parquet(pa.Table.from_pylist(rows, SCHEMA), output)


def read_examples(path: Path) -> list[Example]:
    """The examples in `examples/<task>.parquet`."""
    rows = read_parquet(path).drop_columns("id").to_pylist()
    return [Example(**row | {"choices": tuple(row["choices"])}) for row in rows]


def refuse_few(name: str, task: Task, examples: Sequence[Example]) -> None:
    """Raise DemixError unless there is an example to test, and enough to draw demonstrations from."""
    found = {split: sum(one.split == split for one in examples) for split in ("test", "train", "validation")}
    if not found["test"]:
        raise DemixError(f"tasks.{name}", "has no example to test", "give it more examples")
    if found["train"] < task.shots:
        cause = f"has {found['train']} examples besides those that are tested, of {task.shots} demonstrations"
        raise DemixError(f"tasks.{name}", cause, "give it more examples, or fewer shots")


def prompts(task: Task, examples: Sequence[Example]) -> Iterator[Prompt]:
    """All prompts of a task, seed by seed: tests, validation examples, permutations of the demonstrations, cues.

    A seed draws `task.shots` demonstrations, which stand before each text, and 8 validation examples; none where there
    are fewer. Prompts whose cues are equal share one.
    """
    tests, train, others = ([one for one in examples if one.split == s] for s in ("test", "train", "validation"))
    for seed in task.seeds:
        drawn = _ordered(train, seed, "demonstrations")
        demonstrations = drawn[: task.shots]
        judged = (_ordered(others, seed, "validation") if others else drawn[task.shots :])[:OTHERS]
        turned = [
            ([*demonstrations[number + 1 :], *demonstrations[:number]], one)
            for number, one in enumerate(demonstrations[:OTHERS])
            if len(demonstrations) > 1
        ]
        asked_of = {
            "test": [(demonstrations, one) for one in tests],
            "validation": [(demonstrations, one) for one in judged if len(judged) == OTHERS],
            "permutation": turned,
        }
        cues: dict[tuple[str, tuple[str, ...]], int] = {}
        for split, some in asked_of.items():
            for number, (before, one) in enumerate(some):
                cue = cues.setdefault(_filled(task, before, "", one.choices), len(cues)) if task.calibrated else -1
                context, choices = _filled(task, before, one.text, one.choices)
                yield Prompt(split, seed, number, context, choices, one.answer, one.domain, cue)
        for (context, choices), number in cues.items():
            yield Prompt("cue", seed, number, context, choices)


def asked(task: Task, text: str, choices: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The template up to the label, without white space at its end, and the choices, which begin with that."""
    filled = task.form.removesuffix("{label}").replace("{text}", text)
    context = filled.rstrip()
    return context, tuple(filled[len(context) :] + choice for choice in choices)


def fitted(name: str, task: Task, examples: Iterable[Example], tokenizer: Tokenizer, length: int) -> Iterator[Example]:
    """`examples` with texts shortened so that all demonstrations, the text and its label fit into `length` tokens.

    A text loses tokens at its end, or with `keep: end` at its start, and what is left of a character that was cut.
    Raises DemixError where the longest label leaves fewer than 8 tokens for a text.
    """
    share = length // (task.shots + 1) - (_JOINT + len(tokenizer.encode(task.separator)) if task.shots else 0)
    budget = min(share, task.tokens or share)

    def size(text: str, choices: Sequence[str]) -> int:
        context, labels = asked(task, text, choices)
        return len(tokenizer.encode(context)) + max(len(tokenizer.encode(label)) for label in labels)

    for one in examples:
        text, room = one.text, budget - size("", one.choices)
        if room < FEWEST_TOKENS:
            cause = f"leave {max(room, 0)} tokens for a text: its share of a block is {share}, and its labels are long"
            key = f"config key tasks.{name}.{'tokens' if task.tokens and task.tokens < share else 'shots'}"
            raise DemixError(key, cause, "lower shots, raise tokens, or use shorter labels")
        ids = tokenizer.encode(text)
        kept = len(ids)
        while (over := size(text, one.choices) - budget) > 0:
            kept = max(0, kept - over)
            cut = ids[len(ids) - kept :] if task.keeps_end else ids[:kept]
            text = tokenizer.decode(cut).strip("\ufffd").strip()
        yield replace(one, text=text, shortened=text != one.text)


def _filled(
    task: Task, demonstrations: Iterable[Example], text: str, choices: Sequence[str]
) -> tuple[str, tuple[str, ...]]:
    """The demonstrations, the template and `text` as a context without white space at its end, and the choices."""
    before = []
    for one in demonstrations:
        context, labels = asked(task, one.text, one.choices)
        before.append(context + labels[one.answer])
    context, labels = asked(task, text, choices)
    whole = task.separator.join([*before, context])
    # Without a text there may be white space, which belongs to the label.
    context = whole.rstrip()
    return context, tuple(whole[len(context) :] + label for label in labels)


def _ordered(examples: Iterable[Example], seed: int, what: str) -> list[Example]:
    """The examples in the order of a hash of `seed` and their content."""
    return sorted(examples, key=lambda one: seed_for(seed, what, one.id))


def _drawn(
    name: str, task: ExamplesRecipe, documents: Mapping[str, Mapping[str, Path]], tokenizer: Tokenizer, output: Path
) -> Iterator[Example]:
    """The examples of all splits before their texts are shortened, those to test first."""
    if task.made:
        for split, of, count in (("test", "test", task.examples), ("train", "dev", task.pooled)):
            if not documents.get(of):
                cause = f"is made of documents of {of}, and none are given"
                raise DemixError(f"tasks.{name}", cause, f"give corpus/<domain>/{of}.parquet")
            words = task.words_of(documents[of])
            refuse_equal(f"tasks.{name}.labels", words)
            made = (
                of_domains(documents[of], words, count, task.seed)
                if task.made == "domains"
                else continuations(documents[of], tokenizer, task, count, task.seed)
            )
            for text, choices, answer, domain in made:
                yield Example(split, text, tuple(choices), answer, domain)
        return
    tested = task.tested
    if tested is None:
        raise DemixError(f"tasks.{name}", "has no examples", "give one of path, made and test")
    wanted = None if task.examples is None else task.examples + (0 if task.train else task.pooled)
    values: set[str] = set()
    found = _least(name, task, tested, output, wanted, values)
    # The first by hash serve the others where nothing else does.
    pooled = [] if task.train else found[: task.pooled]
    parts = [("test", found[len(pooled) :]), ("train", pooled)]
    for split, source in (("train", task.train), ("validation", task.validation)):
        if source is not None:
            # No text is tested and shown with its label, nor shown and judged.
            before = {one.text for _, some in parts for one in some}
            parts.append((split, _least(name, task, source, output, 10 * task.pooled, values, before)))
    labels = dict(task.labels) or {value: value for value in sorted(values)}
    # An unknown label is refused below, by the place of its example.
    if len(values) == 1 and values <= labels.keys():
        cause = f"has the one label {min(values)!r:.80}"
        raise DemixError(
            f"tasks.{name}", cause, "name the field of the right label in label, or add examples of others"
        )
    for split, some in parts:
        for one in some:
            yield one.example(name, split, labels)


@dataclass(frozen=True)
class _Record:
    """An example as its source has it: the right label and, where it has its own, the labels to choose from.

    `number` is the label where it is a whole number, and may be the place of the right one among the choices.
    """

    place: str
    text: str
    label: str
    choices: tuple[str, ...]
    number: int | None = None

    def example(self, name: str, split: str, labels: Mapping[str, str]) -> Example:
        """The example, with `labels` (words by value) where it has no choices of its own.

        A label is one of the choices, else the number of one. Raises DemixError where it is neither, and where it could
        be both, of which one is wrong.
        """
        choices = self.choices or tuple(labels.values())
        known = list(self.choices) if self.choices else list(labels)
        found = {known.index(self.label)} if self.label in known else set[int]()
        if self.choices and self.number is not None and 0 <= self.number < len(known):
            found.add(self.number)
        if len(found) != 1:
            listed = ", ".join(map(repr, known))[:200]
            cause = f"has the label {self.label!r:.80}, which is none of {listed}"
            if found:
                cause = f"has the label {self.label}, which is one of its choices ({listed}) and the number of another"
            raise DemixError(f"tasks.{name}: {self.place}", cause, "mend label, labels or choices")
        return Example(split, self.text, choices, min(found))


def _read(name: str, task: Task, section: SourceSection, output: Path, counts: Counter[str]) -> Iterator[_Record]:
    """The examples of a source; those without a text are added to `counts`. What was fetched is removed at its end."""
    first, *more = task.fields
    own = task.choices if isinstance(task.choices, str) else None
    given = {key: getattr(section, key) for key in section.__dataclass_fields__}
    wanted = tuple(dict.fromkeys([*more, task.label, *([own] if own else [])]))
    source = Source(**given | {"text": first, "metadata": wanted})
    fetched, unseen = output.parent / f".{output.stem}.fetched", set(more)
    omitted = Omitted()
    for row, text, metadata in records(source, f"tasks.{name}", fetched, omitted):
        fields, place = json.loads(metadata), f"tasks.{name}: {row}"
        for field in (task.label, *([own] if own else [])):
            if fields[field] is None:
                raise DemixError(place, f"has no field {field}", "mend label or choices")
        further = {field: str(fields[field]) for field in more if fields[field] is not None}
        unseen -= further.keys()
        parts = [text, *further.values()]
        choices = fields.get(own) if own else []
        if own and not isinstance(choices, list):
            raise DemixError(place, f"has {own} {choices!r:.80}, which is no list", "mend the example")
        choices = tuple(_as_label(place, own, one) for one in choices)
        if own and len(set(choices)) < max(2, len(choices)):
            cause = f"has {own} {list(choices)!r:.80}, no list of two or more different labels"
            raise DemixError(place, cause, "mend the example")
        if own:
            refuse_count(f"{place}: {own}", len(choices))
        label = fields[task.label]
        whole = "\n".join(part.strip() for part in parts if part.strip())
        if whole:
            number = label if isinstance(label, int) and not isinstance(label, bool) else None
            yield _Record(row, whole, _as_label(place, task.label, label), choices, number)
        else:
            counts["empty"] += 1
    counts["not_utf8"] += omitted.not_utf8
    shutil.rmtree(fetched, ignore_errors=True)
    if unseen:
        raise DemixError(f"tasks.{name}.text", f"no example has the field {min(unseen)}", "name fields that are there")


def _as_label(place: str, field: str | None, value: Any) -> str:
    """A label of JSON as a text: numbers, true and false as JSON writes them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, int | float):
        raise DemixError(place, f"has the label {value!r:.80} in {field}, which is no text", "mend the example")
    return json.dumps(value)


def _least(
    name: str,
    task: ExamplesRecipe,
    source: SourceSection,
    output: Path,
    count: int | None,
    values: set[str],
    before: Collection[str] = (),
) -> list[_Record]:
    """The `count` different examples of a source of the smallest hash of their content, in this order; None takes all.

    Those of texts in `before` are not taken. The labels of all examples without choices of their own are added to
    `values`. Raises DemixError where more are left out as unusable than the task allows.
    """
    kept: dict[int, _Record] = {}
    seen: set[int] = set()
    counts: Counter[str] = Counter(not_utf8=0, empty=0, duplicate=0, used=0)
    for one in _read(name, task, source, output, counts):
        key = seed_for(task.seed, "task", one.text, one.label, json.dumps(one.choices))
        if key in seen or one.text in before:
            counts["duplicate" if key in seen else "used"] += 1
            seen.add(key)
            continue
        seen.add(key)
        if not one.choices:
            values.add(one.label)
            if len(values) > MOST_LABELS:
                refuse_count(f"tasks.{name}", len(values))
        kept[key] = one
        if count is not None and len(kept) > 2 * count + 1000:
            kept = {key: kept[key] for key in heapq.nsmallest(count, kept)}
    _refuse_left_out(name, task, counts, len(seen))
    return [kept[key] for key in sorted(kept)[:count]]


def _refuse_left_out(name: str, task: Task, counts: Mapping[str, int], different: int) -> None:
    """Say how many examples of a source are not taken and why; raise DemixError where they are too many.

    Examples that another part of the task has are no fault of the source.
    """
    left_out = counts["not_utf8"] + counts["empty"] + counts["duplicate"]
    reasons = f"{counts['not_utf8']} not UTF-8, {counts['empty']} without text, {counts['duplicate']} there before"
    found = left_out + different
    allowed = LEFT_OUT if task.left_out is None else task.left_out
    if left_out > allowed * found:
        cause = f"leaves out {left_out} of {found} examples ({reasons}), more than its left_out of {allowed:g}"
        cure = f"convert the file ({TO_UTF8}), " if counts["not_utf8"] else "mend the file, "
        raise DemixError(f"tasks.{name}", cause, f"{cure}or give the task a left_out of {left_out / found:.2g} or more")
    if left_out or counts["used"]:
        _log.warning("%s: left out %s, %d used by another part of the task", name, reasons, counts["used"])


def examples_of(
    task: str, tokenizer: Path, settings: ExamplesRecipe, output: Path, documents: Sequence[Path] = ()
) -> None:
    """Read or make the examples of a task, with texts that fit into a model's context.

    `documents` are corpus/<domain>/test.parquet and dev.parquet, for a task that is made of them.
    """
    files: dict[str, dict[str, Path]] = {"test": {}, "dev": {}}
    for path in documents:
        files.setdefault(path.stem, {})[path.parent.name] = path
    write_examples(task, settings, files, tokenizer, output)
