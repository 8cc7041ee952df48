"""Rows of other families that join a finished run, which leave what it has as it is."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from scipy.special import logsumexp

from demix.config.tasks import Task
from demix.data.examples import prompts, read_examples
from demix.data.shards import TokenShard, blocks
from demix.files import read_json, read_json_lines, sha256_file
from demix.model.checkpoint import load_model
from demix.model.experts import find_faults, remove_expert
from demix.model.scoring import log_probabilities
from demix.run.run import Run
from demix.settings import settings_from
from support.dry_run import jobs_by_rule, ran
from support.mixing import log_mixture, log_weights
from support.once import once, run_with_progress

TINY = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text())
MASKED = {"attention": "bidirectional", "objective": "mlm"}
BRANCH = {"kind": "branched", "parent": "dense", "seed_tokens": 6000}
ROWS = {
    "models": {
        "demix": {"merged_routed": True},
        "btm": BRANCH | {"experts_per_job": 3},
        "cbtm_2": BRANCH | {"data": "k2", "experts_per_job": 2},
        "upcycled": BRANCH | {"kind": "routed", "experts": 4, "top_k": 2, "every": 2},
        "btx": {"kind": "routed", "parent": "demix", "tokens": 4000},
        "btx_btm": {"kind": "routed", "parent": "btm", "tokens": 4000},
        "btx_routers": {"kind": "routed", "parent": "demix", "tokens": 4000, "trained": "routers"},
        "far": {"kind": "demix", "architecture": {"position": "alibi", "head": "clap"}},
        "masked_dense": {"kind": "dense", "architecture": MASKED},
        "masked": {"kind": "demix", "architecture": MASKED},
    },
    "clusterings": {"k2": {"clusters": 2, "dimensions": 20}, "by_domain": {"method": "metadata", "dimensions": 20}},
    "evaluation": TINY["evaluation"]
    | {"weights": ["history", "cluster", "cluster+history"], "contexts": [32, 64]}
    | {"experts_top_k": [1, "all"]},
    "removal": TINY["removal"] | {"merged": ["demix", "btx"]},
    "tasks": {
        "domain": {"made": "domains", "examples": 12},
        # As docs/tasks.md and config/cbtm-1.3b-tasks.yaml write them; blocks of 32 tokens hold no demonstrations.
        "topics": {"path": "topics.jsonl", "template": "{text} Topic: {label}"},
        "agnews": {
            "test": {"kind": "hub", "path": "ag_news", "data_files": ["data/test-*.parquet"]},
            "train": {"kind": "hub", "path": "ag_news", "data_files": ["data/train-*.parquet"]},
            "labels": {"0": "world", "1": "sports"},
            "template": "{text} The topic is {label}",
            "examples": 6,
        },
        "halves": {"made": "continuations", "examples": 24, "choice_tokens": 8, "others": "all", "calibrated": True},
    },
}

TOKENS_OF_UPDATE = 3 * TINY["training"]["sequences"] * TINY["architecture"]["context"]

pytestmark = pytest.mark.workflow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], str]:
    """A run that the rows have joined, the digests of its weights before, and what was planned."""
    folder = tmp_path_factory.mktemp("families") / "copy"
    shutil.copytree(once(tmp_path_factory, "tiny", run_with_progress), folder, symlinks=True)
    run = folder / "results" / "tiny"
    before = {str(path): sha256_file(path) for path in (run / "models").rglob("*.safetensors")}
    (folder / "config.yaml").write_text(yaml.safe_dump(TINY | ROWS, sort_keys=False))
    write_tasks(folder)
    planned = ran(folder, "config.yaml", "-n", "--quiet", "rules")
    ran(folder, "config.yaml")
    return folder, before, planned


def write_tasks(folder: Path) -> None:
    """The examples of the tasks that are files and a data set."""
    labels = ("law", "music")
    lines = [{"text": f"The {labels[n % 2]} of day {n}.", "label": labels[n % 2]} for n in range(40)]
    (folder / "topics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "ag_news" / "data").mkdir(parents=True)
    for split in ("test", "train"):
        rows = [{"text": f"Of {split} the text {n}.", "label": n % 2} for n in range(20)]
        pq.write_table(pa.Table.from_pylist(rows), folder / "ag_news" / "data" / f"{split}-0.parquet")


def test_rows_join_a_finished_run_and_leave_its_models_as_they_are(
    finished: tuple[Path, dict[str, str], str],
) -> None:
    folder, before, planned = finished
    jobs = jobs_by_rule(planned)
    assert {rule: number for rule, number in jobs.items() if rule.startswith(("train", "join", "seed", "adapt"))} == {
        "seed": 1, "train_btm__parliament__and_2_more": 1, "train_cbtm_2__c00__and_1_more": 1,
        "join_btm": 1, "join_cbtm_2": 1, "train_upcycled": 1, "train_far": 1,
        "train_btx": 1, "train_btx_btm": 1, "train_btx_routers": 1,
        "train_masked_dense": 1, "train_masked": 1,
    }  # fmt: skip
    assert {rule: jobs[rule] for rule in ("score_known_others", "score_others", "contexts")} == {
        "score_known_others": 1, "score_others": 2, "contexts": 5,
    }  # fmt: skip
    assert not [rule for rule in jobs if rule.startswith(("score_known_demix", "score_demix", "score_adapted"))]
    assert (jobs["merge_routed_demix"], jobs["merge_routed_btm"]) == (1, 1)
    assert all(sha256_file(Path(path)) == sha256 for path, sha256 in before.items())
    assert "Nothing to be done" in ran(folder, "config.yaml", "-n")
    run = folder / "results" / "tiny"
    dense = read_json_lines(run / "metrics" / "dense.jsonl")[-1]
    for model, experts in (("btm", list(TINY["domains"]["training"])), ("cbtm_2", ["c00", "c01"])):
        assert sorted(path.stem for path in (run / "models" / model / "experts").glob("*.json")) == sorted(experts)
        ended = read_json_lines(run / "metrics" / f"{model}.jsonl")[-1]
        assert (ended["step"], ended["tokens"]) == (dense["step"], dense["tokens"]), "equal tokens and updates"
        assert read_json(run / "models" / model / "model.json")["expert_scope"] == "model"
    routed = read_json(run / "models" / "upcycled" / "model.json")
    assert routed["architecture"]["routed"]["experts"] == 4
    assert routed["parent"]["step"] * TOKENS_OF_UPDATE == routed["tokens_seed"]
    assert routed["tokens_seed"] < routed["tokens"] < dense["tokens"], "the FLOPs of dense, in fewer updates"
    scored = pd.read_parquet(run / "results.parquet").query("model == 'upcycled' and split == 'test' and top_k.isna()")
    assert set(scored["domain"]) == {*TINY["domains"]["training"], *TINY["domains"]["novel"]}
    assert scored["perplexity"].between(10, 512).all()
    loads = pd.read_parquet(run / "loads" / "upcycled.parquet")
    tokens = scored[scored["domain"].isin(loads["domain"])].set_index("domain")["tokens"]
    assert loads.groupby("domain")["choices"].sum().to_dict() == (2 * tokens).to_dict(), "two choices of each token"
    assert set(loads["layer"]) == {2}
    assert (run / "report" / "figures" / "router_loads.svg").is_file()


def test_merged_experts_are_trained_on(finished: tuple[Path, dict[str, str], str]) -> None:
    run = finished[0] / "results" / "tiny"
    results = pd.read_parquet(run / "results.parquet").query("split == 'test' and top_k.isna()")
    for row, parent in (("btx", "demix"), ("btx_routers", "demix"), ("btx_btm", "btm")):
        merged = load_model(run / "models" / f"{parent}-routed").state_dict()
        trained, about = load_model(run / "models" / row).state_dict(), read_json(run / "models" / row / "model.json")
        changed = {name for name, tensor in trained.items() if not torch.equal(tensor, merged[name])}
        assert changed == {name for name in merged if row != "btx_routers" or "router" in name}
        before = read_json(run / "models" / parent / "model.json")
        assert about["parent"]["tokens"] == before["tokens"]
        scored = results[results["model"] == row]
        assert set(scored["domain"]) == {*TINY["domains"]["training"], *TINY["domains"]["novel"]}
        assert scored["perplexity"].between(10, 512).all()


def test_the_experts_of_demix_are_scored_as_a_routed_model(finished: tuple[Path, dict[str, str], str]) -> None:
    run = finished[0] / "results" / "tiny"
    assert find_faults(run / "models" / "demix-routed") == []
    merged, demix = (read_json(run / "models" / name / "model.json") for name in ("demix-routed", "demix"))
    assert merged["architecture"] == demix["architecture"] | {"routed": merged["architecture"]["routed"]}
    lineage = read_json(run / "models" / "demix-routed" / "experts" / "dense.json")
    # The experts of novel domains, which are in the folder too, are not among them.
    assert [choice["expert"] for choice in lineage["choices"]] == list(TINY["domains"]["training"])
    results = pd.read_parquet(run / "results.parquet").query("model == 'demix' and split == 'test' and top_k.isna()")
    scored = results.query("method == 'merged' and weights == 'routed' and experts == 'training'").set_index("domain")
    assert sorted(scored.index) == sorted({**TINY["domains"]["training"], **TINY["domains"]["novel"]})
    model = load_model(run / "models" / "demix-routed")
    for domain, row in scored.iterrows():
        shard, length = TokenShard.open(run / "tokens" / domain / "test.arrow"), model.architecture.context
        (log_p,) = log_probabilities(model, *blocks(shard, length, int(row["tokens"])))
        assert row["nll"] == pytest.approx(-log_p.sum(), rel=1e-5)
        assert (row["experts"], row["n_experts"]) == ("training", 1)
    for table in ("families", "family_costs"):
        assert "DEMix, merged-routed" in (run / "report" / "tables" / f"{table}.md").read_text()


def test_routed_models_are_scored_with_other_numbers_of_experts(finished: tuple[Path, dict[str, str], str]) -> None:
    run = finished[0] / "results" / "tiny"
    results = pd.read_parquet(run / "results.parquet").query("split == 'test'")
    tried = results[results["top_k"].notna() & results["method"].isin(["dense", "merged"])]
    assert {(row, int(k)) for row, k in zip(tried["model"], tried["top_k"], strict=True)} == {
        ("upcycled", 1), ("upcycled", 4), ("btx", 1), ("btx", 3), ("btx_btm", 1), ("btx_btm", 3),
        ("btx_routers", 1), ("btx_routers", 3), ("demix", 1), ("demix", 3),
    }  # fmt: skip
    model = load_model(run / "models" / "demix-routed")
    for block in model.blocks:
        # The softmax over all experts, whose gates sum to 1 anyway.
        block.feedforward.routed = dataclasses.replace(block.feedforward.routed, top_k=3, renormalise=False)
    for row in tried[(tried["model"] == "demix") & (tried["top_k"] == 3)].itertuples():
        shard = TokenShard.open(run / "tokens" / row.domain / "test.arrow")
        (log_p,) = log_probabilities(model, *blocks(shard, model.architecture.context, int(row.tokens)))
        assert row.nll == pytest.approx(-log_p.sum(), rel=1e-5)
    (table,) = pd.read_html(run / "report" / "tables" / "families.html", index_col=0)
    for row, label in (("btx", Run.read(run).rows["btx"].label), ("demix", "DEMix, merged-routed")):
        of_row = tried[(tried["model"] == row) & tried["domain"].isin(TINY["domains"]["training"])]
        for k, name in ((1, "1"), (3, "all")):
            mean = of_row.loc[of_row["top_k"] == k, "perplexity"].mean()
            (cell,) = table.loc[label, [column for column in table if f"k = {name}" in str(column)][:1]]
            assert float(str(cell).split()[0]) == pytest.approx(mean, rel=1e-3)


def test_merged_models_are_scored_without_the_expert_of_each_domain(finished: tuple[Path, dict[str, str], str]) -> None:
    run = finished[0] / "results" / "tiny"
    results = pd.read_parquet(run / "results.parquet").query("split == 'test'")
    (table,) = pd.read_html(run / "report" / "tables" / "merged_removal.html", index_col=0)
    rows = Run.read(run).rows
    for row, folder, method, label in (
        ("demix", "demix-routed", "merged", "DEMix, merged-routed"), ("btx", "btx", "dense", rows["btx"].label),
    ):  # fmt: skip
        lost = results[(results["model"] == row) & (results["method"] == method)]
        lost = lost[lost["experts"].str.startswith("minus-")]
        assert sorted(lost["domain"]) == sorted(TINY["domains"]["training"])
        assert (lost["experts"] == "minus-" + lost["domain"]).all()
        for one in lost.itertuples():
            model = shutil.copytree(run / "models" / folder, finished[0] / "left" / folder / one.domain)
            remove_expert(model, one.domain)
            shard = TokenShard.open(run / "tokens" / one.domain / "test.arrow")
            (log_p,) = log_probabilities(load_model(model), *blocks(shard, TINY["architecture"]["context"], one.tokens))
            assert one.nll == pytest.approx(-log_p.sum(), rel=1e-5)
        assert float(table.loc[label, "Without the domain's"]) == pytest.approx(lost["perplexity"].mean(), rel=1e-3)
    audit = pd.read_parquet(run / "audit.parquet")
    assert set(audit.loc[audit["system"].str.startswith("merged"), "model"]) == {"demix-routed", "btx"}
    assert f"{rows['btx'].label} without its expert" in (run / "report" / "tables" / "audit.md").read_text()
    assert "A merged model without a domain's expert forgets the domain" in (run / "report" / "claims.md").read_text()


def test_shards_of_clusters_hold_no_tokens(finished: tuple[Path, dict[str, str], str]) -> None:
    run = finished[0] / "results" / "tiny"
    shards = list((run / "clusters" / "k2" / "shards").glob("*/train.arrow"))
    manifests = [read_json(path.with_suffix(".json")) for path in shards]
    of_domains = [read_json(run / "tokens" / name / "train.json") for name in TINY["domains"]["training"]]
    for key in ("tokens", "documents"):
        assert sum(one[key] for one in manifests) == sum(one[key] for one in of_domains)
    headers = 2000 * len(shards)
    assert sum(path.stat().st_size for path in shards) < 16 * sum(one["documents"] for one in manifests) + headers


@pytest.mark.parametrize(("model", "clustering"), [("cbtm_2", "k2"), ("btm", "by_domain")])
@pytest.mark.parametrize("domain", ["licenses", "fantasy"])
def test_the_mixture_by_clusters_is_that_of_plain_arithmetic(
    model: str, clustering: str, domain: str, finished: tuple[Path, dict[str, str], str]
) -> None:
    """Equation 3 of c-BTM on the run's own files, at the default temperature of 0.1."""
    run = finished[0] / "results" / "tiny"
    distances = pq.read_table(run / "routing" / clustering / "document" / f"{domain}.test.parquet")
    experts = distances.column_names
    folder = run / "scores" / model / f"{domain}.test"
    scores = np.stack([pq.read_table(folder / f"{name}.parquet").column(0).to_numpy() for name in experts], 1)
    near = np.stack([distances[name].to_numpy() for name in experts], 1).astype(np.float64)
    found = pd.read_parquet(run / "results.parquet").query(
        "model == @model and domain == @domain and experts == 'training'"
    )
    rows = found[(found["weights"] == "cluster") & (found["variant"] == "") & (found["method"] == "uniform")]
    assert set(rows["routing"]) == {clustering}
    for row in rows.to_dict("records"):
        top_k = None if np.isnan(row["top_k"] or np.nan) else int(row["top_k"])
        wanted = log_mixture(log_weights(-near / 0.1, 0, top_k), scores.astype(np.float64))
        assert row["nll"] == pytest.approx(-wanted.sum(), rel=1e-9)
    assert len(rows) == (1 if model == "cbtm_2" else 2), "and of the two nearest experts"


