"""Rows of models that learn from clusters of documents: what they make of a config, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from demix.data.shards import TokenShard
from demix.evaluate.losses import Mixture
from demix.evaluate.routing import beside_of
from demix.model.checkpoint import expert_names
from demix.model.tokenizer import tokenizer_of
from demix.run.check import load_run
from demix.run.rules import RunRules
from demix.run.run import Run
from demix.run.scoring import scoring_jobs
from demix.run.systems import evaluated
from support.cli import said
from support.errors import refused
from support.tokens import TRAINING
from support.training import TRAIN, train_model

TINY = Path(__file__).parents[1] / "workflow" / "tiny.yaml"
K2 = {"clusters": 2, "dimensions": 6}
VALUES = load_run(TINY).config.values
DOMAINS = VALUES["domains"]
TWICE = DOMAINS | {"novel": {"c01": DOMAINS["novel"]["fantasy"], "fantasy": DOMAINS["novel"]["fortunes"]}}
BRANCH = {"kind": "branched", "data": "k2", "parent": "dense", "seed_tokens": 6000}


def config(clusterings: dict[str, Any] | None = None, sequences: int = 2, **more: Any) -> Run:
    """The run of the tiny config (three domains) with rows on clusters."""
    given = VALUES["training"] | {"sequences": sequences}
    defaults = {"k2": K2, "by_domain": {"method": "metadata"}} if clusterings is None else clusterings
    return load_run(TINY, training=given, clusterings=defaults, **more)


def run(*words: object) -> None:
    assert said([str(word) for word in words]) is None


def test_a_row_on_clusters_has_an_expert_for_each_with_an_equal_part_of_a_step():
    found = config(models={"cbtm_2": BRANCH, "demix_2": {"kind": "demix", "data": "k2"}})
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
    parts = {part.model: part for job in scoring_jobs(found) if "known" in job.rule for part in job.parts}
    assert parts["cbtm_2"].columns == ("c00", "c01")
    for domain in ("licenses", "fantasy"):
        (table,) = [table for table in evaluated(found, domain) if table.model == "cbtm_2"]
        (some,) = table.sets
        assert (some.label, some.experts, some.alone) == ("training", ("c00", "c01"), True)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"models": {"x": BRANCH | {"data": "k3"}}}, "models.x.data"),
        ({"models": {"x": BRANCH | {"data": "by_domain"}}}, "models.x.data"),
        ({"models": {"x": BRANCH}, "sequences": 3}, "models.x.data"),
        ({"models": {"x": {"kind": "dense", "data": "k2"}}}, "models.x.data"),
        ({"models": {"demix": {"data": "k2"}}}, "models.demix.data"),
        ({"models": {"x": BRANCH}, "clusterings": {"k2": {}}}, "clusterings.k2.clusters"),
        ({"models": {"x": BRANCH}, "adaptation": VALUES["adaptation"] | {"model": "x"}}, "adaptation.model"),
        ({"models": {}, "clusterings": {"k2": K2}, "domains": TWICE}, "clusterings.k2"),
        ({"models": {}, "clusterings": {"k2": K2 | {"method": "spectral"}}}, "clusterings.k2.method"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(changes, key):
    with refused(key):
        config(**changes)


def test_clusters_are_fitted_assigned_and_trained_by_the_commands(tokens, tmp_path):
    (tmp_path / "corpus").symlink_to(tokens / "corpus")
    (tmp_path / "tokens").symlink_to(tokens / "tokens")
    (tmp_path / "tokenizer.json").symlink_to(tokens / "tokenizer.json")
    folder = tmp_path / "clusters" / "k2"
    texts = [tmp_path / "corpus" / domain / "train.parquet" for domain in TRAINING]
    shards = [tmp_path / "tokens" / domain / "train.arrow" for domain in TRAINING]

    def cluster(**settings: Any) -> None:
        run("fit-clusters", *texts, "--settings", json.dumps(K2 | settings), "--output", folder)
        run("assign", folder, *texts, "--output", folder / "assigned")
        run("cluster-shards", folder, *shards, "--length", 16, "--output", folder / "shards")

    cluster()
    opened = [TokenShard.open(folder / "shards" / name / "train.arrow", verify=True) for name in ("c00", "c01")]
    assert sum(map(len, opened)) == sum(len(TokenShard.open(path)) for path in shards)

    joined, own = tmp_path / "models" / "cbtm_2", [folder / "shards" / name / "train.arrow" for name in ("c00", "c01")]
    train_model("demix", TRAIN, own, joined, None, tmp_path / "checkpoints")
    assert expert_names(joined) == ("c00", "c01")
    assert tokenizer_of(joined)[0].parent == joined, "the tokenizer travels with the experts"

    # The tokens of its shard say of which clusterer an expert is: one of the same name is refused.
    table = tmp_path / "scores" / "cbtm_2" / "licenses.dev"
    by_distance = Mixture("uniform", ("c00", "c01"), routing="k2", context="document")
    dev, routing = tokens / "tokens" / "licenses" / "dev.arrow", tmp_path / "routing" / "k2" / "document"
    contexts = '{"dev_blocks": 3, "test_tokens": 101, "length": 16, "context": "document"}'
    for method in ("kmeans", "random"):
        cluster(method=method)
        run("route", folder, dev, "--tokenizer", tokens / "tokenizer.json", "--settings", contexts, "--output", routing)
        if method == "kmeans":
            assert beside_of(table, [by_distance])
        else:
            with refused("c00.json"):
                beside_of(table, [by_distance])
