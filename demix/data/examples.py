"""The examples of a task, and the prompts for a model.

`examples/<task>.parquet` has one row per example: a text that fits a model's context, the labels to choose from, and
the right label. `prompts` depends only on this file and the task's settings, so scoring and routing use the same
prompts. Few-shot classification follows Gururangan et al. 2023, section 5 and appendix A.7.
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from demix.config.domains import SourceSection
from demix.config.tasks import LEFT_OUT, MAX_LABELS, OTHERS, ExamplesRecipe, Task, refuse_count
from demix.data.readers import TO_UTF8
from demix.data.sources import Omitted, Source, records
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_parquet, seed_for, write_parquet
from demix.settings import settings_from, written

_TYPES = {"split": pa.string(), "text": pa.large_string(), "choices": pa.list_(pa.string())}
_TYPES |= {"answer": pa.int16(), "shortened": pa.bool_()}
SCHEMA = pa.schema([pa.field(name, type_, False) for name, type_ in _TYPES.items()])
# A template must leave at least this many tokens for the text.
MIN_TOKENS = 8
# The text between demonstrations.
SEPARATOR = "\n\n"
# The number of tokens that two joined texts may need in addition to those of each by itself.
_JOINT = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """A text, the labels to choose from and the number of the right one.

    `split` is test, train (demonstrations) or validation. `shortened` says that the text was longer.
    """

    split: str
    text: str
    choices: tuple[str, ...]
    answer: int
    shortened: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt: a model scores each of `choices` after `context`; the choice with the number `answer` is right.

    `split` is the purpose: `test`, `validation` (other examples, after the same demonstrations), `permutation` (the
    last demonstration after the others) or `cue` (the prompt without the text). `example` is the number among the
    prompts of this split and `seed`; `cue` is the number of the prompt that calibrates this one, -1 without one.
    """

    split: str
    seed: int
    example: int
    context: str
    choices: tuple[str, ...]
    answer: int = -1
    cue: int = -1


def write_examples(task: str, tokenizer: Path, settings: ExamplesRecipe, output: Path) -> None:
    """Write the examples of a task to the Parquet file `output`, with texts that fit into a model's context.

    A text is shortened to `tokens` of the settings, by default to (block length) / (demonstrations + 1). Raises
    DemixError if a task has too few examples or a label that is not in `labels`, or if its template leaves no room for
    texts.
    """
    encoder = Tokenizer.load(tokenizer)
    examples = list(fitted(task, settings, _drawn(task, settings, output), encoder, settings.length))
    check_enough(task, settings, examples)
    write_parquet(pa.Table.from_pylist([asdict(one) for one in examples], SCHEMA), output)


def read_examples(path: Path) -> list[Example]:
    """The examples in `examples/<task>.parquet`."""
    return [Example(**row | {"choices": tuple(row["choices"])}) for row in read_parquet(path).to_pylist()]


def check_enough(name: str, task: Task, examples: Sequence[Example]) -> None:
    """Raise DemixError unless there is an example to test, and enough to draw demonstrations from."""
    found = Counter(one.split for one in examples)
    _log.info("%s: %s examples, %d shortened", name, dict(found), sum(one.shortened for one in examples))
    if not found["test"]:
        raise DemixError(f"tasks.{name}", "has no example to test", "give it more examples")
    if found["train"] < task.shots:
        cause = f"has only {found['train']} untested examples for {task.shots} demonstrations"
        raise DemixError(f"tasks.{name}", cause, "give it more examples, or fewer shots")


def prompts(task: Task, examples: Sequence[Example]) -> Iterator[Prompt]:
    """All prompts of a task, seed by seed: tests, validation examples, permutations of the demonstrations, cues.

    Each random seed draws `task.shots` demonstrations, which precede each text, and 8 validation examples (none if
    there are fewer). Prompts with equal cues share one.
    """
    tests, train = ([one for one in examples if one.split == split] for split in ("test", "train"))
    for seed in task.seeds:
        drawn = _ordered(train, seed, "demonstrations")
        demonstrations = drawn[: task.shots]
        judged = drawn[task.shots :][:OTHERS]
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
                yield Prompt(split, seed, number, context, choices, one.answer, cue)
        for (context, choices), number in cues.items():
            yield Prompt("cue", seed, number, context, choices)


