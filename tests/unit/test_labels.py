"""The names of rows in tables: those that a config gives, and those made of what a row says."""

from pathlib import Path

import pytest

from demix.config.config import Config
from demix.errors import DemixError
from demix.run.main_systems import trained_systems
from demix.run.run import Run
from support.configs import small_run

REPOSITORY = Path(__file__).parents[2]


def labels(**models: dict) -> dict[str, str]:
    run = small_run(models=models, clusterings={"k2": {"clusters": 2}, "r2": {"clusters": 2, "method": "random"}})
    return {name: row.label for name, row in run.rows.items() if name in models}


def test_a_label_is_made_of_what_a_row_says() -> None:
    assert labels(
        a={"kind": "demix", "parent": "dense", "seed_tokens": 500},
        b={"kind": "branched", "data": "k2"},
        c={"kind": "branched", "data": "r2"},
        d={"kind": "demix", "data": "k2"},
        e={"kind": "routed", "top_k": 2},
        f={"kind": "branched", "parent": "imported/gpt2"},
        g={"kind": "demix", "tokens": 2000},
        h={"kind": "dense", "architecture": {"position": "alibi"}},
    ) == {
        "a": "DEMix, seed 500", "b": "c-BTM, 2 clusters", "c": "c-BTM, 2 random clusters", "d": "DEMix, 2 clusters",
        "e": "Token-routed, top-2", "f": "BTM, from gpt2", "g": "DEMix, 2k tokens",
        "h": "Dense (Balanced), position alibi",
    }  # fmt: skip


def test_no_two_rows_have_one_label() -> None:
    alike = {"kind": "demix", "learning_rate": 5e-4}
    assert labels(one=alike, two=alike) == {"one": "DEMix, one", "two": "DEMix, two"}
    # The paper's names are those of the paper's rows, of runs without them, too.
    assert labels(dense_unbalanced=None, plain={"kind": "dense_unbalanced"}) == {"plain": "Dense, plain"}
    with pytest.raises(DemixError, match=r"models\.two\.label: is DEMix, which the row demix is called, too"):
        labels(two=alike | {"label": "DEMix"})
    with pytest.raises(DemixError, match="is Mine, which the row"):
        labels(one=alike | {"label": "Mine"}, two=alike | {"label": "Mine"})
    with pytest.raises(DemixError, match=r"models\.dense\.label: is given to a row of the paper"):
        labels(dense={"label": "Mine"})
    for wrong in ("DEMix (cached prior)", "[red]", "", "two\nlines", "x" * 61):
        with pytest.raises(DemixError, match=r"models\.one\.label"):
            labels(one=alike | {"label": wrong})


def test_a_label_changes_neither_training_nor_names() -> None:
    one, other = (small_run(models={"x": {"kind": "demix", "tokens": 500} | more}) for more in ({}, {"label": "Mine"}))
    assert one.rows["x"].settings == other.rows["x"].settings
    assert [model.name for model in one.planned] == [model.name for model in other.planned]
    shown = [system.label for system in trained_systems(other) if system.model == "x"]
    assert shown[0] == "Mine (naive)"
    assert [system.key for system in trained_systems(one)] == [system.key for system in trained_systems(other)]


@pytest.mark.parametrize("name", ["sample", "families"])
def test_no_row_of_the_examples_is_named_by_its_key(name: str) -> None:
    rows = Run(Config.read(REPOSITORY / "config" / f"{name}.yaml"), Path()).rows
    assert not [row.label for row in rows.values() if row.name in row.label.split(", ")]
