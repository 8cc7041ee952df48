"""Tokens of one split as a flat memory-mapped column in one or more files, and the blocks that are scored.

A shard of spans holds no tokens of its own: it says which stretches of other shards follow one another.
"""

import glob
import hashlib
import io
import logging
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from demix.data.shared import made_once
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import REMAKE, opened, read_json, replacing, scratch, sha256_file, write_json
from demix.files.batches import counted, read_batches

# Just below 500 million, and a multiple of 2**22: no block whose length is a power of two up to that spans two files.
FILE_TOKENS = 476 << 20
CHECK_EVERY = 256
# Bytes of text between two renewals of the encoder: bounds its memory whatever the text.
RENEW_EVERY = 64 << 20
_PIECE = 8 << 20
_MAX_ORIGIN = (1 << 63) - 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spans:
    """Stretches of other shards, one after the other.

    Number n is `ends[n] - ends[n - 1]` tokens of `shards[source[n]]`, from its token `start[n]` on.
    """

    shards: tuple["TokenShard", ...]
    source: np.ndarray
    start: np.ndarray
    ends: np.ndarray

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`, which must be there, as a copy."""
        pieces = [self.shards[0].read(0, 0)]
        for n in range(int(np.searchsorted(self.ends, start, side="right")), len(self.ends)):
            # Where the span would begin if it went back to the shard's beginning.
            origin = int(self.start[n]) - (int(self.ends[n - 1]) if n else 0)
            if start >= stop:
                break
            end = min(stop, int(self.ends[n]))
            pieces.append(self.shards[self.source[n]].read(origin + start, origin + end))
            start = end
        return np.concatenate(pieces)


@dataclass(frozen=True)
class TokenShard:
    """The tokens of one split, memory-mapped and read-only.

    `len` counts them and `read` gives them (uint16, or uint32 above 65,536 types); every document begins with
    `end_of_text`, at the places in `offsets` (int64). `document_bytes` are the UTF-8 bytes of each document's text, and
    `origins` (int64) tell which documents are pieces of one: the pieces' numbers are equal.
    A shard of `spans` has no files; its `offsets` are where the spans begin, each its own origin, and it knows no
    `document_bytes`.
    """

    path: Path
    # A flat array a file; all but the last are of one length.
    files: tuple[np.ndarray, ...] = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    document_bytes: np.ndarray = field(repr=False)
    origins: np.ndarray = field(repr=False)
    end_of_text: int
    vocab_size: int
    tokenizer_sha256: str
    spans: Spans | None = field(default=None, repr=False)

    @staticmethod
    def open(path: str | Path, verify: bool = False) -> "TokenShard":
        """Map the shard at `path`; `verify` compares the sha256 of its files with the manifest next to it.

        Without `verify` no token is read. Raises DemixError naming the file that is missing, damaged, or not the
        manifest's.
        """
        path = Path(path)
        documents, manifest_path = _side_files(path)
        manifest = read_json(manifest_path)
        if "spans" in manifest:
            return _open_spans(path, manifest, verify)
        try:
            files = manifest["files"]
            lengths = [int(entry["tokens"]) for entry in files]
            if {*lengths[:-1]} - {lengths[0]} or lengths[-1] > lengths[0] or sum(lengths) != manifest["tokens"]:
                raise ValueError(f"files of {lengths} tokens")
            listed = [(path.with_name(entry["name"]), entry["tokens"], entry["sha256"]) for entry in files]
            listed += [(documents, manifest["documents"], manifest["documents_sha256"])]
            metadata = [_metadata(manifest, part) for part in (*range(len(files)), "documents")]
            (vocab_size, end_of_text), tokenizer_sha256 = _types(manifest), str(manifest["tokenizer_sha256"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DemixError(manifest_path, f"is not a manifest of tokens ({error!r})", REMAKE) from None
        batches = []
        for (file, rows, sha256), expected in zip(listed, metadata, strict=True):
            batch = _map(file)
            if batch.num_rows != rows or batch.schema.metadata != expected:
                raise DemixError(file, f"is not the file of {rows} rows in {manifest_path.name}", REMAKE)
            if verify and sha256_file(file) != sha256:
                raise DemixError(file, f"is damaged: its sha256 is not the one in {manifest_path.name}", REMAKE)
            batches.append(batch)
        # Not `to_numpy`, which needs a quarter of a second to import pandas.
        *files, offsets, sizes, origins = (np.from_dlpack(column) for batch in batches for column in batch.columns)
        return TokenShard(path, tuple(files), offsets, sizes, origins, end_of_text, vocab_size, tokenizer_sha256)

    def __len__(self) -> int:
        if self.spans is not None:
            return int(self.spans.ends[-1]) if len(self.spans.ends) else 0
        return (len(self.files) - 1) * len(self.files[0]) + len(self.files[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`: a view where one file holds them, a copy where files meet.

        Raises IndexError beyond the ends.
        """
        if self.spans is not None:
            if not 0 <= start <= stop <= len(self):
                raise IndexError(f"tokens {start} to {stop} of the {len(self)} of {self.path}")
            return self.spans.read(start, stop)
        size = max(1, len(self.files[0]))
        first, begin = divmod(start, size)
        if 0 <= first < len(self.files):
            inside = self.files[first][begin : begin + stop - start]
            if len(inside) == stop - start:
                return inside
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of the {len(self)} of {self.path}")
        pieces = [self.files[n][max(0, start - n * size) : stop - n * size] for n in range(first, -(-stop // size))]
        # Of nothing at the very end there is no piece.
        return np.concatenate([self.files[0][:0], *pieces])


def tokenize_splits(documents: list[Path], tokenizer: Path, output: Path) -> None:
    """Convert corpus files to memory-mapped token shards, one below `output` for each."""

    def make() -> None:
        for path in documents:
            tokenize(tokenizer, path, output / f"{path.stem}.arrow")

    made_once(output, [output / f"{path.stem}.*" for path in documents], [*documents, tokenizer], {}, make)


def tokenize(tokenizer: Path, documents: Path, output: Path, *, file_tokens: int = FILE_TOKENS) -> None:
    """Encode the column `text` of the Parquet `documents` into the shard `output` (`<split>.arrow`).

    After `file_tokens` tokens the next file begins: `<split>.1.arrow`, `<split>.2.arrow` and so on. With them come
    `<split>.documents.arrow` (`offset`: the place of each document's first id in the split, `bytes`: the size of its
    text in UTF-8, `origin`: the first 63 bits of its column `origin`, its number where there is none) and,
    last, the manifest `<split>.json`, whose `sha256` is that of all token ids in a row. A sample of the documents is
    encoded by the exact encoder too; where ids differ, all are, with a warning.
    """
    encoder = Tokenizer.load(tokenizer)
    kind = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
    if encoder.fast is None:
        _log.warning("%s: gigatoken does not follow its rules; encoding %s with tokenizers", tokenizer, documents)
    # One record batch needs its length before its columns: they go to flat files first, which are then mapped.
    with scratch(output) as folder:
        flat = {name: folder / name for name in ("token", "offset", "bytes", "origin")}
        try:
            manifest = _encode(encoder, documents, kind, flat, exact=False)
        except _IdsDifferError as error:
            _log.warning("%s: gigatoken's ids differ in %s; encoding with tokenizers", documents, error)
            manifest = _encode(encoder, documents, kind, flat, exact=True)
        _write_flat(output, manifest, kind, flat, file_tokens)


def _write_flat(
    output: Path, manifest: dict[str, Any], kind: np.dtype, flat: dict[str, Path], file_tokens: int = FILE_TOKENS
) -> None:
    """Write the shard `output` of the flat files "token" (of `kind`), "offset", "bytes" and "origin" (int64).

    `manifest` has the counts, the digests of tokens and tokenizer, and what `_said` says.
    """
    documents_path, manifest_path = _side_files(output)
    files = []
    for number, start in enumerate(range(0, max(1, manifest["tokens"]), file_tokens)):
        path = output.with_suffix(f".{number}.arrow") if number else output
        end = min(start + file_tokens, manifest["tokens"])
        _write(path, {"token": flat["token"]}, kind, start, end, _metadata(manifest, number))
        files.append({"name": path.name, "tokens": end - start, "sha256": sha256_file(path)})
    columns, rows = {name: flat[name] for name in ("offset", "bytes", "origin")}, manifest["documents"]
    _write(documents_path, columns, np.dtype(np.int64), 0, rows, _metadata(manifest, "documents"))
    write_json(manifest_path, manifest | {"files": files, "documents_sha256": sha256_file(documents_path)})
    names = {entry["name"] for entry in files}
    for path in output.parent.glob(f"{glob.escape(output.stem)}.*.arrow"):
        if path.stem.rpartition(".")[2].isdigit() and path.name not in names:
            path.unlink()


def write_spans(
    sources: Sequence[Path], source: np.ndarray, start: np.ndarray, length: np.ndarray, output: Path
) -> None:
    """Write the shard `output` of N spans: span n is `length[n]` tokens of `sources[source[n]]` from `start[n]` on.

    No token is copied: `<name>.arrow` has 14 bytes a span. Its manifest `<name>.json` names the sources by their paths
    from there, each with the `sha256` of its tokens; its own `sha256` is that of all tokens in a row. Raises
    DemixError for sources of different tokenizers and for a span that is not inside its source.
    """
    shards = tuple(TokenShard.open(path) for path in sources)
    for path, shard in zip(sources, shards, strict=True):
        if shard.tokenizer_sha256 != shards[0].tokenizer_sha256:
            raise DemixError(path, f"was made with another tokenizer than {sources[0]}", "tokenize all domains again")
    spans = Spans(shards, source, start, np.cumsum(length, dtype=np.int64))
    if _outside(spans):
        raise DemixError(output, "has a span that is not inside its source", "cut it again")
    ends, vocab_size, end_of_text = spans.ends, shards[0].vocab_size, shards[0].end_of_text
    whole = TokenShard(output, (), ends, ends, ends, end_of_text, vocab_size, "", spans)
    manifest = {
        "tokens": len(whole),
        "documents": len(spans.ends),
        "sha256": _sha256_of_tokens(whole),
        "tokenizer_sha256": shards[0].tokenizer_sha256,
        **_said(vocab_size, end_of_text),
        "sources": [
            {"path": os.path.relpath(path, output.parent), "sha256": read_json(_side_files(path)[1])["sha256"]}
            for path in sources
        ],
    }
    types = {"source": pa.uint16(), "start": pa.int64(), "length": pa.int32()}
    fields = [pa.field(name, type_, nullable=False) for name, type_ in types.items()]
    schema = pa.schema(fields, _metadata(manifest, "spans"))
    columns = zip((source, start, length), types.values(), strict=True)
    batch = pa.record_batch([pa.array(values, type_) for values, type_ in columns], schema=schema)
    with replacing(output) as temporary, pa.ipc.new_file(str(temporary), schema) as writer:
        writer.write_batch(batch)
    write_json(_side_files(output)[1], manifest | {"spans": output.name, "spans_sha256": sha256_file(output)})


def _open_spans(path: Path, manifest: dict[str, Any], verify: bool) -> TokenShard:
    """The shard whose `manifest` says that it is made of spans."""
    manifest_path = _side_files(path)[1]
    try:
        sources = [(path.parent / entry["path"], entry["sha256"]) for entry in manifest["sources"]]
        tokens, metadata = manifest["tokens"], _metadata(manifest, "spans")
        sha256, spans_sha256, (vocab_size, end_of_text) = manifest["sha256"], manifest["spans_sha256"], _types(manifest)
        tokenizer_sha256 = str(manifest["tokenizer_sha256"])
        if not sources:
            raise ValueError("no sources")
    except (KeyError, TypeError, ValueError) as error:
        raise DemixError(manifest_path, f"is not a manifest of tokens ({error!r})", REMAKE) from None
    shards = tuple(TokenShard.open(source) for source, _ in sources)
    for source, wanted in sources:
        if read_json(_side_files(source)[1])["sha256"] != wanted:
            raise DemixError(path, f"is made of spans of other tokens than {source} has now", REMAKE)
    batch = _map(path)
    if batch.schema.metadata != metadata:
        raise DemixError(path, f"is not the file that {manifest_path.name} describes", REMAKE)
    if verify and sha256_file(path) != spans_sha256:
        raise DemixError(path, f"is damaged: its sha256 is not the one in {manifest_path.name}", REMAKE)
    source, start, length = (np.from_dlpack(column) for column in batch.columns)
    ends = np.cumsum(length, dtype=np.int64)
    spans = Spans(shards, source, start, ends)
    begins, none = ends - length, np.empty(0, np.int64)
    shard = TokenShard(path, (), begins, none, begins, end_of_text, vocab_size, tokenizer_sha256, spans)
    if _outside(spans) or len(shard) != tokens:
        raise DemixError(path, f"is damaged: its spans are not the {tokens} tokens of {manifest_path.name}", REMAKE)
    if verify and _sha256_of_tokens(shard) != sha256:
        raise DemixError(path, "is made of spans of damaged tokens", "tokenize their domains again")
    return shard


def _outside(spans: Spans) -> bool:
    """Whether a span is empty or not inside its source."""
    lengths = np.diff(spans.ends, prepend=0)
    sizes = np.array([len(shard) for shard in spans.shards])
    wrong = (spans.source < 0) | (spans.source >= len(sizes)) | (spans.start < 0) | (lengths < 1)
    wrong |= spans.start + lengths > sizes[np.minimum(spans.source, len(sizes) - 1)]
    return bool(wrong.any())


def _sha256_of_tokens(shard: TokenShard) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(shard), _PIECE):
        digest.update(np.ascontiguousarray(shard.read(start, min(start + _PIECE, len(shard)))).data)
    return digest.hexdigest()


def blocks(
    shard: TokenShard, length: int, limit_tokens: int | None = None, start: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the first `limit_tokens` tokens (None: all) into N consecutive blocks of `length` T: inputs, targets, mask.

    Only the blocks from token `start` on, a multiple of `length`, are cut.
    inputs [N, T] int64: the token before the block (`end_of_text` before the first) and the block's own but its last.
    targets [N, T] int64 and mask [N, T] bool: each token is a target once; the last short block is padded with
    `end_of_text` and masked (False).
    """
    total = (len(shard) if limit_tokens is None else min(limit_tokens, len(shard))) - start
    before = shard.read(start - 1, start)[0] if start else shard.end_of_text
    return cut(shard.read(start, start + total), length, before, shard.end_of_text)


