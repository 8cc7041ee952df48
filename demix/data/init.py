"""A first config for a user's own texts: domains by file or by the values of a field, and sizes that fit the text."""

import glob
import hashlib
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from demix.config.adaptation import PASSES
from demix.config.domains import MOST_SHARING, Scalar
from demix.config.files import files_at, left_out
from demix.config.names import LONGEST, REPEATED
from demix.config.reference import inline
from demix.data.readers import TO_UTF8, Reading, read_rows, stem
from demix.data.sources import Omitted, Source, records
from demix.errors import DemixError, printable
from demix.progress import so_many
from demix.settings import settings_from

# Words of one domain: fewer are refused, and of more only so many are counted. So are those of a corpus of several.
LEAST_WORDS = 1_000
MOST_WORDS = 2_000_000
MOST_OF_CORPUS = 5 * MOST_WORDS
# The values that a line names.
MOST_TOLD = 5
# A number that sets a name apart comes behind it.
LONGEST_NAME = LONGEST - 10
# Feedforwards that are gated have three maps, so that 8/3 of the width has the parameters of the usual 4.
SMALL, LARGER = "layers: 2, width: 64, heads: 2, inner: 172", "layers: 3, width: 128, heads: 4, inner: 344"
CONTEXT = 128
# The records from which the field of the text is guessed.
GUESSED_FROM = 20
# Between the numbers of updates that were measured, 188 and 521 (docs/experiments/recipe.md).
FEW_UPDATES = 400


