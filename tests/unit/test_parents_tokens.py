"""Tokens of the model in a folder that training begins with: counted where they are known, and else said to be not."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from demix.files import read_json, write_json
from demix.model.description import tokens_learned
from demix.plan.cost import training_tables
from demix.plan.flops import training_flops_per_token
from demix.report.card import model_card
from demix.report.read import tokens_before
from demix.run.check import load_run
from support.configs import changed
from support.models import write_model
from support.report import table_of
from support.synthetic_run import build_run

OWN = 2457600
ROWS = {
    "mine": {"kind": "branched", "label": "mine", "parent": "imported/known"},
    "theirs": {"kind": "demix", "label": "theirs", "parent": "imported/gpt2"},
}


def begun(tokens: int | None) -> dict[str, Any]:
    return {"model": "known", "step": 0, "tokens": tokens, "state_sha256": "4" * 64}


def test_tables_count_what_is_known_and_name_what_is_not(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    with_parents = changed(run.run, models=ROWS)
    for row, tokens in (("mine", 1_000_000), ("theirs", None)):
        write_json(run.path / "models" / row / "model.json", {"kind": "demix", "parent": begun(tokens)})
    before = tokens_before(with_parents)
    assert before == {"mine": 1_000_000, "theirs": None}
    table = table_of("families", run.material(with_parents, tokens_before=before))
    costs = table_of("family_costs", run.material(with_parents))
    by_token = training_flops_per_token(run.run.architecture, 4096, 256)
    for frame, column, each in ((table.frame, "Tokens", 1), (costs.frame, "FLOPs of training", by_token)):
        assert frame.at["mine", column] == pytest.approx(each * (OWN + 1_000_000))
        assert math.isnan(frame.at["theirs", column]), "no number that looks complete"
        assert frame.at["DEMix", column] == pytest.approx(each * OWN)
    for one in (table, costs):
        notes = " ".join(one.notes)
        assert "of the parent imported/gpt2 of theirs are not known; the row's own training took 2,457,600" in notes
        assert "model in a folder that a row began with count, too" in notes
    assert "parent" not in " ".join(table_of("families", run.material(tokens_before={})).notes)


def test_a_chain_of_folders_adds_up_and_is_unknown_where_one_is() -> None:
    seeded = {"tokens": 50, "parent": {"model": "dense", "step": 3, "tokens": 20}}
    assert tokens_learned({"tokens": 50}) == tokens_learned(seeded) == 50
    assert tokens_learned({"tokens": 50, "parent": begun(7)}) == 57
    assert tokens_learned({}) is tokens_learned({"tokens": 50, "parent": begun(None)}) is None
    assert tokens_learned({"tokens": 5, "parent": "dense"}) is None, "those of the adaptation alone"


@pytest.mark.parametrize(("tokens", "told"), [(None, "not known"), (1_234_567, "1,234,567")])
def test_a_card_says_what_its_parent_had_read(tmp_path: Path, tokens: int | None, told: str) -> None:
    run = build_run(tmp_path / "made-up")
    directory = run.path / "models" / "demix"
    shutil.rmtree(directory)
    write_model(directory, ("code", "law", "news"))
    sizes = {"shared_parameters": 1000, "expert_parameters": 2000, "parent": begun(tokens)}
    write_json(directory / "model.json", read_json(directory / "model.json") | sizes)
    card = model_card(run.run, "demix")
    assert f"beside the tokens of its parent known ({told})" in card
    assert "the first" not in card


def test_the_plan_says_what_it_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run(Path(__file__).parents[2] / "config" / "cbtm-1.3b.yaml")
    monkeypatch.chdir(tmp_path)
    told = str(training_tables(config, None, "a100")[0].caption)
    assert "tokens of the parent imported/opt-1.3b of btm, cbtm_16 are not known" in told
    write_model(folder := tmp_path / "imported" / "opt-1.3b", ("dense",))
    write_json(folder / "model.json", read_json(folder / "model.json") | {"tokens": 180_000_000_000})
    told = str(training_tables(config, None, "a100")[0].caption)
    assert "tokens of the parent imported/opt-1.3b of btm, cbtm_16 (180G) are not counted" in told
