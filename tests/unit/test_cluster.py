"""Clusters: fitted, kept in files, used to assign documents and measure contexts, and what rows on them make."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics.pairwise import euclidean_distances

from demix.config.models import Clustering
from demix.data import cluster
from demix.data.cluster import Clusterer, assign, cluster_shards, context_distances, fit_clusters
from demix.data.shards import TokenShard, tokenize
from demix.data.tokenizer import Tokenizer
from demix.files import read_json, read_parquet, write_json
from demix.run.rules import RunRules
from support.entries import tiny
from support.errors import refused
from support.tokens import NOVEL, TRAINING


def train(tokens: Path) -> list[Path]:
    return [tokens / "corpus" / domain / "train.parquet" for domain in TRAINING]


@pytest.fixture(scope="module")
def fitted(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Clusterers of four clusters by k-means, balanced and not, of random ones and of the domains."""
    found = {}
    for name, options in {
        "balanced": {"clusters": 4},
        "unbalanced": {"clusters": 4, "balanced": False},
        "random": {"clusters": 3, "method": "random"},
        "domains": {"method": "metadata"},
        "one": {"clusters": 1},
    }.items():
        found[name] = tmp_path_factory.mktemp("clusters") / name
        fit_clusters(train(tokens), Clustering(dimensions=6, **options), found[name])
    return found


@pytest.mark.parametrize("name", ["balanced", "unbalanced", "random", "domains", "one"])
def test_documents_go_to_the_nearest_centre_or_where_their_method_says(fitted, tokens, tmp_path, name):
    clusterer = Clusterer.open(fitted[name])
    manifest = read_json(fitted[name] / "clusterer.json")
    labels = []
    for domain in (*TRAINING, *NOVEL):
        documents = tokens / "corpus" / domain / "train.parquet"
        assign(fitted[name], [documents], tmp_path)
        table, rows = read_parquet(tmp_path / f"{domain}.train.parquet"), pq.read_table(documents)
        assert table.schema.metadata[b"clusterer_sha256"] == clusterer.sha256.encode()
        points = clusterer.embedding.points(rows["text"].to_pylist())
        distances = euclidean_distances(points, clusterer.centres, squared=True)
        own = table["cluster"].to_numpy()
        assert table["distance"].to_numpy() == pytest.approx(distances[np.arange(len(own)), own], abs=1e-6)
        if name == "domains" and domain in TRAINING:
            assert {clusterer.names[label] for label in own} == {domain}
        elif name != "random":
            assert np.array_equal(own, distances.argmin(1))
        labels += own.tolist() if domain in TRAINING else []
    assert manifest["documents"] == sum(manifest["sizes"]) == len(labels)
    if name == "balanced":
        assert max(manifest["sizes"]) - min(manifest["sizes"]) <= 1
    else:
        assert np.bincount(labels, minlength=len(clusterer.names)).tolist() == manifest["sizes"]
        assert min(manifest["sizes"]) > 0


def test_random_clusters_are_about_equal_and_do_not_depend_on_texts(fitted):
    ids = [str(number) for number in range(3000)]
    clusterer = Clusterer.open(fitted["random"])
    labels = clusterer.labels("a", ids, np.zeros((3000, 3)))
    assert np.bincount(labels) == pytest.approx([1000] * 3, rel=0.1)
    assert np.array_equal(clusterer.labels("b", ids[::-1], np.ones((3000, 3)))[::-1], labels)


@pytest.mark.parametrize(("method", "documents"), [("kmeans", 8), ("kmeans", 30), ("random", 20), ("metadata", 20)])
def test_a_sample_of_documents_does_not_depend_on_their_order(tokens, tmp_path, method, documents):
    shuffled = []
    for path in reversed(train(tokens)):
        table = pq.read_table(path)
        shuffled.append(tmp_path / path.parent.name / path.name)
        shuffled[-1].parent.mkdir()
        pq.write_table(table.take(pa.array(np.arange(len(table))[::-1])), shuffled[-1])
    assert sum(pq.read_metadata(path).num_rows for path in shuffled) > 40
    clustering = Clustering(clusters=4, dimensions=5, method=method, documents=documents)
    first = fit_clusters(train(tokens), clustering, tmp_path / "first")
    assert fit_clusters(shuffled, clustering, tmp_path / "second").sha256 == first.sha256
    assert first.sha256 != fit_clusters(shuffled, clustering, tmp_path / "third", 2).sha256
    manifest = read_json(tmp_path / "first" / "clusterer.json")
    assert sum(manifest["sizes"]) == manifest["documents"] == documents


