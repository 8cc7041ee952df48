"""Rows of clusters less balanced rows and less the dense model: which are compared, and their paired intervals."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from demix.evaluate.domain import Evaluation, Outputs, evaluate_domain
from demix.evaluate.score_tables import read_scores
from demix.files import digest, read_json, seed_for, write_json, write_parquet
from demix.mix.mixtures import mix
from demix.report.claims import claims
from demix.report.clusters import read_clusters
from demix.run.compared import balanced_pairs, compared
from demix.run.systems import bases, evaluated
from support.configs import changed, small_run
from support.families_run import BALANCED, MODELS, WIDTH
from support.report import table_of
from support.scored import LENGTH, write_table
from support.synthetic_run import NOVEL, TRAINING, MadeUp

CLUSTERS = ("c00", "c01")
CONFIG: dict[str, Any] = {
    "seed": 7,
    "clusterings": {
        "k2": {"clusters": 2}, "r2": {"clusters": 2, "method": "random"}, "u2": {"clusters": 2, "balanced": False},
        "k4": {"clusters": 4}, "by_domain": {"method": "metadata"},
    },
    "models": {
        "domain_token": None, "dense_unbalanced": None,
        "loose": {"kind": "branched", "label": "loose", "data": "u2"},
        "even": {"kind": "branched", "label": "even", "data": "k2"},
        "chance": {"kind": "branched", "label": "chance", "data": "r2"},
        "again": {"kind": "branched", "label": "again", "data": "k2"},
        "layers": {"kind": "demix", "label": "layers", "data": "k2"},
        "more": {"kind": "branched", "label": "more", "data": "k2", "tokens": 2000},
        "four": {"kind": "branched", "label": "four", "data": "k4"},
        "btm": {"kind": "branched", "label": "btm"},
    },
    "training": {"sequences": 2, "tokens": 1000},
    "evaluation": {"weights": ["history", "cluster(0.2)"]},
}  # fmt: skip


def test_rows_of_clusters_are_beside_the_first_balanced_one_of_their_size() -> None:
    run = small_run(**CONFIG)
    found = [(one.label, base.label) for one, base in balanced_pairs(run)]
    assert found == [(f"{one} (cluster(0.2))", "even (cluster(0.2))") for one in ("loose", "chance", "again", "layers")]
    keys = {system.key for system in compared(run, "law")}
    assert {one.key for pair in balanced_pairs(run) for one in pair} <= keys, "as they are compared with dense"
    assert not balanced_pairs(changed(run, evaluation={"weights": ["history", "cluster+history"]}))
    assert not balanced_pairs(small_run(models={"btm": {"kind": "branched"}}))


def test_pairs_have_intervals_over_documents_of_origin(tmp_path: Path) -> None:
    """Against a loop over resamples, of pieces that belong to 25 documents."""
    models = {name: CONFIG["models"][name] for name in ("domain_token", "dense_unbalanced", "even", "chance")}
    config = small_run(**CONFIG | {"models": models})
    for number, table in enumerate(evaluated(config, "law")):
        for text, split in enumerate(("dev", "test")):
            place = tmp_path / "scores" / table.folder / f"law.{split}"
            write_table(place, table.columns, seed=number, text=text, documents=60, whole=25)
    far = {}
    for number, (clustering, names) in enumerate(
        {"k2": CLUSTERS, "r2": CLUSTERS, "by_domain": ("law", "news")}.items()
    ):
        write_json(tmp_path / "clusters" / clustering / "clusterer.json", {"names": names})
        about = {"clusterer_sha256": digest(read_json(tmp_path / "clusters" / clustering / "clusterer.json"))}
        for split in ("dev", "test"):
            table = read_scores(tmp_path / "scores" / "dense" / f"law.{split}", ["dense"])
            values = np.random.default_rng(number).uniform(0.1, 1.5, (table.tokens, 2)).astype(np.float32)
            far[clustering] = np.zeros((*table.mask.shape, 2))
            far[clustering][table.mask] = values
            columns = pa.table(dict(zip(names, values.T, strict=True)))
            columns = columns.replace_schema_metadata(about | {"tokens_sha256": table.sha256})
            write_parquet(columns, tmp_path / "routing" / clustering / "document" / f"law.{split}.parquet")
    evaluation = Evaluation(
        kind="training", tables=evaluated(config, "law"), compared=tuple(one.key for one in compared(config, "law")),
        against=tuple((name, *one.key) for name, one in bases(config).items()), seed=7,
        pairs=tuple((*one.key, *base.key) for one, base in balanced_pairs(config)),
        weights=("history", "cluster(0.2)"), dev_blocks=4,
    )  # fmt: skip
    names = ("results", "priors", "differences", "posteriors", "losses")
    evaluate_domain(tmp_path / "scores", "law", evaluation, Outputs(*(tmp_path / f"{name}.parquet" for name in names)))
    differences = pd.read_parquet(tmp_path / "differences.parquet")
    assert set(differences["against"]) == {"dense", "demix_cached", "even"}
    ((_, row),) = differences[differences["against"] == "even"].iterrows()
    assert row[["model", "experts", "method", "weights", "documents", "pieces"]].tolist() == [
        "chance", "training", "uniform", "cluster(0.2)", 25, 60,
    ]  # fmt: skip
    place = tmp_path / "scores" / "dense" / "law.test"
    tokens = pd.read_parquet(place / "tokens.parquet")
    tokens["tokens"] = 1
    for model, clustering in (("chance", "r2"), ("even", "k2"), ("dense", None)):
        table = read_scores(tmp_path / "scores" / model / "law.test", CLUSTERS if clustering else ["dense"])
        log_p = table.scores[..., 0]
        if clustering:
            log_p = mix(table.scores, table.mask, "uniform", "cluster(0.2)", distances=far[clustering])
        tokens[model] = -log_p.reshape(-1)[: len(tokens)]
    assert table.mask.shape[1] == LENGTH
    by_origin = tokens.groupby("origin", sort=False)[["tokens", "chance", "even", "dense"]].sum()
    drawn = np.random.default_rng(seed_for(0, "law", table.sha256)).integers(25, size=(2000, 25))
    for against in ("even", "dense"):
        own = differences[(differences["model"] == "chance") & (differences["weights"] == "cluster(0.2)")]
        (row,) = own[own["against"] == against].to_dict("records")
        nats, perplexity = [], []
        for chosen in drawn:
            count, one, other = by_origin[["tokens", "chance", against]].to_numpy()[chosen].sum(axis=0)
            nats.append((one - other) / count)
            perplexity.append(np.exp(one / count) - np.exp(other / count))
        for name, values in (("nats_per_token", nats), ("perplexity", perplexity)):
            found = [row[f"{name}_low"], row[f"{name}_high"]]
            assert found == pytest.approx(np.quantile(values, [0.025, 0.975]), rel=1e-9)


@pytest.fixture(scope="module")
def run(families: MadeUp) -> MadeUp:
    return families


def test_the_table_by_loops_over_rows(run: MadeUp) -> None:
    table = table_of("family_differences", run.material())
    clustered = [model for model, row in MODELS.items() if "data" in row]
    pairs = [(model, base) for model in clustered for base in (BALANCED.get(model), "dense") if base]
    labels = {"dense": "Dense (Balanced)", "cbtm_3": "cbtm_3 (cluster)"}
    assert list(table.frame.index) == [f"{model} (cluster) less {labels[base]}" for model, base in pairs]
    found = run.results.rows[(run.results.rows["variant"] == "") & run.results.rows["top_k"].isna()]
    found = found[found["weights"].isin(["cluster", ""]) & found["method"].isin(["uniform", "dense"])]
    perplexity = {(row.model, row.domain): row.perplexity for row in found.itertuples()}
    for model, base in pairs:
        label = f"{model} (cluster) less {labels[base]}"
        for kind, domains in (("Training", TRAINING), ("Novel", NOVEL)):
            less = [perplexity[model, domain] - perplexity[base, domain] for domain in domains]
            mean, error = sum(less) / len(less), WIDTH / len(less) ** 0.5
            of_base = sum(perplexity[base, domain] for domain in domains) / len(less)
            row = table.frame.loc[label]
            assert row[kind] == pytest.approx(mean)
            assert row[f"{kind}, %"] == pytest.approx(100 * mean / of_base)
            told = f"[{mean - error:+.2f}, {mean + error:+.2f}]".replace("-", "−")
            assert table.second_lines().at[label, kind] == told
            assert row[f"{kind}: lower"] == sum(one < 0 for one in less)
            assert row[f"{kind}: surely lower"] == sum(one < -WIDTH for one in less)
            assert row[f"{kind}: surely higher"] == sum(one > WIDTH for one in less)


def test_pairs_are_named_in_the_table_of_differences_and_judge_claims(run: MadeUp) -> None:
    frame = table_of("differences", run.material()).frame
    of_random = frame[(frame["Domain"] == "law") & (frame["System"] == "cbtm_3_random (cluster)")]
    assert of_random["Less"].tolist() == ["Dense (Balanced)", "cbtm_3 (cluster)"]

    def told(differences: pd.DataFrame) -> str:
        clusters = read_clusters(run.run)
        judged = claims(run.material(differences=differences, clusters=clusters))
        return next(claim.numbers for claim in judged if claim.name == "random_clusters_are_worse")

    # The claim has the balanced row first.
    less = run.differences[(run.differences["model"] == "cbtm_3_random") & (run.differences["against"] == "cbtm_3")]
    mean, error = -less[less["domain"].isin(TRAINING)]["perplexity"].mean(), WIDTH / 3**0.5
    interval = f"{mean - error:+.2f} to {mean + error:+.2f}".replace("-", "−")
    assert f"The 95% interval of the mean difference is {interval}" in told(run.differences)
    none = told(run.differences[run.differences["against"] != "cbtm_3"])
    assert interval not in none
