"""Records out of files: JSON lines, JSON, CSV, text and Parquet, compressed or in archives, all of it distrusted.

Nothing is ever unpacked to disk, what is decompressed is bounded, and damage ends in a DemixError that names the file.
A byte that is not UTF-8 becomes the lone surrogate U+DC00 + byte (Python's "surrogateescape"), which
`demix.data.sources` replaces and counts.
"""

import codecs
import csv
import io
import json
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from demix.config.files import COMPRESSIONS, readable, suffixes
from demix.data.selection import column
from demix.errors import DemixError

MAX_DOCUMENT_BYTES = 128 << 20
MAX_RATIO = 200
RATIO_FREE_BYTES = 64 << 20
# What a batch of Parquet may take in memory at the worst.
MOST_AT_ONCE = 1 << 30
# Bytes of CSV that are parsed at one time; the header and each record fit into them.
CSV_BLOCK = 8 << 20
# The cure for text in another coding, most often Latin-1.
TO_UTF8 = "iconv -f LATIN1 -t UTF-8 OLD > NEW"

_DAMAGE = (
    pa.ArrowException, OSError, ValueError, EOFError, NotImplementedError,
    zlib.error, zipfile.BadZipFile, tarfile.TarError,
)  # fmt: skip
KNOWN = "known are .parquet, .jsonl .json .csv .txt (.gz, .zst), and the last four in .zip .tar .tgz .tar.gz .tar.zst"


@dataclass(frozen=True)
class Row:
    """One record as it was read: `number` counts from 1 in the file (lines, for JSON lines)."""

    file: Path
    number: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """What to read in a file: the `paths` of the fields wanted, the text first, or none for all fields.

    `members`: those of archives, by glob.
    `values`: a .json file is one array or object whose values are the records. Of the rows (of an archive: of the
    members, of Parquet: of the row groups where there are enough) `part` of `parts` is read, one in `parts`.
    """

    paths: tuple[str, ...]
    members: tuple[str, ...] = ("*",)
    values: bool = False
    part: int = 0
    parts: int = 1

    def takes(self, index: int) -> bool:
        return index % self.parts == self.part


Reader = Callable[["io.BufferedReader[Any]", Path, Reading], Iterator[Row]]


def read_rows(path: Path, reading: Reading) -> Iterator[Row]:
    """The records in the file `path`. Raises DemixError where it is damaged, a bomb, hostile or holds none."""
    found = suffixes(path.name)
    empty = True
    if found[:1] in ([".zip"], [".tar"]):
        rows = (_zip if found[0] == ".zip" else _tar)(path, reading)
    elif found == [".parquet"]:
        rows = _parquet(path, reading)
    else:
        read = _format(path)
        rows = _opened_rows(read, path, reading)
    for row in rows:
        empty = False
        yield row
    # With parts, another one may have it all.
    if empty and reading.parts == 1:
        raise DemixError(path, "holds no documents", "remove it or leave it out of the glob")


def stem(name: str) -> str:
    """The name of a file without the endings that say how it is read."""
    for suffix in reversed(suffixes(name) if readable(name) else []):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
    return name


def _format(path: Path) -> Reader:
    suffix = next(iter(suffixes(path.name)), "")
    if suffix not in _FORMATS:
        raise DemixError(path, "is of an unknown format", KNOWN)
    return _FORMATS[suffix]


