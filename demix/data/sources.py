"""The raw text of a domain, read from the source in its config and written to private Parquet files, one per part."""

import glob
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from demix.config.addresses import COMMIT, LOG_IN, STORES, local, refuse_not_utf8, refuse_secrets
from demix.config.domains import UNCUT, SourceSection
from demix.config.files import left_out
from demix.data import readers
from demix.data.anonymize import anonymize_documents
from demix.data.hub import hub_rows
from demix.data.readers import SURROGATE, Reading, Row, as_text, matches, read_rows, select, select_or_none
from demix.data.shared import made_once
from demix.errors import DemixError
from demix.files import fingerprint
from demix.files.batches import write_rows
from demix.files.json_files import is_deep, without_nan
from demix.progress import followed
from demix.settings import DistinctItems, Text

SCHEMA = pa.schema([("text", pa.large_string())])
# The surrogates by which `demix.data.readers` represents bytes that are not UTF-8.
INVALID = re.compile("[\udc80-\udcff]")
MAX_INVALID = 4
MAX_NESTED = 100

_log = logging.getLogger(__name__)


@dataclass
class Omitted:
    """What was replaced or left out while a source was read.

    Bytes that are not UTF-8 (`invalid_bytes`) and lone surrogates were replaced; documents that are not text
    (`not_utf8`) were skipped. `files` has the endings of the files that are not data.
    """

    surrogates: int = 0
    invalid_bytes: int = 0
    not_utf8: int = 0
    files: Counter[str] = field(default_factory=Counter)

    def footer(self) -> dict[str, str]:
        """The metadata of a raw text file about bytes that are not text."""
        return {name: str(getattr(self, name)) for name in ("surrogates", "invalid_bytes", "not_utf8")}

    def warn(self, name: str) -> None:
        """Log a warning if bytes of the source `name` are not text, and one if files are not data."""
        if self.invalid_bytes or self.not_utf8:
            said = "%s: %d documents that are not UTF-8 were skipped, and %d bytes of others became U+FFFD"
            said += " (convert Latin-1 by: %s)"
            _log.warning(said, name, self.not_utf8, self.invalid_bytes, readers.TO_UTF8)
        if said := left_out(self.files):
            _log.warning("%s: %s; to read some, name them in source.path (in archives: source.members)", name, said)


class Source(SourceSection):
    """Where a domain's text comes from and which of its records are read; config/README.md explains each field.

    `text`, the keys of `where` and `fields` are fields or paths into nested ones (`readers.select`). `records` also
    returns the values of `fields`.
    """

    fields: DistinctItems[Text] = ()

    def reading(self, part: int, parts: int, others: Counter[str]) -> Reading:
        """The settings of a reader, which adds the endings of files that are not data to `others`."""
        wanted = [self.text, *self.fields, *self.where]
        return Reading(tuple(dict.fromkeys(wanted)), self.members, self.json_holds == "values", part, parts, others)


def download(source: Source, domain: str, output: Path, part: int = 0) -> int:
    """Write part `part` (of `source.parts`, from 0) of the documents of `source` to the Parquet file `output`.

    If a pass over a shared source has written the file (`divided`), that file is used, and nothing is read. The column
    is `text`. Text is not anonymized yet, so the file has mode 0600, and a new folder for it 0700. Bytes that are not
    UTF-8, and lone surrogates, which UTF-8 cannot represent, become U+FFFD. A document is not text, and is skipped, if
    more than 1% of its bytes (and more than four) are such bytes or NUL. The file's key-value metadata has the numbers
    ("invalid_bytes", "surrogates", "not_utf8"). Returns the number of documents. Raises DemixError naming the file or
    key at fault; `output` then stays as it was.
    """
    check_part(source, domain, part)
    output = Path(output)
    make_private(output.parent)
    if (ready := divided(output, source, part)).exists():
        os.replace(ready, output)
        _clean(output)
        return int(pq.read_metadata(output).num_rows)
    omitted = Omitted()
    rows = KINDS[source.kind](source, domain, part, _fetched(output), omitted.files)
    documents = _budgeted(valid(_documents(rows, source, domain), omitted), source, domain)
    texts = ((text,) for _, text, _ in documents)
    count = write_rows(output, SCHEMA, texts, private=True, footer=omitted.footer)
    omitted.warn(domain)
    # Fetched files are kept until here, so that a failed job need not download them again.
    _clean(output)
    return count


