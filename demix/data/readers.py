"""Records out of files, and their fields: JSON lines, JSON, CSV, text and Parquet, compressed or in archives.

No file is trusted. Its name gives its format (text, if the name gives none), and its first bytes must agree. Nothing is
ever unpacked to disk, decompression is bounded, and damage raises a DemixError that names the file.
A byte that is not UTF-8 becomes the lone surrogate U+DC00 + byte (Python's "surrogateescape"), which
`demix.data.sources` replaces and counts.
"""

import csv
import io
import json
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from demix.config.files import hidden, is_data, left_out, suffixes
from demix.data.expand import DAMAGE, Bound, expanded
from demix.errors import DemixError
from demix.files.kinds import PARQUET, RECORDS, TAR, TEXT, ZIP, check_file_kind

SURROGATE = re.compile("[\ud800-\udfff]")
MAX_DOCUMENT_BYTES = 128 << 20
# The maximum memory of a Parquet batch.
MAX_BATCH_BYTES = 1 << 30
# The cure for text in another encoding, most often Latin-1.
TO_UTF8 = "iconv -f LATIN1 -t UTF-8 OLD > NEW"
UNPACK = "do not trust this archive; unpack the files that you need by hand"


@dataclass(frozen=True)
class Row:
    """One record as it was read. `number` counts from 1 in the file (for JSON lines, it is the line).

    `address` is the address of a file that was fetched.
    """

    file: Path
    number: int
    fields: dict[str, Any]
    address: str = ""

    @property
    def place(self) -> str:
        """The name of the record in errors."""
        return f"{self.address or self.file}, row {self.number}"


@dataclass(frozen=True)
class Reading:
    """What to read in a file: the `paths` of the needed fields, the text first; none means all fields.

    `members`: members of archives, by glob; a single `*` means all data members. The endings of other members are added
    to `others`. `values`: a .json file is one array or object whose values are the records. Part `part` of `parts` is
    read: every `parts`-th row (in an archive, every `parts`-th member; in Parquet, every `parts`-th row group if there
    are enough groups).
    """

    paths: tuple[str, ...]
    members: tuple[str, ...] = ("*",)
    values: bool = False
    part: int = 0
    parts: int = 1
    others: Counter[str] = field(default_factory=Counter)

    def includes(self, index: int) -> bool:
        return index % self.parts == self.part


# A member of an archive: its name, the reason why it cannot be read, and a function that opens it.
Member = tuple[str, str, Callable[[], Any]]


def read_rows(path: Path, reading: Reading) -> Iterator[Row]:
    """The records in the file `path`. Raises DemixError if it is damaged, a bomb, hostile or without records."""
    found = suffixes(path.name)
    if found[:1] in ([".zip"], [".tar"]):
        rows = _archive(path, reading, found[0] == ".zip")
    elif found == [".parquet"]:
        rows = _parquet(path, reading)
    else:
        rows = _file(path, reading)
    empty = True
    for row in rows:
        empty = False
        yield row
    # If there are parts, all records may be in another part.
    if empty and reading.parts == 1:
        raise DemixError(path, "holds no documents", "delete it or exclude it from the glob")


def _file(path: Path, reading: Reading, bound: Bound | None = None, stream: Any = None) -> Iterator[Row]:
    """The records of a file of lines or text on disk, or of the member `path` of an archive."""
    read = _FORMATS.get(next(iter(suffixes(path.name)), ""), _other_text)
    wanted = TEXT if read in (_text, _other_text) else RECORDS
    with expanded(path, bound, wanted, stream) as content:
        yield from read(content, path, reading)


def _json_lines(stream: "io.BufferedReader[Any]", path: Path, reading: Reading) -> Iterator[Row]:
    number = 0
    while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        place = f"{path}, line {number}"
        if len(line) > MAX_DOCUMENT_BYTES:
            raise DemixError(place, "is over 128 MiB long", "end each JSON object with a line feed")
        if reading.includes(number - 1) and not line.isspace():
            yield Row(path, number, json_object(line, place, first=number == 1))


