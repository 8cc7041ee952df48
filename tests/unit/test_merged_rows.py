"""What is made of the experts of a row without training: averages and routed models, scored as models of their own."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from demix.config.architecture import architecture_from
from demix.config.counts import parameters
from demix.errors import DemixError
from demix.plan.jobs import in_one_line, plan_jobs
from demix.report import left_out
from demix.run.check import completed_run
from demix.run.rules import RunRules
from demix.run.run import Run
from demix.run.scoring import scoring_jobs
from demix.run.systems import evaluated
from support.configs import changed

TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
BTM = {"kind": "branched", "parent": "dense", "seed_tokens": 6000}


def tiny(**rows: Any) -> Run:
    return completed_run(copy.deepcopy(TINY) | {"models": rows, "seeds": [1, 2]})


def test_each_average_is_made_scored_and_evaluated_once() -> None:
    config = tiny(btm=BTM | {"averages": True}, other=BTM)
    training, novel = config.training, config.novel
    assert [(one.rule, one.place) for one in config.merged] == [
        ("average_btm__uniform", "btm-uniform"), ("average_btm", "btm-average-{domain}"),
    ]  # fmt: skip
    made = set()
    for part in (part for job in scoring_jobs(config) for part in job.parts):
        if part.model.startswith(("btm-uniform", "btm-average")):
            assert (part.columns, part.splits, part.experts) == (("dense",), ("test",), ("dense",))
            names = {"{training}": training, "{novel}": novel}
            for place in part.domains:
                for name in names.get(place, [place]):
                    table = part.model.replace(place, name), name
                    assert table not in made
                    made.add(table)
    read = {
        (table.folder, domain) for domain in training + novel for table in evaluated(config, domain) if table.merged
    }
    assert (
        read
        == made
        == {(folder, domain) for domain in training + novel for folder in ("btm-uniform", f"btm-average-{domain}")}
    )
    (uniform, posterior) = [table for table in evaluated(config, novel[0]) if table.merged]
    assert (uniform.model, uniform.merged, uniform.sets, uniform.splits) == ("btm", "uniform", (), ("test",))
    assert (posterior.model, posterior.merged, posterior.seed) == ("btm", "posterior", 1)
    (job,) = [job for job in plan_jobs(config, "cpu") if job.name == "average"]
    assert job.rules == {"average_btm__uniform": 1, "average_btm": len(training + novel)}


def test_rows_that_do_not_ask_have_none() -> None:
    config = tiny(btm=BTM)
    assert config.merged == ()
    assert not [part for job in scoring_jobs(config) for part in job.parts if "btm-" in part.model.replace("-seed", "")]
    assert not [job for job in plan_jobs(config, "cpu") if job.name == "average"]
    with pytest.raises(DemixError, match=r"models\.x\.averages: is given to a row of kind demix; use kind: branched"):
        tiny(x={"kind": "demix", "averages": True})
    with pytest.raises(
        DemixError, match=r"merged_routed: is given to a row of kind dense; use kind: demix or branched"
    ):
        tiny(dense={"merged_routed": True})
    one = {"training": {"law": TINY["domains"]["training"]["licenses"]}}
    alone = copy.deepcopy(TINY) | {"domains": one, "models": {"demix": {"merged_routed": True}}, "removal": {}}
    with pytest.raises(DemixError, match=r"models\.demix\.merged_routed: is given to a row of one expert, and tokens"):
        completed_run(alone)


def test_a_routed_model_is_made_of_a_row_of_demix_scored_and_evaluated_once() -> None:
    rows = {"demix": {"merged_routed": True}, "on_clusters": {"kind": "demix", "data": "k2", "merged_routed": True}}
    clusterings = {"k2": {"clusters": 2}}
    config, before = (
        completed_run(copy.deepcopy(TINY) | {"models": models, "clusterings": clusterings, "seeds": [1, 2]})
        for models in (rows, {"demix": {}, "on_clusters": {"kind": "demix", "data": "k2"}})
    )
    made = config.merged
    assert [(one.rule, one.place) for one in made] == [
        ("merge_routed_demix", "demix-routed"), ("merge_routed_on_clusters", "on_clusters-routed"),
    ]  # fmt: skip
    assert [one.architecture.routed.experts for one in made] == [3, 2]
    for domain in config.domains:
        found, were = (list(evaluated(one, domain)) for one in (config, before))
        assert found[: len(were)] == were
        assert [(table.model, table.folder, table.seed, table.merged, table.columns, table.splits, table.sets)
                for table in found[len(were) :]] == [
            ("demix", "demix-routed", 1, "routed", ("dense",), ("test",), ()),
            ("on_clusters", "on_clusters-routed", 1, "routed", ("dense",), ("test",), ()),
        ]  # fmt: skip
    now, then = ({(job.rule, part): job.jobs for job in scoring_jobs(one) for part in job.parts}
                 for one in (config, before))  # fmt: skip
    training, novel = config.training, config.novel
    assert sorted((rule, part.model, part.domains, now[rule, part]) for rule, part in now.keys() - then.keys()) == [
        *[("score_known_others", f"{row}-routed", training, 1) for row in ("demix", "on_clusters")],
        *[("score_others", f"{row}-routed", ("{novel}",), len(novel)) for row in ("demix", "on_clusters")],
    ]
    assert not then.keys() - now.keys()
    counts = [{rule: count for job in plan_jobs(one, "cpu") for rule, count in job.rules.items()}
              for one in (config, before)]  # fmt: skip
    # Nothing but these jobs is new: trainings and their settings are as before.
    dev = {"cluster_dev_k2": 1, "loads": 2}
    assert {rule: count for rule, count in counts[0].items() if counts[1].get(rule) != count} == dev | {
        one.rule: 1 for one in made
    }
    assert not counts[1].keys() - counts[0].keys()
    for now, then in zip(config.trained, before.trained, strict=True):
        assert RunRules(config).training_settings(now) == RunRules(before).training_settings(then)
        assert RunRules(config).train_inputs(now) == RunRules(before).train_inputs(then)
        assert (
            RunRules(config).train_options(now).split(" --live ")[0]
            == RunRules(before).train_options(then).split(" --live ")[0]
        )
    tokens = RunRules(config).learned_tokens(made[1].model, "dev")
    assert tokens == [f"results/tiny/clusters/k2/shards/{cluster}/dev.arrow" for cluster in ("c00", "c01")]
    large = architecture_from({"preset": "gpt3-xl"})
    sizes = {key: getattr(large, key) for key in ("layers", "width", "heads", "context")}
    now, then = (
        float(re.search(r"([\d.]+) GB", in_one_line(changed(one, architecture=sizes), "cpu"))[1])
        for one in (config, before)
    )
    shared, expert = parameters(large, config.types)
    sums = 8 * 5 * large.layers * (large.width * (large.width + 1) / 2 + large.width)
    assert now - then == pytest.approx((4 * (2 * shared + 5 * expert) + sums) / 1e9, abs=0.2)
    assert "families" in left_out(tiny(demix={}))
    assert "families" not in left_out(tiny(demix={"merged_routed": True}))
