"""Tokens of one split as a flat memory-mapped column, and the blocks that are scored."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from demix.data.tables import read_batches
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_json, replacing, sha256_file, write_json

REMAKE = "delete it and rerun the stage that makes it"


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
    its text in UTF-8) and, last, the manifest `<split>.json`.
    """
    encoder = Tokenizer.load(tokenizer)
    kind = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
    documents_path, manifest_path = _beside(output)
    counts: list[np.ndarray] = []
    bytes_: list[int] = []

    # One record batch needs its length before its tokens: they go to a flat file first, which is then mapped.
    with replacing(output) as temporary:
        flat = temporary.with_name(temporary.name + ".flat")
        try:
            with open(flat, "wb") as stream:
                for ids, size in _encoded(encoder, documents, kind):
                    stream.write(ids.data)
                    counts.append(len(ids))
                    bytes_.append(size)
            lengths = np.array(counts, np.int64)
            schema = pa.schema(
                [pa.field("token", pa.from_numpy_dtype(kind), nullable=False)],
                {
                    "tokenizer_sha256": encoder.sha256,
                    "vocab_size": str(encoder.vocab_size),
                    "documents": str(len(lengths)),
                },
            )
            with pa.memory_map(str(flat)) as source:
                _write_batch(temporary, schema, [(source.read_buffer(), int(lengths.sum()))])
        finally:
            flat.unlink(missing_ok=True)

    schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("offset", "bytes")])
    columns = [np.cumsum(lengths) - lengths, np.array(bytes_, np.int64)]
    with replacing(documents_path) as temporary:
        _write_batch(temporary, schema, [(pa.py_buffer(column), len(column)) for column in columns])
    write_json(
        manifest_path,
        {
            "tokens": int(lengths.sum()),
            "documents": len(lengths),
            "bytes": int(columns[1].sum()),
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


def _encoded(encoder: Tokenizer, documents: Path, kind: np.dtype) -> Iterator[tuple[np.ndarray, int]]:
    for batch in read_batches(documents, ["text"]):
        texts = batch.column(0).to_pylist()
        for text, ids in zip(texts, encoder.encode_batch(texts), strict=True):
            yield np.concatenate([[encoder.end_of_text], ids], dtype=kind, casting="unsafe"), len(text.encode())


def _write_batch(path: Path, schema: pa.Schema, columns: list[tuple[pa.Buffer, int]]) -> None:
    pairs = zip(schema, columns, strict=True)
    arrays = [pa.Array.from_buffers(entry.type, size, [None, buffer]) for entry, (buffer, size) in pairs]
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
