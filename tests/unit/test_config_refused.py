"""Configs that are refused, each by the key at fault."""

from typing import Any

import pytest
from hypothesis import given, strategies
from snakemake.io import PeriodicityDetector

from demix.config.names import refuse_name
from demix.run.check import completed_run
from support.configs import TEXT, domains, small
from support.errors import refused
from support.row_keys import KEYS, SECTIONS

NAN = float("nan")
HUGE = 16**5000
LONG = "a_name_of_" + "0123456789" * 6
TWO = {"experts_per_job": 2}
BTM = {"kind": "branched", "averages": True}
SEED = {"kind": "demix", "parent": "dense", "seed_tokens": 500}
BRANCHED = SEED | {"kind": "branched"}
HUB = {"kind": "hub", "path": "owner/name", "data_files": ["*.parquet"], "revision": "main"}
FOREIGN = {"alibi": {"kind": "dense", "architecture": {"position": "alibi"}}}
LAW = {"retrain_without": ["law"], "replacement": "songs"}


def text(**keys: Any) -> dict[str, Any]:
    """A training domain `law` with these keys."""
    return {"domains": {"training": {"law": TEXT | keys, "news": TEXT}}}


def source(**keys: Any) -> dict[str, Any]:
    """A training domain `law` whose source has these keys."""
    return text(source=TEXT["source"] | keys)


def row(**keys: Any) -> dict[str, Any]:
    """A model entry `mine` with these keys."""
    return {"models": {"mine": keys}}


def task(**keys: Any) -> dict[str, Any]:
    return {"tasks": {"t": keys}}


def suite(**keys: Any) -> dict[str, Any]:
    """A perplexity suite `a` whose text `b` has these keys."""
    return {"evaluation": {"suites": {"a": {"b": TEXT | keys}}}}


def harness(**keys: Any) -> dict[str, Any]:
    return {"lm_eval": {"tasks": ["a"]} | keys}


