"""Added experts that began as the average of others: what tables, claims and queries say of their parents."""

from pathlib import Path

import pandas as pd
import pytest

from demix.files import read_json, write_json
from demix.report.claims import claims
from demix.report.read import read_parents
from support.cli import demix
from support.configs import changed
from support.report import drawn, table_of
from support.synthetic_run import NOVEL, TRAINING, build_run


@pytest.mark.parametrize("named", [True, False])
def test_an_expert_that_began_as_an_average_has_no_single_parent(tmp_path: Path, named: bool) -> None:
    """Whether its file names the likeliest expert as its parent, too, or none. It is compared with the likeliest."""
    run = build_run(tmp_path / "results" / "made-up")
    for name, likeliest in (("wiki", "code"), ("songs", "law")):
        path = run.path / "models" / "demix" / "experts" / f"{name}.json"
        weights = {other: {"weight": 0.6 if other == likeliest else 0.2, "sha256": "0" * 64} for other in TRAINING}
        write_json(path, {**read_json(path), "parent": likeliest if named else None, "parents": weights})
    parents = read_parents(run.path / "models" / "demix" / "experts", list(NOVEL))
    table, copied = (table_of("table13", run.material(parents=which)) for which in (parents, run.parents))
    assert table.frame["Parent expert"].tolist()[:2] == ["average", "average"]
    numbers = table.frame.columns[:-1]
    pd.testing.assert_frame_equal(table.frame[numbers], copied.frame[numbers])
    assert "began as the average of the training experts by posterior, and is compared with the likel" in table.notes[1]
    assert "copied" not in table.caption + " ".join(table.notes)
    assert "with the parent expert that it was copied from" in copied.notes[1]
    judged = {claim.name: claim for claim in claims(run.material(parents=parents))}
    claim = judged["demix_dapt"]
    assert "the new expert beats the likeliest training expert on the new domain" in claim.statement
    assert "began as the average" in claim.statement
    assert "parent" not in claim.statement + claim.numbers
    told = demix("sql", run.path, "select distinct parent from experts where expert in ('wiki', 'songs')")
    assert "average" in told.output
    assert not {"code", "law"} & set(told.output.split())


def test_the_figure_of_adaptation_says_what_experts_begin_as(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    whole = changed(run.run, models={"btm": {"kind": "branched"}}, adaptation={"model": "btm"})
    for one, told in ((run.run, "trains a copy of one expert;"), (whole, "trains the average of all")):
        assert told in " ".join(drawn("figure6", run.material(one))["title"]["subtitle"])
