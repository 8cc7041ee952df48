"""Rows of masked language models: configs, training, mixing, tables, adaptation, and what refuses them."""

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax

from demix.commands.new_domain import add_domain
from demix.config.architecture import Architecture
from demix.config.evaluation import MixingRecipe
from demix.errors import DemixError
from demix.evaluate.choice import tempered_on_dev
from demix.evaluate.domain import Evaluation, Outputs, evaluate_domain
from demix.evaluate.own_text import evaluate_text
from demix.evaluate.parent import choose_parent, own_dev_losses
from demix.evaluate.planned import planned_mixtures
from demix.evaluate.score import Scoring, score
from demix.evaluate.score_tables import read_scores
from demix.files import read_json_lines, sha256_file
from demix.launch.job import Places
from demix.model.checkpoint import describe, load_model
from demix.model.decode import open_model
from demix.model.export import export_hf
from demix.model.gpt import GPT, MASKED
from demix.plan.flops import scoring_flops
from demix.report import report_files
from demix.report.material import Material
from demix.report.read import read_results
from demix.run.check import completed_run
from demix.run.compared import compared
from demix.run.main_systems import main_systems
from demix.run.models import Model
from demix.run.run import Run
from demix.run.scoring import scoring_jobs
from demix.run.systems import Evaluated, ExpertSet, chosen_on_dev, evaluated, masked_systems, table_rows
from demix.train.adapt import adapt_expert
from demix.train.batches import balanced_batches, mixed_batches
from demix.train.branch import branched
from demix.train.loop import train
from demix.train.stage import optimization
from demix.train.state import State
from support.cli import demix, said
from support.configs import changed, domains
from support.contents import contents
from support.plain_training import adamw, plain_steps, rates
from support.report import table_of
from support.tokens import NOVEL, TRAINING
from support.training import ADAPT, SIZES, TRAIN, opened, shard_paths, stop_at, train_model

TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
MASKED_LM = {"attention": "bidirectional", "objective": "mlm"}
ROWS = {
    "masked_dense": {"kind": "dense", "architecture": MASKED_LM},
    "masked": {"kind": "demix", "architecture": MASKED_LM},
}
RECIPE = dataclasses.replace(TRAIN, architecture=SIZES | MASKED_LM, tokens=6 * TRAIN.tokens)
TABLES = ("results", "priors", "differences", "posteriors", "losses")


def tiny(more: dict[str, Any] | None = None, **rows: Any) -> Run:
    return completed_run(copy.deepcopy(TINY) | {"models": rows} | (more or {}))


def row_of(config: Run, name: str) -> Model:
    return next(model for model in config.trained if model.name == name)


