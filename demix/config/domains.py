"""Settings of the text: domains, their sources and splits, and the tokenizer."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from demix.config.addresses import LOG_IN, STORES, local, refuse_secrets, refuse_unnamable
from demix.config.files import files_at
from demix.config.names import refuse_name
from demix.errors import DemixError, nearest
from demix.settings import Integer, Items, Number, Positive, Settings, Switch, Text, absent


def domain_name(name: str) -> str:
    """`name`, of a domain or source. Raises ValueError(cause, cure) if a path cannot hold it."""
    if not re.fullmatch("[a-z0-9][a-z0-9_]*", name) or name in ("tokens", "dense"):
        cure = "use lower-case letters, digits and _; the names tokens and dense are reserved"
        raise ValueError("is not a usable domain name", cure)
    refuse_name(name)
    return name


DomainName = Annotated[Text, AfterValidator(domain_name)]
Scalar = Text | Switch | Integer | Number
Range = Annotated[dict[Literal["min", "max"], Text | Number], Field(min_length=1)]
# Settings of a source whose documents are not cut.
UNCUT = {"document_words": None, "piece_words": None}
# One job writes a file for each domain of a source, and keeps all these files open.
MAX_SHARING = 400
# The path of a data set on the Hugging Face hub begins with this.
DATA_SET = "hf://"
# The beginnings of paths, by source type. Paths with none of them are files on this machine.
_BEGINS = {"hub": DATA_SET, "store": rf"({'|'.join(STORES)})://[^/@*?\[]+(/|$)", "url": "[a-z][a-z0-9+.-]*://"}


def kind_of(path: str) -> str:
    """The kind of a source with this path: files, url, store (of objects) or hub."""
    return next((kind for kind, begins in _BEGINS.items() if re.match(begins, path)), "files")


class SourceSection(Settings):
    """The source of a domain's raw text, and which of its records are read."""

    path: Text | Annotated[Items[Text], Field(min_length=1)] = Field(
        description="A file, a glob or a folder, or a list of them. If a file with the name exists, it is read, even "
        "if the name has characters of a glob. In a folder, all files of a known format are read, at any depth; a log "
        "line counts the other files. Instead of paths, addresses can be given, all of one type. http:// or https://: "
        "files (downloads are resumed and retried). s3://, gs:// or az://: files, globs or folders in a bucket (needs "
        "s3fs, gcsfs or adlfs, and credentials in the environment). hf://owner/name: a data set on the Hugging Face "
        "hub, streamed without running its code. hf://FOLDER: a local copy of such a data set. Formats: .jsonl "
        ".ndjson .json .csv .txt (one document per .txt file), uncompressed or as .gz or .zst; .parquet; and .zip "
        ".tar .tgz .tar.gz .tar.zst archives of such files. A file that is named with another ending is read as one "
        "document of plain text."
    )
    text: Text = Field(
        default="text",
        description="Field that holds the text (not used for .txt). A dot selects a nested field. [] reads every item "
        "of a list and joins the items' texts by newlines: full_text[].paragraphs[].",
    )
    where: dict[Text, Scalar | Annotated[Items[Scalar], Field(min_length=1)] | Range] = Field(
        default_factory=dict,
        description="Read only records whose fields match all of these conditions. A condition is one value (language: "
        "en), a list of values, or an inclusive range with min and max (quote dates: they are compared as text).",
    )
    words: Positive | None = Field(
        default=None,
        description="Stop reading after this many words, divided evenly among the parts; null reads everything.",
    )
    document_words: Positive | None = Field(
        default=None,
        description="Cut files or records longer than this many words, such as a book or a mailbox in one file, into "
        "documents of this length, after anonymization. Each document is assigned to a split by itself.",
    )
    piece_words: Positive | None = Field(
        default=None,
        description="Cut documents longer than this many words into chunks of this length, after anonymization. "
        "All chunks of a document go to one split, and confidence intervals treat them as one document.",
    )
    parts: Positive = Field(
        default=1,
        le=10_000,
        description="Number n of parallel jobs that read and anonymize the source. Each job reads every n-th file, or, "
        "if there are fewer files than jobs, every n-th row. A source of http(s) addresses has at most one part per "
        "address.",
    )
    members: Items[Text] = Field(
        default=("*",),
        min_length=1,
        description="Members of archives to read, as globs in which * also matches /. `*` reads the same files as in a "
        "folder.",
    )
    json_holds: Literal["lines", "values"] = Field(
        alias="json",
        default="lines",
        description="Content of a .json file: lines (one object per line), or values (one array or object whose values "
        "are the records).",
    )
    revision: Text | None = Field(
        default=None,
        description="hf: branch, tag or commit (refs/convert/parquet if the repository has a loader script). A commit "
        "pins the data set. For a branch, the log names the commit.",
    )
    data_files: Items[Text] = Field(
        default=(),
        description="hf: globs of files in the data set (.parquet; .jsonl, .json and .csv, also as .gz or .zst).",
    )
    sha256: dict[Text, Annotated[Text, Field(pattern="^[0-9a-f]{64}$")]] = Field(
        default_factory=dict, description="Expected SHA-256 digests by file name (not for hf)."
    )
    instructions: Text = Field(
        default="",
        description="How to obtain the text. The error for a missing source shows these instructions.",
    )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The paths or addresses as in the config."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def kind(self) -> str:
        """The source type, by the first path."""
        return kind_of(self.addresses[0])

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths or addresses; for a data set of the hub its owner/name, for a local copy its folder."""
        return tuple(path.removeprefix(DATA_SET) for path in self.addresses)

    @cached_property
    def listed(self) -> dict[str, list[str]]:
        """The local files of each path of a source of type files, listed only once; none for a missing file."""
        return {path: files_at(path, self.others) for path in self.paths} if self.kind == "files" else {}

    @cached_property
    def others(self) -> Counter[str]:
        """The endings of files that are not data, in the folders of `listed`."""
        return Counter()

    @cached_property
    def names(self) -> list[str]:
        """The existing local files in reading order. (`demix download` raises an error for missing ones.)

        Raises DemixError for a name that a rule cannot hold.
        """
        return sorted({refuse_unnamable(file) for files in self.listed.values() for file in files})

    def share(self, part: int) -> list[str]:
        """The local files of one part: some files, or, if there are fewer files than parts, rows of all files."""
        return self.names[part :: self.parts] if len(self.names) >= self.parts else self.names


class SharedSource(Settings):
    """A corpus that several domains share. Each part of the corpus is read once for all these domains."""

    source: SourceSection = Field(
        description="Where the corpus comes from, with the keys of a domain's source. `words`, `document_words` and "
        "`piece_words` apply to each domain separately."
    )
    by: Text = Field(
        description="Field that says which domain a document belongs to, such as meta.pile_set_name. A dot selects a "
        "nested field."
    )


class Budget(Settings):
    """Number of words (separated by white space) of each split.

    If `train` is null, the train split gets all words that are not in dev or test.
    """

    train: Positive | None = Field(
        default=None, description="Maximum number of words of the train split; null means all."
    )
    dev: Positive = Field(default=1_000_000, description="Words of the dev split.")
    test: Positive = Field(default=1_000_000, description="Words of the test split.")
    per_document: Positive | None = Field(
        default=None,
        description="Maximum number of words per document in dev and test: only its first chunks "
        "(`source.piece_words`) that fit are used, at least one. The rest of the document is in no split. If documents "
        "are long, dev and test then consist of more documents. null, or no piece_words: whole documents.",
    )


class SplitRecipe(Settings):
    """The settings of a domain that splitting uses."""

    near_duplicates: Number | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Remove from train the documents that share more than this fraction of their word 13-grams with "
        "dev or test; null keeps all.",
    )
    words: Budget = Field(
        default_factory=Budget, description="Word budgets. Dev and test are filled first; train gets the rest."
    )


class DomainSection(SplitRecipe):
    """One text domain."""

    source: SourceSection = Field(
        default_factory=absent,
        description="Where the raw text comes from. A domain has either this key, or `from` and `value`.",
    )
    shared: Text | None = Field(
        alias="from",
        default_factory=absent,
        description="Name of one of `sources`: a corpus that several domains share. The domain has the documents "
        "that `where: {<by>: <value>}` would select.",
    )
    value: Scalar | Annotated[Items[Scalar], Field(min_length=1)] | None = Field(
        default_factory=absent,
        description="Value of the field `by` in the domain's documents, or a list of values.",
    )
    anonymize: Switch = Field(
        default=True, description="Replace personal data with the seven dummy tokens of the paper's Table 8."
    )
    licence: Text = Field(default="", description="Licence or terms of the text, recorded with the run.")

    @property
    def values(self) -> tuple[Scalar, ...]:
        """The values of the field `by` that select the domain's documents in a shared source."""
        return self.value if isinstance(self.value, tuple) else (() if self.value is None else (self.value,))


