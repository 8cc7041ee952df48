"""Raw text of a domain, from wherever its config says, into one private Parquet file."""

import glob
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from demix.data.tables import write_rows
from demix.errors import DemixError

MAX_DOCUMENT_BYTES = 128 << 20
MAX_RATIO = 200
RATIO_FREE_BYTES = 64 << 20

SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string()), ("metadata", pa.large_string())])
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """Where a domain's text comes from.

    `kind` names the function that reads it, `path` one or more paths (for `files`: glob patterns relative to
    the working directory), `text`, `id` and `metadata` the fields or columns to take. Without `id` a document
    is called "<file name>#<row>", rows counted from 1.
    """

    kind: str
    path: str | tuple[str, ...]
    text: str = "text"
    id: str | None = None
    metadata: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One document as it was read: `number` counts from 1 in the file (lines, for JSON lines)."""

    file: Path
    number: int
    fields: dict[str, Any]


def download(source: Source, domain: str, output: Path) -> int:
    """Write the documents of `source` to the Parquet file `output` and return their number.

    Columns: `id`, `text`, `metadata` (JSON text of the fields named in `source.metadata`, sorted keys). Nothing here
    is anonymized yet: the file is made 0600, a folder made for it 0700. Lone surrogates, which UTF-8 cannot
    hold, become U+FFFD; the file's key-value metadata says how many ("surrogates").
    Raises DemixError naming the file or key at fault; `output` is then left as it was.
    """
    if source.kind not in KINDS:
        raise DemixError(f"{domain}.source.kind", f"is {source.kind!r}", f"allowed are {', '.join(sorted(KINDS))}")
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    # The workflow makes the folder before the command runs; one that holds other files is not ours to close.
    if not any(output.parent.iterdir()):
        output.parent.chmod(0o700)
    surrogates = 0

    def documents() -> Iterator[tuple[str, str, str]]:
        nonlocal surrogates
        for row in KINDS[source.kind](source, domain):
            values = []
            for value in _document(row, source):
                value, found = SURROGATE.subn("\ufffd", value)
                surrogates += found
                values.append(value)
            yield tuple(values)

    return write_rows(output, SCHEMA, documents(), private=True, footer=lambda: {"surrogates": str(surrogates)})


def _document(row: Row, source: Source) -> tuple[str, str, str]:
    place = f"{row.file}, row {row.number}"
    for name in (source.text, source.id):
        if name is not None and name not in row.fields:
            raise DemixError(place, f"has no field {name!r}", f"fields are {', '.join(map(repr, row.fields))}"[:300])
    text = row.fields[source.text]
    if not isinstance(text, str):
        raise DemixError(place, f"field {source.text!r} is {type(text).__name__}, not text", "name a text field")
    if len(text) > MAX_DOCUMENT_BYTES:
        raise DemixError(place, "is a document over 128 MiB", "split it into documents")
    name = f"{row.file.name}#{row.number}" if source.id is None else str(row.fields[source.id])
    metadata = {key: _not_nan(row.fields.get(key)) for key in source.metadata}
    return name, text, json.dumps(metadata, sort_keys=True, ensure_ascii=False, default=str)


def _not_nan(value: Any) -> Any:
    return None if isinstance(value, float) and value != value else value


def _files(source: Source, domain: str) -> Iterator[Row]:
    patterns = (source.path,) if isinstance(source.path, str) else source.path
    paths: set[str] = set()
    for pattern in patterns:
        matches = glob.glob(pattern, recursive=True)
        if not matches:
            raise DemixError(f"{domain}.source.path", f"no file matches {pattern!r}", "mend the path or the glob")
        paths.update(matches)
    for path in map(Path, sorted(paths)):
        if path.is_dir():
            raise DemixError(path, "is a folder", f"name its files, such as {path}/*.jsonl.zst")
        empty = True
        for row in _format(path)(path, source):
            empty = False
            yield row
        if empty:
            raise DemixError(path, "holds no documents", "remove it or leave it out of the glob")


def _format(path: Path) -> Callable[[Path, Source], Iterator[Row]]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in _COMPRESSIONS
    suffix = next(iter(suffixes[-2:-1] if compressed else suffixes[-1:]), "")
    if suffix not in _FORMATS or (compressed and suffix == ".parquet"):
        raise DemixError(path, "is of an unknown format", "known are .parquet and .jsonl .json .csv .txt (.gz, .zst)")
    return _FORMATS[suffix]


class _Decompressed(io.RawIOBase):
    """The bytes of a plain, gzip or zstd file. Raises DemixError where it is damaged, cut short or a bomb."""

    def __init__(self, path: Path):
        self.path, self.size, self.total = path, path.stat().st_size, 0
        self.compression = _COMPRESSIONS.get(path.suffix.lower())
        file = pa.OSFile(str(path))
        self.stream = pa.CompressedInputStream(file, self.compression) if self.compression else file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.stream.read(len(buffer))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DemixError(self.path, f"is damaged or cut short ({error})", "fetch it again") from None
        self.total += len(data)
        if self.compression and self.total > max(RATIO_FREE_BYTES, MAX_RATIO * self.size):
            raise DemixError(
                self.path,
                f"expands to over {MAX_RATIO} times its {self.size} bytes",
                "if it is no decompression bomb, decompress it by hand",
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()


def _opened(path: Path) -> io.BufferedReader:
    try:
        return io.BufferedReader(_Decompressed(path), 1 << 18)
    except OSError as error:
        raise DemixError(path, f"cannot be read ({error.strerror or error})", "mend its permissions") from None


def _json_lines(path: Path, source: Source) -> Iterator[Row]:
    with _opened(path) as stream:
        number = 0
        while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            place = f"{path}, line {number}"
            if len(line) > MAX_DOCUMENT_BYTES:
                raise DemixError(place, "is over 128 MiB long", "end each JSON object with a line feed")
            if line.isspace():
                continue
            try:
                fields = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise DemixError(place, f"is not valid JSON ({error})", "mend or remove the line") from None
            if not isinstance(fields, dict):
                raise DemixError(place, "is not a JSON object", 'give one object a line, such as {"text": "..."}')
            yield Row(path, number, fields)


def _text(path: Path, source: Source) -> Iterator[Row]:
    with _opened(path) as stream:
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DemixError(path, "is a document over 128 MiB", "split it, or use JSON lines")
    try:
        if data:
            yield Row(path, 1, {source.text: data.decode("utf-8-sig"), source.id or "": path.name})
    except UnicodeDecodeError as error:
        raise DemixError(path, f"is not UTF-8 ({error})", "convert it to UTF-8") from None


def _csv(path: Path, source: Source) -> Iterator[Row]:
    columns = _columns(source)
    with _opened(path) as stream:
        if not stream.peek(1):
            return
        try:
            reader = pyarrow.csv.open_csv(
                pa.PythonFile(stream, mode="r"),
                read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=8 << 20),
                parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(
                    include_columns=columns, column_types=dict.fromkeys(columns, pa.string())
                ),
            )
            yield from _rows(path, reader)
        except KeyError as error:
            raise DemixError(path, str(error).strip("'\""), f"name columns it has, not all of {columns}") from None
        except (pa.ArrowException, OSError) as error:
            raise DemixError(path, f"is not valid CSV ({error})", "mend the row, or use JSON lines") from None


def _parquet(path: Path, source: Source) -> Iterator[Row]:
    columns = _columns(source)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for column in columns:
                if column not in file.schema_arrow.names:
                    raise DemixError(path, f"has no column {column!r}", f"it has {', '.join(file.schema_arrow.names)}")
            groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
            expanded = sum(group.total_byte_size for group in groups)
            if expanded > max(RATIO_FREE_BYTES, MAX_RATIO * path.stat().st_size):
                raise DemixError(path, f"expands to over {MAX_RATIO} times its size", "rewrite it if it is no bomb")
            yield from _rows(path, file.iter_batches(batch_size=256, columns=columns))
    except (pa.ArrowException, OSError) as error:
        raise DemixError(path, f"is not Parquet, damaged or cut short ({error})", "fetch it again") from None


def _columns(source: Source) -> list[str]:
    return list(dict.fromkeys([source.text, *([source.id] if source.id else []), *source.metadata]))


def _rows(path: Path, batches: Any) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for fields in batch.to_pylist():
            number += 1
            yield Row(path, number, fields)


_FORMATS = {".jsonl": _json_lines, ".json": _json_lines, ".txt": _text, ".csv": _csv, ".parquet": _parquet}

KINDS: dict[str, Callable[[Source, str], Iterator[Row]]] = {"files": _files}