def test_a_row_of_other_positions_reads_longer_blocks(finished: tuple[Path, dict[str, str], str]) -> None:
    run = finished[0] / "results" / "tiny"
    about = read_json(run / "models" / "far" / "model.json")
    assert about["architecture"] == TINY["architecture"] | {"position": "alibi", "head": "clap"}
    assert "position" not in read_json(run / "models" / "demix" / "model.json")["architecture"]
    results = pd.read_parquet(run / "results.parquet").query("split == 'test' and variant == '' and top_k.isna()")
    for domain in (*TINY["domains"]["training"], *TINY["domains"]["novel"]):
        found = pd.read_parquet(run / "evaluations" / f"{domain}.contexts.parquet")
        assert set(found[found["context"] == 64]["model"]) == {"far"}
        for (model, context), rows in found.groupby(["model", "context"]):
            assert rows["tokens"].sum() == 1000
            if context == 32:
                key = (rows["model"].iloc[0], *rows[["experts", "method", "weights"]].iloc[0], domain)
                same = results.set_index(["model", "experts", "method", "weights", "domain"]).loc[[key]]
                assert rows["nll"].sum() == pytest.approx(same["nll"].iloc[0], rel=1e-9), model
    table = (run / "report" / "tables" / "contexts.md").read_text()
    assert Run.read(run).rows["far"].label in table
    assert (run / "report" / "figures" / "positions.svg").exists()
    assert "tables/contexts.html" in (run / "report" / "index.html").read_text()