def cut(
    ids: Sequence[int] | np.ndarray, length: int, before: int, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut `ids` into blocks as `blocks` does; `before` precedes the first of them."""
    count = -(-len(ids) // length)
    sequence = np.full(count * length + 1, padding, np.int64)
    sequence[0], sequence[1 : len(ids) + 1] = before, ids
    shape = (count, length)
    mask = np.arange(count * length) < len(ids)
    return sequence[:-1].reshape(shape), sequence[1:].reshape(shape), mask.reshape(shape)


def _side_files(path: Path) -> tuple[Path, Path]:
    return path.with_suffix(".documents.arrow"), path.with_suffix(".json")


def _metadata(manifest: dict[str, Any], part: int | str) -> dict[bytes, bytes]:
    """What a file says of its split and of its part in it, so that files of different splits are distinguished."""
    values = {key: manifest[key] for key in ("sha256", "documents", "tokenizer_sha256", "vocab_size")} | {"part": part}
    return {key.encode(): str(value).encode() for key, value in values.items()}


def _said(vocab_size: int, end_of_text: int) -> dict[str, int]:
    """What a manifest says of its tokenizer: where nothing else is said, the last of the types ends a document."""
    other = {} if end_of_text == vocab_size - 1 else {"end_of_text": end_of_text}
    return {"vocab_size": vocab_size} | other


def _types(manifest: dict[str, Any]) -> tuple[int, int]:
    """The types and the id that ends a document, as a manifest says. Raises ValueError for an id that is not a type."""
    vocab_size = int(manifest["vocab_size"])
    end_of_text = int(manifest.get("end_of_text", vocab_size - 1))
    if not 0 <= end_of_text < vocab_size:
        raise ValueError(f"document ends in {end_of_text} of {vocab_size} types")
    return vocab_size, end_of_text


class _IdsDifferError(Exception):
    """Names the document that two encoders disagree on."""


def _encode(
    encoder: Tokenizer, documents: Path, kind: np.dtype, flat: dict[str, Path], *, exact: bool
) -> dict[str, Any]:
    """Write ids, offsets, sizes and origins of all documents to the files in `flat`; return the manifest's counts.

    Unless `exact`, one document in `CHECK_EVERY` is checked against the exact encoder: raises _IdsDifferError.
    """
    import pyarrow.compute as pc

    with ExitStack() as stack:
        files = {name: stack.enter_context(open(path, "wb")) for name, path in flat.items()}
        row = total = size = renew_at = 0
        digest = hashlib.sha256()
        read = read_batches(documents, ["text", "origin"])
        for batch in counted(read, f"{documents.parent.name} {documents.stem}: documents", [documents]):
            if size >= renew_at:
                encoder, renew_at = encoder.renewed(), size + RENEW_EVERY
            texts = batch.column("text").to_pylist()
            ids, edges = encoder.encode_batch(texts, exact=exact)
            for number in range(-row % CHECK_EVERY, len(texts), CHECK_EVERY) if not exact else ():
                if not np.array_equal(ids[edges[number] : edges[number + 1]], encoder.encode(texts[number])):
                    raise _IdsDifferError(f"document {row + number + 1}")
            begin = edges[:-1] + np.arange(len(texts))
            tokens = np.full(len(ids) + len(texts), encoder.end_of_text, kind)
            own = np.ones(len(tokens), bool)
            own[begin] = False
            tokens[own] = ids
            sizes = pc.binary_length(batch.column("text")).to_numpy().astype(np.int64)
            origins = np.arange(row, row + len(texts))
            if "origin" in batch.schema.names:
                # The sign bit stays clear, so that no reader needs unsigned numbers.
                hashes = batch.column("origin").to_pylist()
                origins = np.array([int(origin[:16], 16) & _MAX_ORIGIN for origin in hashes], np.int64)
            for name, column in (("token", tokens), ("offset", total + begin), ("bytes", sizes), ("origin", origins)):
                files[name].write(column.data)
            digest.update(tokens.data)
            row, total, size = row + len(texts), total + len(tokens), size + int(sizes.sum())
    return {
        "tokens": total,
        "documents": row,
        "bytes": size,
        "sha256": digest.hexdigest(),
        "tokenizer_sha256": encoder.sha256,
        **_said(encoder.vocab_size, encoder.end_of_text),
    }


def _write(
    path: Path, columns: dict[str, Path], kind: np.dtype, start: int, end: int, metadata: dict[bytes, bytes]
) -> None:
    """Write rows `start` to `end` of flat files, a column each, as an Arrow IPC file of one record batch."""
    type_ = pa.from_numpy_dtype(kind)
    schema = pa.schema([pa.field(name, type_, nullable=False) for name in columns], metadata)
    # An empty file cannot be mapped.
    maps = [_map_flat(file) for file in columns.values()] if end else []
    buffers = [pa.py_buffer(each).slice(start * kind.itemsize, (end - start) * kind.itemsize) for each in maps]
    buffers = buffers or [pa.py_buffer(b"")] * len(columns)
    arrays = [pa.Array.from_buffers(type_, end - start, [None, buffer]) for buffer in buffers]
    with replacing(path) as temporary, _Sink(temporary, maps) as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))


def _map_flat(path: Path) -> mmap.mmap:
    with open(path, "rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


class _Sink(io.BufferedWriter):
    """A file that accepts a buffer in pieces and gives back the pages of `maps` that were read for each."""

    def __init__(self, path: Path, maps: list[mmap.mmap]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._maps = maps

    def write(self, data: Any) -> int:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            super().write(view[start : start + _PIECE])
            for each in self._maps:
                each.madvise(mmap.MADV_DONTNEED)
        return len(view)


def _map(path: Path) -> pa.RecordBatch:
    try:
        # A mapping of a pipe would wait for a writer.
        opened(path).close()
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if reader.num_record_batches != 1:
            raise pa.ArrowInvalid(f"{reader.num_record_batches} record batches instead of one")
        batch = reader.get_batch(0)
        batch.validate()
        return batch
    except FileNotFoundError:
        raise DemixError(path, "is missing", "run the stage that makes it") from None
    except (pa.ArrowException, OSError) as error:
        raise DemixError(path, f"is damaged or cut short ({error})", REMAKE) from None
