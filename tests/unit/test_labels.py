"""The names of models in tables: those that a config gives, and those made of what a model entry says."""

from pathlib import Path
from typing import Any

import pytest

from demix.config.config import Config
from demix.run.main_systems import trained_systems
from demix.run.run import Run
from support.configs import small_run
from support.errors import refused

REPOSITORY = Path(__file__).parents[2]
ALIKE = {"kind": "demix", "learning_rate": 5e-4}


def labels(**models: Any) -> dict[str, str]:
    run = small_run(models=models, clusterings={"k2": {"clusters": 2}, "r2": {"clusters": 2, "method": "random"}})
    return {name: row.label for name, row in run.rows.items() if name in models}


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"kind": "demix", "parent": "dense", "seed_tokens": 500}, "DEMix, warm start 500"),
        ({"kind": "branched", "data": "k2"}, "c-BTM, 2 clusters"),
        ({"kind": "branched", "data": "r2"}, "c-BTM, 2 random clusters"),
        ({"kind": "demix", "data": "k2"}, "DEMix, 2 clusters"),
        ({"kind": "routed", "top_k": 2}, "Token-routed, top-2"),
        ({"kind": "branched", "parent": "imported/gpt2"}, "BTM, from gpt2"),
        ({"kind": "demix", "tokens": 2000}, "DEMix, 2k tokens"),
        ({"kind": "dense", "architecture": {"position": "alibi"}}, "Dense (Balanced), position alibi"),
    ],
)
def test_a_label_is_made_of_what_a_model_entry_says(row: dict[str, Any], label: str) -> None:
    assert labels(x=row) == {"x": label}


def test_no_two_models_have_one_label() -> None:
    assert labels(one=ALIKE, two=ALIKE) == {"one": "DEMix, one", "two": "DEMix, two"}
    # The paper's names are those of the paper's models, of runs without them, too.
    assert labels(dense_unbalanced=None, plain={"kind": "dense_unbalanced"}) == {"plain": "Dense, plain"}


@pytest.mark.parametrize(
    ("models", "subject"),
    [
        ({"two": ALIKE | {"label": "DEMix"}}, "two"),
        ({"one": ALIKE | {"label": "Mine"}, "two": ALIKE | {"label": "Mine"}}, "one"),
        ({"dense": {"label": "Mine"}}, "dense"),
        *(
            ({"one": ALIKE | {"label": label}}, "one")
            for label in ("DEMix (cached prior)", "[red]", "<b>", "a|b", "", "two\nlines", "x" * 61)
        ),
    ],
)
def test_a_label_of_another_or_with_markup_is_refused(models: dict[str, Any], subject: str) -> None:
    with refused(f"config key models.{subject}.label"):
        labels(**models)


def test_a_label_changes_neither_training_nor_names() -> None:
    one, other = (small_run(models={"x": {"kind": "demix", "tokens": 500} | more}) for more in ({}, {"label": "Mine"}))
    assert one.rows["x"].settings == other.rows["x"].settings
    assert [model.name for model in one.planned] == [model.name for model in other.planned]
    assert "Mine (naive)" in {system.label for system in trained_systems(other)}


@pytest.mark.parametrize("name", ["sample", "families"])
def test_no_model_of_the_examples_is_named_by_its_key(name: str) -> None:
    rows = Run(Config.read(REPOSITORY / "config" / f"{name}.yaml"), Path()).rows
    assert not [row.label for row in rows.values() if row.name in row.label.split(", ")]