def test_tasks_join_a_finished_run(finished: tuple[Path, dict[str, str], str]) -> None:
    """Their examples are made once, every trained model is scored, and what the run has stays."""
    folder, _, planned = finished
    run, jobs = folder / "results" / "tiny", jobs_by_rule(planned)
    models = ["btm", "btx", "btx_btm", "btx_routers", "cbtm_2", "demix", "dense", "dense_unbalanced", "far", "upcycled"]
    asked = {f"fewshot_{name}": 1 for name in models} | {"examples": 4, "classify": 1}
    assert {rule: number for rule, number in jobs.items() if rule in asked or rule.startswith("fewshot")} == asked
    rows = pd.read_parquet(run / "tasks.parquet")
    assert sorted(rows["model"].unique()) == models
    assert set(rows["task"]) == {"domain", "halves", "topics", "agnews"}
    for task, end in (("topics", " Topic:"), ("agnews", " The topic is")):
        made = read_examples(run / "examples" / f"{task}.parquet")
        tested = [one for one in made if one.split == "test"]
        assert len(tested) == {"topics": 32, "agnews": 6}[task]
        recipe = settings_from(Task, read_json(run / "config.json")["tasks"][task])
        asked = [one.context for one in prompts(recipe, made) if one.split == "test"]
        assert asked == [one.text + end for one in tested]
    routings = rows.query("task == 'halves'").groupby("model")["routing"].agg(set)
    assert routings["upcycled"] == {"dense"}
    assert {"average", "history", "cluster", "cluster+history", "updating", "one expert"} <= routings["cbtm_2"]
    assert routings["demix"] == routings["btm"] == routings["cbtm_2"] | {"own expert"}
    clusterings = rows.groupby("model")["clustering"].agg(set)
    assert (clusterings["cbtm_2"], clusterings["btm"]) == ({"k2"}, {"by_domain"})
    weighted = pd.read_parquet(run / "task_weights.parquet").query("model == 'cbtm_2'")
    assert weighted.groupby(["task", "routing"])["weight"].sum().to_numpy() == pytest.approx(1)
    used = (run / "report" / "tables" / "task_clusters.md").read_text()
    assert all(f"{Run.read(run).rows['cbtm_2'].label}, {task}: c0" in used for task in ROWS["tasks"])
    # An answer of one whole expert, from the file of scores alone.
    scores = pq.read_table(run / "tasks" / "btm" / "domain.parquet").to_pandas()
    examples = pd.read_parquet(run / "examples" / "domain.parquet").query("split == 'test'")
    tests = scores[(scores["split"] == "test") & (scores["label"] >= 0)]
    names = pq.read_schema(run / "tasks" / "btm" / "domain.parquet").metadata[b"experts"].decode().split(",")
    for number, name in enumerate(names):
        scored = tests.assign(p=tests["log_probability"].str[number])
        totals = scored.groupby(["example", "label"])["p"].sum().unstack()
        hits = (totals.idxmax(axis=1).to_numpy() == examples["answer"].to_numpy()).mean()
        of_expert = rows[(rows["model"] == "btm") & (rows["task"] == "domain") & (rows["expert"] == name)]
        assert of_expert["accuracy"].item() == pytest.approx(hits)
    page = (run / "report" / "index.html").read_text()
    assert "tables/tasks.html" in page
    assert "Accuracy on tasks" in (run / "report" / "tables" / "tasks.md").read_text()


