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
    """The name of a domain or source. Raises ValueError of a cause and a cure for one that a path cannot hold."""
    if not re.fullmatch("[a-z0-9][a-z0-9_]*", name) or name in ("tokens", "dense"):
        cure = "use lower-case letters, digits and _; the names tokens and dense are reserved"
        raise ValueError("is not a usable domain name", cure)
    refuse_name(name)
    return name


DomainName = Annotated[Text, AfterValidator(domain_name)]
Scalar = Text | Switch | Integer | Number
Range = Annotated[dict[Literal["min", "max"], Text | Number], Field(min_length=1)]
# Of a source whose documents stay whole.
UNCUT = {"document_words": None, "piece_words": None}
# One job writes a file for each domain of a source, and a process holds so many open.
MAX_SHARING = 400
# What the path of a data set of the Hugging Face hub begins with.
DATA_SET = "hf://"
# What the paths of a kind of source begin with. All others are files of this machine.
_BEGINS = {"hub": DATA_SET, "store": rf"({'|'.join(STORES)})://[^/@*?\[]+(/|$)", "url": "[a-z][a-z0-9+.-]*://"}


def kind_of(path: str) -> str:
    """The kind of a source with this path: files, url, store (of objects) or hub."""
    return next((kind for kind, begins in _BEGINS.items() if re.match(begins, path)), "files")