class DomainsSection(Settings):
    """The text domains by name, in the order in which tables and figures show them."""

    training: dict[DomainName, DomainSection | None] = Field(
        min_length=1,
        description="Domains that get an expert when the model is trained. null leaves out a domain of the `base` "
        "config. If another key, such as `removal.retrain_without`, still names the domain, an error names that key.",
    )
    novel: dict[DomainName, DomainSection | None] = Field(
        default_factory=dict,
        description="Domains that the trained models have not seen. DEMix-DAPT adds an expert for each of them. Append "
        "new domains at the end: then no existing result is computed again. null leaves out a domain of the `base` "
        "config; it is an error if `removal.replacement` still names the domain.",
    )

    @property
    def kinds(self) -> dict[str, dict[str, DomainSection]]:
        """The domains of a config by type: `training` and `novel`."""
        kinds = {"training": self.training, "novel": self.novel}
        return {kind: {name: one for name, one in domains.items() if one} for kind, domains in kinds.items()}

    @property
    def all(self) -> dict[str, DomainSection]:
        """The training domains and then the novel ones."""
        return self.kinds["training"] | self.kinds["novel"]

    def sharing(self, source: str) -> dict[str, tuple[Scalar, ...]]:
        """The domains of a shared source, each with the values that select its documents."""
        return {name: domain.values for name, domain in self.all.items() if domain.shared == source}