def test_a_task_that_is_added_is_scored_alone(finished: tuple[Path, dict[str, str], str]) -> None:
    folder = finished[0]
    tasks = ROWS["tasks"] | {"more": {"made": "domains", "examples": 5}}
    (folder / "added.yaml").write_text(yaml.safe_dump(TINY | ROWS | {"tasks": tasks}, sort_keys=False))
    jobs = jobs_by_rule(ran(folder, "added.yaml", "-n", "--quiet", "rules"))
    scored = {f"fewshot_{path.name}__more": 1 for path in (folder / "results" / "tiny" / "tasks").iterdir()}
    after = {"classify": 1, "run_config": 1, "report": 1, "card": 1, "track": 1}
    assert jobs == scored | {"examples": 1} | after


def test_masked_rows_have_a_table_of_their_own(finished: tuple[Path, dict[str, str], str]) -> None:
    run = finished[0] / "results" / "tiny"
    results = pd.read_parquet(run / "results.parquet")
    own = results[results["model"].isin(["masked", "masked_dense"])]
    assert set(own["scorer"]) == {"masked, 7 folds"}
    assert not results.drop(own.index)["scorer"].str.startswith("masked").any()
    assert set(own["method"]) == {"dense", "naive", "expert", "average", "fitted", "best_block", "best_token"}
    for domain in (*TINY["domains"]["training"], *TINY["domains"]["novel"]):
        scores = [
            pq.read_table(run / "scores" / "masked" / f"{domain}.test" / f"{name}.parquet").column(0).to_numpy()
            for name in TINY["domains"]["training"]
        ]
        (average,) = own.query("domain == @domain and method == 'average'")["nll"]
        mixed = logsumexp(np.stack(scores).astype(np.float64), 0) - np.log(len(scores))
        assert average == pytest.approx(-mixed.sum(), rel=1e-9)
    tables = {path.stem: path.read_text() for path in (run / "report" / "tables").glob("*.md")}
    assert [name for name, text in tables.items() if "masked" in text.lower()] == ["masked"]
    rows = Run.read(run).rows
    dense, experts = (rows[name].label for name in ("masked_dense", "masked"))
    for line in (dense, *(f"{experts} ({how})" for how in ("own expert", "average", "fitted"))):
        assert line in tables["masked"]
    assert "masked" not in (run / "report" / "claims.md").read_text().lower()
    assert "tables/masked.html" in (run / "report" / "index.html").read_text()
