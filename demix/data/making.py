"""Tasks made of a run's own held-out documents: which domain a text is of, and which second half continues a first.

Documents of dev and test are never those of train (`demix.data.corpus`), so that no example holds a text that models
learned from. Examples are drawn in the order of the splits, which is that of a hash; at most one of a document.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path

from demix.config.tasks import Task
from demix.data.tokenizer import Tokenizer
from demix.files import seed_for
from demix.files.batches import read_batches

# Text, labels to choose from, the number of the right one, domain.
Made = tuple[str, Sequence[str], int, str]
CHOICES = 4
# Tokens of each choice of `made: continuations`.
CHOICE_TOKENS = 16
_GAP = re.compile(r"\s+(?=\S)")


def of_domains(files: Mapping[str, Path], words: list[str], count: int | None, seed: int) -> Iterator[Made]:
    """Which domain a text is of: as many examples of each domain, `count` at most, domains in turn.

    `files` are the corpus files of one split by domain, `words` stand for the domains in this order.
    """
    names = list(files)
    most = None if count is None else -(-count // len(names))
    left = count
    for rows in zip_longest(*(islice(documents(files[name]), most) for name in names)):
        some = [(text, words, number, names[number]) for number, text in enumerate(rows) if text is not None]
        # Domains in an order that says nothing of the next one.
        some = sorted(some, key=lambda one: seed_for(seed, "domain", one[0]))[:left]
        yield from some
        left = None if left is None else left - len(some)


def continuations(
    files: Mapping[str, Path], tokenizer: Tokenizer, task: Task, count: int | None, seed: int
) -> Iterator[Made]:
    """Which of `task.choices` second halves continues a first half, of `count` documents at most, domains in turn.

    A choice is the first CHOICE_TOKENS tokens of a second half, so that no choice is likelier for its length. The wrong
    ones are those of the next documents of the same domain.
    """
    number = task.choices if isinstance(task.choices, int) else CHOICES
    most = None if count is None else max(number, -(-count // len(files)))
    halved = {
        domain: (_halves(text, tokenizer, CHOICE_TOKENS) for text in documents(path)) for domain, path in files.items()
    }
    halves = {domain: list(islice(filter(None, some), most)) for domain, some in halved.items()}
    pairs = [
        (domain, place, *half)
        for domain, some in halves.items()
        for place, half in enumerate(some)
        if len({end for _, end in some}) >= number
    ]
    pairs.sort(key=lambda pair: (pair[1], seed_for(seed, "continuation", pair[2])))
    for at, (domain, _, text, end) in enumerate(pairs[:count]):
        later = chain(pairs[at + 1 :], pairs[:at])
        others = (o for name, _, _, o in later if name == domain)
        wrong = list(islice((each for each in others if each != end), number - 1))
        if len({*wrong}) == number - 1:
            choices = sorted([end, *wrong], key=lambda each: seed_for(seed, "choice", text, each))
            yield text, choices, choices.index(end), domain


def documents(path: Path) -> Iterator[str]:
    """The texts of a corpus file in its order: one piece of each whole document."""
    origins: set[str] = set()
    for batch in read_batches(path, ["text", "origin"]):
        for text, origin in zip(batch.column("text").to_pylist(), batch.column("origin").to_pylist(), strict=True):
            if origin not in origins and text.strip():
                origins.add(origin)
                yield text.strip()


def _halves(text: str, tokenizer: Tokenizer, tokens: int) -> tuple[str, str] | None:
    """The first half of the words of a text, and the first `tokens` tokens of the second; None if it is too short.

    A half that does not end at a character, and other text whose tokens are not those of its parts, is too short too.
    """
    gaps = [gap.start() for gap in _GAP.finditer(text)]
    if not gaps:
        return None
    middle = gaps[len(gaps) // 2]
    ids = tokenizer.encode(text[middle:])[:tokens]
    end = tokenizer.decode(ids)
    if len(ids) < tokens or tokenizer.encode(end).tolist() != ids.tolist():
        return None
    return text[:middle], end
