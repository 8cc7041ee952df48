"""Score tables of n-gram models: baselines that learn from the training domains' tokens by counting."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from demix.config.evaluation import NGramOrder, ScoredTokens
from demix.config.models import DENSE_EXPERT
from demix.data.shards import TokenShard, blocks, open_alike
from demix.errors import DemixError
from demix.evaluate.score_tables import (
    count_to_score,
    row_groups,
    tokens_sha256,
    write_digests,
    write_scores,
    write_tokens,
)
from demix.model.ngram import KneserNey
from demix.run.systems import MAX_NGRAM_TOKENS, ngram_folders
from demix.settings import Positive

log = logging.getLogger(__name__)


class NGramScoring(ScoredTokens):
    """Of which tokens n-gram models learn, and which they score.

    `train_tokens` are the first tokens of each training domain that are counted; None counts all. Blocks have `length`
    tokens.
    """

    order: NGramOrder
    train_tokens: Positive | None
    length: Positive


def score_ngrams(paths: list[Path], scoring: NGramScoring, output: Path, manifest: Path) -> None:
    """Learn from the shards tokens/<domain>/train.arrow among `paths`, and score the others, dev.arrow and test.arrow.

    Writes two folders of score tables below `output`, in the form of those of models. In ngram<order> one model of all
    training text has scored all splits, in a column called dense. ngram<order>_domains has a column for the model of
    each training domain. As under any model, the context of a token ends where its block begins, with the token before
    it. `manifest` gets the number of n-grams by folder and the digests of the tables, last. Raises DemixError if shards
    have different tokenizers or a split is empty.
    """
    shards = {(one.path.parent.name, one.path.stem): one for one in open_alike(paths, verify=True)}
    vocab_size = next(iter(shards.values())).vocab_size
    learned = {domain: _stream(shard, scoring) for (domain, split), shard in shards.items() if split == "train"}
    if (tokens := sum(map(len, learned.values()))) > MAX_NGRAM_TOKENS:
        cause = f"would count {tokens:,} tokens, and at most {MAX_NGRAM_TOKENS:,} fit in memory"
        raise DemixError("config key evaluation.ngrams", cause, "leave out those of all text")
    scored = {".".join(place): shard for place, shard in shards.items() if place[1] != "train"}
    pooled, by_domain = (
        output / folder for folder in ngram_folders(f"{scoring.order}{'' if scoring.train_tokens else '_all'}")
    )
    stored = {pooled.name: 0, by_domain.name: 0}
    for column, streams, folder in (
        (DENSE_EXPERT, [*learned.values()], pooled),
        *((domain, [stream], by_domain) for domain, stream in learned.items()),
    ):
        model = KneserNey.fit(streams, scoring.order, vocab_size)
        stored[folder.name] += model.stored
        for name, shard in scored.items():
            ids = shard.read(0, count_to_score(shard, scoring, scoring.length))
            pieces = _pieces(model, shard, len(ids), scoring.length)
            write_scores(folder / name / f"{column}.parquet", pieces, {"tokens_sha256": tokens_sha256(ids)})
            write_tokens(folder / name, ids, shard.offsets, scoring.length, shard.origins)
        tokens = sum(map(len, streams)) - len(streams)
        log.info("%s: %s learned from %d tokens, scored %d splits", folder.name, column, tokens, len(scored))
    columns: dict[Path, Sequence[str]] = {pooled: (DENSE_EXPERT,), by_domain: (*learned,)}
    tables = [(folder / name, columns[folder]) for folder in columns for name in scored]
    write_digests(manifest, tables, {"ngrams": stored})


def _stream(shard: TokenShard, scoring: NGramScoring) -> np.ndarray:
    """The tokens to learn from, after the end of a text, as a first block follows it."""
    return np.append(np.int64(shard.end_of_text), shard.read(0, min(len(shard), scoring.train_tokens or len(shard))))


def _pieces(model: KneserNey, shard: TokenShard, tokens: int, length: int) -> Iterator[np.ndarray]:
    for start, stop in row_groups(tokens, length):
        inputs, targets, mask = blocks(shard, length, stop, start)
        yield model.log_probabilities(np.concatenate([inputs[:, :1], targets], axis=1))[mask]
