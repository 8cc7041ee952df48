"""A first config for a user's own texts: domains by file, and sizes that fit the amount of text."""

import glob
import json
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from demix.config.adaptation import PASSES
from demix.config.domains import MOST_SHARING, Scalar
from demix.config.files import files_at, left_out
from demix.config.names import LONGEST, REPEATED
from demix.config.reference import inline
from demix.data.parting import Distinct, by_value, parting_fields
from demix.data.readers import TO_UTF8, Reading, read_rows, stem
from demix.data.sources import Omitted, Source, records
from demix.errors import DemixError, printable
from demix.progress import so_many
from demix.settings import settings_from

# Words of one domain: fewer are refused, and of more only so many are counted.
LEAST_WORDS = 1_000
MOST_WORDS = 2_000_000
# Words of a corpus that are counted by the values of a field.
MOST_OF_CORPUS = 5 * MOST_WORDS
# The values and fields that a line names.
MOST_TOLD = 5
# A number that sets a name apart comes behind it.
LONGEST_NAME = LONGEST - 10
# Feedforwards that are gated have three maps, so that 8/3 of the width has the parameters of the usual 4.
SMALL, LARGER, CONTEXT = (
    "layers: 2, width: 64, heads: 2, inner: 172",
    "layers: 3, width: 128, heads: 4, inner: 344",
    128,
)
# The records from which the field of the text is guessed.
GUESSED_FROM = 20
# Between the numbers of updates that were measured, 188 and 521 (docs/own-data.md).
FEW_UPDATES = 400


