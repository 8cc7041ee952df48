"""Tokens of one split as a flat memory-mapped column, and the blocks that are scored."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from demix.data.tables import read_batches
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_json, replacing, sha256_file, write_json

REMAKE = "delete it and rerun the stage that makes it"

MOST_TOKENS = 500_000_000
CHECK_EVERY = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenShard:
    """The tokens of one split, memory-mapped and read-only.

    `tokens` is flat (uint16, or uint32 above 65,536 types); every document begins with `end_of_text`, at the places
    in `offsets` (int64). `document_bytes` are the UTF-8 bytes of each document's text.
    """

    path: Path
    tokens: np.ndarray = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    document_bytes: np.ndarray = field(repr=False)
    end_of_text: int
    vocab_size: int
    tokenizer_sha256: str

    @staticmethod
    def open(path: str | Path, verify: bool = False) -> "TokenShard":
        """Map the shard at `path`; `verify` compares the sha256 of its files with the manifest beside it.

        Raises DemixError naming the file that is missing, damaged, or not the manifest's.
        """
        path = Path(path)
        documents, manifest_path = _beside(path)
        manifest = read_json(manifest_path)
        try:
            expected = {path: manifest["sha256"], documents: manifest["documents_sha256"]}
            sizes = {path: manifest["tokens"], documents: manifest["documents"]}
            vocab_size, tokenizer_sha256 = int(manifest["vocab_size"]), str(manifest["tokenizer_sha256"])
        except (KeyError, TypeError, ValueError) as error:
            raise DemixError(manifest_path, f"is no manifest of tokens ({error!r})", REMAKE) from None
        columns = {file: _map(file) for file in sizes}
        for file, size in sizes.items():
            if len(next(iter(columns[file].values()))) != size:
                raise DemixError(file, f"does not hold the {size} rows of {manifest_path.name}", REMAKE)
            if verify and sha256_file(file) != expected[file]:
                raise DemixError(file, f"is damaged: its sha256 is not the one in {manifest_path.name}", REMAKE)
        return TokenShard(
            path,
            columns[path]["token"],
            columns[documents]["offset"],
            columns[documents]["bytes"],
            vocab_size - 1,
            vocab_size,
            tokenizer_sha256,
        )


def tokenize(tokenizer: Path, documents: Path, output: Path) -> None:
    """Encode the column `text` of the Parquet `documents` into the shard `output` (`<split>.arrow`).

    Beside it come `<split>.documents.arrow` (`offset`: the place of each document's first id, `bytes`: the size of
    its text in UTF-8) and, last, the manifest `<split>.json`. A sample of the documents is encoded by tiktoken too;
    where ids differ, all are, with a warning. Raises DemixError above `MOST_TOKENS` tokens.
    """
    encoder = Tokenizer.load(tokenizer)
    kind = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
    documents_path, manifest_path = _beside(output)

    # One record batch needs its length before its columns: they go to flat files first, which are then mapped.
    with TemporaryDirectory(dir=_made(output.parent), prefix=".tokens.") as folder:
        flat = {name: Path(folder, name) for name in ("token", "offset", "bytes")}
        try:
            _encode(encoder, documents, kind, flat, exact=False)
        except _IdsDifferError as error:
            _log.warning("%s: gigatoken's ids differ from tiktoken's in %s; encoding with tiktoken", documents, error)
            _encode(encoder, documents, kind, flat, exact=True)
        tokens, count = flat["token"].stat().st_size // kind.itemsize, flat["offset"].stat().st_size // 8
        size = int(np.fromfile(flat["bytes"], np.int64).sum()) if count else 0
        schema = pa.schema(
            [pa.field("token", pa.from_numpy_dtype(kind), nullable=False)],
            {"tokenizer_sha256": encoder.sha256, "vocab_size": str(encoder.vocab_size), "documents": str(count)},
        )
        with replacing(output) as temporary:
            _write_batch(temporary, schema, [flat["token"]], tokens)
        schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("offset", "bytes")])
        with replacing(documents_path) as temporary:
            _write_batch(temporary, schema, [flat["offset"], flat["bytes"]], count)
    write_json(
        manifest_path,
        {
            "tokens": tokens,
            "documents": count,
            "bytes": size,
            "sha256": sha256_file(output),
            "documents_sha256": sha256_file(documents_path),
            "tokenizer_sha256": encoder.sha256,
            "vocab_size": encoder.vocab_size,
        },
    )


def blocks(
    tokens: np.ndarray, length: int, end_of_text: int, limit_tokens: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the first `limit_tokens` tokens (None: all) into N consecutive blocks of `length` T: inputs, targets, mask.

    inputs [N, T] int64: the token before the block (`end_of_text` before the first) and the block's own but its last.
    targets [N, T] int64 and mask [N, T] bool: each token is a target once; the last short block is padded with
    `end_of_text` and masked (False).
    """
    tokens = tokens[:limit_tokens]
    count = -(-len(tokens) // length)
    sequence = np.full(count * length + 1, end_of_text, np.int64)
    sequence[1 : len(tokens) + 1] = tokens
    shape = (count, length)
    mask = np.arange(count * length) < len(tokens)
    return sequence[:-1].reshape(shape), sequence[1:].reshape(shape), mask.reshape(shape)


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_suffix(".documents.arrow"), path.with_suffix(".json")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class _IdsDifferError(Exception):
    """Names the document that two encoders disagree on."""


def _encode(encoder: Tokenizer, documents: Path, kind: np.dtype, flat: dict[str, Path], *, exact: bool) -> None:
    """Write ids, offsets and text sizes of all documents to the files in `flat`.

    Unless `exact`, one document in `CHECK_EVERY` is checked against the exact encoder: raises _IdsDifferError.
    """
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(path, "wb")) for name, path in flat.items()}
        row = total = 0
        for batch in read_batches(documents, ["text"]):
            texts = batch.column(0).to_pylist()
            ids, edges = encoder.encode_batch(texts, exact=exact)
            for number in range(-row % CHECK_EVERY, len(texts), CHECK_EVERY) if not exact else ():
                if not np.array_equal(ids[edges[number] : edges[number + 1]], encoder.encode(texts[number])):
                    raise _IdsDifferError(f"document {row + number + 1}")
            begin = edges[:-1] + np.arange(len(texts))
            tokens = np.full(len(ids) + len(texts), encoder.end_of_text, kind)
            own = np.ones(len(tokens), bool)
            own[begin] = False
            tokens[own] = ids
            sizes = pc.binary_length(batch.column(0)).to_numpy().astype(np.int64)
            for name, column in (("token", tokens), ("offset", total + begin), ("bytes", sizes)):
                files[name].write(column.data)
            row, total = row + len(texts), total + len(tokens)
            if total > MOST_TOKENS:
                cause = f"holds more than the {MOST_TOKENS:,} tokens of a shard"
                raise DemixError(documents, cause, "lower the words of the domain's split, or make two domains of it")


def _write_batch(path: Path, schema: pa.Schema, columns: list[Path], size: int) -> None:
    with ExitStack() as stack:
        maps = [stack.enter_context(pa.memory_map(str(column))) if size else None for column in columns]
        buffers = [source.read_buffer() if source else pa.py_buffer(b"") for source in maps]
        pairs = zip(schema, buffers, strict=True)
        arrays = [pa.Array.from_buffers(entry.type, size, [None, buffer]) for entry, buffer in pairs]
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def _map(path: Path) -> dict[str, np.ndarray]:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if reader.num_record_batches != 1:
            raise pa.ArrowInvalid(f"{reader.num_record_batches} record batches instead of one")
        batch = reader.get_batch(0)
        batch.validate(full=True)
        return {name: batch.column(name).to_numpy(zero_copy_only=True) for name in batch.schema.names}
    except FileNotFoundError:
        raise DemixError(path, "is missing", "run the stage that makes it") from None
    except (pa.ArrowException, OSError) as error:
        raise DemixError(path, f"is damaged or cut short ({error})", REMAKE) from None
