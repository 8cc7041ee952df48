"""Scoring: one log-probability per token and expert, once per (model, expert, domain, split)."""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
from demix.evaluate.tables import tokens_sha256, write_scores, write_tokens
from demix.model.checkpoint import describe, expert_lineage, load_model
from demix.model.scoring import log_probabilities
from demix.train.loop import compute_type, set_threads
from demix.train.parallel import own_device

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scoring:
    """How much of each split is scored: the first blocks of dev, the first tokens of test (null: all)."""

    dev_blocks: int
    test_tokens: int | None
    precision: str
    threads: int

    def limit(self, split: str, length: int) -> int | None:
        """The most tokens of `split` to score with blocks of `length`."""
        return self.dev_blocks * length if split == "dev" else self.test_tokens


def score(directory: Path, experts: tuple[str, ...], shards: list[Path], scoring: Scoring, output: Path) -> None:
    """Score the named experts of the model in `directory` on token shards tokens/<domain>/<split>.arrow.

    Writes output/<domain>.<split>/<expert>.parquet and tokens.parquet beside. For a domain-token model the
    names are its domain tokens. Raises DemixError when model and shards differ in their tokenizer.
    """
    set_threads(scoring.threads)
    dtype = compute_type(scoring.precision)
    description = describe(directory)
    domain_tokens = tuple(description["domain_tokens"])
    model = load_model(directory, None if domain_tokens else experts).to(own_device())
    if domain_tokens and domain_tokens != experts:
        raise DemixError(directory, f"has the domain tokens {', '.join(domain_tokens)}", "score all of them, in order")
    length = model.architecture.context
    for path in shards:
        domain, split = path.parent.name, path.stem
        shard = TokenShard.open(path, verify=True)
        if shard.tokenizer_sha256 != description["tokenizer_sha256"]:
            raise DemixError(path, f"was made with another tokenizer than {directory}", "tokenize or train again")
        inputs, targets, mask = blocks(shard, length, scoring.limit(split, length))
        scored = log_probabilities(model, inputs, targets, mask, dtype)
        ids = shard.read(0, scored.shape[1])
        place = output / f"{domain}.{split}"
        for expert, column in zip(experts, scored, strict=True):
            metadata = {
                "tokens_sha256": tokens_sha256(ids),
                "shared_sha256": description["shared_sha256"],
                "expert_sha256": expert_lineage(directory, "dense" if domain_tokens else expert)["sha256"],
                "precision": scoring.precision,
            }
            write_scores(place / f"{expert}.parquet", column, metadata)
        documents = np.searchsorted(shard.offsets, np.arange(len(ids)), side="right") - 1
        write_tokens(place, np.asarray(ids), documents, length)
        log.info("%s %s: %d tokens under %d experts", domain, split, len(ids), len(experts))