@dataclass(frozen=True)
class Found:
    """One domain: its keys in a config that say where its text is, and how much distinct text it has."""

    name: str
    keys: dict[str, Any]
    documents: Distinct
    more: bool = False
    omitted: Omitted = field(default_factory=Omitted)

    @property
    def words(self) -> int:
        """The words of all documents."""
        return sum(self.documents.values())

    @property
    def piece_words(self) -> int | None:
        """The length of pieces, where documents must be cut."""
        # Few documents cannot be divided into splits, and one that is long fills a split beyond its budget.
        few = len(self.documents) < 50 or 20 * max(self.documents.values()) > self.words
        return min(max(self.words // 50, 50), 250) if few else None


def outline(
    run: str,
    training: Sequence[str],
    novel: Sequence[str],
    field: str | None = None,
    schema: str | None = None,
    by: str | None = None,
) -> str:
    """The YAML of a config of the run `run` whose domains are these files, folders and globs.

    `field` holds the text of records; where a file lacks it, the field is guessed. With `by`, the texts of `training`
    are one corpus, and each value of this field is a domain. `schema` is the path of the JSON schema, for editors. The
    same texts give the same config. Raises DemixError for fewer than two training domains, for too little text, and for
    a field that cannot be guessed or does not part the corpus.
    """
    if by is None and len(training) < 2:
        cause = f"{len(training)} is given, and experts are mixed from 2 training domains on"
        cure = "name a file of text for each: demix init letters.txt recipes.txt"
        raise DemixError("training domains", cause, "; ".join(filter(None, [cure, hint(training, field)])))
    texts = [*training, *novel]
    for text in texts:
        if texts.count(text) > 1:
            raise DemixError(text, "is given twice", "name each text once")
    names = dict[str, Any]()
    if by is None:
        shared, known = list[str](), _found_all(training, field, names)
    else:
        shared, known = _parted(training, field, by, names)
    added, total = _found_all(novel, field, names), sum(domain.words for domain in known)
    small = total < 200_000
    tokens = _rounded(min(max(5 * total, 200_000), 1_000_000))
    step = len(known) * CONTEXT
    tokens = max(tokens, 100 * step)
    sizes, rate = (SMALL if small else LARGER), learning_rate(small, tokens // step)
    lines = [
        *([f"# yaml-language-server: $schema={schema}"] if schema else []),
        "# config/README.md explains every key; `demix config FILE` checks this file and says what will run.",
        f"run: {inline(run)}  # the name of the folder in results/",
        *shared,
        "domains:",
        "  training:",
        *_listed(known),
        *(["  novel:  # each gets an expert after the training", *_listed(added)] if added else []),
        f"tokenizer: {{kind: bpe, vocab_size: {2048 if small else 4096}}}",
        f"architecture: {{preset: modern, {sizes}, context: {CONTEXT}}}",
        "training:",
        "  preset: modern  # Muon and AdamW; `demix config --values FILE` prints its values",
        f"  tokens: {tokens}  # of each model: {tokens // step} updates, for {_rounded(total):,} words of text",
        "  sequences: 1  # of each domain in one update: of so few tokens, many small updates teach most",
        f"  learning_rate: {rate}  # docs/own-data.md says how it was chosen",
        f"  checkpoint_every: {max(10, tokens // step // 10)}",
        "  dev_blocks: 8  # of each domain at every checkpoint: the learning curve",
    ]  # fmt: skip
    most = f"{tokens // len(known):,} tokens or {PASSES} passes over its text"
    lines.append(
        f"adaptation: {{preset: modern, sequences: 4, evaluate_every: 10}}  # to each novel domain: at most {most}"
    )
    return "\n".join(lines) + "\n"


def learning_rate(small: bool, updates: int) -> str:
    """The learning rate for so many updates of a model of the `small` size or the larger one (docs/own-data.md)."""
    return "4.0e-3" if small and updates >= FEW_UPDATES else "8.0e-3"


def hint(texts: Sequence[str], field: str | None = None) -> str:
    """How to part the first of these texts of which a field seems to tell domains; empty if there is none."""
    for text in texts:
        files, source = _read_as([text], field)
        if fields := parting_fields(files, source):
            told = ", ".join(f"{name} {number}" for name, number in [*fields.items()][:MOST_TOLD])
            command = f"demix init {shlex.quote(text)} --by {shlex.quote(next(iter(fields)))}"
            return f"{text}: few values of a field part its first documents ({told}); {command} makes each a domain"
    return ""


def _listed(domains: Iterable[Found]) -> Iterable[str]:
    for domain in domains:
        many = "at least " if domain.more else ""
        said = f"{many}{domain.words:,} words in {so_many(len(domain.documents), 'document')}"
        if domain.documents.repeated:
            said += f"; left out: {domain.documents.repeated:,} of the same text as another"
        if domain.omitted.not_utf8:
            said += f"; left out: {domain.omitted.not_utf8:,} not in UTF-8: {TO_UTF8}"
        if others := left_out(domain.omitted.files):
            said += f"; {others}"
        held_out = _rounded(min(domain.words // 10, 15_000))
        yield f"    {inline(domain.name)}:  # {said}"
        yield from (f"      {key}: {_in_one_line(value)}" for key, value in domain.keys.items())
        yield f"      words: {{dev: {held_out}, test: {held_out}}}"


def _rounded(number: int) -> int:
    """The number down to two digits that are not zero."""
    unit = int(10 ** max(0, len(str(number)) - 2))
    return number // unit * unit


def _add_name(words: Iterable[str], item: Any, names: dict[str, Any]) -> str:
    """Add `item` to `names` by the name of a domain: of the first of these words that has letters or digits, a new one.

    A name has the letters a to z, digits and _.
    """
    number = len(names) + 1
    name = next(filter(None, map(_plain, words)), "")[:LONGEST_NAME].strip("_")
    if not name or REPEATED.search(name):
        name = f"domain_{number}"
    if name in ("tokens", "dense"):
        name += "_text"
    while name in names:
        name += f"_{number}"
    names[name] = item
    return name


def _words_of(text: str) -> Iterable[str]:
    """What a text may be named after: its name, and of letters/*.txt, where the folder says more, those above."""
    return (stem(place.name) for place in [Path(text), *(Path(text).parents if glob.has_magic(text) else ())])


def _plain(name: str) -> str:
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z0-9]+", "_", plain).strip("_")


def _found_all(texts: Sequence[str], field: str | None, names: dict[str, Any]) -> list[Found]:
    named = [(_add_name(_words_of(text), text, names), text) for text in texts]
    return [_found(name, text, field) for name, text in named]


def _found(name: str, text: str, field: str | None) -> Found:
    """What there is of one domain's text."""
    _, source = _read_as([text], field)
    documents, omitted = distinct_documents(source | {"words": MOST_WORDS}, name)
    if (words := sum(documents.values())) < LEAST_WORDS:
        cause = f"has {words:,} words in {len(documents):,} documents"
        cause += f", and {omitted.not_utf8:,} not in UTF-8" if omitted.not_utf8 else ""
        cure = f"give a domain {LEAST_WORDS:,} words or more"
        raise DemixError(text, cause, cure + (f"; convert them: {TO_UTF8}" if omitted.not_utf8 else ""))
    one = Found(name, {"source": source}, documents, words >= MOST_WORDS, omitted)
    if one.piece_words:
        source["piece_words"] = one.piece_words
    return one


def _parted(texts: Sequence[str], field: str | None, by: str, names: dict[str, Any]) -> tuple[list[str], list[Found]]:
    """The section `sources` of the corpus of these texts, and a domain for each value of the field `by`."""
    files, source = _read_as(texts, field)
    documents, without, more = by_value(files, source, by, MOST_OF_CORPUS)
    words = {value: sum(of_value.values()) for value, of_value in documents.items()}
    enough = [value for value, many in words.items() if many >= LEAST_WORDS]
    if not 2 <= len(enough) <= MOST_SHARING:
        cause = f"has {len(words):,} values, {len(enough):,} of them with {LEAST_WORDS:,} words or more"
        cure = f"name a field of which 2 to {MOST_SHARING} values have so many"
        others = ", ".join(name for name in parting_fields(files, source) if name != by)
        raise DemixError(f"--by {by}", cause, f"{cure}{', such as ' * bool(others)}{others}")
    corpus, known = _add_name(_words_of(texts[0]), None, {}), list[Found]()
    for value in enough:
        name, found = _add_name([str(value)], value, names), documents[value]
        keys = {"from": corpus, "value": value}
        known.append(Found(name, keys, found, more))
    if pieces := [one.piece_words for one in known if one.piece_words]:
        source |= {"piece_words": min(pieces)}
    little = [f"{_shown(value)} {many:,}" for value, many in words.items() if many < LEAST_WORDS]
    if len(little) > MOST_TOLD:
        little[MOST_TOLD:] = [f"{len(little) - MOST_TOLD} more"]
    return [
        "sources:",
        f"  {inline(corpus)}:",
        f"    source: {inline(source)}",
        f"    by: {inline(by)}",
        *(
            [f"    # Of no domain, since they have fewer than {LEAST_WORDS:,} words: {', '.join(little)}"]
            if little
            else []
        ),
        *([f"    # Of no domain: {without:,} documents without a text or a number there"] if without else []),
    ], known


def _in_one_line(value: Any) -> str:
    """A value as YAML in one line, whatever characters it has."""
    return json.dumps(value) if isinstance(value, str) and not value.isprintable() else inline(value)


def _shown(value: Scalar) -> str:
    """A value of a field within a comment: in one line."""
    return " ".join(printable(str(value)).split())


def _read_as(texts: Sequence[str], field: str | None) -> tuple[list[str], dict[str, Any]]:
    """The files of some texts, and the source of all of them."""
    files, others = set[str](), Counter[str]()
    for text in texts:
        found = files_at(text, others)
        if not found:
            cause = f"is no file, and no folder of files that can be read{'; ' * bool(others)}{left_out(others)}"
            raise DemixError(text, cause, "correct the name, or name files of plain text by a glob in quotes")
        files |= {*found}
    source: dict[str, Any] = {"kind": "files", "path": texts[0] if len(texts) == 1 else [*texts]}
    return sorted(files), source | _layout(Path(min(files)), field)


def distinct_documents(source: Mapping[str, Any], domain: str) -> tuple[Distinct, Omitted]:
    """The distinct documents of a source of local files, without those that have no word, and what was left out."""
    documents, omitted = Distinct(), Omitted()
    for _, text, _ in records(settings_from(Source, {**source, "parts": 1}), domain, Path(), omitted):
        if words := len(text.split()):
            documents.add(text, words)
    return documents, omitted


def _layout(file: Path, field: str | None) -> dict[str, str]:
    """The keys `json` and `text` of a source, where they differ from their defaults, by the first records of a file."""
    layout: dict[str, str] = {}
    try:
        rows = list(islice(read_rows(file, Reading(())), GUESSED_FROM))
    except DemixError:
        if ".json" not in file.suffixes:
            raise
        rows = list(islice(read_rows(file, Reading((), values=True)), GUESSED_FROM))
        layout["json"] = "values"
    words: Counter[str] = Counter()
    for row in rows:
        _count_fields(row.fields, "", words)
    (best, most), (_, second) = [*words.most_common(2), ("", 0), ("", 0)][:2]
    named = next((name for name in (field, "text") if name in words), None)
    if named is None and most < max(1, 10 * second):
        several = ", ".join(f"{name} ({number:,} words)" for name, number in words.most_common(16))
        cause = f"has no field that is plainly the text: {several or 'none holds words'}"
        raise DemixError(file, cause, "name it with --field")
    if (chosen := named or best) != "text":
        layout["text"] = chosen
    return layout


def _count_fields(value: Any, path: str, words: Counter[str]) -> None:
    """Add the words of each field of text in a record, by paths as `demix.data.selection.select` takes them.

    A number of a table is no text.
    """
    if isinstance(value, str):
        words[path] += len(value.split()) if any(map(str.isalpha, value)) else 0
    elif isinstance(value, dict):
        for name, inner in value.items():
            _count_fields(inner, f"{path}.{name}" if path else name, words)
    elif isinstance(value, list):
        for inner in value:
            _count_fields(inner, f"{path}[]", words)