def with_source(key: str, domain: DomainSection, sources: Mapping[str, SharedSource]) -> DomainSection:
    """The domain at `key`, with the source that `from` and `value` describe.

    That is the shared source with the domain's value as a further condition. Raises DemixError for keys that exclude
    each other.
    """
    if (name := domain.shared) is None:
        if domain.value is not None:
            raise DemixError(f"{key}.value", "needs the key `from`", "set `from` to the name of one of `sources`")
        if not domain.source:
            cure = "say where the raw text comes from, or give from and value to use one of `sources`"
            raise DemixError(f"{key}.source", "is missing", cure)
        return domain
    if name not in sources:
        raise DemixError(f"{key}.from", f"is {name!r}, not one of `sources`", nearest(name, sources, "add it"))
    shared = sources[name]
    if domain.value is None:
        raise DemixError(f"{key}.value", "is missing", f"give a value of the field {shared.by}, or a list of values")
    source = shared.source.replace(where=shared.source.where | {shared.by: domain.value})
    # A completed config, such as the one that a run keeps, has both.
    if domain.source and domain.source != source:
        raise DemixError(f"{key}.source", f"is given together with from: {name}", "remove one of the two")
    return domain.replace(source=source)


def check_sources(sources: Mapping[str, SharedSource], domains: DomainsSection) -> None:
    """Raise DemixError if a shared source's `where` names the field `by`, or if domains have the same value."""
    places = {name: f"domains.{kind}.{name}" for kind, named in domains.kinds.items() for name in named}
    for name, shared in sources.items():
        key = f"config key sources.{name}"
        if shared.by in shared.source.where:
            cause = f"names {shared.by}, the field by which the documents are divided among the domains"
            raise DemixError(f"{key}.source.where", cause, "remove this condition")
        sharing = domains.sharing(name)
        if len(sharing) > MAX_SHARING:
            cause = f"is shared by {len(sharing)} domains, more than {MAX_SHARING}"
            raise DemixError(key, cause, "divide the domains among several sources")
        check_values(sharing, places)


def check_values(domains: Mapping[str, Sequence[Scalar]], places: Mapping[str, str]) -> None:
    """Raise DemixError if a value occurs twice, in one domain or in two. `places` are the config keys of domains."""
    used = dict[Scalar, str]()
    for domain, values in domains.items():
        for value in values:
            if other := used.get(value) or used.get(str(value)):
                cause = f"has {value!r}, like the domain {other}" if other != domain else f"has {value!r} twice"
                subject = f"config key {places[domain]}.value" if domain in places else f"domains.{domain}"
                raise DemixError(subject, cause, "give each value to only one domain")
            used[value] = used[str(value)] = domain


def check_domains(domains: DomainsSection) -> None:
    """Raise DemixError for a domain that is both a training and a novel domain."""
    for name in domains.novel:
        if name in domains.training:
            cause, cure = "is also a training domain", "list the domain only once"
            raise DemixError(f"config key domains.novel.{name}", cause, cure)


def check_source(place: str, source: SourceSection) -> None:
    """Raise DemixError if keys of the source at `place` exclude each other."""
    for path in source.addresses:
        if "://" in path:
            refuse_secrets(f"{place}.path", path, LOG_IN)
    if source.kind == "url" and source.parts > len(source.paths):
        cause = f"is {source.parts} for {len(source.paths)} addresses"
        raise DemixError(f"{place}.parts", cause, "use at most one part per address")
    for path in source.addresses:
        if kind_of(path) != source.kind:
            raise DemixError(f"{place}.path", "has addresses of several kinds", "use one domain for each kind")
        if source.kind == "url" and not re.match("https?://", path):
            cure = "begin with http://, https://, hf://, or s3://, gs:// or az:// and the name of a bucket"
            raise DemixError(f"{place}.path", "is an address of no known kind", cure)
    if source.kind != "hub":
        return
    if not source.data_files:
        raise DemixError(f"{place}.data_files", "is missing", 'name files of the data set, such as ["data/*.parquet"]')
    if source.sha256:
        raise DemixError(f"{place}.sha256", "is given for a data set of the hub", "pin a commit by revision instead")
    if not source.revision and not local(source.paths):
        raise DemixError(f"{place}.revision", "is missing", "pin a commit, or name a branch such as main")
