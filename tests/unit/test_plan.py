"""`demix plan`: FLOPs, memory, hours, disk and jobs of a config, by the paper's numbers and by what was measured."""

from contextlib import chdir
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from demix.config import models
from demix.config.architecture import DECODERS, PRESETS, Architecture
from demix.config.counts import parameters, training_flops_per_token
from demix.data.init import outline
from demix.model.gpt import GPT
from demix.model.heads import ROWS_AT_ONCE
from demix.model.scoring import log_probabilities
from demix.plan.cost import ScoringCosts, cluster_bytes, plan_domain, plan_training
from demix.plan.flops import (
    HARDWARE,
    LOGITS_ROWS,
    achieved_tflops,
    activation_bytes,
    hours,
    scoring_flops,
    update_flops,
)
from demix.plan.jobs import in_one_line, runs_here, seconds_here, usual_hardware
from demix.plan.tables import too_large, training_tables
from demix.run.check import completed_run, load_run
from demix.run.scoring import scoring_jobs
from support.cli import demix, succeeds
from support.configs import changed
from support.errors import refused
from support.models import own_tensors

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "config"
PAPER = {path.stem: load_run(path) for path in sorted(CONFIGS.glob("paper-*.yaml"))}
SAMPLE, BTM, LARGE_BTM = (load_run(CONFIGS / f"{name}.yaml") for name in ("sample", "cbtm-1.3b", "cbtm-6.7b"))
DAGGERS = {"webtext", "realnews", "reddit", "reviews", "breaking_news", "contracts", "tweets", "yelp"}


def test_the_papers_domains_and_budgets() -> None:
    assert PAPER.keys() == {"paper-125m", "paper-350m", "paper-760m", "paper-1.3b"}
    domains = PAPER["paper-125m"].config.domains
    assert all(other.config.domains == domains for other in PAPER.values())
    assert sum(domain.words.train for domain in domains.training.values()) == 73_800_000_000
    assert {name for name, domain in domains.all.items() if domain.anonymize} == DAGGERS
    assert all(domain.licence for domain in domains.all.values())
    for name, domain in domains.all.items():
        words = domain.words
        assert (domain.source.words or 10**12) > words.train + words.dev + words.test, name


def test_the_plan_of_the_papers_largest_models() -> None:
    config = PAPER["paper-1.3b"]
    plans = {plan.name: plan for plan in plan_training(config, 128, HARDWARE["v100"])}
    trained, adapted = ([one.name for one in found] for found in (config.trained, config.adaptations))
    assert list(plans) == trained + [f"{kind}, 3 rates" for kind in models.PAPER] + adapted
    swept = plans["dense, 3 rates"]
    assert (swept.tokens, swept.steps) == (3 * 1_048_576_000, 1500)
    assert swept.hours == pytest.approx(0.03 * plans["dense"].hours)
    demix, dense = plans["demix"], plans["dense"]
    assert (demix.sequences, demix.steps, demix.tokens) == (2 * 8 * 128, 50_000, 104_857_600_000)
    assert (demix.ranks, demix.experts_per_rank, demix.experts, dense.experts) == (128, 1, 8, 1)
    # Our vocabulary is GPT-2's own, seven types fewer than the paper's.
    assert demix.shared + 8 * demix.expert == 6_952_505_344 - 7 * 2048
    assert demix.state == dense.state == 16 * (1_313_640_448 - 7 * 2048)
    assert demix.checkpoint == 12 * (6_952_505_344 - 7 * 2048)
    assert demix.weights == 4 * (demix.shared + 8 * demix.expert)
    assert (round(dense.hours, 1), round(demix.hours, 1)) == (49.5, 45.9)
    assert dense.rank_hours == 128 * dense.hours
    # Two of a rank's sixteen sequences at a time: values of two bytes in the layers, logits of a chunk in two types.
    assert demix.activations == 2 * 1024 * (24 * 2048 * 32 + 6 * 50257)
    assert plans["domain_token"].flops > dense.flops
    assert plans["domain_token"].shared == dense.shared + 9 * 2048
    expert, whole = plans["demix-dapt-yelp"], plans["dense_unbalanced-dapt-yelp"]
    assert (expert.steps, expert.sequences, expert.ranks) == (1011, 128, 128)
    assert (expert.weights, swept.weights) == (4 * expert.expert, 0)
    assert expert.state == 16 * demix.expert + 4 * (demix.expert + demix.shared)
    assert whole.state == (16 + 4) * (demix.expert + demix.shared)
    assert (expert.checkpoint, whole.checkpoint) == (16 * demix.expert, 16 * (demix.expert + demix.shared))


