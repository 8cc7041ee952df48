"""Score tables on disk: `<expert>.parquet` and `tokens.parquet` in `scores/<model>/<domain>.<split>/`."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from demix.config.evaluation import ScoredTokens
from demix.config.models import DENSE_EXPERT
from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.files import read_parquet, sha256_file, write_json, write_parquet
from demix.files.batches import read_batches, regrouped, write_batches
from demix.model.manifest import read_description, read_lineage

# The approximate size of a row group: small in memory with all experts, and fast to score again after a kill.
ROW_GROUP_TOKENS = 1 << 16
ROUNDING = 1e-3
# The workflow tracks the tables by the manifests of the jobs that write them.
SCORE_AGAIN = "score the domain again: `snakemake -R score` (n-grams: score_ngrams) keeps undamaged columns"


@dataclass(frozen=True)
class ScoreTable:
    """The scores of one split under E experts, cut into blocks.

    `scores` [B, T, E] are float64 log p in nats, 0 at padding. `mask` [B, T] is False at padding. `sha256` is the hash
    of the scored token ids. `folds` is as in `Footer`.
    """

    scores: np.ndarray
    mask: np.ndarray
    experts: tuple[str, ...]
    sha256: str = ""
    folds: int = 0

    @property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return int(self.mask.sum())

    def select(self, experts: Sequence[str]) -> "ScoreTable":
        """The table with only the columns of `experts`, in this order."""
        columns = [self.experts.index(expert) for expert in experts]
        return replace(self, scores=self.scores[..., columns], experts=tuple(experts))


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks of a split.

    `scores` [B, T, E] are float64 log p in nats, 0 at padding; their memory layout is [B, E, T]. `mask` [B, T] is False
    at padding. `tokens` [N] and `documents` [N] are the ids and the non-decreasing document numbers of the N tokens
    that are not padding; `origins` [N] are equal for chunks of one source document. `side` has other values of each
    token by name, [B, T, C], 0 at padding, in the layout of `scores`.
    """

    scores: np.ndarray
    mask: np.ndarray
    tokens: np.ndarray
    documents: np.ndarray
    origins: np.ndarray
    side: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class SideTable:
    """C columns of a Parquet file with one row per scored token. The file's footer holds their `tokens_sha256`."""

    path: Path
    columns: tuple[str, ...]


def column_path(directory: Path, column: str) -> Path:
    """The file of a score table's column. `directory` is scores/<model>/<domain>.<split>/; the column `x/y` is the
    column `y` of the model `x`."""
    model, _, name = column.rpartition("/")
    return (directory.parents[1] / model / directory.name if model else directory) / f"{name}.parquet"


