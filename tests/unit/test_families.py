"""The report of families: numbers against plain loops over rows, claims shown and not, and what a run lacks."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from demix.config.counts import parameters, training_flops_per_token
from demix.data.cluster import Clusterer
from demix.files import read_json, write_parquet
from demix.report import left_out, left_out_notes, report_files, report_items
from demix.report.claims import claims
from demix.report.clusters import read_clusters
from demix.report.item import FigureItem, Group, TableItem
from demix.report.items import all_items
from demix.report.items.by_clusters import by_clusters_points
from demix.report.items.index import groups
from demix.report.material import Material
from demix.report.read import Results
from demix.report.verdict import Claim
from demix.run.systems import clustered
from support.cli import demix
from support.configs import changed
from support.families_run import MODELS, TOP_K, build_families, experts_of, nll_of
from support.report import names_of, table_of
from support.synthetic_run import NOVEL, TRAINING, MadeUp, build_run, with_keys
from support.titles import titles

LABELS = {"Dense": "dense_unbalanced", "Dense (Balanced)": "dense", "DEMix": "demix"}


@pytest.fixture(scope="module")
def run(families: MadeUp) -> MadeUp:
    return families


Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows(run: MadeUp) -> Rows:
    found = run.results.rows[run.results.rows["experts"].isin(["training", "dense"])]
    return found.astype({"top_k": "float64"}).fillna({"top_k": 0}).to_dict("records")


def mean(
    rows: Rows, model: str, domains: tuple[str, ...], method: str, weights: str, variant: str = "", top_k: int = 0
) -> float:
    """The mean of the perplexities of a row of models, by a loop over the rows of results."""
    wanted = {"model": model, "method": method, "weights": weights, "variant": variant, "top_k": top_k}
    found = [row["perplexity"] for row in rows if row["domain"] in domains and wanted.items() <= row.items()]
    assert len(found) == len(domains)
    return sum(found) / len(found)


def test_families_are_mixed_by_the_rule_of_their_paper(run: MadeUp, rows: Rows) -> None:
    frame = table_of("families", run.material(tokens_before={})).frame
    routed, averaged = (
        "demix_seeded, merged-routed",
        {f"btm, averaged ({weights})": weights for weights in ("uniform", "posterior")},
    )
    assert list(frame.index) == [*LABELS, "demix_seeded", routed, "btm", *averaged, *list(MODELS)[2:]]
    for label, weights in averaged.items():
        assert frame.at[label, "Novel"] == pytest.approx(mean(rows, "btm", NOVEL, "merged", weights))
    assert frame.at[routed, "Training"] == pytest.approx(mean(rows, "demix_seeded", TRAINING, "merged", "routed"))
    assert frame.loc[routed, ["Family", "Experts", "Mixed by"]].tolist() == [
        "Merged-routed", "3, top-2", "merged routed",
    ]  # fmt: skip
    assert math.isnan(frame.at[routed, "Novel, switching"])
    for label, row in frame.drop(index=[routed, *averaged]).iterrows():
        model = LABELS.get(str(label), str(label))
        clusters = "data" in MODELS.get(model, {})
        rule = ("uniform", "cluster") if clusters else ("cached", "history")
        rule = ("dense", "") if model.startswith("dense") else rule
        for kind, domains in (("Training", TRAINING), ("Novel", NOVEL)):
            own, dense = (mean(rows, *of) for of in ((model, domains, *rule), ("dense", domains, "dense", "")))
            assert row[kind] == pytest.approx(own)
            if model != "dense":
                assert row[f"{kind}, %"] == pytest.approx(100 * (own / dense - 1))
            if model in MODELS:
                assert row[f"{kind}, switching"] == pytest.approx(mean(rows, model, domains, "fitted", "switching"))
                dev = mean(rows, model, domains, "uniform", "cluster", variant="dev_temperature", top_k=2)
                assert row[f"{kind}, cluster on dev"] == pytest.approx(dev)
                released = mean(rows, model, domains, "uniform", "cluster", variant="released_scorer")
                assert row[f"{kind}, released scorer"] == pytest.approx(released)
    assert frame.loc["cbtm_2", ["Family", "Experts", "Mixed by"]].tolist() == [
        "c-BTM", "2 clusters", "uniform cluster",
    ]  # fmt: skip
    assert frame["Family"][["btm", "demix_k3", "demix_seeded"]].tolist() == ["BTM", "DEMix on clusters", "DEMix"]


def test_an_interval_of_a_mean_adds_up_those_of_the_domains(run: MadeUp, rows: Rows) -> None:
    table = table_of("families", run.material(tokens_before={}))
    each = [mean(rows, "cbtm_3", (domain,), "uniform", "cluster") for domain in TRAINING]
    half = math.sqrt(sum((0.15 * value) ** 2 for value in each)) / 3
    centre = sum(each) / 3
    assert table.second_lines().at["cbtm_3", "Training"] == f"[{centre - half:.2f}, {centre + half:.2f}]"
    assert table.second_lines().at["DEMix", "Training"] == "", "domains of 7 documents have no interval"


def test_costs_follow_from_sizes_and_settings(run: MadeUp) -> None:
    frame = table_of("family_costs", run.material()).frame
    architecture = run.run.architecture
    shared, expert = parameters(architecture, 4096)
    whole = shared + expert
    step = 3 * 4 * 256
    updates, begin = 2457600 // step, 819200 // step
    told = {
        "Dense (Balanced)": (whole, whole * updates),
        "DEMix": (shared + 3 * expert, shared * updates),
        "demix_seeded": (shared + 3 * expert, shared * (updates - begin) + whole * begin),
        "btm": (3 * whole, whole * begin),
        "btm, averaged (uniform)": (whole, whole * begin),
        "cbtm_2": (2 * whole, whole * begin),
        "cbtm_2_short": (2 * whole, 0),
    }
    for label, (size, exchanged) in told.items():
        assert frame.at[label, "Parameters"] == size
        assert frame.at[label, "Bytes synchronised"] == 4 * exchanged
    by_token = training_flops_per_token(architecture, 4096, 256)
    routed, layers, width = "demix_seeded, merged-routed", architecture.layers, architecture.width
    assert frame.at[routed, "Parameters"] == shared + 3 * (expert + layers * width), "and a router in each layer"
    assert frame.at[routed, "Parameters a token, all"] == shared + 2 * expert + 3 * layers * width
    assert frame.at[routed, "FLOPs a token, all"] - frame.at["Dense", "FLOPs a token, all"] == layers * (
        16 * width**2 + 2 * 3 * width
    )
    for column in ("Updates", "FLOPs of training", "Bytes synchronised"):
        assert frame.at[routed, column] == frame.at["demix_seeded", column], "nothing is trained for it"
    assert frame.at["cbtm_3", "FLOPs of training"] == pytest.approx(by_token * updates * step)
    assert frame.at["cbtm_2_short", "FLOPs of training"] == pytest.approx(by_token * (1228800 // step) * step)
    one = frame.at["Dense", "FLOPs a token, all"]
    assert frame.at["cbtm_3", "FLOPs a token, top-1"] == one
    assert frame.at["cbtm_3", "FLOPs a token, top-2"] == 2 * one
    assert frame.at["cbtm_3", "FLOPs a token, all"] == 3 * one
    # Experts that are layers share the first attention.
    assert frame.at["DEMix", "FLOPs a token, all"] == 3 * one - 2 * (8 * 128**2 + 2 * 256 * 128)
    assert frame.at["cbtm_3", "Parameters a token, top-2"] == 2 * whole
    assert frame.at["DEMix", "Parameters a token, top-2"] == shared + 2 * expert
    assert math.isnan(frame.at["cbtm_2", "Parameters a token, top-2"]), "all"
    # Five steps of 8,192 tokens; the second expert takes twice as long as the first.
    assert frame.at["cbtm_3", "Seconds to add a domain"] == pytest.approx(5 * (1 + 2 + 3) / 3)
    assert math.isnan(frame.at["demix_k3", "Seconds to add a domain"])


def test_perplexity_by_top_k_and_temperature(run: MadeUp, rows: Rows) -> None:
    full = table_of("full", run.material()).frame.set_index(["Domain", "System"])
    released = mean(rows, "cbtm_3", NOVEL[:1], "uniform", "cluster", variant="released_scorer")
    assert full.at[(NOVEL[0], "cbtm_3 (cluster), released scorer"), "Perplexity"] == pytest.approx(released)
    frame = table_of("top_k", run.material()).frame
    hot = table_of("temperatures", run.material()).frame
    for model in ("cbtm_3", "demix_k3"):
        for k in TOP_K:
            column = f"Novel, {f'top-{k}' if k else 'all'}"
            own = mean(rows, model, NOVEL, "uniform", "cluster", top_k=k or 0)
            assert frame.at[f"{model} (cluster)", column] == pytest.approx(own)
            assert hot.at[f"{model}, document, τ = 0.01", column] == pytest.approx(1.03 * own)
    assert math.isnan(frame.at["cbtm_2 (cluster)", "Training, top-2"]), "two experts are all"
    assert frame.at["Dense (Balanced)", "Training, all"] == pytest.approx(110 * 1.3)
    assert len(hot) == 3 * len(MODELS)


def test_points_of_the_figure_by_clusters(run: MadeUp, rows: Rows) -> None:
    points = by_clusters_points(run.material()).query("kind == 'Training'").set_index("row")
    assert points["made"].to_dict() == {
        "Dense (Balanced)": "1 cluster", "btm": "domains (BTM)", "cbtm_2": "k-means", "cbtm_3": "k-means",
        "cbtm_3_random": "random", "cbtm_3_loose": "k-means, unbalanced", "demix_k3": "DEMix, k-means",
        "cbtm_2_short": "k-means",
    }  # fmt: skip
    assert points["clusters"].to_dict() == {"Dense (Balanced)": 1} | {
        model: len(experts_of(model)) for model in MODELS if model != "demix_seeded"
    }
    assert points.at["cbtm_2_short", "tokens"] == 1228800
    assert points.at["cbtm_2", "perplexity"] == pytest.approx(mean(rows, "cbtm_2", TRAINING, "uniform", "cluster"))


def test_clusters_by_loops_over_documents(run: MadeUp) -> None:
    clusters = read_clusters(run.run)
    assert [model.row for model in clustered(run.run)] == [model for model, row in MODELS.items() if "data" in row]
    names = experts_of("cbtm_3")
    ratios = clusters.over_own("cbtm_3", run.run.seed, names)
    for cluster in names:
        for expert in names:
            less = nll_of("", expert, cluster) - nll_of("", cluster, cluster)
            assert ratios.at[cluster, expert] == pytest.approx(math.exp(less))
    folder = run.path / "clusters" / "k3" / "assigned"
    labels = {
        (domain, split): pd.read_parquet(folder / f"{domain}.{split}.parquet")["cluster"].tolist()
        for domain in TRAINING for split in ("train", "test")
    }  # fmt: skip
    found = clusters.shares("k3", list(TRAINING), names)
    told = table_of("clusters", run.material(clusters=clusters)).frame
    spread = clusters.sizes().query("clustering == 'k3'").set_index("cluster")["share"]
    test = [label for domain in TRAINING for label in labels[domain, "test"]]
    for number, cluster in enumerate(names):
        counts = {domain: labels[domain, "train"].count(number) for domain in TRAINING}
        for domain in TRAINING:
            assert found.at[domain, cluster] == pytest.approx(counts[domain] / len(labels[domain, "train"]))
        assert told.at[f"k3 {cluster}", "Training documents"] == sum(counts.values())
        assert told.at[f"k3 {cluster}", "Most are of"] == max(counts, key=counts.__getitem__)
        assert spread[cluster] == pytest.approx(test.count(number) / len(test) * 3)
    # Each of three clusters has the words of one domain.
    top = {told.at[f"k3 {name}", "Terms"].split(", ")[0] for name in names}
    assert len(top) == 3
    scored = sum(10 + document for place in range(3) for document in range(4 + place))
    assert clusters.losses.query("model == 'cbtm_3' and expert == 'c00'")["tokens"].sum() == scored
    assert list(told.index) == [f"{data} {name}" for data in ("k2", "k3", "r3", "u3") for name in experts_of(
        next(model for model, row in MODELS.items() if row.get("data") == data)
    )]  # fmt: skip


def judge(run: MadeUp) -> dict[str, Claim]:
    clusters = read_clusters(run.run)
    judged = claims(run.material(clusters=clusters))
    return {claim.name: claim for claim in judged}


CLAIMS = {
    "clusters_beat_one", "one_expert_beats_one_cluster", "few_experts_suffice", "own_cluster_expert_best",
    "random_clusters_are_worse", "balance_helps_at_large_k", "clusters_against_metadata", "btm_against_dense",
    "seeding_helps",
}  # fmt: skip


def test_a_run_like_the_papers_shows_every_claim_of_families(run: MadeUp) -> None:
    judged = judge(run)
    assert {name: judged[name].verdict for name in CLAIMS} == dict.fromkeys(CLAIMS, "shown")
    # The row of fewer tokens has no model of one cluster beside it.
    assert "cbtm_2_short" not in judged["clusters_beat_one"].numbers
    assert "cbtm_3 (cluster) " in judged["random_clusters_are_worse"].numbers
    assert "cbtm_2" not in judged["random_clusters_are_worse"].numbers, "two clusters are not made at random"
    assert "cbtm_3 (cluster), top-1" in judged["one_expert_beats_one_cluster"].numbers
    assert "cbtm_3 (cluster), top-2" in judged["few_experts_suffice"].numbers
    assert "against btm (cluster)" in judged["clusters_against_metadata"].numbers, "both without the domain's dev text"
    assert "2 of 2 clusters. cbtm_3: the best other" in judged["own_cluster_expert_best"].numbers


def test_a_run_unlike_the_papers_shows_none(tmp_path: Path) -> None:
    def change(model: str, value: float) -> float:
        return {"cbtm_3_random": 0.9, "cbtm_3_loose": 1.4, "btm": 1.5, "demix_seeded": 1.5}.get(model, 1.6)

    run = build_families(tmp_path, change)
    judged = judge(run)
    untouched = {"few_experts_suffice", "own_cluster_expert_best"}
    assert {judged[name].verdict for name in CLAIMS - untouched} == {"not shown"}


@pytest.mark.parametrize(("factor", "verdict"), [(0.8, "shown"), (1.6, "not shown")])
def test_merged_experts_beside_the_mixture_and_their_routers(
    run: MadeUp, tmp_path: Path, factor: float, verdict: str
) -> None:
    merged = {"kind": "routed", "parent": "demix_seeded", "tokens": 819200}
    rows = {"btx": merged, "btx_routers": merged | {"trained": "routers"}, "switch": {"kind": "routed", "experts": 3}}
    shutil.copytree(run.run.folder, tmp_path / "run")
    keys = run.keys | {"models": run.keys["models"] | rows}
    found = with_keys(tmp_path / "run", keys)
    results = run.results.rows
    tempered = results[(results["model"] == "demix_seeded") & (results["weights"] == "tempered")]
    dense = results[(results["model"] == "dense") & (results["variant"] == "")]
    more = [tempered.assign(top_k=2)]
    for number, (name, worse) in enumerate(
        (("btx", 1.0), ("btx_routers", 1.004 if factor < 1 else 1.1), ("switch", 1.0))
    ):
        own = dense["domain"].map(tempered.groupby("domain")["perplexity"].first())
        more.append(dense.assign(model=name, perplexity=own * factor * worse))
        # Of three experts each domain of the merged has one; those of `switch` get equal shares of all.
        apart = (number < 2) == (factor < 1)
        table = [
            {"domain": domain, "layer": layer, "expert": expert, "choices": 90 if apart and place % 3 == expert else 5}
            for place, domain in enumerate((*TRAINING, *NOVEL))
            for layer in range(3)
            for expert in range(3)
        ]
        write_parquet(pa.Table.from_pylist(table), tmp_path / "run" / "loads" / f"{name}.parquet")
    write_parquet(pa.Table.from_pylist(table), tmp_path / "run" / "loads" / "demix_seeded-routed.parquet")
    material = run.material(found, results=Results(pd.concat([results, *more], ignore_index=True)))
    judged = {claim.name: claim for claim in claims(material)}
    for name in ("trained_together_against_outputs", "routers_are_enough", "routers_follow_domains"):
        assert judged[name].verdict == verdict, (name, judged[name].numbers)
    assert "against demix_seeded (tempered), top-2" in judged["trained_together_against_outputs"].numbers


def test_a_run_without_such_models_tells_nothing_of_them(tmp_path: Path, run: MadeUp) -> None:
    plain = build_run(tmp_path)
    assert not {Path(name).stem for name in report_files(plain.run)} & {*names_of(Group.FAMILIES)}
    assert not left_out_notes(plain.run)
    judged = claims(plain.material())
    assert not CLAIMS & {claim.name for claim in judged}
    alone = changed(run.run, models={name: None for name in MODELS if name != "btm"})
    assert {*names_of(Group.FAMILIES)} - left_out(alone).keys() == {"families", "family_costs", "top_k"}


def test_the_report_has_all_that_is_promised(run: MadeUp, tmp_path: Path) -> None:
    absent = {name: None for name in MODELS if name not in ("btm", "cbtm_2", "cbtm_2_short")}
    some = changed(run.run, models=absent | {"switch": {"kind": "routed", "label": "switch", "experts": 2}})
    loads = {
        "switch": pd.DataFrame(
            0.5, pd.MultiIndex.from_product([[1], [*TRAINING, *NOVEL]], names=["layer", "domain"]), [0, 1]
        )
    }
    material = Material(some, {"loads": loads})
    # No merged model of this run loses experts, and no dense model has another budget.
    names = [name for name in names_of(Group.FAMILIES) if name not in ("merged_removal", "speed_up")]
    for item in report_items(some):
        if item.name in names:
            item.write(material, tmp_path)
    made = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert made == {name for name in report_files(some) if Path(name).stem in names}
    tables, figures = (
        [name for name in names_of(Group.FAMILIES, kind=kind) if name in names] for kind in (TableItem, FigureItem)
    )
    assert len(made) == 3 * len(tables) + 4 * len(figures)
    assert titles(tmp_path) == {name: all_items()[name].heading for name in names}
    drawn = json.loads((tmp_path / "figures" / "by_clusters.json").read_text())["datasets"].values()
    short = [row for rows in drawn for row in rows if row["row"] == "cbtm_2_short" and "tokens" in row]
    assert {row["tokens"] for row in short} == {1228800}, "k-means by two clusters has two budgets"
    ratios = json.loads((tmp_path / "figures" / "cluster_experts.json").read_text())["datasets"].values()
    own = [
        row["value"] for rows in ratios for row in rows if row["kind"] == "cbtm_2" and row["domain"] == row["expert"]
    ]
    assert own == [1, 1]
    listed = groups(some)
    assert [entry["shows"] for entry in listed["Families"]] == [all_items()[name].heading for name in tables]
    shown = [entry["shows"] for entry in listed["Figures"]]
    assert [one for one in shown if one in {all_items()[name].heading for name in names}] == [
        all_items()[name].heading for name in figures
    ]


def test_cards_leave_the_clusters_in_the_folders_of_models(run: MadeUp, tmp_path: Path) -> None:
    done = demix("card", run.path, "demix", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    own = Clusterer.open(run.path / "models" / "demix" / "clusterer")
    assert own.sha256 == Clusterer.open(run.path / "clusters" / "by_domain").sha256
    about = read_json(run.path / "models" / "demix" / "clusterer" / "routing.json")
    assert about == {"clustering": "by_domain", "context": "document", "temperature": 0.1}


def test_merged_models_are_compared_with_the_dense_model_of_their_seed(run: MadeUp) -> None:
    """They are made of the run's own seed alone, here of two."""
    more = run.results.rows.query("method != 'merged'").assign(seed=2)
    both = Results(pd.concat([run.results.rows, more.assign(perplexity=3 * more["perplexity"])], ignore_index=True))
    alone, table = (
        table_of("families", run.material(results=results, tokens_before={})).frame for results in (run.results, both)
    )
    averaged = [label for label in alone.index if "averaged" in label or "merged" in label]
    assert len(averaged) == 3
    for label in averaged:
        for column in ("Training", "Training, %", "Novel, %"):
            assert table.at[label, column] == pytest.approx(alone.at[label, column])
    assert table.at["btm", "Training"] == pytest.approx(2 * alone.at["btm", "Training"])