class SourceSection(Settings):
    """The source of a domain's raw text, and which of its records are read."""

    path: Text | Annotated[Items[Text], Field(min_length=1)] = Field(
        description="A file, a glob or a folder, or a list of them; a path that exists is that file, whatever "
        "characters it has. Of a folder all files below it are read that have one of the formats; a line counts the "
        "others. Or addresses of one kind: http:// and https:// of files, which are fetched, resumed and retried; "
        "s3://, gs:// or az:// and a bucket, with globs and folders, fetched by a package that you install (s3fs, "
        "gcsfs or adlfs) with the credentials of the environment; hf://owner/name, a data set of the Hugging Face "
        "hub, streamed without running code of the data set (hf:// and a local folder is a copy of one). Formats: "
        ".jsonl .ndjson .json .csv .txt (one document per .txt file), plain, .gz or .zst; .parquet; and .zip .tar "
        ".tgz .tar.gz .tar.zst archives of such files. A named file with another ending is one document of plain "
        "text."
    )
    text: Text = Field(
        default="text",
        description="Field that holds the text (not used for .txt). A dot leads into a nested field. [] reads every "
        "item of a list and joins the texts of the items by newlines: full_text[].paragraphs[].",
    )
    where: dict[Text, Scalar | Annotated[Items[Scalar], Field(min_length=1)] | Range] = Field(
        default_factory=dict,
        description="Read only records whose fields match all of these conditions. A condition is one value (language: "
        "en), a list of values, or a range with min and max (inclusive; quote dates, which are compared as text).",
    )
    words: Positive | None = Field(
        default=None,
        description="Stop reading after this many words, divided evenly among the parts; null reads everything.",
    )
    document_words: Positive | None = Field(
        default=None,
        description="Cut files or records that are longer than this many words into documents of this length, once "
        "they are anonymized, such as a book or a mailbox that is one file. Each has a split of its own.",
    )
    piece_words: Positive | None = Field(
        default=None,
        description="Cut documents that are longer than this many words into pieces of this length, "
        "once they are anonymized. All pieces of a document go to one split; intervals treat them together.",
    )
    parts: Positive = Field(
        default=1,
        le=10_000,
        description="Number of parallel jobs that read and anonymize the source. Each job reads one in this many "
        "files, or rows where there are fewer files than jobs. A source of http(s) addresses has at most one part per "
        "address.",
    )
    members: Items[Text] = Field(
        default=("*",),
        min_length=1,
        description="Members of archives to read, as globs in which * also matches /. `*` reads the members that "
        "would be read of a folder.",
    )
    json_holds: Literal["lines", "values"] = Field(
        alias="json",
        default="lines",
        description="Content of a .json file: lines (one object per line), or values (one array or object whose values "
        "are the records).",
    )
    revision: Text | None = Field(
        default=None,
        description="hf: branch, tag or commit (refs/convert/parquet where the repository has a loader script). A "
        "commit pins the data set. For a branch, the log names the commit.",
    )
    data_files: Items[Text] = Field(
        default=(),
        description="hf: globs of files in the data set (.parquet; .jsonl, .json and .csv, also as .gz or .zst).",
    )
    sha256: dict[Text, Annotated[Text, Field(pattern="^[0-9a-f]{64}$")]] = Field(
        default_factory=dict, description="Expected SHA-256 digests by file name (not of hf)."
    )
    instructions: Text = Field(
        default="",
        description="How to obtain the text. The error for a missing source shows these instructions as its cure.",
    )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The paths or addresses of the config."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def kind(self) -> str:
        """The kind of the source, by its first path."""
        return kind_of(self.addresses[0])

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths or addresses; of data sets of the hub owner/name, or a local folder."""
        return tuple(path.removeprefix(DATA_SET) for path in self.addresses)

    @cached_property
    def listed(self) -> dict[str, list[str]]:
        """The local files of each path of a source of this kind, listed once; none where they are missing."""
        return {path: files_at(path, self.others) for path in self.paths} if self.kind == "files" else {}

    @cached_property
    def others(self) -> Counter[str]:
        """The endings of the files in the folders of `listed` that are not data."""
        return Counter()

    @cached_property
    def names(self) -> list[str]:
        """The local files in the order in which they are read, but for missing ones, which `demix download` refuses.

        Raises DemixError for a name that no rule can hold.
        """
        return sorted({refuse_unnamable(file) for files in self.listed.values() for file in files})

    def share(self, part: int) -> list[str]:
        """The local files of a part: whole ones where there are enough, else all of them, each for its share."""
        return self.names[part :: self.parts] if len(self.names) >= self.parts else self.names


class SharedSource(Settings):
    """A corpus of several domains. Each of its parts is read once for all of them."""

    source: SourceSection = Field(
        description="Where the corpus comes from, with the keys of a domain's source. `words`, `document_words` and "
        "`piece_words` hold for each domain by itself."
    )
    by: Text = Field(
        description="Field that says which domain a document belongs to, such as meta.pile_set_name. A dot leads into "
        "a nested field."
    )


class Budget(Settings):
    """Words of each split, where white space separates words.

    With `train` null the train split gets all words that dev and test leave.
    """

    train: Positive | None = Field(
        default=None, description="Largest number of words of the train split; null means all."
    )
    dev: Positive = Field(default=1_000_000, description="Words of the dev split.")
    test: Positive = Field(default=1_000_000, description="Words of the test split.")
    per_document: Positive | None = Field(
        default=None,
        description="Largest number of words of a document in dev and test: its first chunks (`source.piece_words`), "
        "at least one. The rest of the document is in no split. Dev and test of long documents then have more "
        "documents; null uses whole documents.",
    )


class SplitRecipe(Settings):
    """The settings of a domain that splitting uses."""

    near_duplicates: Number | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Leave out of train the documents that share more than this fraction of their word 13-grams with "
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
        description="Name of one of `sources`: a corpus that several domains share. The domain has the documents that "
        "`where: {<by>: <value>}` would select.",
    )
    value: Scalar | Annotated[Items[Scalar], Field(min_length=1)] | None = Field(
        default_factory=absent,
        description="Value of the field `by` in the domain's documents, or a list of values.",
    )
    anonymize: Switch = Field(
        default=True, description="Replace personal data by the seven dummy tokens of the paper's Table 8."
    )
    licence: Text = Field(default="", description="Licence or terms of the text, recorded with the run.")

    @property
    def values(self) -> tuple[Scalar, ...]:
        """The values of the field `by` that the documents of a domain of a shared source have."""
        return self.value if isinstance(self.value, tuple) else (() if self.value is None else (self.value,))


class DomainsSection(Settings):
    """The text domains by name, in the order in which tables and figures show them."""

    training: dict[DomainName, DomainSection | None] = Field(
        min_length=1,
        description="Domains that get an expert when the model is trained. null leaves out a domain of the base. A key "
        "that still names it, such as `removal.retrain_without`, is refused in one line that names the key.",
    )
    novel: dict[DomainName, DomainSection | None] = Field(
        default_factory=dict,
        description="Domains that the trained models have not seen. DEMix-DAPT gives each of them an expert. Append "
        "new domains at the end: then nothing that exists is computed again. null leaves out a domain of the base; "
        "`removal.replacement` that still names it is refused.",
    )

    @property
    def kinds(self) -> dict[str, dict[str, DomainSection]]:
        """The domains of a config by kind, `training` and `novel`."""
        kinds = {"training": self.training, "novel": self.novel}
        return {kind: {name: one for name, one in domains.items() if one} for kind, domains in kinds.items()}

    @property
    def all(self) -> dict[str, DomainSection]:
        """The training domains and then the novel ones."""
        return self.kinds["training"] | self.kinds["novel"]

    def sharing(self, source: str) -> dict[str, tuple[Scalar, ...]]:
        """The domains of a shared source, each with its values."""
        return {name: domain.values for name, domain in self.all.items() if domain.shared == source}


def with_source(key: str, domain: DomainSection, sources: Mapping[str, SharedSource]) -> DomainSection:
    """The domain at `key`, with the source that `from` and `value` come to.

    It is the shared one, with the domain's value among its conditions. Raises DemixError for keys that do not go
    together.
    """
    if (name := domain.shared) is None:
        if domain.value is not None:
            raise DemixError(f"{key}.value", "is given without from", "name one of `sources` in from")
        if not domain.source:
            cure = "add it: where the raw text comes from; or give from and value, for one of `sources`"
            raise DemixError(f"{key}.source", "is missing", cure)
        return domain
    if name not in sources:
        raise DemixError(f"{key}.from", f"is {name!r}, not a source", nearest(name, sources, "add it to sources"))
    shared = sources[name]
    if domain.value is None:
        raise DemixError(f"{key}.value", "is missing", f"give a value of the field {shared.by}, or a list of values")
    source = shared.source.replace(where=shared.source.where | {shared.by: domain.value})
    # A completed config, such as the one that a run keeps, has both.
    if domain.source and domain.source != source:
        raise DemixError(f"{key}.source", f"is given together with from: {name}", "leave out one of the two")
    return domain.replace(source=source)


def check_sources(sources: Mapping[str, SharedSource], domains: DomainsSection) -> None:
    """Raise DemixError for a shared source that selects by the field of its domains, and a value that two have."""
    places = {name: f"domains.{kind}.{name}" for kind, named in domains.kinds.items() for name in named}
    for name, shared in sources.items():
        key = f"config key sources.{name}"
        if shared.by in shared.source.where:
            cause = f"names {shared.by}, by which the domains part the documents"
            raise DemixError(f"{key}.source.where", cause, "leave it out there")
        sharing = domains.sharing(name)
        if len(sharing) > MAX_SHARING:
            cause = f"has {len(sharing)} domains"
            raise DemixError(key, cause, f"give a source at most {MAX_SHARING}, and the rest another one")
        check_values(sharing, places)


def check_values(domains: Mapping[str, Sequence[Scalar]], places: Mapping[str, str]) -> None:
    """Raise DemixError for a value that two domains have, or one twice. `places` are the config keys of domains."""
    used = dict[Scalar, str]()
    for domain, values in domains.items():
        for value in values:
            if other := used.get(value) or used.get(str(value)):
                cause = f"names {value!r}, which {other} has too" if other != domain else f"names {value!r} twice"
                subject = f"config key {places[domain]}.value" if domain in places else f"domains.{domain}"
                raise DemixError(subject, cause, "give a value to one domain")
            used[value] = used[str(value)] = domain


def check_domains(domains: DomainsSection) -> None:
    """Raise DemixError for a domain in both lists."""
    for name in domains.novel:
        if name in domains.training:
            cause, cure = "is a training domain too", "name the domain in one list only"
            raise DemixError(f"config key domains.novel.{name}", cause, cure)


def check_source(place: str, source: SourceSection) -> None:
    """Raise DemixError unless the keys of the source at `place` go together."""
    for path in source.addresses:
        if "://" in path:
            refuse_secrets(f"{place}.path", path, LOG_IN)
    if source.kind == "url" and source.parts > len(source.paths):
        cause = f"is {source.parts} for {len(source.paths)} addresses"
        raise DemixError(f"{place}.parts", cause, "set at most one part per address")
    for path in source.addresses:
        if kind_of(path) != source.kind:
            raise DemixError(f"{place}.path", "has addresses of several kinds", "make each a domain of its own")
        if source.kind == "url" and not re.match("https?://", path):
            cure = "begin with http://, https://, hf://, or s3://, gs:// or az:// and the name of a bucket"
            raise DemixError(f"{place}.path", "is an address of no known kind", cure)
    if source.kind != "hub":
        return
    if not source.data_files:
        raise DemixError(f"{place}.data_files", "is missing", 'name files of the data set, such as ["data/*.parquet"]')
    if source.sha256:
        raise DemixError(f"{place}.sha256", "is given to a data set of the hub", "pin a commit by revision instead")
    if not source.revision and not local(source.paths):
        raise DemixError(f"{place}.revision", "is missing", "pin a commit, or name a branch such as main")
