"""Weights rules that see the whole stream: their state goes from chunk to chunk, their columns come with the scores."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demix.evaluate.losses import PlannedMixture, document_losses
from demix.evaluate.score_tables import SideTable, stream_scores, tokens_sha256
from demix.mix.rules import Chunk, State, WeightsRule
from support.errors import refused
from support.mixing import log_mixture, log_weights, mix, planned
from support.scored import write_columns

EXPERTS = ("law", "news", "code")
# More than a chunk, the last block short.
TOKENS = (1 << 14) + 1005


@dataclass(frozen=True)
class Returning(WeightsRule):
    """Weights that go back to the prior a little with each token: they depend on it."""

    by_prior: ClassVar[bool] = True
    share: float

    def begin(self, log_prior: np.ndarray) -> State:
        return log_prior, log_prior

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        log_prior, log_g = state
        found = np.zeros_like(chunk.scores)
        for block, position in np.argwhere(chunk.mask):
            found[block, position] = log_g - log_prior
            joint = np.exp(log_g + chunk.scores[block, position])
            log_g = np.log((1 - self.share) * joint / joint.sum() + self.share * np.exp(log_prior))
        return found, (log_prior, log_g)


@dataclass(frozen=True)
class Near(WeightsRule):
    """Evidence that was computed elsewhere."""

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        return -chunk.distances, state


@pytest.fixture
def table(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray, np.ndarray]:
    """A score table, its scores [N, E], the document of each token [N], and distances [N, E] in a file beside."""
    generator = np.random.default_rng(4)
    ids = generator.integers(0, 500, TOKENS).astype(np.uint16)
    offsets = np.unique(np.append(0, generator.integers(1, TOKENS, 700)))
    scores = -generator.exponential(2, (TOKENS, len(EXPERTS))).astype(np.float32)
    distances = generator.exponential(1, (TOKENS, len(EXPERTS))).astype(np.float32)
    write_columns(tmp_path, ids, offsets, dict(zip(EXPERTS, scores.T, strict=True)))
    write_beside(tmp_path / "distances.parquet", distances, tokens_sha256(ids))
    documents = np.searchsorted(offsets, np.arange(TOKENS), side="right") - 1
    return tmp_path, scores.astype(np.float64), documents, distances.astype(np.float64)


def write_beside(path: Path, values: np.ndarray, sha256: str) -> None:
    schema = pa.schema({name: pa.float32() for name in EXPERTS}, {"tokens_sha256": sha256})
    # Other row groups than the scores have.
    pq.write_table(pa.table(list(values.T), schema=schema), path, row_group_size=1000)


@pytest.mark.parametrize("rule", [Returning(0.05), Near()])
def test_a_new_rule_is_a_class(table, rule: WeightsRule) -> None:
    """Mixtures by it, of different priors, streamed with mixtures by other rules, are those of the definition."""
    folder, scores, documents, distances = table
    old = planned("uniform", EXPERTS)
    new = [PlannedMixture("uniform", EXPERTS, rule)]
    new += [PlannedMixture("cached", EXPERTS, rule, dev_blocks=blocks) for blocks in (1, 2)]
    fixed = dict(zip(new, np.log([[1 / 3, 1 / 3, 1 / 3], [0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]), strict=True))
    priors = fixed | {replace(mixture, top_k=2): log_prior for mixture, log_prior in fixed.items()}
    beside = {new[0].context: SideTable(folder / "distances.parquet", EXPERTS)}
    found = document_losses(folder, EXPERTS, [*priors, old], priors, side=beside)
    # The whole text at once, as one block.
    text = Chunk(scores[None], np.ones((1, TOKENS), bool), distances[None])
    for mixture, log_prior in priors.items():
        evidence, _ = rule.evidence(text, rule.begin(log_prior))
        losses = -log_mixture(log_weights(log_prior, evidence[0], mixture.top_k), scores)
        np.testing.assert_allclose(found.nll[mixture], np.bincount(documents, losses), rtol=1e-9)
    (chunk,) = stream_scores(folder, EXPERTS, at_once=1 << 20)
    alone = mix(chunk.scores, chunk.mask, "uniform")[chunk.mask]
    np.testing.assert_allclose(found.nll[old], np.bincount(documents, -alone), rtol=1e-9)


def test_losses_keep_the_numbers_of_the_documents(table) -> None:
    """Documents without a token have no row."""
    folder, scores, _, _ = table
    ids, offsets = np.arange(TOKENS).astype(np.uint16), np.array([0, 0, 5, 5, 5, 17_000])
    write_columns(folder, ids, offsets, dict(zip(EXPERTS, scores.T, strict=True)))
    found = document_losses(folder, EXPERTS)
    assert found.numbers.tolist() == [1, 4, 5]
    assert found.tokens.tolist() == [5, 16_995, TOKENS - 17_000]
    expected = [-part.sum() for part in np.split(scores[:, 1], [5, 17_000])]
    np.testing.assert_allclose(found.nll["news"], expected, rtol=1e-12)


def test_columns_of_other_tokens_are_refused(table) -> None:
    folder, _, _, distances = table
    path = folder / "distances.parquet"
    sha256 = pq.read_schema(path).metadata[b"tokens_sha256"].decode()
    for values, tokens in ((distances, "0" * 64), (distances[1:], sha256)):
        write_beside(path, values, tokens)
        with refused("distances.parquet"):
            list(stream_scores(folder, EXPERTS, side={"near": SideTable(path, EXPERTS)}))
