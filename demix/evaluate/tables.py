"""Score tables on disk: `scores/<model>/<domain>.<split>/<expert>.parquet` and `tokens.parquet` beside them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from demix.errors import DemixError
from demix.files import read_parquet, write_parquet


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


def write_tokens(directory: Path, tokens: np.ndarray, documents: np.ndarray, length: int) -> None:
    """Write what all score columns of a split share: token ids, block and document numbers.

    A file that already holds just this is left as it is.
    """
    blocks = (np.arange(len(tokens)) // length).astype(np.int32)
    table = pa.table({"token": tokens, "block": blocks, "document": documents.astype(np.int32)})
    table = table.replace_schema_metadata({"length": str(length)})
    path = directory / "tokens.parquet"
    if not path.exists() or not read_parquet(path).equals(table, check_metadata=True):
        write_parquet(table, path)


def write_scores(path: Path, log_probabilities: np.ndarray, metadata: dict[str, str]) -> None:
    """Write one expert's column: a float32 log-probability in nats per token."""
    table = pa.table({"log_probability": log_probabilities.astype(np.float32)})
    write_parquet(
        table.replace_schema_metadata(metadata), path, use_dictionary=False, column_encoding="BYTE_STREAM_SPLIT"
    )


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