@dataclass
class Domain:
    """A domain: its keys in a config that say where its text is, and the words of its distinct documents by hash.

    `more` says that there is more text, `repeated` how many documents have the text of another one.
    """

    name: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    documents: dict[bytes, int] = field(default_factory=dict)
    repeated: int = 0
    more: bool = False
    omitted: Omitted = field(default_factory=Omitted)

    def add(self, text: str) -> int:
        """Add a document that has a word; returns its words."""
        if words := len(text.split()):
            self.repeated += (key := hashlib.sha256(text.encode()).digest()) in self.documents
            self.documents[key] = words
        return words

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

    @property
    def lines(self) -> list[str]:
        """The domain in the YAML of a config, with its amount of text and what is left out of it."""
        many = "at least " if self.more else ""
        said = [f"{many}{self.words:,} words in {so_many(len(self.documents), 'document')}"]
        said += [f"left out: {self.repeated:,} of the same text as another"] if self.repeated else []
        said += [f"left out: {self.omitted.not_utf8:,} not in UTF-8: {TO_UTF8}"] if self.omitted.not_utf8 else []
        said += filter(None, [left_out(self.omitted.files)])
        held_out = _rounded(min(self.words // 10, 15_000))
        keys = [f"      {key}: {_in_one_line(value)}" for key, value in self.keys.items()]
        words = f"      words: {{dev: {held_out}, test: {held_out}}}"
        return [f"    {inline(self.name)}:  # {'; '.join(said)}", *keys, words]


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
        cure = "name a file of text for each (demix init letters.txt recipes.txt), or a field that tells them by --by"
        raise DemixError("training domains", cause, cure)
    if twice := [text for text, number in Counter([*training, *novel]).items() if number > 1]:
        raise DemixError(twice[0], "is given twice", "name each text once")
    names, shared = list[str](), list[str]()
    if by is None:
        known = [_found(text, field, names) for text in training]
    else:
        shared, known = _parted(training, field, by, names)
    added, total = [_found(text, field, names) for text in novel], sum(domain.words for domain in known)
    small, step = total < 200_000, len(known) * CONTEXT
    tokens = max(_rounded(min(max(5 * total, 200_000), 1_000_000)), 100 * step)
    updates = tokens // step
    rate = "4.0e-3" if small and updates >= FEW_UPDATES else "8.0e-3"
    most = f"{tokens // len(known):,} tokens or {PASSES} passes over its text"
    lines = [
        *([f"# yaml-language-server: $schema={schema}"] if schema else []),
        "# config/README.md explains every key; `demix config FILE` checks this file and says what will run.",
        f"run: {inline(run)}  # the name of the folder in results/",
        *shared,
        "domains:",
        "  training:",
        *(line for domain in known for line in domain.lines),
        *(["  novel:  # each gets an expert after the training"] if added else []),
        *(line for domain in added for line in domain.lines),
        f"tokenizer: {{kind: bpe, vocab_size: {2048 if small else 4096}}}",
        f"architecture: {{preset: modern, {SMALL if small else LARGER}, context: {CONTEXT}}}",
        "training:",
        "  preset: modern  # Muon and AdamW; `demix config --values FILE` prints its values",
        f"  tokens: {tokens}  # of each model: {updates} updates, for {_rounded(total):,} words of text",
        "  sequences: 1  # of each domain in one update: of so few tokens, many small updates teach most",
        f"  learning_rate: {rate}  # docs/experiments/recipe.md says how it was chosen",
        f"  checkpoint_every: {max(10, updates // 10)}",
        "  dev_blocks: 8  # of each domain at every checkpoint: the learning curve",
        f"adaptation: {{preset: modern, sequences: 4, evaluate_every: 10}}  # to each novel domain: at most {most}",
    ]
    return "\n".join(lines) + "\n"


def _rounded(number: int) -> int:
    """The number down to two digits that are not zero."""
    unit = int(10 ** max(0, len(str(number)) - 2))
    return number // unit * unit


def _add_name(words: Iterable[str], names: list[str]) -> str:
    """Add the name of a domain to `names`: of the first of these words that has letters or digits, a new one.

    A name has the letters a to z, digits and _.
    """
    ascii = (unicodedata.normalize("NFKD", word).encode("ascii", "ignore").decode().lower() for word in words)
    plain = (re.sub("[^a-z0-9]+", "_", word).strip("_") for word in ascii)
    name = next(filter(None, plain), "")[:LONGEST_NAME].strip("_")
    if not name or REPEATED.search(name):
        name = f"domain_{len(names) + 1}"
    if name in ("tokens", "dense"):
        name += "_text"
    number = len(names) + 1
    while name in names:
        name += f"_{number}"
    names.append(name)
    return name


def _words_of(text: str) -> Iterable[str]:
    """What a text may be named after: its name, and of letters/*.txt, where the folder says more, those above."""
    return (stem(place.name) for place in [Path(text), *(Path(text).parents if glob.has_magic(text) else ())])


def _found(text: str, field: str | None, names: list[str]) -> Domain:
    """The domain of one text, whose name is added to `names`."""
    name, (_, source) = _add_name(_words_of(text), names), _read_as([text], field)
    one = read_domain(source | {"words": MOST_WORDS}, name)
    if one.words < LEAST_WORDS:
        cause = f"has {one.words:,} words in {len(one.documents):,} documents"
        cure = f"give a domain {LEAST_WORDS:,} words or more"
        if one.omitted.not_utf8:
            cause, cure = f"{cause}, and {one.omitted.not_utf8:,} not in UTF-8", f"{cure}; convert them: {TO_UTF8}"
        raise DemixError(text, cause, cure)
    one.more = one.words >= MOST_WORDS
    one.keys["source"] = source | ({"piece_words": one.piece_words} if one.piece_words else {})
    return one


def read_domain(source: Mapping[str, Any], name: str) -> Domain:
    """The distinct documents of a source of local files, without those that have no word, and what was left out."""
    one = Domain(name)
    for _, text, _ in records(settings_from(Source, {**source, "parts": 1}), name, Path(), one.omitted):
        one.add(text)
    return one


def _parted(texts: Sequence[str], field: str | None, by: str, names: list[str]) -> tuple[list[str], list[Domain]]:
    """The section `sources` of the corpus of these texts, and a domain for each value of the field `by`.

    Of all files about MOST_OF_CORPUS words are read, of each the same number. Values that a condition takes for the
    same are one, the first.
    """
    files, source = _read_as(texts, field)
    domains, same = defaultdict[Scalar, Domain](Domain), dict[Scalar, Scalar]()
    without, more, omitted, share = 0, False, Omitted(), -(-MOST_OF_CORPUS // len(files))
    for file in files:
        keys, words = source | {"path": file, "metadata": [by], "words": share}, 0
        for _, text, metadata in records(settings_from(Source, keys), file, Path(), omitted):
            value = json.loads(metadata)[by]
            words += len(text.split())
            if not isinstance(value, (str, int, float)) or not str(value).strip():
                without += 1
            elif text.split():
                domains[same.setdefault(value, same.setdefault(str(value), value))].add(text)
        more |= words >= share
    known = {value: one for value, one in domains.items() if one.words >= LEAST_WORDS}
    if not 2 <= len(known) <= MOST_SHARING:
        cause = f"has {len(domains):,} values, {len(known):,} of them with {LEAST_WORDS:,} words or more"
        raise DemixError(f"--by {by}", cause, f"name a field of which 2 to {MOST_SHARING} values have so many")
    corpus = _add_name(_words_of(texts[0]), [])
    for value, one in known.items():
        one.name, one.keys, one.more = _add_name([str(value)], names), {"from": corpus, "value": value}, more
    if pieces := [one.piece_words for one in known.values() if one.piece_words]:
        source["piece_words"] = min(pieces)
    section = ["sources:", f"  {inline(corpus)}:", f"    source: {inline(source)}", f"    by: {inline(by)}"]
    # In one line, whatever characters they have.
    shown = {value: " ".join(printable(str(value)).split()) for value in domains if value not in known}
    little = [f"{text} {domains[value].words:,}" for value, text in shown.items()]
    if len(little) > MOST_TOLD:
        little[MOST_TOLD:] = [f"{len(little) - MOST_TOLD} more"]
    if little:
        section.append(f"    # Of no domain, since they have fewer than {LEAST_WORDS:,} words: {', '.join(little)}")
    if without:
        section.append(f"    # Of no domain: {without:,} documents without a text or a number there")
    return section, [*known.values()]


def _in_one_line(value: Any) -> str:
    """A value as YAML in one line, whatever characters it has."""
    return json.dumps(value) if isinstance(value, str) and not value.isprintable() else inline(value)


def _read_as(texts: Sequence[str], field: str | None) -> tuple[list[str], dict[str, Any]]:
    """The files of some texts, and the source of all of them, as the first records of one tell it."""
    files, others = set[str](), Counter[str]()
    for text in texts:
        found = files_at(text, others)
        if not found:
            cause = f"is no file, and no folder of files that can be read{'; ' * bool(others)}{left_out(others)}"
            raise DemixError(text, cause, "correct the name, or name files of plain text by a glob in quotes")
        files |= {*found}
    source: dict[str, Any] = {"kind": "files", "path": texts[0] if len(texts) == 1 else [*texts]}
    return sorted(files), source | _layout(Path(min(files)), field)


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
    for path, text in (one for row in rows for one in _texts(row.fields, "")):
        # A number of a table is no text.
        words[path] += len(text.split()) if any(map(str.isalpha, text)) else 0
    (best, most), (_, second) = [*words.most_common(2), ("", 0), ("", 0)][:2]
    named = next((name for name in (field, "text") if name in words), None)
    if named is None and most < max(1, 10 * second):
        several = ", ".join(f"{name} ({number:,} words)" for name, number in words.most_common(16))
        cause = f"has no field that is plainly the text: {several or 'none holds words'}"
        raise DemixError(file, cause, "name it with --field")
    return layout if (named or best) == "text" else layout | {"text": named or best}


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Path and value of each text in a record, by paths as `demix.data.selection.select` reads them."""
    if isinstance(value, str):
        yield path, value
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _texts(inner, f"{path}.{name}" if path else name)
    for inner in value if isinstance(value, list) else ():
        yield from _texts(inner, f"{path}[]")