def json_object(line: bytes, place: str, first: bool = False) -> dict[str, Any]:
    """The JSON object of a line, which may be the `first` of its file. Raises DemixError that names `place`."""
    fields = _json(line, place, first)
    if not isinstance(fields, dict):
        raise DemixError(place, "is not a JSON object", 'write one object per line, such as {"text": "..."}')
    return fields


def _json_file(stream: "io.BufferedReader[Any]", path: Path, reading: Reading) -> Iterator[Row]:
    if not reading.values:
        yield from _json_lines(stream, path, reading)
        return
    values = _json(_whole(stream, path), str(path), first=True)
    if not isinstance(values, (dict, list)):
        raise DemixError(path, "is neither a JSON array nor an object", "remove `json: values`")
    for number, fields in enumerate(values.values() if isinstance(values, dict) else values, 1):
        if not isinstance(fields, dict):
            raise DemixError(f"{path}, value {number}", "is not a JSON object", "remove `json: values`")
        if reading.includes(number - 1):
            yield Row(path, number, fields)


def _json(data: bytes, place: str, first: bool) -> Any:
    try:
        text = data.decode("utf-8-sig" if first else "utf-8", "surrogateescape")
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DemixError(place, f"is not valid JSON ({error})", "fix or remove the line") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values. Raises ValueError for a duplicate key (json would keep the last value)."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"the key {_twice([key for key, _ in pairs])!r} occurs twice in an object")
    return made