def test_damaged_and_foreign_files_are_refused(fitted, tmp_path):
    folder = tmp_path / "k4"
    shutil.copytree(fitted["balanced"], folder)
    for name in ("clusterer.safetensors", "terms.parquet"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with refused(name):
            Clusterer.open(folder)
        (folder / name).unlink()
        with refused(name):
            Clusterer.open(folder)
        (folder / name).write_bytes(data)
    manifest = read_json(folder / "clusterer.json")
    write_json(folder / "clusterer.json", manifest | {"version": 0})
    with refused("clusterer.json"):
        Clusterer.open(folder)
    (folder / "clusterer.json").unlink()
    with refused("clusterer.json"):
        Clusterer.open(folder)


def write_documents(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": [f"{path.stem} {n}" for n in range(len(texts))], "text": texts}), path)
    return path


def test_what_cannot_be_clustered_is_refused(tmp_path):
    words = ["alpha beta", "gamma delta", "epsilon zeta", "alpha gamma", "beta zeta"]
    five = [write_documents(tmp_path / "a" / "five.parquet", words)]
    twice = [write_documents(tmp_path / "a" / "twice.parquet", [*words[:2], *words[:2] * 4])]
    uneven = [write_documents(tmp_path / domain / f"{domain}.parquet", words[:4]) for domain in ("c", "d")]
    for documents, options, key in (
        (five, {"clusters": 8}, ".clusters"),
        (twice, {"clusters": 3}, ".clusters"),
        (five, {}, ".clusters"),
        (uneven, {"method": "metadata", "documents": 1}, ".clusters"),
        (five, {"clusters": 5, "method": "random"}, ""),
        (five, {"clusters": 2, "dimensions": 7}, ".dimensions"),
    ):
        with refused(f"clusterings.k8{key}"):
            fit_clusters(documents, Clustering(**{"dimensions": 2} | options), tmp_path / "k8")
    assert not (tmp_path / "k8").exists()


def expected(clusterer: Clusterer, tokenizer: Tokenizer, shard: TokenShard, context: str, length: int) -> np.ndarray:
    """The distances, each context decoded and embedded by itself."""
    ids, texts = shard.read(0, len(shard)).tolist(), []
    for place in range(len(ids)):
        seen = [shard.end_of_text, *ids[:place]]
        if context == "block":
            seen = seen[place // length * length :]
        else:
            seen = seen[len(seen) - 1 - seen[::-1].index(shard.end_of_text) :]
        if context == "document_half" and place:
            # Of a document's tokens those that follow are looked at to count them.
            later = ids[place:].index(shard.end_of_text) if shard.end_of_text in ids[place:] else len(ids) - place
            seen = seen[: 1 + (len(seen) - 1 + later) // 2]
        texts.append(tokenizer.decode(seen).replace("<|endoftext|>", "\n"))
    return clusterer.distances(clusterer.embedding.points(texts))


@pytest.fixture(scope="module")
def shard(fitted: dict[str, Path], tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenShard:
    """A shard of short documents, one of them empty, whose tokens cut words and characters, and some of terms alone."""
    terms = Clusterer.open(fitted["balanced"]).embedding.terms
    texts = [text[:150] for path in train(tokens) for text in pq.read_table(path)["text"].to_pylist()[:2]]
    some = [" ".join(terms[9 * number : 9 * number + 2 + number]) for number in range(1, 7)]
    folder = tmp_path_factory.mktemp("shard")
    documents = write_documents(
        folder / "dev.parquet", [*texts, "", "naïve İstanbul ΟΔΟΣ 日本語 Straße 1999 law", *some]
    )
    tokenize(tokens / "tokenizer.json", documents, folder / "dev.arrow")
    return TokenShard.open(folder / "dev.arrow")


@pytest.mark.parametrize("context", ["document", "block", "document_half"])
def test_distances_of_contexts_are_those_of_their_decoded_texts(fitted, tokens, shard, monkeypatch, context):
    monkeypatch.setattr(cluster, "_TOKENS", 70)
    clusterer, tokenizer = Clusterer.open(fitted["balanced"]), Tokenizer.load(tokens / "tokenizer.json")
    # The name of the token between documents is no word of theirs.
    terms = ("endoftext", *clusterer.embedding.terms[1:])
    clusterer = replace(clusterer, embedding=replace(clusterer.embedding, terms=terms))
    wanted = expected(clusterer, tokenizer, shard, context, 32)
    pieces = list(context_distances(clusterer, tokenizer, shard, context, 32, None))
    assert {len(piece) for piece in pieces[:-1]} == {64 if context == "block" else 70}
    found = np.concatenate(pieces)
    assert found.dtype == np.float32
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    limited = list(context_distances(clusterer, tokenizer, shard, context, 32, 101))
    assert np.array_equal(np.concatenate(limited), found[:101])
    empty = clusterer.distances(clusterer.embedding.points([""]))[0]
    assert found[0] == pytest.approx(empty, rel=1e-6)
    # Pieces end before, at and behind the middles of documents.
    for size in (1, 2, 7, 33):
        monkeypatch.setattr(cluster, "_TOKENS", 32 * size if context == "block" else size)
        again = np.concatenate(list(context_distances(clusterer, tokenizer, shard, context, 32, None)))
        assert again == pytest.approx(found, rel=1e-6, abs=1e-6)


def test_distances_want_the_tokenizer_of_the_shard(fitted, tokens, shard):
    clusterer = Clusterer.open(fitted["one"])
    tokenizer = replace(Tokenizer.load(tokens / "tokenizer.json"), sha256="0" * 64)
    with refused(shard.path):
        next(context_distances(clusterer, tokenizer, shard, "document", 32, None))


def test_shards_of_clusters_hold_the_documents_of_all_domains(fitted, tokens, tmp_path):
    folder, wanted = shutil.copytree(fitted["unbalanced"], tmp_path / "k4"), {}
    clusterer, assigned = Clusterer.open(folder), folder / "assigned"
    shards = [tokens / "tokens" / domain / "train.arrow" for domain in TRAINING]
    assign(folder, train(tokens), assigned)
    for domain in sorted(TRAINING):
        shard = TokenShard.open(tokens / "tokens" / domain / "train.arrow")
        ends = [*shard.offsets[1:], len(shard)]
        labels = read_parquet(assigned / f"{domain}.train.parquet")["cluster"].to_pylist()
        for start, end, label in zip(shard.offsets, ends, labels, strict=True):
            wanted.setdefault(clusterer.names[label], []).append(shard.read(start, end))
    cluster_shards(folder, shards[::-1], 16, tmp_path / "shards")
    for name in clusterer.names:
        found = TokenShard.open(tmp_path / "shards" / name / "train.arrow", verify=True)
        assert np.array_equal(found.read(0, len(found)), np.concatenate(wanted[name]))

    # Dev losses are measured on short blocks too.
    one = shutil.copytree(fitted["one"], tmp_path / "one")
    assign(one, [path.with_name("dev.parquet") for path in train(tokens)], one / "assigned")
    cluster_shards(one, [path.with_name("dev.arrow") for path in shards], 10**6, tmp_path / "dev")
    assert len(TokenShard.open(tmp_path / "dev" / Clusterer.open(one).names[0] / "dev.arrow")) < 10**6

    least = min(wanted, key=lambda name: sum(map(len, wanted[name])))
    with refused("clustering k4"):
        cluster_shards(folder, shards, sum(map(len, wanted[least])) + 1, tmp_path / "none")
    one, other = (assigned / f"{domain}.train.parquet" for domain in TRAINING[:2])
    shutil.copyfile(other, one)
    with refused(one.name):
        cluster_shards(folder, shards, 16, tmp_path / "none")
    assign(fitted["balanced"], train(tokens), assigned)
    with refused(f"{min(TRAINING)}.train.parquet"):
        cluster_shards(folder, shards, 16, tmp_path / "none")
    assert not (tmp_path / "none").exists()


K2, BY_DOMAIN = {"clusters": 2, "dimensions": 6}, {"method": "metadata"}
BRANCH = {"kind": "branched", "data": "k2", "parent": "dense", "seed_tokens": 6000}


def test_a_row_on_clusters_has_an_expert_for_each_with_an_equal_part_of_a_step():
    rows = {"cbtm_2": BRANCH, "demix_2": {"kind": "demix", "data": "k2"}}
    found = tiny(rows, training={"sequences": 2}, clusterings={"k2": K2, "by_domain": BY_DOMAIN})
    models, rules = {model.name: model for model in found.planned}, RunRules(found)
    cbtm, on_clusters, domains = models["cbtm_2"], models["demix_2"], models["demix"]
    assert cbtm.experts == cbtm.columns == on_clusters.experts == ("c00", "c01") == found.clusters("k2")
    # Three domains of two sequences are two clusters of three.
    assert cbtm.settings.sequences == on_clusters.settings.sequences == 3
    assert {model.step_tokens for model in (domains, cbtm, *cbtm.parts, on_clusters)} == {3 * 2 * 32}
    assert [part.place for part in cbtm.parts] == ["cbtm_2/c00", "cbtm_2/c01"]
    assert cbtm.scored == domains.scored == ("parliament", "scripture", "licenses", "fantasy", "fortunes")
    assert (cbtm.routing, domains.routing, models["dense"].routing) == ("k2", "by_domain", "")
    assert models["without-licenses"].routing == "", "the replacement has no centre"
    shard = "results/tiny/clusters/k2/shards/{}/train.arrow"
    assert rules.train_inputs(on_clusters) == [shard.format("c00"), shard.format("c01")]
    assert rules.train_inputs(cbtm.parts[1]) == [shard.format("c01")]
