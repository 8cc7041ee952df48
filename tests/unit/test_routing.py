"""Routing tables: the distances of the text before each scored token, and the mixtures that they weight."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics.pairwise import euclidean_distances

from demix.data.cluster import Clusterer, Clustering, Contexts, context_distances, fit_clusters
from demix.data.shards import TokenShard
from demix.data.tokenizer import Tokenizer
from demix.evaluate.routing import Routing, route, side_tables_of
from demix.evaluate.score_tables import tokens_sha256
from demix.files import read_parquet, write_json
from demix.mix.rules import Chunk, ReleasedCluster
from support.errors import refused
from support.mixing import planned
from support.models import write_model
from support.tokens import NOVEL, TRAINING

DOMAINS = TRAINING + NOVEL
LENGTH, DEV_BLOCKS, TEST_TOKENS = 16, 3, 101


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a clustering of four clusters and the routing tables of both contexts."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("tokens", "corpus", "tokenizer.json"):
        (folder / name).symlink_to(tokens / name)
    documents = [tokens / "corpus" / domain / "train.parquet" for domain in TRAINING]
    fit_clusters(documents, Clustering(clusters=4, dimensions=6), folder / "clusters" / "k4")
    for context in ("document", "block"):
        settings = Routing(dev_blocks=DEV_BLOCKS, test_tokens=TEST_TOKENS, length=LENGTH, context=context)
        shards = [folder / "tokens" / domain / f"{split}.arrow" for domain in DOMAINS for split in ("dev", "test")]
        route(folder / "clusters" / "k4", shards, folder / "tokenizer.json", settings, output(folder, context))
    return folder


def output(run: Path, context: str) -> Path:
    return run / "routing" / "k4" / context


@pytest.mark.parametrize("context", ["document", "block"])
def test_a_table_has_the_distances_of_every_token_that_is_scored(run: Path, context: str) -> None:
    clusterer, tokenizer = Clusterer.open(run / "clusters" / "k4"), Tokenizer.load(run / "tokenizer.json")
    for domain, split, scored in (("scripture", "dev", DEV_BLOCKS * LENGTH), ("fantasy", "test", TEST_TOKENS)):
        shard = TokenShard.open(run / "tokens" / domain / f"{split}.arrow")
        wanted = np.concatenate(list(context_distances(clusterer, tokenizer, shard, context, LENGTH, None)))[:scored]
        table = read_parquet(output(run, context) / f"{domain}.{split}.parquet")
        assert table.column_names == list(clusterer.names)
        assert np.array_equal(np.stack([column.to_numpy() for column in table], axis=1), wanted)
        about = table.schema.metadata
        assert about[b"tokens_sha256"].decode() == tokens_sha256(shard.read(0, scored))
        assert (about[b"clusterer_sha256"].decode(), about[b"context"].decode()) == (clusterer.sha256, context)


def test_the_released_rule_measures_a_document_without_the_last_token_before(run: Path) -> None:
    """Each token by the text of its own document alone, as a released script that is given one document after another.

    The token of `<|endoftext|>` itself, which that script never predicts, has the document that it ends.
    """
    clusterer, tokenizer = Clusterer.open(run / "clusters" / "k4"), Tokenizer.load(run / "tokenizer.json")
    end, ids = tokenizer.end_of_text, []
    for text in ("the house of lords", "in the beginning", "a", "permission is hereby granted to any person"):
        ids += [end, *tokenizer.encode(text)]
    documents = np.cumsum(np.array(ids) == end)
    far = Contexts(clusterer, tokenizer, "document", LENGTH).distances(np.array([end, *ids[:-1]])).astype(np.float64)
    texts, document = [""], []
    for token in ids[:-1]:
        texts.append(tokenizer.decode(document))
        document = [] if token == end else [*document, token]
    texts = ["" if before == end else text for before, text in zip([None, *ids], texts, strict=False)]
    points = clusterer.embedding.points(texts)
    expected = -(euclidean_distances(points, clusterer.centres, squared=True) ** 2) / 0.1
    rule = ReleasedCluster(0.1)
    for size in (1, 7, len(ids)):
        found, state = [], ()
        for start in range(0, len(ids), size):
            rows = far[None, start : start + size]
            mask = np.ones(rows.shape[:2], bool)
            chunk = Chunk(np.zeros_like(rows), mask, rows, documents[start : start + size])
            evidence, state = rule.evidence(chunk, state)
            found.append(evidence[0])
        np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)


def test_a_table_of_another_clusterer_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "clusters", tmp_path / "clusters")
    shutil.copytree(run / "routing", tmp_path / "routing")
    one = planned("uniform", ("c02", "c00"), routing="k4", context="block")
    dev, test = (tmp_path / "scores" / "cbtm" / f"fantasy.{split}" for split in ("dev", "test"))
    beside = side_tables_of(dev, [one, replace(one, context="document"), replace(one, routing="")])
    assert beside.keys() == {"block", "document"}
    assert {each.columns for each in beside.values()} == {one.experts}
    with refused("fantasy.dev.parquet"):
        side_tables_of(dev, [replace(one, experts=("c00", "songs"))])
    documents = [run / "corpus" / domain / "train.parquet" for domain in TRAINING]
    fit_clusters(documents, Clustering(clusters=4, dimensions=6), tmp_path / "clusters" / "k4", 2)
    with refused("routing/k4/block/fantasy.test.parquet"):
        side_tables_of(test, [one])
    # The tokens of its shard say of which clusterer an expert is: one of the same name is refused.
    write_model(tmp_path / "models" / "cbtm", one.experts)
    for name in one.experts:
        write_json(tmp_path / "clusters" / "k4" / "shards" / name / "train.json", {"sha256": "0" * 64})
    with refused("experts/c00.json"):
        side_tables_of(test, [one])