def row_groups(tokens: int, length: int) -> list[tuple[int, int]]:
    """The (first, last + 1) tokens of each row group of a split: whole blocks of `length`, for any experts."""
    size = length * max(1, ROW_GROUP_TOKENS // length)
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def write_tokens(
    directory: Path, tokens: np.ndarray, offsets: np.ndarray, length: int, origins: np.ndarray | None = None
) -> None:
    """Write tokens.parquet, which all score columns of a split share: token ids, block and document numbers, origins.

    Documents begin at `offsets`. Documents with equal numbers in `origins` (default: none) are chunks of one source
    document. A file that would not change is not written again, because other jobs may be reading it.
    """
    path, places = directory / "tokens.parquet", np.arange(len(tokens))
    documents = np.searchsorted(offsets, places, side="right") - 1
    columns = {
        "token": tokens,
        "block": (places // length).astype(np.int32),
        "document": documents.astype(np.int32),
        "origin": documents if origins is None else origins[documents],
    }
    table = pa.table(columns).replace_schema_metadata({"length": str(length)})
    # A file that is missing or damaged is written again.
    with suppress(DemixError):
        before = read_parquet(path)
        if before.equals(table) and before.schema.metadata.get(b"length") == str(length).encode():
            return
    write_parquet(table, path, row_group_size=row_groups(len(tokens), length)[0][1])


def write_digests(
    path: Path, tables: Iterable[tuple[Path, Sequence[str]]], about: Mapping[str, Any] | None = None
) -> None:
    """Write the digests of score tables, each a folder with the columns that a job has written there.

    `about` has further information about the job.
    """
    files = [place / f"{name}.parquet" for place, columns in tables for name in (*columns, "tokens")]
    digests = {os.path.relpath(file, path.parent): sha256_file(file) for file in files}
    write_json(path, {"files": digests, **(about or {})})


def write_scores(path: Path, pieces: Iterable[np.ndarray], metadata: dict[str, str]) -> None:
    """Write the column of one expert: float32 log p of each token, in nats. Each piece becomes a row group.

    Raises DemixError for a value that is not a log p.
    """
    schema = pa.schema({"log_probability": pa.float32()}, metadata)

    def batches() -> Iterator[pa.RecordBatch]:
        row = 0
        for piece in pieces:
            _refuse_impossible(path, piece, row, "train the model again: it gives no probabilities")
            row += len(piece)
            yield pa.record_batch([pa.array(piece.astype(np.float32))], schema=schema)

    write_batches(path, schema, batches(), use_dictionary=False, column_encoding="BYTE_STREAM_SPLIT")


def read_scores(directory: Path, experts: Sequence[str]) -> ScoreTable:
    """The columns of `experts` in `scores/<model>/<domain>.<split>/`, padded to whole blocks.

    Raises the errors of `stream_scores`.
    """
    chunks, footer = list(stream_scores(directory, experts)), footer_of(directory, experts)
    scores, mask = (np.concatenate(parts) for parts in zip(*((one.scores, one.mask) for one in chunks), strict=True))
    return ScoreTable(scores, mask, tuple(experts), footer.tokens_sha256, footer.folds)


def stream_scores(
    directory: Path,
    experts: Sequence[str],
    at_once: int = 1 << 14,
    side: Mapping[str, SideTable] | None = None,
) -> Iterator[Blocks]:
    """The columns of `experts` in the order of the text: an even number of blocks at a time, about `at_once` tokens.

    The columns of `side` are returned with the scores of the same tokens. Raises DemixError if two columns were scored
    with different shared weights, if a value is not a log p, or, after the last block, if a file belongs to other
    tokens than tokens.parquet.
    """
    side, path = side or {}, directory / "tokens.parquet"
    paths = [column_path(directory, expert) for expert in experts]
    tokens, *files = (_footer(one) for one in (path, *paths, *(table.path for table in side.values())))
    _check_structure(tokens, files, len(paths))
    length = tokens.number(b"length")
    # The released scorer works on pairs of blocks, so the number of blocks is even.
    size = 2 * length * max(1, at_once // (2 * length))
    sources = [(one, ["log_probability"]) for one in paths]
    sources += [(table.path, list(table.columns)) for table in side.values()]
    digest, row = hashlib.sha256(), 0
    for (ids, documents, origins), *pieces in zip(
        _pieces(path, ["token", "document", "origin"], size),
        *(_pieces(one, names, size) for one, names in sources),
        strict=True,
    ):
        digest.update(ids.astype("<u4").tobytes())
        for column, (piece,) in zip(paths, pieces, strict=False):
            _refuse_impossible(column, piece, row, SCORE_AGAIN)
        row += len(ids)
        blocks = -(-len(ids) // length)
        mask = (np.arange(blocks * length) < len(ids)).reshape(blocks, length)
        scores = _in_blocks([piece for (piece,) in pieces[: len(paths)]], blocks, length)
        more = zip(side, pieces[len(paths) :], strict=True)
        others = {name: _in_blocks(piece, blocks, length) for name, piece in more}
        yield Blocks(scores, mask, ids, documents, origins, others)
    for one in files:
        if one.tokens_sha256 != digest.hexdigest():
            raise DemixError(one.path, f"has scores of other tokens than {path}", SCORE_AGAIN)


def _check_structure(tokens: "Footer", files: "Sequence[Footer]", columns: int) -> None:
    """Raise DemixError if a file does not have one row per token, or if score columns were scored differently.

    The first `columns` of `files` are score columns. Columns of other models may have other shared weights.
    """
    for one in files:
        if one.rows != tokens.rows:
            raise DemixError(one.path, f"is not as long as {tokens.path}", SCORE_AGAIN)
    for one in files[:columns]:
        for key in (*[b"shared_sha256"] * (one.path.parent == files[0].path.parent), b"precision", b"folds"):
            if one.about.get(key) != files[0].about.get(key):
                raise DemixError(one.path, f"was scored with another {key.decode()} than {files[0].path}", SCORE_AGAIN)


def _refuse_impossible(path: Path, piece: np.ndarray, row: int, cure: str) -> None:
    """Raise DemixError for the first of the values [N], which are rows `row` and following of `path`, that is not a log
    p.

    A log p is finite, and above 0 by no more than the rounding error of float32.
    """
    possible = (piece <= ROUNDING) & (piece > -np.inf)
    if not possible.all():
        first = int(possible.argmin())
        raise DemixError(path, f"holds {piece[first]:g} in row {row + first}, which is not a log-probability", cure)


def _in_blocks(columns: Sequence[np.ndarray], blocks: int, length: int) -> np.ndarray:
    """Columns with one value per token, as [B, T, C] float64 with 0 at padding. Their memory layout is [B, C, T]."""
    count = len(columns[0])
    whole = count // length
    filled = np.zeros((blocks, len(columns), length))
    for number, column in enumerate(columns):
        filled[:whole, number] = column[: whole * length].reshape(whole, length)
        filled[whole:, number, : count - whole * length] = column[whole * length :]
    return filled.transpose(0, 2, 1)


def refuse_other_model(directory: Path, experts: Iterable[str], model: Path) -> None:
    """Raise DemixError if a column in `scores/<model>/<domain>.<split>/` was scored with other weights than `model`'s.

    Experts that the folder `model` no longer has, such as averages that are made only for scoring, are not compared.
    """
    if not (model / "model.json").exists():
        return
    shared = read_description(model / "model.json").shared_sha256
    for expert in (name for name in experts if "/" not in name):
        # The domains of a model with domain tokens share one expert.
        names = [name for name in (expert, DENSE_EXPERT) if (model / "experts" / f"{name}.json").exists()]
        own = read_lineage(model / "experts" / f"{names[0]}.json").sha256 if names else None
        path = directory / f"{expert}.parquet"
        found = _footer(path).about
        for key, expected in (("shared_sha256", shared), ("expert_sha256", own)):
            if expected is not None and found.get(key.encode(), b"").decode() != expected:
                cause = f"was scored with other parameters ({key}) than the model {model} has"
                raise DemixError(path, cause, SCORE_AGAIN)


def footer_of(directory: Path, experts: Sequence[str]) -> "Footer":
    """The footer of the first score column of a split. `stream_scores` checks that all columns have the same values."""
    return _footer(directory / f"{experts[0]}.parquet")


def refuse_evidence(subject: object, folds: int, asked: str) -> None:
    """Raise DemixError if a masked model's table (`folds`) would be used to weight or compare experts by the text.

    A masked model has read the text after a token, so its scores of earlier tokens depend on the token to be mixed.
    `asked` describes the use.
    """
    if folds:
        cause = f"is of a masked model ({folds} folds), whose scores would show {asked} the tokens to be predicted"
        raise DemixError(subject, cause, "mix masked models by average or fitted")


@dataclass(frozen=True)
class Footer:
    """The footer of a column with `rows` tokens."""

    path: Path
    rows: int
    about: dict[bytes, bytes]

    @property
    def tokens_sha256(self) -> str:
        """The hash of the scored tokens."""
        return self.about.get(b"tokens_sha256", b"").decode()

    @property
    def folds(self) -> int:
        """The number of passes in which a masked model predicted the tokens of each block; 0 for a causal model."""
        return self.number(b"folds", b"0")

    def number(self, key: bytes, default: bytes = b"") -> int:
        """The value of a key, an integer."""
        said = self.about.get(key, default)
        if not said.isdigit():
            raise DemixError(self.path, f"has an invalid value of {key.decode()} ({said!r:.40})", SCORE_AGAIN)
        return int(said)


def _footer(path: Path) -> Footer:
    if path.with_name("tokens.parquet").exists() and not path.exists():
        raise DemixError(path, "is missing", SCORE_AGAIN)
    nothing = read_parquet(path, columns=[])
    return Footer(path, nothing.num_rows, nothing.schema.metadata or {})


def _pieces(path: Path, names: list[str], size: int) -> Iterator[list[np.ndarray]]:
    """Columns in pieces of `size` rows (the last may be shorter), for a file with row groups of any size."""
    for batch in regrouped(read_batches(path, names, rows=size), repeat(size)):
        yield [batch.column(name).to_numpy() for name in names]


def count_to_score(shard: TokenShard, scored: ScoredTokens, length: int) -> int:
    """The number of tokens of tokens/<domain>/<split>.arrow that are scored, in blocks of `length` tokens.

    Raises DemixError if there are none.
    """
    limit = scored.limit(shard.path.stem, length)
    if not (count := len(shard) if limit is None else min(limit, len(shard))):
        raise DemixError(shard.path, "holds no token to score", "give the domain more words")
    return count


def tokens_sha256(tokens: np.ndarray) -> str:
    """A hash of token ids of any integer type. Scores are comparable only if these hashes are equal."""
    return hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()