def check_part(source: Source, name: str, part: int) -> None:
    """Raise DemixError if a source does not have this part."""
    if not 0 <= part < source.parts:
        raise DemixError(f"{name}.source.parts", f"is {source.parts}, so there is no part {part}", "count parts from 0")


def discard(output: Path) -> None:
    """Remove the raw text `output`, and the files that `download` fetched for it."""
    output.unlink(missing_ok=True)
    _clean(output)


def anonymize_once(
    raw: Path,
    output: Path,
    counts: Path,
    enabled: bool = True,
    document_words: int | None = None,
    piece_words: int | None = None,
) -> None:
    """Normalise one part of a domain's raw text, replace personal data by dummy tokens, cut long documents.

    With `enabled` false nothing is replaced. `document_words` and `piece_words` are as in `anonymize_documents`.
    """
    how: dict[str, Any] = {"enabled": enabled, "document_words": document_words, "piece_words": piece_words}
    make = partial(anonymize_documents, raw, output, counts, **how)
    made_once(output, [output, counts], [raw], how, make, passing=True)


def read(
    domain: str, settings: Source, raw: Path, output: Path, counts: Path, part: int = 0, enabled: bool = True
) -> None:
    """Read one part of a domain's text from its source, and anonymize it: download and anonymize in one.

    The intermediate raw text, `raw`, is private and is removed at the end.
    """

    how = enabled, settings.document_words, settings.piece_words

    def make() -> None:
        download(settings, domain, raw, part)
        anonymize_documents(raw, output, counts, *how)

    if (inputs := pinned(settings, part)) is None:
        download(settings, domain, raw, part)
        anonymize_once(raw, output, counts, *how)
    else:
        values = {"source": settings.as_dict(), "part": part, "enabled": enabled}
        made_once(output, [output, counts], inputs, values, make)
    discard(raw)


def divided(output: Path, source: Source, part: int, where: Mapping[str, Any] | None = None) -> Path:
    """The path to which a pass over a shared source (`demix.data.divide`) writes the file `output` of a domain.

    `where` are the conditions of the domain, if they differ from the source's. The name contains a digest of the pass's
    inputs: the settings and, for local files, their sizes and times.
    """
    files = (pinned(source, part) or []) if source.kind == "files" else []
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.exists()]
    given = source.as_dict() | UNCUT | {"where": source.where if where is None else where}
    digest = fingerprint([given, part, stamps])
    return output.with_name(f".{output.stem}.{digest[:16]}.divided")


def _clean(output: Path) -> None:
    """Remove the files fetched for `output`, and unused files that passes wrote for it."""
    shutil.rmtree(_fetched(output), ignore_errors=True)
    for left in output.parent.glob(f".{glob.escape(output.stem)}.*.divided"):
        left.unlink(missing_ok=True)


def _fetched(output: Path) -> Path:
    return output.parent / f".{output.stem}.fetched"


def pinned(source: Source, part: int) -> list[Path] | None:
    """The local files that, with the settings, determine the text of a part; None if the text may change unnoticed.

    Files of an address or an object store are determined by their `sha256`, a data set of the hub by a commit.
    """
    if source.kind == "files":
        return [Path(file) for file in source.share(part)]
    found = bool(source.sha256)
    if source.kind == "url":
        found = all(file_name(url) in source.sha256 for url in source.paths)
    elif source.kind == "hub":
        found = COMMIT.fullmatch(source.revision or "") is not None and not local(source.paths)
    return [] if found else None


def records(source: Source, name: str, fetched: Path, omitted: Omitted) -> Iterator[tuple[str, str, str]]:
    """Place, text and `source.fields` (JSON) of all documents of `source`; `name` is for errors.

    A file of an address or an object store is fetched to the folder `fetched`. The counts that `download` writes to a
    file's metadata are added to `omitted`.
    """
    for part in range(source.parts):
        rows = KINDS[source.kind](source, name, part, fetched, omitted.files)
        yield from _budgeted(valid(_documents(rows, source, name), omitted), source, name)
    omitted.warn(name)