VALUES = [
    ({"evalution": {}}, "evalution"),
    ({"seed": "one"}, "seed"),
    ({"seed": True}, "seed"),
    ({"seed": HUGE}, "seed"),
    ({"run": "../elsewhere"}, "run"),
    ({"run": "my run"}, "run"),
    ({"run": "r" * 101}, "run"),
    ({"training": {"learning_rat": 1}}, "training.learning_rat"),
    ({"training": {"learning_rate": "1e-3"}}, "training.learning_rate"),
    ({"training": {"learning_rate": NAN}}, "training.learning_rate"),
    ({"training": {"learning_rate": HUGE}}, "training.learning_rate"),
    ({"training": {"tokens": 1.0e6}}, "training.tokens"),
    ({"training": {"tokens": HUGE}}, "training.tokens"),
    ({"training": {"tokens": 9}}, "training.tokens"),
    ({"training": {"sequences": 9_999_999_999}}, "training.sequences"),
    ({"training": {"ranks": 9_999_999_999}}, "training.ranks"),
    ({"training": {"ranks": 3}}, "training.ranks"),
    ({"training": {"ranks": 4, "replicas": {"nesw": 2}}}, "training.replicas.nesw"),
    ({"training": {"preset": "papers"}}, "training.preset"),
    ({"training": {"sweep": {"learning_rates": [1e-3], "tokens": 9}}}, "training.sweep.tokens"),
    ({"training": {"sweep": {"learning_rates": [], "tokens": 99}}}, "training.sweep.learning_rates"),
    ({"training": {"sweep": {"learning_rates": [0.1, 0.1], "tokens": 99}}}, "training.sweep.learning_rates"),
    ({"architecture": {"heads": 3}}, "architecture.heads"),
    ({"clusterings": {"k": {"clusters": 10**12}}}, "clusterings.k.clusters"),
    ({"tracking": {"uri": "postgresql://me:secret@host/db"}}, "tracking.uri"),
    ({"cluster": {"minutes": 2, "grace_seconds": 120}}, "cluster.grace_seconds"),
    ({"evaluation": {"decay": 1.5}}, "evaluation.decay"),
    ({"evaluation": {"weights": ["last"]}}, "evaluation.weights.0"),
    ({"evaluation": {"weights": ["switching(2)"]}}, "evaluation.weights.0"),
    ({"evaluation": {"weights": ["tempered(2,0.5,1)"]}}, "evaluation.weights.0"),
    ({"evaluation": {"weights": ["released"]}}, "evaluation.weights"),
    ({"evaluation": {"weights": ["history", "cluster"]}}, "evaluation.weights"),
    ({"adaptation": {"model": "nothing"}}, "adaptation.model"),
    ({"adaptation": {"model": "dense"}}, "adaptation.model"),
    ({"adaptation": {"dense": "dense_unbalanced"}, "models": {"dense_unbalanced": None}}, "adaptation.dense"),
]
DOMAINS = [
    (text(words={"dev": -5}), "domains.training.law.words.dev"),
    ({"domains": {"training": {"law": {}, "news": TEXT}}}, "domains.training.law.source"),
    ({"domains": {"training": {"law": None}}}, "domains.training"),
    ({"domains": {"training": {"law": 3}}}, "domains.training.law"),
    ({"domains": domains(("law",), ("law",))}, "domains.novel.law"),
    ({"domains": domains(("law",), ("a/b",))}, "domains.novel.a/b"),
    ({"domains": domains(("law",), ("tokens",))}, "domains.novel.tokens"),
    ({"domains": domains(("law",), ("ab\n",))}, "domains.novel.ab\n"),
    ({"domains": domains(("law",), (LONG,))}, f"domains.novel.{LONG}"),
    ({"domains": domains(("law",), ("ha" * 30,))}, f"domains.novel.{'ha' * 30}"),
    (source(kind="ftp"), "domains.training.law.source.kind"),
    (source(kind="url", path="text.jsonl"), "domains.training.law.source.path"),
    (source(kind="url", path=["https://host/a.jsonl"], parts=2), "domains.training.law.source.parts"),
    (source(kind="hub", path="owner/name", revision="0" * 40), "domains.training.law.source.data_files"),
    (text(source=HUB), "domains.training.law.source.revision"),
    (text(source=HUB | {"revision": None}), "domains.training.law.source.revision"),
    (text(source=HUB | {"revision": "0" * 40, "bytes": {"a": 1}}), "domains.training.law.source.sha256"),
    (source(sha256={"a": "xyz"}), "domains.training.law.source.sha256.a"),
    (source(where={"license": None}), "domains.training.law.source.where.license"),
    ({"removal": {"retrain_without": ["lwa"]}}, "removal.retrain_without"),
    (
        {"domains": {"training": {"law": None, "news": TEXT}}, "removal": {"retrain_without": ["law"]}},
        "removal.retrain_without",
    ),
    ({"removal": LAW | {"replacement": "wiki"}}, "removal.replacement"),
    ({"removal": LAW | {"model": "nothing"}}, "removal.model"),
    ({"domains": domains(("law",)), "removal": {"retrain_without": ["law"]}}, "removal.replacement"),
    (row(**SEED) | {"removal": {"retrain_without": ["law"], "model": "mine"}}, "removal.replacement"),
]
MODELS = [
    ({"models": {"Demix-small": {}}}, "models.Demix-small"),
    ({"models": {"x" * 20: {"kind": "dense"}}}, f"models.{'x' * 20}"),
    ({"models": {"demix": None}}, "models.demix"),
    ({"models": {"dense": None}}, "models.dense"),
    ({"models": {"dense": {"kind": "demix"}}}, "models.dense.kind"),
    ({"models": {"dense": {"preset": 3}}}, "models.dense.preset"),
    (row(), "models.mine.kind"),
    (row(kind="sparse"), "models.mine.kind"),
    (row(kind="demix", learning_rat=1), "models.mine.learning_rat"),
    (row(kind="demix", tokens=None), "models.mine.tokens"),
    (row(kind="demix", ranks=3), "models.mine.ranks"),
    (row(kind="demix", replicas={"law": 2}), "models.mine.ranks"),
    (row(kind="demix", replicas={"laws": 2}), "models.mine.replicas.laws"),
    (row(kind="demix", data="k2", replicas={"law": 2}), "models.mine.replicas"),
    (
        row(kind="demix", data="k2") | {"training": {"sequences": 2, "ranks": 3, "replicas": {"law": 2}}},
        "models.mine.replicas",
    ),
    (row(kind="dense", replicas={"law": 2}), "models.mine.replicas"),
    (row(kind="demix", trained="routers", parent="a/b"), "models.mine.trained"),
    (row(kind="demix", parent="a/b", sweep=KEYS["sweep"]), "models.mine.sweep"),
    (row(kind="routed", capacity=1e308), "models.mine.capacity"),
    (row(kind="routed", parent="demix", sweep=KEYS["sweep"]), "models.mine.sweep"),
    (row(kind="demix", parent="dense"), "models.mine.seed_tokens"),
    (row(kind="demix", seed_tokens=5), "models.mine.parent"),
    (row(**SEED | {"parent": "old"}), "models.mine.parent"),
    (row(**SEED | {"parent": "domain_token"}), "models.mine.parent"),
    (row(**SEED | {"parent": "dense_unbalanced"}), "models.mine.parent"),
    (row(**SEED | {"parent": "a/b"}), "models.mine.parent"),
    (row(**SEED | {"kind": "dense"}), "models.mine.parent"),
    (row(kind="domain_token", parent="a/b"), "models.mine.parent"),
    ({"models": {"mine": SEED | {"parent": "yours"}, "yours": SEED}}, "models.mine.parent"),
    (row(**SEED | {"seed_tokens": 1001}), "models.mine.seed_tokens"),
    (row(**SEED | {"seed_tokens": 9}), "models.mine.seed_tokens"),
    (row(**SEED | {"z_loss": 0.1}), "models.mine.z_loss"),
    (row(**SEED | {"learning_rate": 0.1}), "models.mine.learning_rate"),
    (row(**SEED | {"kind": "anchored"}), "models.mine.weight_decay"),
    (
        row(**SEED | {"kind": "anchored", "weight_decay": 0.0}) | {"adaptation": {"model": "mine"}},
        "adaptation.model",
    ),
    (
        {"models": FOREIGN | {"mine": SEED | {"parent": "alibi", "architecture": {"preset": "paper"}}}},
        "models.mine.architecture",
    ),
    # Names that rules of other models have.
    ({"seeds": [2], "models": {"dense_seed2": {"kind": "dense"}}}, "models.dense_seed2"),
    ({"models": {"btm": BTM, "btm__uniform": BTM}}, "models.btm__uniform"),
    ({"models": {"btm": BTM, "btm__law": {"kind": "dense"}}}, "models.btm__law"),
    ({"removal": LAW, "models": {"without_law": {"kind": "demix"}}}, "models.without_law"),
    ({"models": {"known_dense": {"kind": "dense"}}}, "models.known_dense"),
]
OTHER_TEXT = [
    (task(), "tasks.t"),
    (task(path="a", made="domains"), "tasks.t"),
    (task(path="a", template="{label}: {text}"), "tasks.t.template"),
    (task(path="a", seeds=[1, 2]), "tasks.t.seeds"),
    (task(path="a", choices=3), "tasks.t.choices"),
    (task(path="a", labels={"a": "b", "c": "b"}), "tasks.t.labels"),
    (task(path="a", labels={"a": "b"}), "tasks.t.labels"),
    (task(path="a", labels={str(number): "x" for number in range(100_000)}), "tasks.t.labels"),
    (task(path="a", shots=1, calibrated=True), "tasks.t.calibrated"),
    (task(path="https://me:word@there/x.jsonl"), "tasks.t.path"),
    (task(test=HUB), "tasks.t.test.revision"),
    ({"tasks": {"X y": {"path": "a"}}}, "tasks.X y"),
    (suite(words={"train": 9}), "evaluation.suites.a.b"),
    (suite(near_duplicates=0.5), "evaluation.suites.a.b"),
    (suite(source=HUB), "evaluation.suites.a.b.source.revision"),
    (suite(source={"kind": "url", "path": "x"}), "evaluation.suites.a.b.source.path"),
    ({"evaluation": {"suites": {"a": {"b": {}}}}}, "evaluation.suites.a.b.source"),
    ({"evaluation": {"suites": {"A": {"b": TEXT}}}}, "evaluation.suites.A"),
    ({"evaluation": {"suites": {"a": {"b_c": TEXT}, "a_b": {"c": TEXT}}}}, "evaluation.suites.a_b.c"),
    (harness(tasks=[]), "lm_eval.tasks"),
    (harness(models=["domain_token"]), "lm_eval.models"),
    (harness(weights=["best"]), "lm_eval.weights.0"),
    (harness(weights=["cluster"]), "lm_eval.weights"),
    (harness(limit=0), "lm_eval.limit"),
    (harness(include_path="."), "lm_eval.include_path: ."),
]


