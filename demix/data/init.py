"""A first config for a user's own texts: one domain per file, folder or glob, and sizes that fit the text."""

import glob
import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demix.config.adaptation import PASSES
from demix.config.files import files_at, left_out
from demix.config.names import LONGEST, REPEATED
from demix.config.reference import inline
from demix.data.readers import TO_UTF8, Reading, read_rows, select_or_none
from demix.data.sources import Omitted, Source, records
from demix.errors import DemixError
from demix.progress import so_many
from demix.settings import settings_from

# Words of one domain: the minimum, and the maximum that is counted.
MIN_WORDS = 1_000
MAX_WORDS = 2_000_000
# A number that makes a name unique follows it.
LONGEST_NAME = LONGEST - 10
# Feedforwards that are gated have three maps, so that 8/3 of the width has the parameters of the usual 4.
SMALL, LARGER = "layers: 2, width: 64, heads: 2, inner: 172", "layers: 3, width: 128, heads: 4, inner: 344"
CONTEXT = 128
# A value between the measured numbers of updates, 188 and 521 (docs/experiments/recipe.md).
FEW_UPDATES = 400


@dataclass
class Domain:
    """A domain: its source without chunks, and the number of words of its distinct documents, by hash.

    `more` means that there is more text; `repeated` is the number of documents with the same text as another document.
    """

    name: str
    source: Mapping[str, Any]
    documents: dict[bytes, int] = field(default_factory=dict)
    repeated: int = 0
    more: bool = False
    omitted: Omitted = field(default_factory=Omitted)

    @property
    def words(self) -> int:
        """The number of words of all documents."""
        return sum(self.documents.values())

    @property
    def cut(self) -> dict[str, int]:
        """The source's key that cuts few files into many documents, or long documents into chunks."""
        length = min(max(self.words // 50, 50), 250)
        if len(self.documents) < 50:
            return {"document_words": length}
        return {"piece_words": length} if 20 * max(self.documents.values()) > self.words else {}

    @property
    def lines(self) -> list[str]:
        """The domain in the YAML of a config, with comments on its amount of text and on skipped text."""
        many = "at least " if self.more else ""
        said = [f"{many}{self.words:,} words in {so_many(len(self.documents), 'document')}"]
        said += [f"left out: {self.repeated:,} of the same text as another"] if self.repeated else []
        said += [f"left out: {self.omitted.not_utf8:,} not in UTF-8: {TO_UTF8}"] if self.omitted.not_utf8 else []
        said += filter(None, [left_out(self.omitted.files)])
        held_out = _rounded(min(self.words // 10, 15_000))
        budget = {"dev": held_out, "test": held_out}
        # With this limit, dev and test have ten documents or more.
        budget |= {"per_document": held_out // 10} if "piece_words" in self.cut else {}
        return [
            f"    {inline(self.name)}:  # {'; '.join(said)}",
            f"      source: {inline({**self.source} | self.cut)}",
            f"      words: {inline(budget)}",
        ]


def outline(
    run: str,
    training: Sequence[str],
    novel: Sequence[str],
    field: str | None = None,
    schema: str | None = None,
) -> str:
    """The YAML of a config of the run `run` whose domains are these files, folders and globs.

    `field` is the field of records that holds the text; files without it use the field `text`. `schema` is the path of
    the JSON schema, for editors. The same texts give the same config. Raises DemixError for fewer than two training
    domains, for too little text, and for records without the field.
    """
    if len(training) < 2:
        cause = f"are {len(training)}, but mixing experts needs 2 or more"
        cure = "name one text for each domain (demix init letters.txt recipes.txt)"
        raise DemixError("training domains", cause, cure)
    if twice := [text for text, number in Counter([*training, *novel]).items() if number > 1]:
        raise DemixError(twice[0], "is given twice", "name each text once")
    names = list[str]()
    known, added = ([_found(text, field, names) for text in texts] for texts in (training, novel))
    total = sum(domain.words for domain in known)
    small, step = total < 200_000, len(known) * CONTEXT
    tokens = max(_rounded(min(max(5 * total, 200_000), 1_000_000)), 100 * step)
    updates = tokens // step
    rate = "4.0e-3" if small and updates >= FEW_UPDATES else "8.0e-3"
    most = f"{tokens // len(known):,} tokens or {PASSES} passes over its text"
    lines = [
        *([f"# yaml-language-server: $schema={schema}"] if schema else []),
        "# config/README.md explains every key; `demix config FILE` checks this file and prints what it will run.",
        f"run: {inline(run)}  # the name of the folder in results/",
        "domains:",
        "  training:",
        *(line for domain in known for line in domain.lines),
        *(["  novel:  # each gets an expert after training"] if added else []),
        *(line for domain in added for line in domain.lines),
        f"tokenizer: {{kind: bpe, vocab_size: {2048 if small else 4096}}}",
        f"architecture: {{preset: modern, {SMALL if small else LARGER}, context: {CONTEXT}}}",
        "training:",
        "  preset: modern  # Muon and AdamW; `demix config --values FILE` prints its values",
        f"  tokens: {tokens}  # of each model: {updates} updates, for {_rounded(total):,} words of text",
        "  sequences: 1  # of each domain in one update; with few tokens, many small updates work best",
        f"  learning_rate: {rate}  # docs/experiments/recipe.md says how it was chosen",
        f"  checkpoint_every: {max(10, updates // 10)}",
        "  dev_blocks: 8  # of each domain, evaluated at every checkpoint for the learning curve",
        f"adaptation: {{sequences: 4, evaluate_every: 10}}  # for each novel domain, at most {most}",
    ]
    return "\n".join(lines) + "\n"


def _rounded(number: int) -> int:
    """The number, rounded down to two significant digits."""
    unit = int(10 ** max(0, len(str(number)) - 2))
    return number // unit * unit


def _add_name(words: Iterable[str], names: list[str]) -> str:
    """Add a new domain name to `names`, made from the first of these words that has letters or digits.

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


def _found(text: str, field: str | None, names: list[str]) -> Domain:
    """The domain of one text, whose name is added to `names`."""
    # For letters/*.txt, the folder is a better name than the file.
    above = Path(text).parents if glob.has_magic(text) else ()
    name = _add_name((place.name.partition(".")[0] for place in (Path(text), *above)), names)
    one = read_domain(_source(text, field), name, MAX_WORDS)
    if one.words < MIN_WORDS:
        cause = f"has {one.words:,} words in {len(one.documents):,} documents"
        cure = f"give each domain {MIN_WORDS:,} words or more"
        if one.omitted.not_utf8:
            cause, cure = f"{cause}, and {one.omitted.not_utf8:,} not in UTF-8", f"{cure}; convert them: {TO_UTF8}"
        raise DemixError(text, cause, cure)
    one.more = one.words >= MAX_WORDS
    return one


def read_domain(source: Mapping[str, Any], name: str, words: int) -> Domain:
    """The distinct, non-empty documents in the first `words` words of a source of local files."""
    one = Domain(name, source)
    settings = settings_from(Source, {**source, "parts": 1, "words": words})
    for _, text, _ in records(settings, name, Path(), one.omitted):
        if number := len(text.split()):
            one.repeated += (key := hashlib.sha256(text.encode()).digest()) in one.documents
            one.documents[key] = number
    return one


def _source(text: str, field: str | None) -> dict[str, Any]:
    """The source of a text, with the keys `json` and `text` if the first record of its first file needs them."""
    files = files_at(text, others := Counter[str]())
    if not files:
        cause = f"is neither a file nor a folder with readable files{'; ' * bool(others)}{left_out(others)}"
        raise DemixError(text, cause, "correct the name, or name files of plain text by a glob in quotes")
    file, layout = Path(min(files)), dict[str, str]()
    try:
        row = next(read_rows(file, Reading(())))
    except DemixError:
        if ".json" not in file.suffixes:
            raise
        row, layout["json"] = next(read_rows(file, Reading((), values=True))), "values"
    if field and select_or_none(row.fields, field) is not None:
        layout["text"] = field
    return {"path": text} | layout
