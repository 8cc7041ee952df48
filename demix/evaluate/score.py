"""Scoring: the log-probability of each token under each expert, computed once per (model, expert, domain, split)."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from demix.config.architecture import FOLDS
from demix.config.evaluation import ScoringRecipe
from demix.config.sections import Threads
from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
from demix.evaluate.score_tables import row_groups, tokens_sha256, write_scores, write_tokens
from demix.files import digest, fsync, read_parquet, write_parquet
from demix.model.checkpoint import describe, expert_lineage, load_experts, refuse_other_tokenizer, whole_models
from demix.model.device import compute_type, own_device, set_threads
from demix.model.scoring import trunk_log_probabilities
from demix.progress import progress
from demix.settings import settings

log = logging.getLogger(__name__)


@settings(kw_only=True)
class Scoring(ScoringRecipe):
    """How scores are computed, and of which tokens."""

    threads: Threads


def score(
    directory: Path, experts: tuple[str, ...], shards: list[Path], scoring: Scoring, output: Path, context: int = 0
) -> None:
    """Score the named experts of the model in `directory` on the token shards tokens/<domain>/<split>.arrow.

    Writes output/<domain>.<split>/<expert>.parquet and tokens.parquet in the same folder. For a domain-token model,
    `experts` are domain tokens; without any, each domain is scored under its own token. Blocks have `context` tokens,
    by default those of the model's training. Raises DemixError if model and shards have different tokenizers, a split
    is empty, or blocks are longer than the positions that the model has learned.

    A split is scored one row group at a time. Scored row groups stay in a hidden folder, which is no rule's output,
    until the last split is written. After a kill, the same command scores only the missing row groups and writes the
    same bytes.
    """
    set_threads(scoring.threads)
    description = describe(directory)
    domain_tokens, architecture = tuple(description["domain_tokens"]), description["architecture"]
    if architecture.get("position", "learned") == "learned" and context > architecture["context"]:
        cause = f"is longer than the {architecture['context']} positions that {directory} has learned"
        raise DemixError(f"--context {context}", cause, "use fewer, or a model with position alibi")
    wanted = {*experts, *(path.parent.name for path in shards if not experts)}
    if (domain_tokens or not experts) and not wanted <= {*domain_tokens}:
        has = f"has the domain tokens {', '.join(domain_tokens)}" if domain_tokens else "has no domain tokens"
        raise DemixError(directory, has, "score under these, or name experts")
    # Each column is a file of its own, so experts that are whole models are never in memory together.
    parts = [(expert,) for expert in experts] if whole_models(directory) else [experts]
    for (expert,) in parts if len(parts) > 1 else ():
        # A missing expert ends the job before the first one is scored.
        expert_lineage(directory, expert)
    folders = [folder for part in parts for folder in _score(directory, part, shards, scoring, output, context)]
    # Snakemake removes all outputs of a killed job, so the pieces stay until every split is written.
    for folder in folders:
        shutil.rmtree(folder)


def _score(
    directory: Path, experts: tuple[str, ...], shards: list[Path], scoring: Scoring, output: Path, context: int
) -> list[Path]:
    """Score as `score` does experts that are in memory together; returns the hidden folders, which are still there."""
    dtype, description = compute_type(scoring.precision), describe(directory)
    domain_tokens = tuple(description["domain_tokens"])
    trunks = load_experts(directory, None if domain_tokens else experts, own_device())
    hashes = {name: expert_lineage(directory, name)["sha256"] for trunk in trunks for name in trunk.experts}
    length, device = context or trunks[0].architecture.context, trunks[0].token_embedding.device
    folders = []
    for path in shards:
        domain, split = path.parent.name, path.stem
        columns = experts or (domain,)
        shard = TokenShard.open(path, verify=True)
        refuse_other_tokenizer(directory, path, shard.tokenizer_sha256, shard.vocab_size)
        limit = scoring.limit(split, length)
        ids = shard.read(0, len(shard) if limit is None else min(limit, len(shard)))
        if not len(ids):
            raise DemixError(path, "holds no token to score", "give the domain more words, or raise the limit")
        sha256 = tokens_sha256(ids)
        folds = {"folds": str(FOLDS)} if trunks[0].architecture.objective == "mlm" else {}
        # Everything on which the bits of a score depend.
        origin = (
            {
                "model": digest(description),
                "experts": hashes,
                "columns": columns,
                "tokens": sha256,
                "settings": [
                    scoring.precision,
                    scoring.threads,
                    torch.__version__,
                    _device(device),
                ],
            }
            | folds
            | ({"context": context} if context else {})
        )
        fingerprint = hashlib.sha256(json.dumps(origin).encode()).hexdigest()
        place = output / f"{domain}.{split}"
        # No two jobs write the same column, so the name of a job's first column makes its folder unique.
        folder = place / f".{columns[0]}.pieces"
        folders.append(folder)
        groups = row_groups(len(ids), length)
        pieces = [folder / f"{start}.parquet" for start, _ in groups]
        missing = [
            (piece, start, stop)
            for piece, (start, stop) in zip(pieces, groups, strict=True)
            if not _is_piece(piece, fingerprint, stop - start)
        ]
        work = len(trunks) * sum(stop - start for _, start, stop in missing)
        with progress(f"{domain} {split}: tokens", work) as advance:
            for piece, start, stop in missing:
                scored = trunk_log_probabilities(
                    trunks, *blocks(shard, length, stop, start), dtype, advance,
                    columns if domain_tokens else None, start // length,
                )  # fmt: skip
                table = pa.table(dict(zip(columns, scored.astype(np.float32), strict=True)))
                write_parquet(table.replace_schema_metadata({"fingerprint": fingerprint}), piece)
        for expert in columns:
            metadata = {
                "tokens_sha256": sha256,
                "shared_sha256": description["shared_sha256"],
                "expert_sha256": hashes[expert if expert in hashes else "dense"],
                "precision": scoring.precision,
            } | folds
            name = f"{expert}.parquet"
            write_scores(folder / name, _column(pieces, expert), metadata, place / name)
        write_tokens(place, ids, shard.offsets, length, shard.origins)
        for expert in columns:
            os.replace(folder / f"{expert}.parquet", place / f"{expert}.parquet")
        fsync(place)
        log.info("%s %s: %d tokens under %d experts", domain, split, len(ids), len(columns))
        if len(missing) < len(pieces):
            log.info(
                "%s %s: %d of %d pieces were already scored", domain, split, len(pieces) - len(missing), len(pieces)
            )
    return folders


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def _is_piece(path: Path, fingerprint: str, tokens: int) -> bool:
    """Whether `path` is an undamaged piece with this number of tokens and this fingerprint."""
    try:
        table = read_parquet(path)
    except DemixError:
        return False
    return len(table) == tokens and (table.schema.metadata or {}).get(b"fingerprint") == fingerprint.encode()


def _column(pieces: list[Path], expert: str) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield read_parquet(piece, [expert])[expert].to_numpy()