def _twice(names: Iterable[str]) -> str | None:
    """The first duplicate name."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _whole(stream: "io.BufferedReader[Any]", path: Path) -> bytes:
    data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DemixError(path, "is a document over 128 MiB", "split it, or use JSON lines")
    return data


def _text(stream: "io.BufferedReader[Any]", path: Path, reading: Reading) -> Iterator[Row]:
    data = _whole(stream, path)
    if data and reading.includes(0):
        text = data.decode("utf-8-sig", "surrogateescape")
        yield Row(path, 1, {next(iter(reading.paths), "text"): text, "file": path.name})


def _other_text(stream: "io.BufferedReader[Any]", path: Path, reading: Reading) -> Iterator[Row]:
    """The single document of a file whose name gives no format. Raises DemixError if it is clearly not text."""
    head = stream.peek(1 << 10)
    if b"\0" in head:
        raise DemixError(path, "is not text", "name a text file")
    if head.lstrip().startswith(b'{"') or path.suffix.lower() == ".tsv":
        raise DemixError(path, "holds records", "rename it to .jsonl, or convert it to .jsonl or .csv")
    yield from _text(stream, path, reading)


def _csv(stream: "io.BufferedReader[Any]", path: Path, reading: Reading) -> Iterator[Row]:
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    rows = csv.reader(_csv_lines(stream, path), strict=True)
    header, number = list[str](), 0
    try:
        header = next(rows, [])
        columns = _columns(path, reading, header)
        places = {name: place for place, name in enumerate(header) if name in columns or not columns}
        for values in rows:
            # A blank line.
            if not values:
                continue
            number += 1
            if len(values) != len(header):
                cause = f"has {len(values)} values, but the header has {len(header)}"
                cure = "quote values with commas and line ends, or fix the row"
                raise DemixError(f"{path}, row {number}", cause, cure)
            if reading.includes(number - 1):
                yield Row(path, number, {name: values[place] for name, place in places.items()})
    except csv.Error as error:
        cause = f"is not valid CSV ({error})"
        cure = "close each quote and double quotes within values, or use JSON lines"
        raise DemixError(f"{path}, {f'row {number + 1}' if header else 'header'}", cause, cure) from None


def _csv_lines(stream: "io.BufferedReader[Any]", path: Path) -> Iterator[str]:
    """The lines of a CSV file with their ends, which are \\n, \\r or both."""
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    while line := text.readline(MAX_DOCUMENT_BYTES + 1):
        if len(line) > MAX_DOCUMENT_BYTES:
            raise DemixError(path, "has a line of over 128 MiB", "end each row with a line feed")
        yield line


def _columns(path: Path, reading: Reading, names: list[str]) -> list[str]:
    """The columns of a table with these `names` to read; none means all.

    Raises DemixError if a column is missing or occurs twice.
    """
    columns = list(dict.fromkeys(column(wanted, names) for wanted in reading.paths))
    for name in columns:
        if name not in names:
            cure = f"it has {', '.join(map(repr, names))[:300]}; set source.text or --field to the field of the text"
            raise DemixError(path, f"has no column {name!r}", cure)
    if twice := _twice(name for name in names if name in (columns or names)):
        raise DemixError(path, f"has two columns {twice!r}", "rename one of them")
    return columns


def _parquet(path: Path, reading: Reading) -> Iterator[Row]:
    check_file_kind(path, PARQUET)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            columns = _columns(path, reading, file.schema_arrow.names)
            groups = range(file.metadata.num_row_groups)
            sizes = [file.metadata.row_group(group).total_byte_size for group in groups]
            bound = Bound(path)
            bound.refuse(sum(sizes))
            by_group = len(groups) >= reading.parts
            start = 0
            for group in groups:
                rows = file.metadata.row_group(group).num_rows
                if not by_group or reading.includes(group):
                    # A value that the file stores once, in a dictionary, may be expanded for every row.
                    size = min(256, max(8, MAX_BATCH_BYTES // (sizes[group] + 1)))
                    batches = file.iter_batches(batch_size=size, row_groups=[group], columns=columns or None)
                    for number, fields in _numbered(map(bound.spent_on, batches), start):
                        if by_group or reading.includes(number - 1):
                            yield Row(path, number, fields)
                start += rows
    except UnicodeDecodeError as error:
        raise DemixError(path, f"holds a nested field that is not UTF-8 ({error})", "remove the row") from None
    except OverflowError as error:
        raise DemixError(path, f"holds a value out of bounds ({error})", "remove the row or the column") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DemixError(path, f"is not Parquet, damaged or cut short ({error})", "fetch it again") from None


def _numbered(batches: Any, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    for batch in batches:
        # Strings are read as bytes, because strings that are not UTF-8 cannot become Python's.
        batch = pa.record_batch([_as_bytes(column) for column in batch.columns], names=batch.schema.names)
        for fields in batch.to_pylist():
            start += 1
            yield start, {name: _decoded(value) for name, value in fields.items()}


def _as_bytes(column: pa.Array) -> pa.Array:
    types = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    return column.view(types[column.type]) if column.type in types else column


def _decoded(value: Any) -> Any:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _archive(path: Path, reading: Reading, zipped: bool) -> Iterator[Row]:
    index, bound = 0, Bound(path)
    try:
        with ExitStack() as stack:
            if zipped:
                check_file_kind(path, ZIP)
                members = _zip_members(stack.enter_context(zipfile.ZipFile(path)))
            else:
                # The file is read as a stream, without seeking, so that gzip is decompressed only once.
                stream = stack.enter_context(expanded(path, bound, TAR))
                members = _tar_members(stack.enter_context(tarfile.open(fileobj=stream, mode="r|")))
            for name, problem, content in members:
                if not _wanted(path, name, reading):
                    continue
                if problem:
                    raise DemixError(path, f"member {name!r} is {problem}", UNPACK)
                if reading.includes(index):
                    of_member = Reading(reading.paths, values=reading.values)
                    with content() as inner:
                        yield from _file(path / name, of_member, bound, inner)
                index += 1
    except DAMAGE as error:
        cause = f"is not a {'zip' if zipped else 'tar'} archive, damaged or cut short ({error})"
        raise DemixError(path, cause, "fetch it again") from None
    if not index:
        cause = f"has no member that is data and matches {', '.join(reading.members)}"
        cure = f"correct source.members (its * matches / too){'; ' * bool(reading.others)}{left_out(reading.others)}"
        raise DemixError(path, cause, cure)


def _zip_members(archive: zipfile.ZipFile) -> Iterator[Member]:
    for member in archive.infolist():
        # The upper half of external_attr is the Unix mode; 0o12 in its top bits is a symbolic link.
        link = member.create_system == 3 and member.external_attr >> 28 == 0o12
        problem = "a link" if link else "encrypted" if member.flag_bits & 1 else ""
        yield member.filename, problem, partial(archive.open, member)


def _tar_members(archive: tarfile.TarFile) -> Iterator[Member]:
    for member in archive:
        if not member.isdir():
            plain = member.isreg() and not member.issparse()
            yield member.name, "" if plain else "a link or special file", partial(archive.extractfile, member)
        # tarfile would keep every header; they are not needed again.
        archive.members = []  # type: ignore[attr-defined]


def _wanted(path: Path, name: str, reading: Reading) -> bool:
    """Whether a member of an archive should be read, like a file in a folder. Raises DemixError for an attack."""
    steps = name.replace("\\", "/").split("/")
    if steps[0] == "" or steps[0].endswith(":") or ".." in steps or "\0" in name:
        raise DemixError(path, f"member {name!r} points outside the archive", UNPACK)
    if name.endswith("/"):
        return False
    if reading.members == ("*",):
        return is_data(name, reading.others)
    return name in reading.members or (
        not hidden(name) and any(fnmatchcase(name, pattern) for pattern in reading.members)
    )


def select(fields: dict[str, Any], path: str) -> Any:
    """The value at `path` in a record: a field's name, or names joined by dots, where `[]` stands for every item.

    `full_text[].paragraphs[]` gives the list of all paragraphs of all sections. A null on the way gives None, or no
    item. Raises LookupError with the step that the record lacks.
    """
    if path in fields:
        return fields[path]
    values: list[Any] = [fields]
    for step in path.split("."):
        name, *lists = step.split("[]")
        found = []
        for value in values:
            if not isinstance(value, dict) or name not in value:
                raise LookupError(name)
            found.append(value[name])
        for _ in lists:
            if any(not isinstance(value, list) for value in found if value is not None):
                raise LookupError(step)
            found = [item for value in found if value is not None for item in value]
        values = [value for value in found if value is not None]
    if "[]" in path:
        return values
    return values[0] if values else None


def select_or_none(fields: dict[str, Any], path: str) -> Any:
    """Like `select`, but None for a path that the record lacks."""
    try:
        return select(fields, path)
    except LookupError:
        return None


def as_text(value: Any) -> str:
    """`value` as the text of a document: a list's items are joined by newlines, null is the empty text.

    Raises TypeError with the type's name if it is not text.
    """
    if isinstance(value, list):
        return "\n".join(map(as_text, value))
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(type(value).__name__)
    return value


def column(path: str, names: list[str]) -> str:
    """The column among `names` with which `path` begins."""
    return path if path in names else re.split(r"[.\[]", path, maxsplit=1)[0]


def matches(fields: dict[str, Any], where: dict[str, Any]) -> bool:
    """Whether a record has, for each path in `where`, the value, one of the values, or a value within min and max.

    Bounds are inclusive. Numbers are compared as numbers, other values (such as ISO dates) as text. A record without
    the field, or with null in it, does not match.
    """
    for path, wanted in where.items():
        value = select_or_none(fields, path)
        if value is None:
            return False
        if isinstance(wanted, dict):
            if not _within(value, wanted.get("min"), wanted.get("max")):
                return False
        elif not any(value == one or str(value) == str(one) for one in as_list(wanted)):
            return False
    return True


def _within(value: Any, low: Any, high: Any) -> bool:
    if isinstance(low if low is not None else high, str):
        value = str(value)
    else:
        try:
            # An integer may exceed the range of a float.
            value = value if isinstance(value, int) else float(value)
        except (TypeError, ValueError, OverflowError):
            return False
    return (low is None or low <= value) and (high is None or value <= high)


def as_list(value: Any) -> Any:
    """The values of a condition: a list, or one value as a list."""
    return value if isinstance(value, (list, tuple)) else [value]


_FORMATS = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json_file, ".txt": _text, ".csv": _csv}