@pytest.mark.parametrize(
    ("sections", "subject"),
    [pytest.param(*case, id=ascii(case[1])) for case in (*VALUES, *DOMAINS, *MODELS, *OTHER_TEXT)],
)
def test_a_config_is_refused_by_its_key(sections: dict[str, Any], subject: str) -> None:
    with refused(subject):
        completed_run(small(**{"clusterings": SECTIONS["clusterings"]} | sections))


def test_a_key_that_is_no_text_is_refused() -> None:
    with refused("None"):
        completed_run({None: None})


def test_names_and_values_that_only_resemble_refused_ones_are_accepted() -> None:
    names = ("dense_seed3", "without_news", "btm__posterior", "others", "ab" * 8 + "c" * 19)
    rows = {name: {"kind": "dense"} for name in names} | {"btm": BTM}
    rows |= {"same": SEED | {"z_loss": None, "optimizer": None}}
    rows |= {"flat": SEED | {"kind": "anchored", "weight_decay": 0.0}}
    rows |= {"again": SEED | {"parent": "alibi", "architecture": {"preset": "paper", "position": "alibi"}}, **FOREIGN}
    run = completed_run(small(seeds=[1, 2], models=rows))
    assert run.rows.keys() >= {*rows}
    assert run.rows["again"].architecture == run.rows["alibi"].architecture
    plain = {"plain": {"kind": "dense"}, "clusters": {"kind": "demix", "data": "k2", "replicas": {}, "ranks": 2}}
    training = {"sequences": 2, "ranks": 3, "replicas": {"law": 2}}
    completed_run(small(**SECTIONS | {"training": training}, models=plain))


@given(strategies.text("ab_", min_size=1, max_size=4), strategies.integers(1, 60), strategies.text("ab_", max_size=4))
def test_a_name_that_snakemake_takes_for_a_loop_is_refused(part: str, number: int, before: str) -> None:
    name = (before + part * number)[:64]
    if PeriodicityDetector().is_periodic(name) is None:
        refuse_name(name)
    else:
        with pytest.raises(ValueError):  # noqa: PT011
            refuse_name(name)