def test_no_rule_that_reads_the_text_mixes_a_masked_row_and_no_table_of_others_has_it() -> None:
    clusterings = {"by_domain": {"method": "metadata"}, "k2": {"clusters": 2}}
    weights = ["history", "released", "tempered", "switching", 8, "cluster", "cluster+history"]
    more = {"clusterings": clusterings, "evaluation": {"weights": weights, "temperatures": [1], "top_k": [2]}}
    config, plain = (tiny(more, **rows) for rows in (ROWS | {"masked_k2": ROWS["masked"] | {"data": "k2"}}, {}))
    assert [row_of(config, name).masked for name in (*ROWS, "masked_k2", "demix")] == [True, True, True, False]
    evaluation = MixingRecipe(weights=tuple(weights), temperatures=(1.0,), top_k=(2,))
    for domain in ("parliament", "fantasy"):
        tables = {table.model: table for table in evaluated(config, domain)}
        assert [table for table in tables.values() if not table.model.startswith("masked")] == [
            *evaluated(plain, domain)
        ]
        assert (tables["masked_dense"].columns, tables["masked_dense"].sets) == (("dense",), ())
        for name in ("masked", "masked_k2"):
            (some,) = tables[name].sets
            found = {(one.method, one.weights, one.top_k) for one, _ in planned_mixtures(evaluation, some, 10)}
            floors = {("best_block", "", None), ("best_token", "", None)}
            static = {("average", "", None), ("fitted", "", None)}
            # Two experts have no fewer than two.
            assert found == floors | static | ({("fitted", "", 2)} if name == "masked" else set())
        assert compared(config, domain) == compared(plain, domain)
    assert chosen_on_dev(config) == chosen_on_dev(plain)
    assert table_rows(config) == table_rows(plain)
    assert main_systems(config) == main_systems(plain)
    assert [(one.model, one.method) for one in masked_systems(config)] == [
        ("masked_dense", "dense"),
        *(("masked", method) for method in ("naive", "average", "fitted")),
        *(("masked_k2", method) for method in ("average", "fitted")),
    ]
    assert {file.partition("/")[2] for file in {*report_files(config)} - {*report_files(plain)}} == {
        f"masked.{suffix}" for suffix in ("html", "md", "tex")
    }
    now, then = ({part.model for job in scoring_jobs(one) for part in job.parts} for one in (config, plain))
    assert now - then == {*ROWS, "masked_k2"}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "models.demix.architecture.objective: is mlm": ({"architecture": TINY["architecture"] | MASKED_LM}, {}),
    "models.dense.architecture.objective: is mlm": ({}, {"dense": {"architecture": MASKED_LM}}),
    "models.x.kind: is domain_token": ({}, {"x": {"kind": "domain_token", "architecture": MASKED_LM}}),
    "models.x.averages: is given to a masked model": (
        {},
        {"x": {"kind": "branched", "averages": True, "architecture": MASKED_LM}},
    ),
    "adaptation.model: is masked, which is no such row": (
        {"adaptation": TINY["adaptation"] | {"model": "masked"}},
        ROWS,
    ),
    "removal.model: is masked, which is no such row": ({"removal": TINY["removal"] | {"model": "masked"}}, ROWS),
}


@pytest.mark.parametrize("told", REFUSED)
def test_a_config_that_asks_for_more_is_refused_in_one_line(told: str) -> None:
    more, rows = REFUSED[told]
    with pytest.raises(DemixError) as refused:
        tiny(more, **rows)
    assert str(refused.value).startswith(f"config key {told}")
    assert "\n" not in str(refused.value)


def test_the_plan_counts_seven_passes_of_all_but_the_vocabulary() -> None:
    causal, masked = (Architecture(**SIZES, **more) for more in ({}, MASKED_LM))
    layers, width, context, types = 2, 32, 32, 400
    a_layer = 24 * width**2 + 4 * context * width
    assert scoring_flops(masked, types, 1) == 7 * layers * a_layer + 2 * width * types
    assert scoring_flops(causal, types, 1) == layers * (a_layer - 2 * context * width) + 2 * width * types


def test_training_is_the_obvious_loop_in_any_micro_batches(tokens: Path, tmp_path: Path) -> None:
    architecture = Architecture(**SIZES, **MASKED_LM)
    drawn = mixed_batches(opened(tokens), TRAINING, 2, 32, seed=1, objective="mlm")
    about = dataclasses.replace(optimization(RECIPE, 4, 3e-3), precision="fp64")
    model = GPT(architecture, 400, ("dense",)).initialise(1).double()
    steps = plain_steps(model, adamw(model), drawn, dict(enumerate(rates(4, 3e-3, RECIPE.warmup))))
    told = [(step.loss, step.norm, number * 6 * 32) for number, step in enumerate(steps, start=1)]
    for micro, checkpointing in itertools.product((None, 4), (False, True)):
        again = dataclasses.replace(about, micro_sequences=micro, checkpoint_activations=checkpointing)
        ours = GPT(architecture, 400, ("dense",)).initialise(1)
        rows = train(ours, drawn, TRAINING, again, tmp_path / f"{micro}{checkpointing}")
        found = [tuple(row[key] for key in ("loss", "gradient_norm", "tokens")) for row in rows]
        np.testing.assert_allclose(found, told, rtol=1e-9)
        assert rows[0]["loss"] == pytest.approx(np.mean([rows[0][f"loss/{name}"] for name in TRAINING]))
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(parameter, model.get_parameter(name), rtol=0, atol=1e-9)