class _Bound:
    """How many bytes may still come out of one file on disk, through however many layers of compression."""

    def __init__(self, path: Path):
        self.path, self.size = path, path.stat().st_size
        self.left = max(RATIO_FREE_BYTES, MAX_RATIO * self.size)

    def spend(self, count: int) -> None:
        self.left -= count
        self.refuse(0)

    def spent_on(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """`batch` without dictionaries; its bytes in memory are spent."""
        decoded = [one.dictionary_decode() if pa.types.is_dictionary(one.type) else one for one in batch.columns]
        batch = pa.record_batch(decoded, names=batch.schema.names)
        self.spend(batch.nbytes)
        return batch

    def refuse(self, more: int) -> None:
        """Raise DemixError if `more` bytes are too many."""
        if self.left < more:
            raise DemixError(
                self.path,
                f"expands to over {MAX_RATIO} times its {self.size} bytes",
                "if it is no decompression bomb, decompress it by hand, or write the Parquet anew",
            )


class _Decompressed(io.RawIOBase):
    """The bytes of a plain, gzip or zstd stream. Raises DemixError where it is damaged, cut short or a bomb."""

    def __init__(self, path: Path, stream: Any, bound: _Bound | None, compression: str | None):
        self.path, self.bound = path, bound
        self.stream = pa.CompressedInputStream(stream, compression) if compression else stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.stream.read(len(buffer))
        except _DAMAGE as e:
            raise DemixError(self.path, f"is damaged or cut short ({e})", "fetch it again") from None
        if self.bound:
            self.bound.spend(len(data))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()


def _opened(path: Path, bound: _Bound | None = None) -> io.BufferedReader:
    """The decompressed bytes of a file on disk."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    try:
        if compression:
            bound = bound or _Bound(path)
        return io.BufferedReader(_Decompressed(path, pa.OSFile(str(path)), bound, compression), 1 << 18)
    except OSError as error:
        raise DemixError(path, f"cannot be read ({error.strerror or error})", "mend its permissions") from None


def _opened_rows(read: Reader, path: Path, reading: Reading) -> Iterator[Row]:
    with _opened(path) as stream:
        if stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise DemixError(path, "is UTF-16, not UTF-8", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW")
        yield from read(stream, path, reading)


def _json_lines(stream: "io.BufferedReader[Any]", path: Path, reading: Reading) -> Iterator[Row]:
    number = 0
    while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        place = f"{path}, line {number}"
        if len(line) > MAX_DOCUMENT_BYTES:
            raise DemixError(place, "is over 128 MiB long", "end each JSON object with a line feed")
        if not reading.takes(number - 1) or line.isspace():
            continue
        fields = _json(line, place, first=number == 1)
        if not isinstance(fields, dict):
            raise DemixError(place, "is not a JSON object", 'give one object a line, such as {"text": "..."}')
        yield Row(path, number, fields)


def _json_values(stream: "io.BufferedReader[Any]", path: Path, reading: Reading) -> Iterator[Row]:
    values = _json(_whole(stream, path), str(path), first=True)
    if not isinstance(values, (dict, list)):
        raise DemixError(path, "is neither a JSON array nor an object", "leave out `json: values`")
    for number, fields in enumerate(values.values() if isinstance(values, dict) else values, 1):
        if not isinstance(fields, dict):
            raise DemixError(f"{path}, value {number}", "is not a JSON object", "leave out `json: values`")
        if reading.takes(number - 1):
            yield Row(path, number, fields)


def _json(data: bytes, place: str, first: bool) -> Any:
    try:
        text = data.decode("utf-8-sig" if first else "utf-8", "surrogateescape")
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DemixError(place, f"is not valid JSON ({error})", "mend or remove the line") from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values. Raises ValueError for a key that stands twice; json takes the last one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"the key {_twice([key for key, _ in pairs])!r} stands twice in an object")
    return made


def _twice(names: Iterable[str]) -> str | None:
    """The first name that stands twice."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _whole(stream: "io.BufferedReader[Any]", path: Path) -> bytes:
    data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DemixError(path, "is a document over 128 MiB", "split it, or use JSON lines")
    return data


def _text(stream: "io.BufferedReader[Any]", path: Path, reading: Reading) -> Iterator[Row]:
    data = _whole(stream, path)
    if data and reading.takes(0):
        text = data.decode("utf-8-sig", "surrogateescape")
        yield Row(path, 1, {next(iter(reading.paths), "text"): text, "file": path.name})


def _csv(stream: "io.BufferedReader[Any]", path: Path, reading: Reading) -> Iterator[Row]:
    columns, begin = list(reading.paths), bytearray()
    if not stream.peek(1):
        return
    try:
        header = next(csv.reader(_header_lines(stream, path, begin)), [])
        known = set(columns or header)
        if name := _twice(name for name in header if name in known):
            raise DemixError(path, f"has two columns {name!r}", "rename one of them")
        reader = pyarrow.csv.open_csv(
            pa.PythonFile(io.BufferedReader(_Resumed(begin, stream)), mode="r"),
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK),
            parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=columns, column_types=dict.fromkeys(columns, pa.binary())
            ),
        )
        for number, fields in _numbered(reader):
            if reading.takes(number - 1):
                yield Row(path, number, fields)
    except KeyError as error:
        cure = f"it lacks one of {', '.join(columns)}: name the text's as source.text or --field"
        raise DemixError(path, str(error).strip("'\""), cure) from None
    except (pa.ArrowException, OSError, csv.Error) as error:
        raise DemixError(path, f"is not valid CSV ({error})", "mend the row, or use JSON lines") from None