def test_the_command_prints_the_papers_numbers() -> None:
    done = succeeds("plan", CONFIGS / "paper-1.3b.yaml", "--ranks", 128, "--hardware", "v100", "--full")
    assert "│" not in demix("plan", CONFIGS / "paper-1.3b.yaml").stdout
    cells = {cell.strip() for line in done.stdout.splitlines() for cell in line.split("│")}
    assert cells >= {"508M", "806M", "23250.34", "5,900", "demix-dapt-* × 8"}


@pytest.mark.parametrize(("layers", "width", "fits"), [(32, 4096, True), (40, 5120, False)])
def test_what_a_gpu_does_not_hold_is_warned_of(
    layers: int, width: int, fits: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of 6.7B and one of 13B, on as many ranks as leave the embedding's moments alone on the fullest."""
    sizes = {"layers": layers, "width": width, "heads": width // 128}
    run = changed(LARGE_BTM, architecture=sizes)
    dense = next(plan for plan in plan_training(run, 128, HARDWARE["a100"]) if plan.name == "dense")
    types, context = 50257, 2048
    count = (types + context) * width + layers * (12 * width**2 + 13 * width) + 2 * width
    # Two sequences of values of two bytes, and one of which a layer's inputs are kept; logits; masks of dropout.
    held = 2 * context * 32 * layers * width + 6 * 2 * context * types + 2 * 2 * context * layers * width
    recomputed = 2 * context * (layers + 16) * width + 6 * context * types + 2 * context * width
    assert (dense.state, dense.activations) == (16 * count, held)
    assert dense.least == 8 * count + 8 * types * width + recomputed
    assert (dense.least <= 80e9) == fits
    assert "dense" in {line.split()[0] for line in too_large(run, 128, "a100")}
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"base": str(CONFIGS / "cbtm-6.7b.yaml"), "architecture": sizes})
    )
    succeeds("plan", tmp_path / "mine.yaml", "--hardware", "a100")
    assert "dense" in caplog.text


def test_what_fits_by_a_setting_needs_no_more() -> None:
    lines = too_large(BTM, None, "v100")
    assert [line.split()[0] for line in lines] == ["btm-dapt-*", "dense-dapt-*"]
    assert too_large(BTM, None, "a100") == too_large(LARGE_BTM, None, "cpu") == []
    for key in ("shard_optimizer", "checkpoint_activations"):
        assert too_large(changed(BTM, training={key: True}), None, "v100") == []


def test_a_rank_holds_the_experts_of_several_domains() -> None:
    config = PAPER["paper-125m"]
    by_ranks = {
        ranks: {plan.name: plan for plan in plan_training(config, ranks, HARDWARE["a100"])} for ranks in (1, 2, 8, 16)
    }
    for ranks, experts in ((1, 8), (2, 4), (8, 1), (16, 1)):
        plan = by_ranks[ranks]["demix"]
        assert plan.experts_per_rank == experts
        assert plan.state == 16 * (plan.shared + experts * plan.expert)
        assert plan.rank_hours == pytest.approx(by_ranks[1]["demix"].hours)
        assert by_ranks[ranks]["dense"].state == 16 * (plan.shared + plan.expert)
        # Two sequences of each expert at a time.
        assert plan.activations == 2 * experts * 1024 * 12 * 768 * 32 + min(2048 * experts, 4096) * 50257 * 6
    assert sum(name.startswith("without-") for name in by_ranks[1]) == 8
    assert "on 8 nodes with 8 GPUs" in in_one_line(config, "a100", 64)
    for ranks in (3, 12, 8 * 65):
        with refused("ranks", f"--ranks {ranks}", "--ranks", "training.ranks"):
            plan_training(config, ranks, HARDWARE["a100"])


