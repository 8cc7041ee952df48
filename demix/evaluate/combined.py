"""Score tables without a neural network: of n-gram models, and of combined systems of several models.

N-gram models are counted on the training domains' tokens. Combined systems are, for example, a dense model with
n-grams, paired experts, or a model with a cache of the text. They are computed from score tables on the same tokens,
without running a model. Proportions are chosen once for all texts, on the dev splits of the training domains, so such a
system is domain-agnostic, like `tempered`. Only a member that is mixed by `switching` knows the domain, whose dev split
gives its prior and α.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from demix.config.evaluation import NGramOrder, ScoredTokens
from demix.config.models import DENSE_EXPERT
from demix.data.shards import TokenShard, blocks, open_alike
from demix.errors import DemixError
from demix.evaluate.choice import DEFAULT, mixing_of, switching_on_dev, tempered_on_dev
from demix.evaluate.losses import Mixer, PlannedMixture
from demix.evaluate.score_tables import (
    count_to_score,
    footer_of,
    read_scores,
    row_groups,
    stream_scores,
    tokens_sha256,
    write_digests,
    write_scores,
    write_tokens,
)
from demix.mix.priors import fitted_log_prior
from demix.mix.rules import in_blocks, weights_rule
from demix.model.ngram import KneserNey
from demix.run.systems import MAX_NGRAM_TOKENS, Member, ngram_folders
from demix.settings import Items, Positive, Settings, Switch, Text

# The decays of the unigram caches that a system with a cache mixes.
CACHE_DECAYS = (0.98, 0.995, 0.999, 0.9998)

log = logging.getLogger(__name__)


class NGramScoring(ScoredTokens):
    """The tokens on which n-gram models are counted, and the tokens that they score.

    `train_tokens` are the first tokens of each training domain that are counted; None counts all. Blocks have `length`
    tokens.
    """

    order: NGramOrder
    train_tokens: Positive | None
    length: Positive


def score_ngrams(paths: list[Path], scoring: NGramScoring, output: Path, manifest: Path) -> None:
    """Count n-grams in the shards tokens/<domain>/train.arrow among `paths`, and score the others (dev and test).

    Writes two folders of score tables below `output`, in the same form as for other models. ngram<order> has the scores
    of one model of all training text, in a column called dense. ngram<order>_domains has one column per training
    domain, for its model. As for other models, the context of a token reaches back to the token before its block.
    `manifest` is written last, with the number of n-grams by folder and the digests of the tables. Raises DemixError if
    shards have different tokenizers or a split is empty.
    """
    shards = {(one.path.parent.name, one.path.stem): one for one in open_alike(paths, verify=True)}
    vocab_size = next(iter(shards.values())).vocab_size
    learned = {domain: _stream(shard, scoring) for (domain, split), shard in shards.items() if split == "train"}
    if (tokens := sum(map(len, learned.values()))) > MAX_NGRAM_TOKENS:
        cause = f"would count {tokens:,} tokens, but at most {MAX_NGRAM_TOKENS:,} fit in memory"
        raise DemixError("config key evaluation.ngrams", cause, "remove the orders that end with _all")
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
        log.info("%s: %s counted on %d tokens, scored %d splits", folder.name, column, tokens, len(scored))
    columns: dict[Path, Sequence[str]] = {pooled: (DENSE_EXPERT,), by_domain: (*learned,)}
    tables = [(folder / name, columns[folder]) for folder in columns for name in scored]
    write_digests(manifest, tables, {"ngrams": stored})


def _stream(shard: TokenShard, scoring: NGramScoring) -> np.ndarray:
    """The tokens to count, after an end-of-text token, as before a first block."""
    return np.append(np.int64(shard.end_of_text), shard.read(0, min(len(shard), scoring.train_tokens or len(shard))))


def _pieces(model: KneserNey, shard: TokenShard, tokens: int, length: int) -> Iterator[np.ndarray]:
    for start, stop in row_groups(tokens, length):
        inputs, targets, mask = blocks(shard, length, stop, start)
        yield model.log_probabilities(np.concatenate([inputs[:, :1], targets], axis=1))[mask]


class Combination(Settings):
    """The members of a combined system. With `paired`, columns of the same name of two members are mixed pairwise.

    With `reset` rules and cache start again at each block. The proportions are chosen on the dev splits of the domains
    `training`. Blocks have `length` tokens.
    """

    members: Items[Member]
    paired: Switch = False
    reset: Switch = False
    training: Items[Text]
    length: Positive


def combine(name: str, paths: list[Path], scores: Path, combination: Combination, manifest: Path) -> None:
    """Write the score tables of the system `name` on the splits tokens/<domain>/<split>.arrow of `paths`.

    `scores` has the score tables of the members, by folder, next to the folder models/ with their mixing.json. A system
    has one column, dense, whose probabilities are weighted sums of the members' with fixed proportions; a paired system
    has one column per pair. The proportions have the lowest loss on dev (`fitted_log_prior`); for a pair, on the dev
    split of the domain with its name. `manifest` is written last, with the proportions, the members with the parameters
    of `tempered`, and the digests of the tables.
    """

    def read(some: Sequence[Member], place: str) -> Iterator[np.ndarray]:
        return log_p(scores, some, place, types, combination.reset)

    shards = {f"{path.parent.name}.{path.stem}": TokenShard.open(path, verify=True) for path in paths}
    members = [_with_parameters(scores, one, combination) for one in combination.members]
    first = next(one for one in members if one.folder)
    columns, judged = {DENSE_EXPERT: members}, [(members, domain) for domain in combination.training]
    if combination.paired:
        columns = {name: [replace(one, columns=(name,), weights="") for one in members] for name in first.columns}
        judged = [(pair, column) for column, pair in columns.items()]
    types = next(iter(shards.values())).vocab_size
    dev = np.concatenate([rows for some, domain in judged for rows in read(some, f"{domain}.dev")])
    proportions = fitted_log_prior(dev[:, None], np.ones((len(dev), 1), bool))
    for place, shard in shards.items():
        ids = shard.read(0, footer_of(scores / first.folder / place, first.columns).rows)
        for column, some in columns.items():
            pieces = (np.logaddexp.reduce(rows + proportions, axis=-1) for rows in read(some, place))
            write_scores(scores / name / place / f"{column}.parquet", pieces, {"tokens_sha256": tokens_sha256(ids)})
        write_tokens(scores / name / place, ids, shard.offsets, combination.length, shard.origins)
    about = {"proportions": np.exp(proportions).tolist(), "members": [asdict(one) for one in members]}
    write_digests(manifest, [(scores / name / place, [*columns]) for place in shards], about)


def log_p(scores: Path, members: Sequence[Member], place: str, types: int, reset: bool = False) -> Iterator[np.ndarray]:
    """log p [N, K] of the next N tokens of a split under each of the members; a cache has one column per decay.

    With `reset` rules and cache start again at each block.
    """
    cache, scored = UnigramCache(types), [one for one in members if one.folder]
    tables = [stream_scores(scores / one.folder / place, one.columns) for one in scored]
    mixers = [_mixer(scores, one, place, reset) for one in scored]
    for chunks in zip(*tables, strict=True):
        # The last row is that of the mixture, or of the only column.
        mixed = [[*mixer.log_p(chunk)][-1][:, -1] for mixer, chunk in zip(mixers, chunks, strict=True)]
        found = [log_p[chunk.mask][:, None] for log_p, chunk in zip(mixed, chunks, strict=True)]
        if len(tables) < len(members):
            tokens, length = chunks[0].tokens, chunks[0].mask.shape[1]
            blocks = np.split(tokens, range(length, len(tokens), length)) if reset else [tokens]
            parts = [(UnigramCache(types) if reset else cache).log_p(block) for block in blocks]
            found.append(np.concatenate(parts))
        yield np.concatenate(found, axis=1)


def _with_parameters(scores: Path, member: Member, combination: Combination) -> Member:
    """The member with the parameters of `tempered` that were chosen for its model, or that are chosen with `reset`."""
    if member.weights != "tempered":
        return member
    rule = mixing_of(scores.parent / "models" / member.folder)
    if combination.reset:
        folders = {domain: scores / member.folder / f"{domain}.dev" for domain in combination.training}
        dev = {domain: read_scores(folder, member.columns) for domain, folder in folders.items()}
        rule = next(iter(tempered_on_dev(dev, reset=True)), DEFAULT)
    return replace(member, weights=f"tempered({rule.beta},{rule.gamma})")


def _mixer(scores: Path, member: Member, place: str, reset: bool) -> Mixer:
    """The mixer of a member's experts on a split: with a uniform prior, or for `switching` with the fitted prior."""
    experts = member.columns
    if not member.weights:
        return Mixer(experts)
    if member.weights == "switching":
        dev = read_scores(scores / member.folder / f"{place.split('.')[0]}.dev", experts)
        fitted = fitted_log_prior(dev.scores, dev.mask)
        mixture = PlannedMixture("fitted", experts, switching_on_dev(dev, fitted, reset))
        return Mixer(experts, [mixture], {mixture: fitted})
    rule = weights_rule(member.weights)
    return Mixer(experts, [PlannedMixture("uniform", experts, in_blocks(rule) if reset else rule)])


class UnigramCache:
    """Unigrams of the text so far (Kuhn and De Mori 1990): after d tokens, a token counts γ^d, for each of K decays γ.

    They are smoothed by a count of 1 that is divided among all `types` vocabulary entries, so that each token has a
    positive probability.
    """

    def __init__(self, types: int) -> None:
        self._decays, self._types = np.array(CACHE_DECAYS), types
        # For each token its decayed counts and the position at which they were updated; the sum of all counts; the next
        # position.
        self._counts: dict[int, tuple[np.ndarray, int]] = {}
        self._total, self._place = np.zeros(len(CACHE_DECAYS)), 0

    def log_p(self, tokens: np.ndarray) -> np.ndarray:
        """log p [N, K] of the next tokens [N]. Each token is counted after it was predicted."""
        found = np.empty((len(tokens), len(self._decays)))
        nothing = np.zeros(len(self._decays)), 0
        for row, token in enumerate(tokens.tolist()):
            counted, at = self._counts.get(token, nothing)
            counted = counted * self._decays ** (self._place - at)
            found[row] = np.log((counted + 1 / self._types) / (self._total + 1))
            self._counts[token] = counted + 1, self._place
            self._total = (self._total + 1) * self._decays
            self._place += 1
        return found
