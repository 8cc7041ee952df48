"""The table of models: what a config's model entries make, and what is evaluated of them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from demix.run.check import completed_run, load_run
from demix.run.evaluated import compared, evaluated
from demix.run.run import Run
from demix.run.scoring import scoring_jobs
from support.configs import TEXT, domains, small_run

TRAINING, NOVEL = ("law", "news", "code"), ("songs", "wiki")
REMOVAL = {"retrain_without": ["law"], "replacement": "songs", "model": "demix"}


def run_of(**changes: Any) -> Run:
    """A run with two seeds and one domain removed."""
    usual = {"seed": 7, "seeds": [7, 9], "domains": domains(TRAINING, NOVEL), "removal": REMOVAL}
    return small_run(**usual | changes)


def test_the_models_of_a_run() -> None:
    by_name = {model.name: model for model in run_of().planned}
    assert by_name["without-law"].experts == ("songs", "news", "code"), "the replacement stands in the domain's place"
    assert by_name["without-law"].scored == ("law",)
    assert (by_name["demix-seed9"].row, by_name["demix-seed9"].seed) == ("demix", 9)
    assert by_name["dense"].experts == by_name["dense"].columns == ("dense",)
    assert (by_name["domain_token"].experts, by_name["domain_token"].columns) == (("dense",), TRAINING)
    assert by_name["dense-dapt-wiki"].scored == (*TRAINING, "wiki")
    added, made, *_ = run_of().adaptations
    assert (added.model, added.expert, made.model, made.expert) == ("demix", "songs", "dense-dapt-songs", "dense")


def test_adaptation_and_removal_follow_the_rows_that_they_name() -> None:
    rows = run_of(
        models={"other": {"kind": "demix"}}, adaptation={"model": "other"}, removal=REMOVAL | {"model": "other"}
    )
    assert {one.name for one in rows.adaptations} >= {"other-dapt-songs", "dense-dapt-songs"}
    without = next(model for model in rows.planned if model.removed)
    assert (without.name, without.base.name) == ("without-law", "other")
    sets = {table.model: [some.label for some in table.sets] for table in evaluated(rows, "news") if table.seed == 7}
    assert sets["other"] == ["all", "plus-songs", "plus-wiki", "training", "minus-news"]
    assert sets["demix"] == ["training"]
    models = {job.name: [part.model for part in job.parts] for job in scoring_jobs(rows)}
    assert {name: some for name, some in models.items() if name.startswith("adapted-")} == {
        f"adapted-{name}": [*["other"] * number, f"dense-dapt-{name}"] for number, name in enumerate(NOVEL, 1)
    }


def test_the_model_without_a_domain_begins_with_the_seed_of_its_row() -> None:
    """The seed has seen the domain."""
    models = {"seeded": {"kind": "demix", "parent": "dense", "seed_tokens": 500}}
    removing = run_of(models=models, training={"sequences": 2}, removal=REMOVAL | {"model": "seeded"})
    without = next(model for model in removing.trained if model.removed)
    assert (without.parent, without.seed_step, without.base.name) == ("dense", 10, "seeded")


def test_each_added_expert_is_mixed_with_the_training_experts_alone() -> None:
    """On its own domain and on every training domain, by one rule, in the receiver's tables (section 6.2)."""
    for domain, added in (("wiki", ["wiki"]), ("law", ["songs", "wiki"])):
        (table,) = [one for one in evaluated(run_of(), domain) if one.model == "demix" and one.seed == 7]
        plus = [some for some in table.sets if some.label.startswith("plus-")]
        assert [some.experts for some in plus] == [(*TRAINING, name) for name in added]
        assert {(some.methods, some.weights) for some in plus} == {(("cached",), ("history",))}
    keys = {system.key for system in compared(run_of(), "wiki")}
    assert {("demix", "plus-wiki", "cached", "history"), ("demix", "training", "average", "")} <= keys


@pytest.mark.parametrize(("given", "factors"), [(0.3, [0.3, 0.3]), ({"demix": 1.0, "dense": 0.1}, [1.0, 0.1])])
def test_each_kind_of_adaptation_has_its_learning_rate(given: Any, factors: list[float]) -> None:
    rows = run_of(adaptation={"learning_rate_factor": given})
    assert [rows.learning_rate_factor(one.parent) for one in rows.adaptations[:2]] == factors


def test_a_novel_domain_that_is_appended_changes_no_job_of_before() -> None:
    """Of all others, seeds and contexts too; where jobs are submitted, each has one model."""
    for cluster in ({"launch": "local"}, {"launch": "slurm"}):
        rows, more = run_of(cluster=cluster, domains=domains(TRAINING, NOVEL[:1])), run_of(cluster=cluster)
        before, after = ({job.name: job for job in scoring_jobs(one)} for one in (rows, more))
        assert before.items() <= after.items()
        assert {name for name in after.keys() - before.keys() if "wiki" in name} == after.keys() - before.keys()
        assert (cluster["launch"] == "slurm") == all(len(job.parts) == 1 for job in after.values())


REPOSITORY = Path(__file__).parents[2]


def test_null_leaves_out_a_domain_of_the_base(tmp_path: Path) -> None:
    left_out = {"training": {"scripture": None, "politics": None}, "novel": {"wiki": None, "politics": TEXT}}
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump({"base": str(REPOSITORY / "config" / "sample.yaml"), "domains": left_out}))
    run, sample = load_run(mine), load_run(REPOSITORY / "config" / "sample.yaml")
    assert run.training == tuple(name for name in sample.training if name not in left_out["training"])
    assert run.novel == (*(name for name in sample.novel if name != "wiki"), "politics"), "moved to the novel domains"
    assert run.rows["demix"].learned == run.training
    assert completed_run(run.config.values).config.values == run.config.values