def valid(documents: Iterable[tuple[str, str, str]], omitted: Omitted) -> Iterator[tuple[str, str, str]]:
    """The documents in valid UTF-8; replaced bytes and skipped documents are added to `omitted`."""
    for document in documents:
        try:
            # Nearly all documents are valid, and this check is much faster than a search for invalid bytes.
            "".join(document).encode()
            yield document
            continue
        except UnicodeEncodeError:
            pass
        found = [len(INVALID.findall(value)) for value in document]
        # A later stage removes NUL. Together with bytes that are not UTF-8, it is a sign of UTF-16 or of binary data.
        if found[1] and found[1] + document[1].count("\0") > max(MAX_INVALID, len(document[1]) / 100):
            omitted.not_utf8 += 1
            continue
        replaced = [SURROGATE.subn("\ufffd", value) for value in document]
        omitted.invalid_bytes += sum(found)
        omitted.surrogates += sum(number for _, number in replaced) - sum(found)
        (place, _), (text, _), (fields, _) = replaced
        yield place, text, fields


def make_private(folder: Path) -> None:
    """Make `folder` private. A folder that already has files is not changed; one made by the workflow is empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            folder.chmod(0o700)
    except OSError as error:
        raise DemixError(folder, f"cannot be written ({error.strerror})", "fix its permissions, then rerun") from None


def _documents(rows: Iterator[Row], source: Source, domain: str) -> Iterator[tuple[str, str, str]]:
    """Place, text and fields of the rows that `source.where` keeps."""
    seen = kept = 0
    for row in followed(rows, f"{domain}: documents"):
        seen += 1
        check_depth(row)
        if source.where and not matches(row.fields, source.where):
            continue
        kept += 1
        yield document_of(row, source)
    # If there are parts, all documents may be in another part. A domain without any is an error in `split`.
    if not kept and source.parts == 1:
        cause = f"keeps none of {seen} documents" if seen else "has no documents to choose from"
        raise DemixError(f"{domain}.source.where", cause, f"fix {source.where or 'the source'}")
    _log.info("%s: selected %d of %d documents", domain, kept, seen)


def check_depth(row: Row) -> None:
    """Raise DemixError for a record that is nested too deeply for the recursion over its fields."""
    if is_deep([row.fields], MAX_NESTED + 1):
        cause = f"is nested deeper than {MAX_NESTED} levels"
        raise DemixError(row.place, cause, "flatten or remove it")


def document_of(row: Row, source: Source) -> tuple[str, str, str]:
    """Place ("<file name>#<row>"), text and fields (JSON) of a record. Raises DemixError if the text is missing."""
    place = row.place
    try:
        text = as_text(select(row.fields, source.text))
    except LookupError as error:
        named = ", ".join(map(repr, row.fields))[:300]
        cure = f"fields are {named}; set source.text or --field to the field of the text"
        raise DemixError(place, f"has no field {error.args[0]!r}", cure) from None
    except TypeError as error:
        raise DemixError(place, f"field {source.text!r} is {error}, not text", "name a text field") from None
    if len(text) > readers.MAX_DOCUMENT_BYTES:
        raise DemixError(place, "is a document over 128 MiB", "split it into documents")
    fields = {path: without_nan(select_or_none(row.fields, path)) for path in source.fields}
    return f"{row.file.name}#{row.number}", text, json.dumps(fields, ensure_ascii=False, default=str)


def _budgeted(documents: Iterator[tuple[str, str, str]], source: Source, domain: str) -> Iterator[tuple[str, str, str]]:
    """The first documents, up to this part's share of `source.words`."""
    if source.words is None:
        yield from documents
        return
    share, words = share_of(source), 0.0
    for document in documents:
        yield document
        words += len(document[1].split())
        if words >= share:
            return
    warn_short(domain, words, share)


