"""Averages of the experts of a row, scored as models of their own."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from demix.config.averages import averages
from demix.config.check import complete
from demix.config.evaluated import evaluated
from demix.config.scoring import scoring_jobs
from demix.errors import DemixError
from demix.plan.jobs import plan_jobs

TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
BTM = {"kind": "branched", "parent": "dense", "seed_tokens": 6000}


def tiny(**rows: Any) -> dict[str, Any]:
    return complete(copy.deepcopy(TINY) | {"models": rows, "seeds": [1, 2]}, Path())


def test_each_average_is_made_scored_and_evaluated_once() -> None:
    config = tiny(btm=BTM | {"averages": True}, other=BTM)
    training, novel = list(config["domains"]["training"]), list(config["domains"]["novel"])
    assert [(one.rule, one.place) for one in averages(config)] == [
        ("average_btm__uniform", "btm-uniform"), ("average_btm", "btm-average-{domain}"),
    ]  # fmt: skip
    made = set()
    for job in scoring_jobs(config):
        if "average" in job.rule:
            assert (job.columns, job.splits, job.experts) == (("dense",), ("test",), ("dense",))
            names = {"{training}": training, "{novel}": novel}
            for place in job.domains:
                for name in names.get(place, [place]):
                    table = job.model.replace(place, name), name
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
    assert averages(config) == ()
    assert not [job for job in scoring_jobs(config) if "average" in job.rule]
    assert not [job for job in plan_jobs(config, "cpu") if job.name == "average"]
    with pytest.raises(DemixError, match=r"models\.x\.averages: is given to a row of kind demix; use kind: branched"):
        tiny(x={"kind": "demix", "averages": True})