def asked(task: Task, text: str, choices: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The template up to the label, and the choices. White space before the label is moved to the choices."""
    filled = task.template.removesuffix("{label}").replace("{text}", text)
    context = filled.rstrip()
    return context, tuple(filled[len(context) :] + choice for choice in choices)


def fitted(name: str, task: Task, examples: Iterable[Example], tokenizer: Tokenizer, length: int) -> Iterator[Example]:
    """`examples` with texts shortened so that all demonstrations, the text and its label fit into `length` tokens.

    A text is shortened at its end; an incomplete last character is removed.
    Raises DemixError if the longest label leaves fewer than 8 tokens for a text.
    """
    share = length // (task.shots + 1) - (_JOINT + len(tokenizer.encode(SEPARATOR)) if task.shots else 0)
    budget = min(share, task.tokens or share)

    def size(text: str, choices: Sequence[str]) -> int:
        context, labels = asked(task, text, choices)
        return len(tokenizer.encode(context)) + max(len(tokenizer.encode(label)) for label in labels)

    for one in examples:
        text, room = one.text, budget - size("", one.choices)
        if room < MIN_TOKENS:
            cause = f"leaves a text {max(room, 0)} of its {share} tokens of a block: template and label use the others"
            key = f"config key tasks.{name}.{'tokens' if task.tokens and task.tokens < share else 'shots'}"
            raise DemixError(key, cause, "lower shots, raise tokens, or use shorter labels")
        ids = tokenizer.encode(text)
        kept = len(ids)
        while (over := size(text, one.choices) - budget) > 0:
            kept = max(0, kept - over)
            text = tokenizer.decode(ids[:kept]).strip("\ufffd").strip()
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
    whole = SEPARATOR.join([*before, context])
    # Without a text, the template may begin with white space, which belongs to the label.
    context = whole.rstrip()
    return context, tuple(whole[len(context) :] + label for label in labels)


def _ordered(examples: Iterable[Example], seed: int, what: str) -> list[Example]:
    """The examples in the order of a hash of `seed` and their content."""
    return sorted(examples, key=lambda one: seed_for(seed, what, one.text, one.choices[one.answer]))


def _drawn(name: str, task: ExamplesRecipe, output: Path) -> Iterator[Example]:
    """The examples of all splits before their texts are shortened, those to test first."""
    wanted = None if task.examples is None else task.examples + (0 if task.train else task.pooled)
    values: set[str] = set()
    found = _least(name, task, task.test, output, wanted, values)
    # If there is no other source, the first examples by hash are used for the other splits.
    pooled = [] if task.train else found[: task.pooled]
    parts = [("test", found[len(pooled) :]), ("train", pooled)]
    if task.train is not None:
        # A text that is shown with its label must not also be tested.
        before = {one.text for one in found}
        parts.append(("train", _least(name, task, task.train, output, 10 * task.pooled, values, before)))
    labels = dict(task.labels) or {value: value for value in sorted(values)}
    known = list(labels)
    # An unknown label is an error below, which names the place of the example.
    if len(values) == 1 and values <= labels.keys():
        cure = "set label to the field of the right label, or add examples with other labels"
        raise DemixError(f"tasks.{name}", f"has only the label {min(values)!r:.80}", cure)
    for split, some in parts:
        for one in some:
            if one.label not in labels:
                cause = f"has the label {one.label!r:.80}, which is not one of {', '.join(map(repr, known))[:200]}"
                raise DemixError(f"tasks.{name}: {one.place}", cause, "correct the task's key label or labels")
            yield Example(split, one.text, tuple(labels.values()), known.index(one.label))


class _Record(NamedTuple):
    """An example as its source has it."""

    place: str
    text: str
    label: str


def _read(name: str, task: Task, section: SourceSection, output: Path, counts: Counter[str]) -> Iterator[_Record]:
    """The examples of a source; those without a text are added to `counts`. Fetched files are removed at the end."""
    first, *more = task.fields
    wanted = {"text": first, "fields": [*dict.fromkeys([*more, task.label])]}
    source = settings_from(Source, written(section) | wanted)
    fetched, unseen, omitted = output.parent / f".{output.stem}.fetched", set(more), Omitted()
    for row, text, others in records(source, f"tasks.{name}", fetched, omitted):
        fields, place = json.loads(others), f"tasks.{name}: {row}"
        label = fields[task.label]
        if label is None:
            raise DemixError(place, f"has no field {task.label}", "set the task's key label to an existing field")
        if not isinstance(label, str | int | float):
            raise DemixError(place, f"has {label!r:.80} in the field {task.label}, not text", "fix the example")
        unseen -= {field for field in more if fields[field] is not None}
        parts = [text, *(str(fields[field]) for field in more if fields[field] is not None)]
        if whole := "\n".join(part.strip() for part in parts if part.strip()):
            # Numbers, true and false are written as in JSON.
            yield _Record(row, whole, label if isinstance(label, str) else json.dumps(label))
        else:
            counts["empty"] += 1
    counts["not_utf8"] += omitted.not_utf8
    shutil.rmtree(fetched, ignore_errors=True)
    if unseen:
        raise DemixError(f"tasks.{name}.text", f"no example has the field {min(unseen)}", "name existing fields")


def _least(
    name: str,
    task: ExamplesRecipe,
    source: SourceSection,
    output: Path,
    count: int | None,
    values: set[str],
    before: Collection[str] = (),
) -> list[_Record]:
    """The `count` different examples of a source with the smallest hashes of their content, in this order; None: all.

    Examples with texts in `before` are skipped. The labels of all examples are added to `values`. Raises DemixError if
    more than the fraction LEFT_OUT of all are not UTF-8 or have no text.
    """
    kept: dict[int, _Record] = {}
    counts: Counter[str] = Counter(not_utf8=0, empty=0)
    read = 0
    for one in _read(name, task, source, output, counts):
        read += 1
        if one.text in before:
            continue
        values.add(one.label)
        if len(values) > MAX_LABELS:
            refuse_count(f"tasks.{name}", len(values))
        kept[seed_for(task.seed, "task", one.text, one.label)] = one
        if count is not None and len(kept) > 2 * count + 1000:
            kept = {key: kept[key] for key in sorted(kept)[:count]}
    said, wrong = "{not_utf8} not UTF-8, {empty} without text".format(**counts), counts.total()
    if wrong > LEFT_OUT * (wrong + read):
        cause = f"has {wrong} unusable of {wrong + read} examples ({said})"
        raise DemixError(f"tasks.{name}", cause, f"fix the file, or convert it ({TO_UTF8})")
    if wrong:
        _log.warning("%s: left out %s", name, said)
    return [kept[key] for key in sorted(kept)[:count]]
