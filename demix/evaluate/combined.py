"""Systems that mix columns of several models: a dense model with n-grams, experts that are pairs, a cache of the text.

All come from score tables on the same tokens, so that no model runs. Proportions are chosen once for all texts, on the
dev splits of the training domains: such a system does not know the domain of a text, as `tempered` does not. Only a
member mixed by `switching` knows the domain, whose dev split gives its prior and α.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from demix.config.models import DENSE_EXPERT
from demix.data.shards import TokenShard
from demix.evaluate.choice import DEFAULT, mixing_of, switching_on_dev, tempered_on_dev
from demix.evaluate.losses import Mixer, PlannedMixture
from demix.evaluate.score_tables import (
    footer_of,
    read_scores,
    stream_scores,
    tokens_sha256,
    write_digests,
    write_scores,
    write_tokens,
)
from demix.mix.priors import fitted_log_prior
from demix.mix.rules import in_blocks, weights_rule
from demix.run.systems import Member
from demix.settings import Items, Positive, Settings, Switch, Text

# The decays of the unigram caches that a system with a cache mixes.
CACHE_DECAYS = (0.98, 0.995, 0.999, 0.9998)


class Combination(Settings):
    """What a system mixes. With `paired` the columns of the same name of two members are mixed, and remain columns.

    With `reset` rules and cache begin again at each block. `training` are the domains on whose dev splits the
    proportions are chosen. Blocks have `length` tokens.
    """

    members: Items[Member]
    paired: Switch = False
    reset: Switch = False
    training: Items[Text]
    length: Positive


def combine(name: str, paths: list[Path], scores: Path, combination: Combination, manifest: Path) -> None:
    """Write the score tables of the system `name` on the splits tokens/<domain>/<split>.arrow of `paths`.

    `scores` has the score tables of the members, by folder, next to the folder models/ with their mixing.json. A system
    has one column, dense, whose probabilities are sums of those of the members in fixed proportions, and a paired one a
    column for each pair, in the same proportions. These have the lowest loss on dev (`fitted_log_prior`); of a pair,
    on the dev split of the domain with its name. `manifest` gets the proportions, the members with the parameters of
    `tempered`, and the digests of the tables, last.
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
    """log p [N, K] of the next N tokens of a split under each of the members; a cache has a column for each decay.

    With `reset` rules and cache begin again at each block.
    """
    cache, scored = UnigramCache(types), [one for one in members if one.folder]
    tables = [stream_scores(scores / one.folder / place, one.columns) for one in scored]
    mixers = [_mixer(scores, one, place, reset) for one in scored]
    for chunks in zip(*tables, strict=True):
        # The last row is that of the mixture, or of the one column.
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
    """What mixes a member's experts on a split, from a uniform prior, that of `switching` fitted, if it mixes any."""
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
    """Unigrams of the text so far (Kuhn and De Mori 1990): a token counts γ^d after d tokens, for each of K decays γ.

    All are smoothed by a count of 1 that the `types` of the tokenizer share, so that each token has a probability.
    """

    def __init__(self, types: int) -> None:
        self._decays, self._types = np.array(CACHE_DECAYS), types
        # By token the decayed counts and the place at which they were taken; the sum of all counts; the next place.
        self._counts: dict[int, tuple[np.ndarray, int]] = {}
        self._total, self._place = np.zeros(len(CACHE_DECAYS)), 0

    def log_p(self, tokens: np.ndarray) -> np.ndarray:
        """log p [N, K] of the next tokens [N], each counted once it is predicted."""
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