def _header_lines(stream: "io.BufferedReader[Any]", path: Path, begin: bytearray) -> Iterator[str]:
    """The lines at the beginning of a CSV file as they are asked for; their bytes are added to `begin`."""
    while line := stream.readline(CSV_BLOCK - len(begin)):
        text = line.decode("utf-8" if begin else "utf-8-sig", "replace")
        begin += line
        if len(begin) == CSV_BLOCK:
            raise DemixError(path, f"has a header of over {CSV_BLOCK >> 20} MiB", "mend its first line")
        yield text


class _Resumed(io.RawIOBase):
    """The bytes of a stream of which `begin` has been read."""

    def __init__(self, begin: bytearray, rest: "io.BufferedReader[Any]"):
        self.parts: list[Any] = [io.BytesIO(begin), rest]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self.parts:
            if count := self.parts[0].readinto(buffer):
                return int(count)
            self.parts.pop(0)
        return 0


def _parquet(path: Path, reading: Reading) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            columns = list(dict.fromkeys(column(wanted, names) for wanted in reading.paths))
            for name in columns:
                if name not in names:
                    raise DemixError(path, f"has no column {name!r}", f"it has {', '.join(names)}")
            if twice := _twice(name for name in names if name in (columns or names)):
                raise DemixError(path, f"has two columns {twice!r}", "rename one of them")
            groups = range(file.metadata.num_row_groups)
            sizes = [file.metadata.row_group(group).total_byte_size for group in groups]
            bound = _Bound(path)
            bound.refuse(sum(sizes))
            by_group = len(groups) >= reading.parts
            start = 0
            for group in groups:
                rows = file.metadata.row_group(group).num_rows
                if not by_group or reading.takes(group):
                    # A value that stands in the file once, in a dictionary, may come out for every row.
                    size = min(256, max(8, MOST_AT_ONCE // (sizes[group] + 1)))
                    batches = file.iter_batches(batch_size=size, row_groups=[group], columns=columns or None)
                    for number, fields in _numbered(map(bound.spent_on, batches), start):
                        if by_group or reading.takes(number - 1):
                            yield Row(path, number, fields)
                start += rows
    except UnicodeDecodeError as error:
        raise DemixError(path, f"holds a nested field that is not UTF-8 ({error})", "leave out the row") from None
    except OverflowError as error:
        raise DemixError(path, f"holds a value out of bounds ({error})", "leave out the row, or the column") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DemixError(path, f"is not Parquet, damaged or cut short ({error})", "fetch it again") from None


def _numbered(batches: Any, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    for batch in batches:
        # Strings as bytes: those that are not UTF-8 cannot become Python's.
        batch = pa.record_batch([_as_bytes(column) for column in batch.columns], names=batch.schema.names)
        for fields in batch.to_pylist():
            start += 1
            yield start, {name: _decoded(value) for name, value in fields.items()}


def _as_bytes(column: pa.Array) -> pa.Array:
    types = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    return column.view(types[column.type]) if column.type in types else column


def _decoded(value: Any) -> Any:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _zip(path: Path, reading: Reading) -> Iterator[Row]:
    bound = _Bound(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = []
            for member in archive.infolist():
                # The upper half of external_attr is the Unix mode; 0o12 in its top bits is a symbolic link.
                link = member.create_system == 3 and member.external_attr >> 28 == 0o12
                _check_member(path, member.filename, "link" if link else "")
                if member.flag_bits & 1:
                    raise DemixError(path, f"member {member.filename!r} is encrypted", "decrypt it by hand")
                if not member.is_dir() and _wanted(member.filename, reading):
                    names.append(member)
            _check_any(path, names, reading)
            for index, member in enumerate(names):
                if reading.takes(index):
                    with archive.open(member) as stream:
                        yield from _member_rows(path, member.filename, stream, bound, reading)
    except _DAMAGE as error:
        raise DemixError(path, f"is not a zip archive, damaged or cut short ({error})", "fetch it again") from None


def _tar(path: Path, reading: Reading) -> Iterator[Row]:
    index = 0
    bound = _Bound(path)
    try:
        # As a stream: members are read in order and nothing is sought, so that gzip is decompressed once.
        with _opened(path, bound) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                kind = "" if (member.isreg() and not member.issparse()) or member.isdir() else "link or special file"
                _check_member(path, member.name, kind)
                if member.isreg() and _wanted(member.name, reading):
                    if reading.takes(index):
                        yield from _member_rows(path, member.name, archive.extractfile(member), bound, reading)
                    index += 1
                # tarfile keeps every header it has seen; nothing here goes back.
                archive.members = []  # type: ignore[attr-defined]
    except _DAMAGE as error:
        raise DemixError(path, f"is not a tar archive, damaged or cut short ({error})", "fetch it again") from None
    _check_any(path, index, reading)


def _check_member(path: Path, name: str, kind: str) -> None:
    if kind:
        raise DemixError(path, f"member {name!r} is a {kind}", "do not trust it; unpack by hand what you need")
    parts = name.replace("\\", "/").split("/")
    if parts[0] == "" or parts[0].endswith(":") or ".." in parts or "\0" in name:
        raise DemixError(path, f"member {name!r} points outside", "do not trust it; unpack by hand what you need")


def _check_any(path: Path, found: Any, reading: Reading) -> None:
    if not found:
        wanted = ", ".join(reading.members)
        raise DemixError(path, f"has no member that matches {wanted}", "mend source.members (its * matches / too)")


def _wanted(name: str, reading: Reading) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in reading.members)


def _member_rows(path: Path, name: str, stream: IO[bytes] | None, bound: _Bound, reading: Reading) -> Iterator[Row]:
    place = path / name
    read = _format(place)
    compression = COMPRESSIONS.get(suffixes(name)[-1])
    # A plain tar's bytes are on disk; a member of a zip, and what a member is compressed with, expand.
    with io.BufferedReader(_Decompressed(place, stream, bound, None), 1 << 18) as plain:
        if not compression:
            yield from read(plain, place, Reading(reading.paths, values=reading.values))
            return
        inner = _Decompressed(place, pa.PythonFile(plain, mode="r"), bound, compression)
        with io.BufferedReader(inner, 1 << 18) as expanded:
            yield from read(expanded, place, Reading(reading.paths, values=reading.values))


def _json_file(stream: "io.BufferedReader[Any]", path: Path, reading: Reading) -> Iterator[Row]:
    return (_json_values if reading.values else _json_lines)(stream, path, reading)


_FORMATS = {".jsonl": _json_lines, ".json": _json_file, ".txt": _text, ".csv": _csv}