def test_a_model_plans_with_its_own_settings() -> None:
    paper = {"preset": "paper", "inner": 512, "context": 256}
    rows = {"dense": {"tokens": 2_000_000, "sequences": 2}, "demix": {"sequences": 1}}
    plans = {
        plan.name: plan for plan in plan_training(changed(SAMPLE, architecture=paper, models=rows), 1, HARDWARE["cpu"])
    }
    assert (plans["demix"].steps, plans["demix"].sequences) == (1_000_000 // (8 * 256), 8)
    assert (plans["dense"].steps, plans["dense"].sequences) == (2_000_000 // (16 * 256), 16)
    # The sample's config computes in fp32.
    assert plans["demix"].activations == 8 * 256 * (3 * 128 * 64 + 8 * 4096)


def test_a_warm_start_counts_for_each_model_that_begins_with_it_and_is_trained_once() -> None:
    without = {plan.name: plan for plan in plan_training(SAMPLE, 1, HARDWARE["cpu"])}
    config = changed(SAMPLE, models={"branch": {"kind": "demix", "parent": "dense", "seed_tokens": 250_000}})
    plans = {plan.name: plan for plan in plan_training(config, 1, HARDWARE["cpu"])}
    branch, demix = plans["branch"], plans["demix"]
    assert (branch.tokens, branch.steps, branch.flops) == (demix.tokens, demix.steps, demix.flops)
    assert branch.begin == 250_000 // (16 * 128)
    assert branch.hours == pytest.approx(demix.hours * (demix.steps - branch.begin) / demix.steps)
    assert {name: plans[name] for name in without} == without
    total = sum(plan.flops * (plan.steps - plan.begin) for plan in plans.values())
    work, _ = training_tables(config, 1, "cpu")
    assert float(work.columns[-1].footer) == pytest.approx(total / 1e15, abs=0.006)


def test_the_papers_flops_whatever_the_number_of_experts() -> None:
    """F_ELM(T, k) = 96·l·h²·T/k·(1 + s/6h + V/16lh), appendix A.2: 1.998 ZFLOPs for 24 × 2,048 on 168B tokens."""
    sizes = Architecture(layers=24, width=2048, heads=32, context=2048)
    for k in (1, 2, 4, 8, 16, 32, 64, 128):
        expert = training_flops_per_token(sizes, 50_272, 2048) * 167_772_160_000 / k
        assert k * expert == pytest.approx(1.998e21, rel=2.5e-3)
        formula = 96 * 24 * 2048**2 * (1 + 2048 / (6 * 2048) + 50_272 / (16 * 24 * 2048))
        assert k * expert == pytest.approx(formula * 167_772_160_000, rel=1e-12)
    plans = [
        plan for plan in plan_training(BTM, None, HARDWARE["a100"]) if (plan.stage, plan.name[:4]) == ("train", "btm-")
    ]
    assert len(plans) == 8
    assert sum(plan.steps * plan.flops for plan in plans) == pytest.approx(1.998e21, rel=2.5e-3)
    # A job for each expert, of 10,000 updates on its eighth of the tokens.
    assert {(plan.jobs, plan.steps, plan.tokens, plan.experts) for plan in plans} == {(1, 10_000, 20_971_520_000, 1)}
    hours = sum(plan.steps * plan.flops for plan in plans) / 137e12 / 3600
    assert sum(plan.rank_hours for plan in plans) == pytest.approx(hours, rel=1e-9)
    assert plans[0].weights == 4 * plans[0].expert


def test_the_plan_of_a_domain(tmp_path: Path) -> None:
    training = PAPER["paper-125m"].config.domains.training
    plan = plan_domain("reddit", training["reddit"], 2)
    assert (plan.words, plan.read) == (25_020_000_000, 27_500_000_000)
    assert plan.disk == 2 * 27_500_000_000 * 2.6 + 25_020_000_000 * (2.6 + 3)
    wide = plan_domain("reddit", training["reddit"], 4)
    assert wide.disk - plan.disk == 25_020_000_000 * 3
    whole = training["1b"].replace(words=training["1b"].words.replace(train=None))
    plan = plan_domain("1b", whole, 2)
    assert (plan.words, plan.disk) == (None, None)
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("words " * 16)
    local = whole.replace(source={"path": f"{tmp_path}/*.txt"})
    assert [plan_domain("d", local, 2, sharing).words for sharing in (1, 2)] == [30, 15]


def test_token_files_of_clusters_are_counted_once_for_each_clustering_that_models_learn_from() -> None:
    domain = {"source": {"path": "a.jsonl", "words": 3000}, "words": {"train": 1000, "dev": 100, "test": 100}}
    branched = {"kind": "branched", "data": "k2"}
    values = {
        "run": "one",
        "domains": {"training": {"a": domain, "b": domain}, "novel": {"c": domain}},
        "tokenizer": {"kind": "bpe", "vocab_size": 512},
        "clusterings": {"k2": {"clusters": 2}, "k3": {"clusters": 3}},
        "architecture": {"preset": "modern", "layers": 1, "width": 8, "heads": 1, "inner": 16, "context": 16},
        "training": {"tokens": 1024, "sequences": 1, "learning_rate": 0.1, "dev_blocks": 0},
    }
    sizes = [cluster_bytes(completed_run(values | more)) for more in ({}, {"models": {"btm": branched}})]
    # 1.5 tokens a word of two bytes, for the train splits of a and b.
    assert sizes == [0, 1.5 * 2 * 2000]
    values["training"]["dev_blocks"] = 4
    assert cluster_bytes(completed_run(values | {"models": {"btm": branched}})) == 1.5 * 2 * 2200


def test_wrong_options_of_the_plan_are_refused() -> None:
    for ranks, hardware, subject in ((None, "tpu", "--hardware tpu"), (0, "v100", "--ranks")):
        with refused(subject):
            training_tables(PAPER["paper-125m"], ranks, hardware)
    with refused("cluster.ranks_per_node"):
        in_one_line(changed(PAPER["paper-125m"], cluster={"ranks_per_node": 5}), "v100")


def test_the_hardware_is_that_of_the_config() -> None:
    assert (usual_hardware(SAMPLE), usual_hardware(PAPER["paper-125m"])) == ("cpu", "v100")
    assert runs_here(SAMPLE)
    assert not runs_here(changed(SAMPLE, cluster={"launch": "slurm"}))
    assert not runs_here(PAPER["paper-125m"])


def test_the_cost_of_scoring_counts_every_text_under_every_column() -> None:
    # Every split has as many tokens.
    removal = {"retrain_without": ["licenses"], "replacement": "fantasy"}
    run = changed(SAMPLE, evaluation={"test_tokens": 5120}, models={"domain_token": {}}, removal=removal)
    rules, costs = scoring_jobs(run), ScoringCosts(run, HARDWARE["cpu"])
    jobs = {(job.name, part.folder): costs.of_part(part)[1] for job in rules for part in job.parts if part.shared}
    dev, test = 60 * 128, 5120
    # Eight domains under eight experts; a domain under its own token alone, and new ones under all eight.
    known, new = (jobs[f"demix_seeded/{texts}", "demix_seeded"] for texts in ("training", "wiki"))
    assert known == 8 * new == 8 * (dev + test) * (8 * 4 + 18)
    assert jobs["others-training", "domain_token"] == 8 * test * (4 + 18)
    assert jobs["others-training", "without-licenses"] == (dev + test) * (8 * 4 + 18)
    # Beside tables that have the tokens: the first new expert on eight domains, the second on nine; and one, then two
    # new experts on the new domain. Dense-DAPT makes tables of its own.
    added = {job.name: costs.of_job(job)[1] for job in rules}
    assert [added[f"adapted-{name}"] for name in ("wiki", "code")] == [
        (n + k) * (dev + test) * 4 + 9 * test * (4 + 18) for n, k in ((8, 1), (9, 2))
    ]
    # Of three orders of n-grams one model of all text, and one of each training domain.
    of_ngrams = 3 * 16 * (dev + test) * ((4 + 18) + (8 * 4 + 18))
    assert costs.of_all[1] == sum(costs.of_job(job)[1] for job in rules) + of_ngrams


# Seconds of processors: of the jobs of `make demo` with snakemake's 8%, and of all of `make families` and `snakemake
# --configfile mine.yaml`. Families was measured on two idle cores, too; the others are as two cores that are busy for
# 95% of the time need.
SPENT = {"sample": 1103 * 1.08, "families": 2208, "own": 95}
MEASURED = {"families": 1200} | {name: SPENT[name] / 2 / 0.95 for name in ("sample", "own")}


@cache
def own() -> str:
    """What `demix init` prints for three files of 19,600 words each."""
    with TemporaryDirectory() as folder, chdir(folder):
        for name in "abc":
            Path(f"{name}.txt").write_text(f"The mill of {name} stood by the river.\n" * 2450)
        return outline("mine", ["a.txt", "b.txt", "c.txt"], [])


@pytest.mark.parametrize("name", MEASURED)
def test_the_time_is_true_within_a_factor_of_two(name: str) -> None:
    config = completed_run(yaml.safe_load(own())) if name == "own" else load_run(CONFIGS / f"{name}.yaml")
    expected = seconds_here(config, 2)
    assert 0.5 < expected / MEASURED[name] < 2
    assert 0.5 < seconds_here(config, 1) / SPENT[name] < 2


def test_more_cores_shorten_a_run_down_to_its_longest_jobs() -> None:
    one, two, sixteen, many = (seconds_here(SAMPLE, cores) for cores in (1, 2, 16, 1000))
    assert one / 2 < two < one / 1.8
    assert 50 < many <= sixteen < two / 3


# Of each size: GPUs, updates, TFLOPs an update, hours of Dense and of DEMix (Table 2; FACTS section 2).
TABLE_2 = {
    "gpt3-small": (32, 300_000, 556.84, 46.8, 46.8),
    "gpt3-medium": (64, 120_000, 3279.31, 46.2, 46.2),
    "gpt3-large": (128, 65_000, 13637.84, 42.7, 40.1),
    "gpt3-xl": (128, 50_000, 23250.34, 49.5, 45.9),
}
EIGHT = tuple("abcdefgh")


@pytest.mark.parametrize("vocab_size", [50257, 50264])
@pytest.mark.parametrize("preset", TABLE_2)
def test_the_papers_updates_and_hours(preset: str, vocab_size: int) -> None:
    gpus, steps, tflops, dense, demix = TABLE_2[preset]
    architecture = PRESETS[preset]
    flops = update_flops(architecture, vocab_size, 2 * 8 * gpus, 1024)
    assert round(flops / 1e12, 2) == tflops
    for expected, kind in ((dense, False), (demix, True)):
        achieved = achieved_tflops(HARDWARE["v100"], architecture, demix=kind)
        assert round(hours(flops, steps, gpus, achieved), 1) == expected
    (training,) = (run.config.training for run in PAPER.values() if run.architecture == architecture)
    assert (training.sequences, training.tokens) == (2 * gpus, steps * 2 * 8 * gpus * 1024)
    assert (training.learning_rate, training.clip, training.warmup) == (5e-4, 0.1, 0.08)


@pytest.mark.parametrize(
    ("preset", "dense", "expert", "eight"),
    [
        ("gpt3-small", 124_445_184, 56_669_184, 521_129_472),
        ("gpt3-medium", 354_830_336, 201_449_472, 1_764_976_640),
        ("gpt3-large", 758_737_920, 453_169_152, 3_930_921_984),
        ("gpt3-xl", 1_313_640_448, 805_552_128, 6_952_505_344),
    ],
)
def test_parameters_are_the_papers_and_the_models(preset: str, dense: int, expert: int, eight: int) -> None:
    architecture = PRESETS[preset]
    shared, own = parameters(architecture, 50264)
    assert (shared + expert, own, shared + 8 * expert) == (dense, expert, eight)
    with torch.device("meta"):
        model = GPT(architecture, 50264, EIGHT)
    assert sum(p.numel() for p in model.parameters()) == eight
    assert sum(p.numel() for p in own_tensors(model).values()) == 8 * expert


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "alibi", "rope"])
@pytest.mark.parametrize("scope", ["feedforward", "model"])
def test_scoring_flops_are_those_that_torch_counts(scope: str, position: str) -> None:
    """Shared work once, unless experts have tables. Of attention torch counts what the mask leaves out too."""
    compact = DECODERS["compact"] if position == "rope" else {}
    architecture = Architecture(**compact | {"layers": 3, "width": 32, "heads": 4, "context": 64, "position": position})
    trunks = [EIGHT] if scope == "feedforward" else [(name,) for name in EIGHT]
    models = [GPT(architecture, 200, experts, (), scope).initialise(1) for experts in trunks]
    ids = np.zeros((2, 64), np.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        for model in models:
            log_probabilities(model, ids, ids, ids == 0)
    first = 8 if compact else len(trunks)
    masked = 2 * architecture.context * architecture.width * (first + 8 * (architecture.layers - 1))
    found = scoring_flops(architecture, 200, 8, scope)
    assert counter.get_total_flops() == ids.size * (found + (0 if position == "alibi" else masked))


def test_activations_are_what_backward_keeps() -> None:
    """What autograd saves a layer more, counted on the model; Korthikanti's 34 bytes where dropout has its masks."""

    def saved(layers: int) -> int:
        architecture = Architecture(layers=layers, width=64, heads=4, context=128)
        model = GPT(architecture, 300, ("x",)).initialise(1)
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        found: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model(torch.zeros(1, 6, 128, dtype=torch.int64))
        assert hidden.requires_grad
        return sum(tensor.untyped_storage().nbytes() for tensor in found.values())

    def estimate(layers: int) -> int:
        return activation_bytes(
            Architecture(layers=layers, width=64, heads=4, context=128), 300, 6, 4, checkpointing=False
        )

    assert estimate(4) - estimate(2) == pytest.approx(saved(4) - saved(2), rel=0.1)
    small = PRESETS["gpt3-small"]
    assert ROWS_AT_ONCE["cuda"] == LOGITS_ROWS
    layer = activation_bytes(small, 0, 1, 2, checkpointing=False) / (12 * 1024 * 768)
    assert layer == 34 - 2
    assert activation_bytes(small, 0, 1, 2, checkpointing=True) == 1024 * 768 * (12 * 2 + 32)
