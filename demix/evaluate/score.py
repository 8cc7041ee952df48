"""Scoring: the log-probability of each token under each expert, computed once per (model, expert, domain, split)."""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
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
    """How scores are computed, and for which tokens. `models` are as in `score_models`."""

    threads: Threads
    models: Items[ScoringPart] = ()


def score_models(models: Path, shards: list[Path], scoring: Scoring, output: Path, manifest: Path) -> None:
    """Score texts under experts: write the log-probability of every token.

    Scores each of `scoring.models`, below the folder `models`, on its splits among the token shards
    tokens/<domain>/<split>.arrow, each of which is opened once. Writes output/<model>/<domain>.<split>/<expert>.parquet
    and tokens.parquet in the same folder; in output/<model>@… if context, top-k or experts differ from training. For a
    domain-token model, `experts` are domain tokens; without any, each domain is scored with its own token. The file
    `manifest`, with the digests of all tables, is written last. Raises DemixError, before the first text is scored, if
    no model is named, an expert is missing, model and shards have different tokenizers, a split is not among the
    arguments, blocks are longer than a model's learned positions, or a layer has fewer experts than `top_k`.

    A split is scored one row group at a time. Scored row groups are kept in a hidden folder until the columns of the
    split are written. After a kill, the same command scores only the missing row groups and writes the same bytes.
    Finished columns record their inputs: the same command keeps them unless something on which their bits depend has
    changed.
    """
    if not scoring.models:
        raise DemixError("--settings.models", "names no model", "list the models to score")
    set_threads(scoring.threads)
    texts = {(path.parent.name, path.stem): TokenShard.open(path, verify=True) for path in shards}
    # What is missing ends the job before the first model is scored.
    for part in scoring.models:
        _check(models / part.model, part, texts)
    written: list[tuple[Path, Sequence[str]]] = []
    for part in scoring.models:
        directory, places = models / part.model, [*product(part.domains, part.splits)]
        # Each column is a separate file, so experts that are whole models are never in memory together.
        apart = whole_models(directory) and part.experts
        for experts in [(expert,) for expert in part.experts] if apart else [part.experts]:
            scorer = _Scorer(directory, replace(part, experts=experts), scoring, output)
            for place in places:
                scorer.score(*place, texts[place])
        for domain, split in places:
            shard, folder = texts[domain, split], output / part.folder / f"{domain}.{split}"
            ids = shard.read(0, count_to_score(shard, scoring, scorer.length))
            write_tokens(folder, ids, shard.offsets, scorer.length, shard.origins)
            written.append((folder, part.experts or (domain,)))
    write_digests(manifest, written)


def _check(directory: Path, part: ScoringPart, texts: Mapping[tuple[str, str], TokenShard]) -> None:
    """Raise DemixError for a missing text or expert, another tokenizer, and blocks too long for the model."""
    for domain, split in product(part.domains, part.splits):
        if (domain, split) not in texts:
            cause, cure = f"needs the tokens of {domain} {split}", f"add the argument tokens/{domain}/{split}.arrow"
            raise DemixError(f"model {part.model}", cause, cure)
        shard = texts[domain, split]
        refuse_other_tokenizer(directory, shard.path, shard.tokenizer_sha256, shard.vocab_size)
    described = describe(directory)
    domain_tokens, architecture = described.domain_tokens, described.architecture
    if architecture.position == "learned" and part.context > architecture.context:
        cause = f"is longer than the {architecture.context} learned positions of {directory}"
        raise DemixError(f"context {part.context}", cause, "use fewer, or a model with position alibi")
    routed = architecture.routed.experts if architecture.routed else 0
    if part.top_k > routed:
        cause = f"is more than the {routed} experts in a layer of {directory}"
        raise DemixError(f"top_k {part.top_k}", cause, "use fewer, or a model of kind routed")
    wanted = {*(part.experts or part.domains)}
    if (domain_tokens or not part.experts) and not wanted <= {*domain_tokens}:
        has = f"has only the domain tokens {', '.join(domain_tokens)}" if domain_tokens else "has no domain tokens"
        raise DemixError(directory, has, "name domain tokens as experts" if domain_tokens else "name experts")
    for expert in expert_names(directory) if domain_tokens else part.experts:
        expert_lineage(directory, expert)


class _Scorer:
    """The experts of a part that are in memory together. They are loaded only if a column is missing."""

    def __init__(self, directory: Path, part: ScoringPart, scoring: Scoring, output: Path) -> None:
        self.directory, self.part, self.scoring, self.output = directory, part, scoring, output
        self.described = describe(directory)
        self.domain_tokens = self.described.domain_tokens
        named = expert_names(directory) if self.domain_tokens else part.experts
        self.hashes = {name: expert_lineage(directory, name).sha256 for name in named}
        architecture = self.described.architecture
        self.length = part.context or architecture.context
        self.folds = {"folds": str(FOLDS)} if architecture.objective == "mlm" else {}

    @cached_property
    def trunks(self) -> list[GPT]:
        """The experts."""
        if self.part.without:
            return [load_without(self.directory, self.part.without).to(own_device())]
        trunks = load_experts(self.directory, None if self.domain_tokens else self.part.experts, own_device())
        for block in (block for trunk in trunks if self.part.top_k for block in trunk.blocks):
            if isinstance(block.feedforward, MoELayer):
                block.feedforward.choose(self.part.top_k)
        return trunks

    def score(self, domain: str, split: str, shard: TokenShard) -> None:
        """Score a split, unless all columns exist."""
        columns = self.part.experts or (domain,)
        place = self.output / self.part.folder / f"{domain}.{split}"
        label = f"{self.part.folder} on {domain} {split}"
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
        """A digest of everything on which the bits of these columns of scores depend, for these tokens."""
        hashes = {name: sha256 for name, sha256 in self.hashes.items() if name in columns} or self.hashes
        part, settings = self.part, [self.scoring.precision, self.scoring.threads, torch.__version__]
        model = [digest(self.described.content), hashes, self.folds, part.context, part.top_k, part.without]
        return digest([model, columns, sha256, settings, _device(own_device())])

    def _score_pieces(
        self, shard: TokenShard, columns: tuple[str, ...], folder: Path, count: int, fingerprint: str, label: str
    ) -> list[Path]:
        """The files in `folder` with the scores of each row group of a split; missing ones are written."""
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
                    raise error.but(f"{self.directory}: {error.subject}") from None
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
