"""Tokens of one split as a flat memory-mapped column, and the blocks that are scored."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from demix.files.batches import BATCH_ROWS, counted, read_batches

CHECK_EVERY = 256
# Bytes of text after which the encoder is renewed, so that its memory is bounded for any text.
RENEW_EVERY = 64 << 20
_MAX_ORIGIN = (1 << 63) - 1

_log = logging.getLogger(__name__)


# For several consecutive documents: their tokens, and for each its number of tokens, bytes of text and origin.
Encoded = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class TokenShard:
    """The tokens of one split, memory-mapped and read-only.

    `tokens` (uint16, or uint32 for a vocabulary above 65,536) is flat; every document begins with `end_of_text`, at the
    positions in `offsets` (int64). `document_bytes` are the UTF-8 bytes of each document's text. Documents that are
    chunks of one source document have the same number in `origins` (int64).
    """

    path: Path
    tokens: np.ndarray = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    document_bytes: np.ndarray = field(repr=False)
    origins: np.ndarray = field(repr=False)
    end_of_text: int
    vocab_size: int
    tokenizer_sha256: str

    @staticmethod
    def open(path: str | Path, verify: bool = False) -> "TokenShard":
        """Map the shard at `path`; `verify` compares the sha256 of its files with the manifest next to it.

        Without `verify` no token is read. Raises DemixError naming the file that is missing, damaged, or different from
        the manifest.
        """
        path = Path(path)
        documents, manifest_path = _side_files(path)
        manifest = read_json(manifest_path)
        try:
            expected = [
                (file, int(manifest[part]), manifest[f"{part}_sha256"], _metadata(manifest, part))
                for file, part in ((path, "tokens"), (documents, "documents"))
            ]
            vocab_size, end_of_text = int(manifest["vocab_size"]), int(manifest["end_of_text"])
            if not 0 <= end_of_text < vocab_size:
                raise ValueError(f"end_of_text is {end_of_text}, but vocab_size is {vocab_size}")
        except (KeyError, TypeError, ValueError) as error:
            raise DemixError(manifest_path, f"is not a manifest of tokens ({error!r})", REMAKE) from None
        columns = []
        for file, rows, sha256, metadata in expected:
            batch = _map(file)
            if batch.num_rows != rows or batch.schema.metadata != metadata:
                raise DemixError(file, f"does not have the {rows} rows that {manifest_path.name} records", REMAKE)
            if verify and sha256_file(file) != sha256:
                raise DemixError(file, f"is damaged: its sha256 is not the one in {manifest_path.name}", REMAKE)
            # `to_numpy` is not used, because it would import pandas, which needs a quarter of a second.
            columns += [np.from_dlpack(column) for column in batch.columns]
        tokens, offsets, sizes, origins = columns
        return TokenShard(path, tokens, offsets, sizes, origins, end_of_text, vocab_size, manifest["tokenizer_sha256"])

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """A view of the tokens `start` to `stop`. Raises IndexError beyond the ends."""
        if not 0 <= start <= stop <= len(self.tokens):
            raise IndexError(f"tokens {start} to {stop} of the {len(self)} of {self.path}")
        return self.tokens[start:stop]


def open_alike(paths: Sequence[Path], verify: bool = False) -> list[TokenShard]:
    """The shards at `paths`, mapped by `TokenShard.open`. Raises DemixError if their tokenizers differ."""
    shards = [TokenShard.open(path, verify) for path in paths]
    for shard in shards:
        if shard.tokenizer_sha256 != shards[0].tokenizer_sha256:
            cause = f"was made with another tokenizer than {shards[0].path}"
            raise DemixError(shard.path, cause, "tokenize all domains again")
    return shards


def tokenize_splits(documents: list[Path], tokenizer: Path, output: Path) -> None:
    """Convert corpus files to memory-mapped token shards, one below `output` for each."""

    def make() -> None:
        for path in documents:
            tokenize(tokenizer, path, output / f"{path.stem}.arrow")

    made_once(output, [output / f"{path.stem}.*" for path in documents], [*documents, tokenizer], {}, make)


def tokenize(tokenizer: Path, documents: Path, output: Path) -> None:
    """Encode the column `text` of the Parquet `documents` into the shard `output` (`<split>.arrow`).

    Also writes `<split>.documents.arrow` (`offset`: the position of each document's first id in the split, `bytes`: the
    size of its text in UTF-8, `origin`: the first 63 bits of its column `origin`, or, without this column, the
    document's number), and last the manifest `<split>.json`, whose `sha256` is the hash of all token ids in a row. A
    sample of the documents is also encoded by the exact encoder; if ids differ, it encodes all documents, with a
    warning.
    """
    encoder = Tokenizer.load(tokenizer)
    if encoder.fast is None:
        _log.warning("%s: gigatoken lacks this tokenizer's rules; encoding %s with tokenizers", tokenizer, documents)
    about = encoder.sha256, encoder.vocab_size, encoder.end_of_text
    try:
        _write_shard(output, _encoded(encoder, documents, exact=False), *about)
    except _IdsDifferError as error:
        _log.warning("%s: gigatoken's ids differ in %s; encoding with tokenizers", documents, error)
        _write_shard(output, _encoded(encoder, documents, exact=True), *about)


def join_documents(sources: Sequence[Path], chosen: Sequence[np.ndarray], output: Path) -> None:
    """Write the shard `output` of the documents with the numbers `chosen[n]` of the shard `sources[n]`, for each n.

    Raises DemixError for sources of different tokenizers.
    """
    shards = open_alike(sources)

    def documents() -> Iterator[Encoded]:
        for shard, numbers in zip(shards, chosen, strict=True):
            edges = np.append(shard.offsets, len(shard))
            for start in range(0, len(numbers), BATCH_ROWS):
                some = numbers[start : start + BATCH_ROWS]
                begins, ends = edges[some], edges[some + 1]
                tokens = np.concatenate([shard.read(*each) for each in zip(begins, ends, strict=True)])
                yield tokens, ends - begins, shard.document_bytes[some], shard.origins[some]

    _write_shard(output, documents(), shards[0].tokenizer_sha256, shards[0].vocab_size, shards[0].end_of_text)


def _write_shard(
    output: Path, documents: Iterable[Encoded], tokenizer_sha256: str, vocab_size: int, end_of_text: int
) -> None:
    """Write the shard `output` of these documents, whose tokens are those of a tokenizer."""
    documents_path, manifest_path = _side_files(output)
    digest, total, count, size = hashlib.sha256(), 0, 0, 0
    # The length of a record batch precedes its columns, so columns are first written to flat files and then mapped.
    with scratch(output) as folder:
        flat = {name: folder / name for name in ("token", "offset", "bytes", "origin")}
        with ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in flat.values()]
            for tokens, lengths, sizes, origins in documents:
                offsets = total + np.cumsum(lengths) - lengths
                for file, column in zip(files, (tokens, offsets, sizes, origins), strict=True):
                    file.write(column.data)
                digest.update(tokens.data)
                total, count, size = total + len(tokens), count + len(lengths), size + int(sizes.sum())
        manifest: dict[str, Any] = {"tokens": total, "documents": count, "bytes": size, "sha256": digest.hexdigest()}
        manifest |= {"tokenizer_sha256": tokenizer_sha256, "vocab_size": vocab_size, "end_of_text": end_of_text}
        _write(output, {"token": flat.pop("token")}, _kind(vocab_size), total, _metadata(manifest, "tokens"))
        _write(documents_path, flat, np.dtype(np.int64), count, _metadata(manifest, "documents"))
        digests = {"tokens_sha256": sha256_file(output), "documents_sha256": sha256_file(documents_path)}
        write_json(manifest_path, manifest | digests)


def blocks(
    shard: TokenShard, length: int, limit_tokens: int | None = None, start: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the first `limit_tokens` tokens (None: all) into N consecutive blocks of `length` T: inputs, targets, mask.

    Only blocks from token `start` on (a multiple of `length`) are returned. inputs [N, T] int64: the token before the
    block (`end_of_text` for the first block), then the block's tokens except the last. targets [N, T] int64 and mask
    [N, T] bool: each token is a target once; the last short block is padded with `end_of_text` and masked (False).
    """
    total = (len(shard) if limit_tokens is None else min(limit_tokens, len(shard))) - start
    before = shard.read(start - 1, start)[0] if start else shard.end_of_text
    return cut(shard.read(start, start + total), length, before, shard.end_of_text)


def cut(
    ids: Sequence[int] | np.ndarray, length: int, before: int, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut `ids` into blocks as `blocks` does; `before` is the token before the first block."""
    count = -(-len(ids) // length)
    sequence = np.full(count * length + 1, padding, np.int64)
    sequence[0], sequence[1 : len(ids) + 1] = before, ids
    shape = (count, length)
    mask = np.arange(count * length) < len(ids)
    return sequence[:-1].reshape(shape), sequence[1:].reshape(shape), mask.reshape(shape)


def _side_files(path: Path) -> tuple[Path, Path]:
    return path.with_suffix(".documents.arrow"), path.with_suffix(".json")


def _metadata(manifest: dict[str, Any], part: str) -> dict[bytes, bytes]:
    """The metadata of a file about its split and part, so that files of different splits can be distinguished."""
    values = {key: manifest[key] for key in ("sha256", "documents", "tokenizer_sha256", "vocab_size")} | {"part": part}
    return {key.encode(): str(value).encode() for key, value in values.items()}


def _kind(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class _IdsDifferError(Exception):
    """Two encoders disagree; the message names the document."""


def _encoded(encoder: Tokenizer, documents: Path, *, exact: bool) -> Iterator[Encoded]:
    """The documents of a Parquet file, in batches.

    Unless `exact`, one document in `CHECK_EVERY` is checked against the exact encoder: raises _IdsDifferError.
    """
    import pyarrow.compute as pc

    row = size = renew_at = 0
    read = read_batches(documents, ["text", "origin"])
    for batch in counted(read, f"{documents.parent.name} {documents.stem}: documents", [documents]):
        if size >= renew_at:
            encoder, renew_at = encoder.renewed(), size + RENEW_EVERY
        texts = batch.column("text").to_pylist()
        ids, edges = encoder.encode_batch(texts, exact=exact)
        for number in range(-row % CHECK_EVERY, len(texts), CHECK_EVERY) if not exact else ():
            if not np.array_equal(ids[edges[number] : edges[number + 1]], encoder.encode(texts[number])):
                raise _IdsDifferError(f"document {row + number + 1}")
        tokens = np.insert(ids, edges[:-1], encoder.end_of_text)
        sizes = pc.binary_length(batch.column("text")).to_numpy().astype(np.int64)
        origins = np.arange(row, row + len(texts))
        if "origin" in batch.schema.names:
            # The sign bit stays 0, so that readers need no unsigned numbers.
            hashes = batch.column("origin").to_pylist()
            origins = np.array([int(origin[:16], 16) & _MAX_ORIGIN for origin in hashes], np.int64)
        yield tokens.astype(_kind(encoder.vocab_size)), np.diff(edges) + 1, sizes, origins
        row, size = row + len(texts), size + int(sizes.sum())


def _write(path: Path, columns: Mapping[str, Path], kind: np.dtype, rows: int, metadata: dict[bytes, bytes]) -> None:
    """Write flat files, one per column with `rows` rows each, as an Arrow IPC file of one record batch."""
    type_ = pa.from_numpy_dtype(kind)
    schema = pa.schema([pa.field(name, type_, nullable=False) for name in columns], metadata)
    # An empty file cannot be mapped.
    buffers = [pa.memory_map(str(file)).read_buffer() if rows else pa.py_buffer(b"") for file in columns.values()]
    arrays = [pa.Array.from_buffers(type_, rows, [None, buffer]) for buffer in buffers]
    # A batch of 2^31 rows or more is one that other readers of Arrow may refuse.
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)
    with replacing(path) as temporary, pa.ipc.new_file(str(temporary), schema, options=options) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))


def _map(path: Path) -> pa.RecordBatch:
    try:
        # A mapping of a pipe would wait for a writer.
        opened(path).close()
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        # Damaged names of columns raise ValueError when they are decoded, as here.
        if reader.num_record_batches != 1 or "" in reader.schema.names:
            raise pa.ArrowInvalid(f"{reader.num_record_batches} record batches instead of one")
        batch = reader.get_batch(0)
        batch.validate()
        return batch
    except FileNotFoundError:
        raise DemixError(path, "is missing", "run the stage that makes it") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DemixError(path, f"is damaged or cut short ({error})", REMAKE) from None
