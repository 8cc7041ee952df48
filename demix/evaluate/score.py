"""Scoring: the log-probability of each token under each expert, computed once per (model, expert, domain, split)."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from demix.config.architecture import FOLDS
from demix.config.evaluation import ScoringRecipe
from demix.config.training import Threads
from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
from demix.evaluate.score_tables import (
    count_to_score,
    row_groups,
    tokens_sha256,
    write_digests,
    write_scores,
    write_tokens,
)
from demix.files import digest, read_parquet, write_parquet
from demix.model.device import compute_type, own_device, set_threads
from demix.model.directory import (
    describe,
    expert_lineage,
    expert_names,
    load_experts,
    refuse_other_tokenizer,
    whole_models,
)
from demix.model.experts import load_without
from demix.model.gpt import GPT
from demix.model.moe import MoELayer
from demix.model.scoring import trunk_log_probabilities
from demix.progress import progress
from demix.run.scoring import ScoringPart
from demix.settings import Items

log = logging.getLogger(__name__)


class Scoring(ScoringRecipe):
    """How scores are computed, and of which tokens. `models` are those of `score_models`."""

    threads: Threads
    models: Items[ScoringPart] = ()


@dataclass(frozen=True)
class _Work:
    """The arguments of `score`."""

    directory: Path
    experts: tuple[str, ...]
    shards: list[Path]
    output: Path
    context: int = 0
    top_k: int = 0
    without: str = ""


def score(
    directory: Path,
    experts: tuple[str, ...],
    shards: list[Path],
    scoring: Scoring,
    output: Path,
    context: int = 0,
    top_k: int = 0,
) -> None:
    """Score the named experts of the model in `directory` on the token shards tokens/<domain>/<split>.arrow.

    Writes output/<domain>.<split>/<expert>.parquet and tokens.parquet in the same folder. For a domain-token model,
    `experts` are domain tokens; without any, each domain is scored under its own token. Blocks have `context` tokens,
    by default those of the model's training, and tokens choose `top_k` experts in each layer that routes them, by
    default as many as in training. Raises DemixError if model and shards have different tokenizers, a split is empty,
    blocks are longer than the positions that the model has learned, or a layer has fewer experts.

    A split is scored one row group at a time. Scored row groups stay in a hidden folder until the columns of the split
    are written. After a kill, the same command scores only the missing row groups and writes the same bytes. Finished
    columns say of what they were made: the same command leaves them, unless something on which their bits depend has
    changed.
    """
    _score_all([_Work(directory, experts, shards, output, context, top_k)], scoring)


def score_models(
    models: Path, shards: list[Path], scoring: Scoring, output: Path, manifest: Path | None = None
) -> None:
    """Score texts under experts: write the log-probability of every token.

    Does `score` for each of `scoring.models` below the folder `models`, with the same bytes. Writes output/<model>/…,
    or output/<model>@… for what is not as in training, and opens each of the shards once. The file `manifest` gets the
    digests of all tables, last. Raises DemixError before the first is scored if an expert of the last is missing, and
    where no model is named.
    """
    if not scoring.models:
        raise DemixError("--settings.models", "names no model", "list the models to score")
    places = {(path.parent.name, path.stem): path for path in shards}
    works = []
    for one in scoring.models:
        wanted = [(domain, split) for domain in one.domains for split in one.splits]
        if absent := [place for place in wanted if place not in places]:
            domain, split = absent[0]
            cure = f"give tokens/{domain}/{split}.arrow"
            raise DemixError(f"model {one.model}", f"is to be scored on {domain} {split}, not an argument", cure)
        changed = one.context, one.top_k, one.without
        own = [places[place] for place in wanted]
        works.append(_Work(models / one.model, one.experts, own, output / one.folder, *changed))
    written = _score_all(works, scoring)
    if manifest is not None:
        write_digests(manifest, written)


def _score_all(works: list[_Work], scoring: Scoring) -> list[tuple[Path, Sequence[str]]]:
    """Score all works; returns the folders of tables, each with its columns."""
    set_threads(scoring.threads)
    # What is missing ends the job before the first model is scored.
    for work in works:
        _check(work)
    shards = {path: TokenShard.open(path, verify=True) for path in dict.fromkeys(chain(*(one.shards for one in works)))}
    for work in works:
        for path in work.shards:
            refuse_other_tokenizer(work.directory, path, shards[path].tokenizer_sha256, shards[path].vocab_size)
    written: list[tuple[Path, Sequence[str]]] = []
    for work in works:
        # Each column is a file of its own, so experts that are whole models are never in memory together.
        apart = whole_models(work.directory) and work.experts
        for experts in [(expert,) for expert in work.experts] if apart else [work.experts]:
            scorer = _Scorer(replace(work, experts=experts), scoring)
            for path in work.shards:
                scorer.score(path, shards[path])
        for path in work.shards:
            shard, place = shards[path], work.output / f"{path.parent.name}.{path.stem}"
            ids = shard.read(0, count_to_score(shard, scoring, scorer.length))
            write_tokens(place, ids, shard.offsets, scorer.length, shard.origins)
            written.append((place, work.experts or (path.parent.name,)))
    return written


def _check(work: _Work) -> None:
    """Raise DemixError for an expert or a domain token that the model lacks, and for blocks too long for it."""
    directory, experts, context = work.directory, work.experts, work.context
    described = describe(directory)
    domain_tokens, architecture = described.domain_tokens, described.architecture
    if architecture.position == "learned" and context > architecture.context:
        cause = f"is longer than the {architecture.context} positions that {directory} has learned"
        raise DemixError(f"context {context}", cause, "use fewer, or a model with position alibi")
    routed = architecture.routed.experts if architecture.routed else 0
    if work.top_k > routed:
        cause = f"is more than the {routed} experts among which tokens of {directory} choose in a layer"
        raise DemixError(f"top_k {work.top_k}", cause, "use fewer, or a model of kind routed")
    wanted = {*experts, *(path.parent.name for path in work.shards if not experts)}
    if (domain_tokens or not experts) and not wanted <= {*domain_tokens}:
        has = f"has the domain tokens {', '.join(domain_tokens)}" if domain_tokens else "has no domain tokens"
        raise DemixError(directory, has, "score under these, or name experts")
    for expert in expert_names(directory) if domain_tokens else experts:
        expert_lineage(directory, expert)


class _Scorer:
    """Experts that are in memory together, which are loaded once a column is missing; scores as `score` does."""

    def __init__(self, work: _Work, scoring: Scoring) -> None:
        self.work, self.scoring, self.described = work, scoring, describe(work.directory)
        self.domain_tokens = self.described.domain_tokens
        named = expert_names(work.directory) if self.domain_tokens else work.experts
        self.hashes = {name: expert_lineage(work.directory, name).sha256 for name in named}
        architecture = self.described.architecture
        self.length = work.context or architecture.context
        self.folds = {"folds": str(FOLDS)} if architecture.objective == "mlm" else {}

    @cached_property
    def trunks(self) -> list[GPT]:
        """The experts."""
        if self.work.without:
            return [load_without(self.work.directory, self.work.without).to(own_device())]
        trunks = load_experts(self.work.directory, None if self.domain_tokens else self.work.experts, own_device())
        for block in (block for trunk in trunks if self.work.top_k for block in trunk.blocks):
            if isinstance(block.feedforward, MoELayer):
                block.feedforward.choose(self.work.top_k)
        return trunks

    def score(self, path: Path, shard: TokenShard) -> None:
        """Score a split, unless all columns are there."""
        domain, split = path.parent.name, path.stem
        columns = self.work.experts or (domain,)
        place, label = self.work.output / f"{domain}.{split}", f"{self.work.output.name} on {domain} {split}"
        ids = shard.read(0, count_to_score(shard, self.scoring, self.length))
        sha256 = tokens_sha256(ids)
        fingerprint = self._fingerprint(columns, sha256)
        files = {column: (place / f"{column}.parquet", self._fingerprint((column,), sha256)) for column in columns}
        # No two jobs write the same column, so the name of a job's first column makes its folder unique.
        folder = place / f".{columns[0]}.pieces"
        if all(_is_whole(file, len(ids), own) for file, own in files.values()):
            log.info("%s: %d columns were already scored", label, len(columns))
        else:
            pieces = self._score_pieces(shard, columns, folder, len(ids), fingerprint, label)
            for column, (file, own) in files.items():
                metadata = {
                    "tokens_sha256": sha256,
                    "shared_sha256": self.described.shared_sha256,
                    "expert_sha256": self.hashes[column if column in self.hashes else "dense"],
                    "precision": self.scoring.precision,
                    "fingerprint": own,
                } | self.folds
                write_scores(file, _column(pieces, column), metadata)
        shutil.rmtree(folder, ignore_errors=True)

    def _fingerprint(self, columns: tuple[str, ...], sha256: str) -> str:
        """A digest of everything on which the bits of some columns of scores of some tokens depend."""
        hashes = {name: sha256 for name, sha256 in self.hashes.items() if name in columns} or self.hashes
        work, settings = self.work, [self.scoring.precision, self.scoring.threads, torch.__version__]
        model = [digest(self.described.content), hashes, self.folds, work.context, work.top_k, work.without]
        return digest([model, columns, sha256, settings, _device(own_device())])

    def _score_pieces(
        self, shard: TokenShard, columns: tuple[str, ...], folder: Path, count: int, fingerprint: str, label: str
    ) -> list[Path]:
        """The files in `folder` with the scores of each row group of a split; those that are missing are written."""
        groups = {folder / f"{start}.parquet": (start, stop) for start, stop in row_groups(count, self.length)}
        missing = {
            piece: span for piece, span in groups.items() if not _is_whole(piece, span[1] - span[0], fingerprint)
        }
        dtype, domains = compute_type(self.scoring.precision), columns if self.domain_tokens else None
        amount = len(self.trunks) * sum(stop - start for start, stop in missing.values())
        with progress(f"{label}: tokens", amount) as advance:
            for piece, (start, stop) in missing.items():
                cut = blocks(shard, self.length, stop, start)
                try:
                    scored = trunk_log_probabilities(self.trunks, *cut, dtype, advance, domains, start // self.length)
                except DemixError as error:
                    raise error.but(f"{self.work.directory}: {error.subject}") from None
                table = pa.table(dict(zip(columns, scored.astype(np.float32), strict=True)))
                write_parquet(table.replace_schema_metadata({"fingerprint": fingerprint}), piece)
        log.info("%s: %d tokens under %d experts", label, count, len(columns))
        if len(missing) < len(groups):
            log.info("%s: %d of %d pieces were already scored", label, len(groups) - len(missing), len(groups))
        return [*groups]


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def _is_whole(path: Path, tokens: int, fingerprint: str) -> bool:
    """Whether `path` is an undamaged table with this number of tokens and this fingerprint."""
    try:
        table = read_parquet(path)
    except DemixError:
        return False
    return (len(table), (table.schema.metadata or {}).get(b"fingerprint")) == (tokens, fingerprint.encode())


def _column(pieces: list[Path], expert: str) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield read_parquet(piece, [expert])[expert].to_numpy()