def test_the_loss_that_balances_routed_experts_is_its_mean_over_sequences(tokens: Path, tmp_path: Path) -> None:
    routed = {"experts": 4, "top_k": 2, "every": 2, "capacity": 4.0, "balance": 1.0}
    architecture = Architecture(**SIZES, **MASKED_LM, routed=routed)
    drawn = mixed_batches(opened(tokens), TRAINING, 2, 32, seed=1, objective="mlm")
    about = dataclasses.replace(optimization(RECIPE, 1, 3e-3), precision="fp64")
    model, auxiliary = GPT(architecture, 400, ("dense",)).initialise(1).double(), []
    batch = drawn.draw(0)
    hidden = model(batch.inputs, auxiliary=auxiliary).take_along_dim(batch.places[..., None], 2)
    loss = -model.log_probabilities(hidden, batch.targets).mean()
    (loss + sum(each.losses.mean() for each in auxiliary)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    (row,) = train(GPT(architecture, 400, ("dense",)).initialise(1), drawn, TRAINING, about, tmp_path)
    assert (row["loss"], row["gradient_norm"]) == pytest.approx((loss.item(), norm.item()), rel=1e-9)


def test_a_stopped_training_goes_on_to_the_bit(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    places = tmp_path / "model", tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    stop_at(monkeypatch, {13})
    with pytest.raises(DemixError, match="a signal stopped training"):
        train_model("demix", RECIPE, shard_paths(tokens), *places)
    train_model("demix", RECIPE, shard_paths(tokens), *places)
    for path in (run / "models" / "masked").rglob("*.safetensors"):
        assert sha256_file(tmp_path / "model" / path.relative_to(run / "models" / "masked")) == sha256_file(path), path


def test_a_branch_masks_what_its_parent_would_have(tokens: Path) -> None:
    """The first gradients of DEMix layers after a seed phase add up to those of the dense model."""
    architecture = Architecture(**SIZES, **MASKED_LM)
    dense = GPT(architecture, 400, ("dense",)).initialise(3).double()
    shared, own = dense.parted({f"parameter/{name}": p.detach() for name, p in dense.named_parameters()})
    state = branched(State(5, shared, own, []), TRAINING)
    model = GPT(architecture, 400, TRAINING).double()
    tensors = model.stacked(state.shared, state.experts)
    model.load_state_dict({name.removeprefix("parameter/"): tensor for name, tensor in tensors.items()})
    sums = []
    for one, draw in ((dense, mixed_batches), (model, balanced_batches)):
        batch = draw(opened(tokens), TRAINING, 2, 32, seed=1, objective="mlm").draw(5)
        hidden = one(batch.inputs).take_along_dim(batch.places[..., None], 2)
        one.log_probabilities(hidden, batch.targets).sum().backward()
        sums.append({name: p.grad.sum(0) if ".feedforward." in name else p.grad for name, p in one.named_parameters()})
    for name, gradient in sums[0].items():
        torch.testing.assert_close(sums[1][name], gradient, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/ and scores/ of the masked rows and of the causal DEMix beside them."""
    folder, paths = tmp_path_factory.mktemp("run"), shard_paths(tokens)
    scoring = Scoring(dev_blocks=10, test_tokens=500, precision="fp32", threads=1)
    kinds = {"masked": ("demix", RECIPE), "masked_dense": ("dense", RECIPE), "demix": ("demix", TRAIN)}
    for name, (kind, recipe) in kinds.items():
        more = dataclasses.replace(recipe, dev_blocks=2) if name == "masked_dense" else recipe
        dev = shard_paths(tokens, split="dev") if more.dev_blocks else []
        places = folder / "models" / name, folder / "metrics" / f"{name}.jsonl", folder / "checkpoints" / name
        train_model(kind, more, [*paths, *dev], *places)
        columns = TRAINING if kind == "demix" else ("dense",)
        shards = [path for split in ("dev", "test") for path in shard_paths(tokens, (*TRAINING, NOVEL[0]), split)]
        score(folder / "models" / name, columns, shards, scoring, folder / "scores" / name)
    return folder


def test_a_masked_model_learns_and_its_loss_on_dev_is_in_folds(run: Path, tokens: Path) -> None:
    rows = read_json_lines(run / "metrics" / "masked_dense.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.3
    assert describe(run / "models" / "masked")["architecture"] == SIZES | MASKED_LM
    last = [row for row in rows if "dev_loss" in row][-1]
    for domain in TRAINING:
        table = read_scores(run / "scores" / "masked_dense" / f"{domain}.dev", ("dense",))
        assert last[f"dev_loss/{domain}"] == pytest.approx(-table.scores[:2].mean(), rel=1e-5)


def fitted(scores: np.ndarray) -> np.ndarray:
    """The static weights of the lowest loss on `scores` [tokens, E], by scipy."""
    found = minimize(lambda logits: -logsumexp(scores, axis=1, b=softmax(logits)).sum(), np.zeros(3), tol=1e-10)
    return softmax(found.x)


def test_an_evaluation_holds_static_mixtures_alone_as_plain_arithmetic_has_them(run: Path, tmp_path: Path) -> None:
    config = tiny(**ROWS)
    assert config.training == TRAINING
    found = []
    for domain, kind in ((TRAINING[0], "training"), (NOVEL[0], "novel")):
        causal = Evaluated("demix", "demix", 1, TRAINING, (ExpertSet("training", TRAINING, variants=True),))
        evaluation = Evaluation(
            kind=kind, tables=(*(one for one in evaluated(config, domain) if one.model in ROWS), causal),
            compared=(), against=(), seed=1, dev_blocks=10, weights=("history", "released", "tempered", "switching"),
        )  # fmt: skip
        outputs = Outputs(*(tmp_path / f"{domain}.{name}.parquet" for name in TABLES))
        evaluate_domain(run / "scores", domain, evaluation, outputs)
        rows = pd.read_parquet(outputs.results)
        assert set(rows.query("model == 'demix'").scorer) == {"paper", "released"}
        rows = rows.query("model != 'demix'")
        assert set(rows.scorer) == {"masked, 7 folds"}
        assert set(rows.method) == {"dense", "naive", "expert", "average", "fitted", "best_block", "best_token"}
        assert not rows.query("method in ('average', 'fitted')").weights.any()
        dev, test = (
            read_scores(run / "scores" / "masked" / f"{domain}.{split}", TRAINING) for split in ("dev", "test")
        )
        scored, known = test.scores[test.mask], dev.scores[dev.mask]
        weights = fitted(known)
        nll = rows.query("model == 'masked' and variant == ''").set_index(["method", "expert"]).nll
        assert nll["average", ""] == pytest.approx(-logsumexp(scored - np.log(3), axis=1).sum())
        assert nll["fitted", ""] == pytest.approx(-logsumexp(scored, axis=1, b=weights).sum(), rel=1e-4)
        own = TRAINING[0] if kind == "training" else rows.query("method == 'naive' and oracle").expert.iloc[0]
        assert nll["naive", own] == pytest.approx(-scored[:, TRAINING.index(own)].sum())
        found.append(rows)
    pd.concat(found).to_parquet(tmp_path / "results.parquet")
    few = changed(config, domains=domains(TRAINING[:1], NOVEL[:1]))
    table = table_of("masked", Material(few, {"results": read_results(tmp_path / "results.parquet")}))
    names = [f"{kind}, attention bidirectional, masked" for kind in ("Dense (Balanced)", "DEMix")]
    columns = [names[0], *(f"{names[1]} ({how})" for how in ("own expert", "average", "fitted"))]
    assert [*table.frame.columns] == [*columns, "Documents", "Pieces"]
    assert [*table.frame.index] == [TRAINING[0], NOVEL[0], "Mean of 1 training", "Mean of 1 novel"]
    assert table.frame[columns].notna().all().all()
    assert "compare with one another alone" in table.caption


def test_evidence_of_a_masked_table_is_refused_in_one_line_and_what_is_left_is_mixed(run: Path) -> None:
    test = run / "scores" / "masked" / f"{TRAINING[0]}.test"
    told = r"test: holds masked log-probabilities \(7 folds\), by which .* would see what is to be predicted; "
    for words in (
        ("--weights", "history"), ("--weights", "released"), ("--weights", "4"), ("--weights", "tempered(0.2,0.9)"),
        ("--weights", "switching(0.2)"), ("--methods", "cached", "--weights", "history"),
        ("--methods", "fitted", "--weights", "tempered(0.2,0.9)"),
    ):  # fmt: skip
        error = str(said(["mix", str(test), *words]))
        assert "\n" not in error
        assert pd.Series([error]).str.contains(told).all(), (words, error)
    done = demix("mix", test)
    assert done.exit_code == 0
    assert "average" in done.output
    assert "fitted" in done.output
    assert "uniform" not in done.output
    causal = demix("mix", run / "scores" / "demix" / f"{TRAINING[0]}.test")
    assert "uniform" in causal.output
    with pytest.raises(DemixError, match="by which tempered would see"):
        tempered_on_dev({TRAINING[0]: read_scores(test.with_suffix(".dev"), TRAINING)})


def test_what_continues_or_weighs_a_text_refuses_a_masked_model(run: Path, tmp_path: Path) -> None:
    model, text = run / "models" / "masked", tmp_path / "own.txt"
    text.write_text("some text of our own")
    with pytest.raises(DemixError, match="is a masked language model, which continues no text; choose a causal model"):
        open_model(model)
    assert "continues no text" in str(said(["generate", str(model), "--prompt", "a"]))
    with pytest.raises(DemixError, match="masked: is a masked language model, which says nothing of a text"):
        evaluate_text(model, text)
    with pytest.raises(DemixError, match="masked: is a masked language model, which says nothing of a text"):
        add_domain(model, "own", [text], tmp_path / "more")
    with pytest.raises(DemixError, match="has objective mlm, which GPT-2's format cannot hold"):
        export_hf(model, TRAINING[0], None, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["own.txt"]


def test_demix_dapt_begins_with_the_expert_of_the_highest_fitted_prior(run: Path, tokens: Path, tmp_path: Path) -> None:
    domain, scores, model = NOVEL[0], run / "scores" / "masked", run / "models" / "masked"
    chosen = choose_parent(scores, domain, TRAINING, blocks=5, decay=0.3)
    dev = read_scores(scores / f"{domain}.dev", TRAINING)
    known = dev.scores[:5][dev.mask[:5]]
    weights = fitted(known)
    assert list(chosen["priors"].values()) == pytest.approx(weights.tolist(), abs=0.02)
    assert chosen["parent"] == TRAINING[int(weights.argmax())]
    before = contents(model)
    shards = tuple(tokens / "tokens" / domain / f"{split}.arrow" for split in ("train", "dev"))
    unchanged = own_dev_losses(scores, TRAINING, 2)
    places = Places(tmp_path, tmp_path / "metrics.jsonl", tmp_path / "states")
    adapt_expert(model, shards, chosen, unchanged, ADAPT, places)
    assert contents(model) == before
    rows = [row for row in read_json_lines(tmp_path / "metrics.jsonl") if "early_stopping_loss" in row]
    table = read_scores(scores / f"{domain}.dev", (chosen["parent"],))
    assert rows[0]["early_stopping_loss"] == pytest.approx(-table.scores[: ADAPT.dev_blocks].mean(), rel=1e-5)
    assert min(row["early_stopping_loss"] for row in rows) < rows[0]["early_stopping_loss"]


def test_an_expert_that_is_left_out_is_left_out(run: Path, tokens: Path) -> None:
    model, ids = run / "models" / "masked", torch.full((1, 2, 32), 7)
    ids[..., 3] = MASKED
    whole, rest = load_model(model, TRAINING), load_model(model, TRAINING[1:])
    torch.testing.assert_close(rest(ids), whole(ids)[1:])