def share_of(source: Source) -> float:
    """The number of words after which one part of a source stops; infinity if it is read to its end."""
    return math.inf if source.words is None else -(-source.words // source.parts)


def warn_short(domain: str, words: float, share: float) -> None:
    """Log a warning that a part has fewer words than its share."""
    _log.warning("%s: this part has only %d words, fewer than its share of source.words, %d", domain, words, share)


def _files(source: Source, domain: str, part: int, fetched: Path, others: Counter[str]) -> Iterator[Row]:
    for pattern, matching in source.listed.items():
        if not matching:
            cause = f"no file matches {pattern!r}{'; ' * bool(source.others)}{left_out(source.others)}"
            raise DemixError(f"{domain}.source.path", cause, source.instructions or "correct the path or the glob")
    _check_names(source, domain, {Path(file).name for file in source.names})
    paths = [Path(file) for file in source.share(part)]
    for path in paths:
        refuse_not_utf8(path)
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "a pipe or a device" if path.exists() else "a link to nothing"
            raise DemixError(path, f"is {kind}", "name a file, or a folder's files by a glob")
    share = (0, 1) if len(source.names) >= source.parts else (part, source.parts)
    if part == 0:
        others.update(source.others)
    for path in paths:
        _verify(path, source)
        yield from read_rows(path, source.reading(*share, others))


def _verify(path: Path, source: Source) -> None:
    digest = source.sha256.get(path.name)
    if digest is None:
        return
    # requests loads for a tenth of a second.
    from demix.data.fetch import mismatch

    if problem := mismatch(path, None, digest):
        raise DemixError(path, problem, "fetch it again or change the config")


def _check_names(source: Source, domain: str, names: set[str]) -> None:
    for name in source.sha256:
        if name not in names:
            raise DemixError(f"{domain}.source.sha256.{name}", "names no file", f"files are {sorted(names)}"[:300])


def _urls(source: Source, domain: str, part: int, fetched: Path, others: Counter[str]) -> Iterator[Row]:
    _check_names(source, domain, {file_name(url) for url in source.paths})
    yield from _fetched_rows(source, source.paths[part :: source.parts], source.reading(0, 1, others), fetched)


def _stored(source: Source, domain: str, part: int, fetched: Path, others: Counter[str]) -> Iterator[Row]:
    from demix.data.fetch import stored

    try:
        addresses = stored(source.paths, others if part == 0 else Counter())
    except DemixError as error:
        raise error.but(cure=source.instructions) from None
    names = [file_name(address) for address in addresses]
    _check_names(source, domain, {*names})
    # Digests pin the list of files, too.
    if source.sha256 and (more := sorted((Counter(names) - Counter([*source.sha256])).elements())):
        cause = f"lacks, or has twice, these files of {', '.join(source.paths)}: {', '.join(more)}"
        cure = "add them by `demix config --pin`, or name fewer files in path"
        raise DemixError(f"{domain}.source.sha256", cause[:300], cure)
    whole = len(addresses) >= source.parts
    reading = source.reading(*(0, 1) if whole else (part, source.parts), others)
    chosen = addresses[part :: source.parts] if whole else addresses
    yield from _fetched_rows(source, chosen, reading, fetched)


def _fetched_rows(source: Source, addresses: Sequence[str], reading: Reading, fetched: Path) -> Iterator[Row]:
    """The rows of the files at these addresses. Each file is first fetched to a path below `fetched`."""
    # requests loads for a tenth of a second.
    from demix.data.fetch import fetch

    make_private(fetched)
    for address in addresses:
        name = file_name(address)
        # Two addresses may end in the same name, and a changed address must not reuse the old bytes.
        path = fetched / hashlib.sha256(address.encode()).hexdigest()[:12] / name
        make_private(path.parent)
        try:
            fetch(address, path, sha256=source.sha256.get(name))
        except DemixError as error:
            raise error.but(cure=source.instructions) from None
        try:
            for row in read_rows(path, reading):
                yield replace(row, address=str(row.file).replace(str(path), address, 1))
        except DemixError as error:
            # It was damaged at its source or during the download, so the next run must fetch it again.
            path.unlink()
            raise error.but(error.subject.replace(str(path), address, 1)) from None


def file_name(url: str) -> str:
    """The name by which `sha256` knows the file at an address. Raises DemixError for other addresses."""
    refuse_secrets("an address in source.path", url, LOG_IN)
    parts = urlsplit(url)
    # A name in a store is not part of a URL: % and ? have no meaning.
    name = url.rpartition("/")[2] if parts.scheme in STORES else PurePosixPath(unquote(parts.path)).name
    if parts.scheme not in ("http", "https", *STORES) or name in ("", ".", ".."):
        raise DemixError(url, "is not the address of a file", "give http(s)://host/…/file.suffix")
    return name


def _hub(source: Source, domain: str, part: int, fetched: Path, others: Counter[str]) -> Iterator[Row]:
    reading = source.reading(part, source.parts, others)
    for repository in source.paths:
        try:
            yield from hub_rows(repository, source.revision, source.data_files, reading.paths, part, source.parts)
        except DemixError as error:
            raise error.but(cure=source.instructions) from error


KINDS: dict[str, Callable[[Source, str, int, Path, Counter[str]], Iterator[Row]]] = {
    "files": _files,
    "url": _urls,
    "store": _stored,
    "hub": _hub,
}
