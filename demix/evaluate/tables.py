"""Score tables on disk: `scores/<model>/<domain>.<split>/<expert>.parquet` and `tokens.parquet` beside them."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from demix.data.tables import write_batches
from demix.errors import DemixError
from demix.files import read_parquet

# About so many make a row group: little to hold in memory under every expert, and to score again after a kill.
ROW_GROUP_TOKENS = 1 << 16


@dataclass(frozen=True)
class ScoreTable:
    """The scores of one split under some experts, cut into blocks.

    scores [B, T, E] float64 nats, 0 at padding; mask [B, T] bool; sha256 of the token ids scored.
    """

    scores: np.ndarray
    mask: np.ndarray
    experts: tuple[str, ...]
    documents: int
    sha256: str

    @property
    def tokens(self) -> int:
        """How many tokens were scored."""
        return int(self.mask.sum())

    def select(self, experts: Sequence[str]) -> "ScoreTable":
        """The same table with these experts' columns only."""
        columns = [self.experts.index(expert) for expert in experts]
        return ScoreTable(self.scores[..., columns], self.mask, tuple(experts), self.documents, self.sha256)


def row_groups(tokens: int, length: int) -> list[tuple[int, int]]:
    """From which token to which each row group of a split goes: whole blocks of `length`, whatever the experts."""
    size = length * max(1, ROW_GROUP_TOKENS // length)
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def write_tokens(directory: Path, tokens: np.ndarray, offsets: np.ndarray, length: int) -> None:
    """Write what all score columns of a split share: token ids, block and document numbers.

    Documents begin at `offsets`. A file that already holds just this is left as it is.
    """
    types = (pa.from_numpy_dtype(tokens.dtype), pa.int32(), pa.int32())
    schema = pa.schema(zip(("token", "block", "document"), types, strict=True), {"length": str(length)})

    def rows(start: int, stop: int) -> pa.RecordBatch:
        places = np.arange(start, stop)
        documents = np.searchsorted(offsets, places, side="right") - 1
        columns = (tokens[start:stop], (places // length).astype(np.int32), documents.astype(np.int32))
        return pa.record_batch([pa.array(column) for column in columns], schema=schema)

    path = directory / "tokens.parquet"
    if not _holds(path, schema, len(tokens), rows):
        write_batches(path, schema, (rows(start, stop) for start, stop in row_groups(len(tokens), length)))


def _holds(path: Path, schema: pa.Schema, count: int, rows: Callable[[int, int], pa.RecordBatch]) -> bool:
    """Whether a Parquet file is there, undamaged, with just these rows, whatever its row groups."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if file.metadata.num_rows != count or not file.schema_arrow.equals(schema, check_metadata=True):
                return False
            start = 0
            for number in range(file.num_row_groups):
                found = file.read_row_group(number)
                if not found.equals(pa.table(rows(start, start + len(found)))):
                    return False
                start += len(found)
            return True
    except (pa.ArrowException, OSError):
        return False


def write_scores(path: Path, pieces: Iterable[np.ndarray], metadata: dict[str, str]) -> None:
    """Write one expert's column, a float32 log-probability in nats per token, of which each piece is a row group."""
    schema = pa.schema({"log_probability": pa.float32()}, metadata)
    batches = (pa.record_batch([pa.array(piece.astype(np.float32))], schema=schema) for piece in pieces)
    write_batches(path, schema, batches, use_dictionary=False, column_encoding="BYTE_STREAM_SPLIT")


def read_scores(directory: Path, experts: Sequence[str]) -> ScoreTable:
    """The columns of `experts` in `scores/<model>/<domain>.<split>/`, padded to whole blocks.

    Raises DemixError when a column was scored on other tokens than the table beside it holds, or with other shared
    weights than the columns before it.
    """
    tokens = read_parquet(directory / "tokens.parquet")
    ids, length = tokens["token"].to_numpy(), int(tokens.schema.metadata[b"length"])
    sha256 = tokens_sha256(ids)
    blocks = -(-len(ids) // length)
    scores = np.zeros((blocks * length, len(experts)))
    shared = None
    for number, expert in enumerate(experts):
        path = directory / f"{expert}.parquet"
        column = read_parquet(path)
        origin = column.schema.metadata or {}
        if origin.get(b"tokens_sha256", b"").decode() != sha256:
            raise DemixError(path, "was scored on other tokens than tokens.parquet holds", "score the domain again")
        shared = shared or origin.get(b"shared_sha256")
        if origin.get(b"shared_sha256") != shared:
            other = f"{experts[0]}.parquet"
            raise DemixError(path, f"was scored with other shared weights than {other}", "score the domain again")
        scores[: len(ids), number] = column["log_probability"].to_numpy()
    mask = np.arange(blocks * length) < len(ids)
    return ScoreTable(
        scores.reshape(blocks, length, len(experts)),
        mask.reshape(blocks, length),
        tuple(experts),
        len(np.unique(tokens["document"].to_numpy())),
        sha256,
    )


def tokens_sha256(tokens: np.ndarray) -> str:
    """A hash of token ids, whatever their integer type: equal hashes mean comparable numbers."""
    return hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()
