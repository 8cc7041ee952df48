"""Tokens of the model in a folder that training begins with: counted where they are known, and else said to be not."""

import math
from pathlib import Path
from typing import Any

import pytest

from demix.files import read_json, write_json
from demix.model.description import tokens_learned
from demix.plan.cost import training_tables
from demix.plan.flops import training_flops_per_token
from demix.report.card import model_card
from demix.report.material import Material
from demix.report.read import tokens_before
from demix.run.check import load_run
from demix.run.run import Run
from support.configs import changed
from support.models import write_model
from support.report import table_of

ROWS = {
    "mine": {"kind": "branched", "label": "mine", "parent": "imported/known"},
    "theirs": {"kind": "demix", "label": "theirs", "parent": "imported/gpt2"},
}


def begun(tokens: int | None) -> dict[str, Any]:
    return {"model": "known", "step": 0, "tokens": tokens, "state_sha256": "4" * 64}


def test_tables_count_what_is_known_and_leave_out_what_is_not(frozen_copy: Run) -> None:
    run = changed(frozen_copy, models=ROWS)
    for row, tokens in (("mine", 1_000_000), ("theirs", None)):
        write_json(run.folder / "models" / row / "model.json", {"kind": "demix", "parent": begun(tokens)})
    before = tokens_before(run)
    assert (before["mine"], before["theirs"]) == (1_000_000, None)
    table, costs = (table_of(name, Material(run)).frame for name in ("families", "family_costs"))
    by_token = training_flops_per_token(run.architecture, run.types, run.context)
    own = int(run.config.training.tokens)
    for frame, column, each in ((table, "Tokens", 1), (costs, "FLOPs of training", by_token)):
        assert frame.at["mine", column] == pytest.approx(each * (own + 1_000_000))
        assert math.isnan(frame.at["theirs", column]), "no number that looks complete"
        assert frame.at["DEMix", column] == pytest.approx(each * own)


def test_a_chain_of_folders_adds_up_and_is_unknown_where_one_is() -> None:
    seeded = {"tokens": 50, "parent": {"model": "dense", "step": 3, "tokens": 20}}
    assert tokens_learned({"tokens": 50}) == tokens_learned(seeded) == 50
    assert tokens_learned({"tokens": 50, "parent": begun(7)}) == 57
    assert tokens_learned({}) is tokens_learned({"tokens": 50, "parent": begun(None)}) is None
    assert tokens_learned({"tokens": 5, "parent": "dense"}) is None, "those of the adaptation alone"


@pytest.mark.parametrize(("tokens", "told"), [(None, "not known"), (1_234_567, "1,234,567")])
def test_a_card_says_what_its_parent_had_read(frozen_copy: Run, tokens: int | None, told: str) -> None:
    path = frozen_copy.folder / "models" / "demix" / "model.json"
    write_json(path, read_json(path) | {"parent": begun(tokens)})
    assert f"its parent known ({told})" in model_card(frozen_copy, "demix")


def test_the_plan_says_what_it_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run(Path(__file__).parents[2] / "config" / "cbtm-1.3b.yaml")
    monkeypatch.chdir(tmp_path)
    told = str(training_tables(config, None, "a100")[0].caption)
    assert "tokens of the parent imported/opt-1.3b of btm, cbtm_16 are not known" in told
    write_model(folder := tmp_path / "imported" / "opt-1.3b", ("dense",))
    write_json(folder / "model.json", read_json(folder / "model.json") | {"tokens": 180_000_000_000})
    told = str(training_tables(config, None, "a100")[0].caption)
    assert "tokens of the parent imported/opt-1.3b of btm, cbtm_16 (180G) are not counted" in told
