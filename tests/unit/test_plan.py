"""`demix plan`, and the configs of the paper's four sizes."""

import copy
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from demix.config import models
from demix.errors import DemixError
from demix.plan.cells import decimal, folded
from demix.plan.cost import plan_training, too_large, training_tables
from demix.plan.domains import plan_domain, plan_table
from demix.plan.flops import HARDWARE
from demix.plan.jobs import ScoringCosts, in_one_line, jobs_table, lacking, levers, plan_jobs, usual_hardware
from demix.run.check import load_run
from demix.run.scoring import scoring_jobs
from support.configs import changed

REPOSITORY = Path(__file__).parents[2]
PAPER = {path.stem: load_run(path) for path in sorted((REPOSITORY / "config").glob("paper-*.yaml"))}
SAMPLE = load_run(REPOSITORY / "config" / "sample.yaml")
CBTM = load_run(REPOSITORY / "config" / "cbtm-6.7b.yaml")
DAGGERS = {"webtext", "realnews", "reddit", "reviews", "breaking_news", "contracts", "tweets", "yelp"}


def test_the_papers_domains_and_budgets():
    assert PAPER.keys() == {"paper-125m", "paper-350m", "paper-760m", "paper-1.3b"}
    domains = PAPER["paper-125m"].config.domains
    assert all(other.config.domains == domains for other in PAPER.values())
    assert sum(domain.words.train for domain in domains.training.values()) == 73_800_000_000
    assert {name for name, domain in domains.all.items() if domain.anonymize} == DAGGERS
    assert all(domain.licence for domain in domains.all.values())
    for name, domain in domains.all.items():
        words = domain.words
        assert (domain.source.words or 10**12) > words.train + words.dev + words.test, name


@pytest.mark.parametrize(
    ("name", "gpus", "steps"),
    [
        ("paper-125m", 32, 300_000),
        ("paper-350m", 64, 120_000),
        ("paper-760m", 128, 65_000),
        ("paper-1.3b", 128, 50_000),
    ],
)
def test_the_papers_updates(name, gpus, steps):
    training = PAPER[name].config.training
    sequences = 2 * 8 * gpus
    assert training.sequences == sequences / 8
    assert training.tokens == steps * sequences * 1024
    assert (training.learning_rate, training.clip, training.warmup) == (5e-4, 0.1, 0.08)


def test_the_plan_of_a_domain():
    training = PAPER["paper-125m"].config.domains.training
    plan = plan_domain("reddit", training["reddit"], 2)
    assert (plan.documents, plan.words, plan.jobs) == (None, 25_020_000_000, 26)
    assert plan.kept == 27_500_000_000 * 2.6 + 25_020_000_000 * (2.6 + 3)
    assert plan.passing == 27_500_000_000 * 2.6
    assert plan_domain("reddit", training["reddit"], 2, apart=True).jobs == 50
    wide = plan_domain("reddit", training["reddit"], 4)
    assert wide.kept - plan.kept == 25_020_000_000 * 3
    whole = replace(training["1b"], words=replace(training["1b"].words, train=None))
    plan = plan_domain("1b", whole, 2)
    assert (plan.words, plan.kept, plan.jobs) == (None, None, 6)


def test_local_parquet_is_counted(tmp_path):
    for number in range(2):
        pq.write_table(pa.table({"text": ["a"] * 5}), tmp_path / f"{number}.parquet")
    source = {"kind": "files", "path": f"{tmp_path}/*.parquet"}
    domain = replace(PAPER["paper-125m"].config.domains.novel["tweets"], source=source)
    assert plan_domain("d", domain, 2).documents == 10
    (tmp_path / "2.parquet").write_bytes(b"")
    # A source is listed once.
    assert plan_domain("d", replace(domain, source=source), 2).documents is None


def test_totals_say_what_they_leave_out():
    footers = [column.footer for column in plan_table(PAPER["paper-125m"]).columns]
    assert footers[4:9] == ["641M+", "77.9G", "255", "650GB", "214GB"]
    assert [column.footer for column in plan_table(SAMPLE).columns][4:9] == ["?", "all", "50", "?", "?"]


def test_a_plan_tells_how_each_text_is_to_be_had() -> None:
    table = plan_table(PAPER["paper-125m"])
    told = dict(zip(table.columns[1].cells, table.columns[9].cells, strict=True))
    assert [told[name] for name in ("webtext", "reddit", "yelp", "cs")] == ["open", "terms", "by hand", "not verified"]
    assert set(plan_table(SAMPLE).columns[9].cells) == {"here"}


def test_the_command_prints_every_domain_and_the_totals():
    command = [sys.executable, "-m", "demix", "plan", str(REPOSITORY / "config" / "paper-125m.yaml")]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in PAPER["paper-125m"].domains:
        assert f" {name} " in shown
    assert "25.0G" in shown
    assert "77.9G" in shown


def test_the_plan_of_the_largest_models():
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
    assert (round(dense.hours, 1), round(demix.hours, 1)) == (49.5, 45.9)
    assert dense.rank_hours == 128 * dense.hours
    assert demix.recomputed < demix.activations
    # Two of a rank's sixteen sequences at a time: values of two bytes in the layers, logits of a chunk in two types.
    assert demix.activations == 2 * 1024 * (24 * 2048 * 32 + 6 * 50257)
    assert plans["domain_token"].flops > dense.flops
    assert plans["domain_token"].shared == dense.shared + 9 * 2048
    expert, whole = plans["demix-dapt-yelp"], plans["dense_unbalanced-dapt-yelp"]
    assert (expert.steps, expert.sequences, expert.ranks) == (1011, 128, 128)
    assert expert.state == 16 * demix.expert + 4 * (demix.expert + demix.shared)
    assert whole.state == (16 + 4) * (demix.expert + demix.shared)
    assert (expert.checkpoint, whole.checkpoint) == (16 * demix.expert, 16 * (demix.expert + demix.shared))


@pytest.mark.parametrize(("layers", "width", "fits"), [(32, 4096, True), (40, 5120, False)])
def test_what_a_gpu_does_not_hold_is_told(layers: int, width: int, fits: bool) -> None:
    """A model of 6.7B and one of 13B, on as many ranks as leave the embedding's moments alone on the fullest."""
    run = changed(CBTM, architecture={"layers": layers, "width": width, "heads": width // 128})
    dense = next(plan for plan in plan_training(run, 128, HARDWARE["a100"]) if plan.name == "dense")
    types, context = 50257, 2048
    count = (types + context) * width + layers * (12 * width**2 + 13 * width) + 2 * width
    # Two sequences of values of two bytes, and one of which a layer's inputs are kept; logits; masks of dropout.
    held = 2 * context * 32 * layers * width + 6 * 2 * context * types + 2 * 2 * context * layers * width
    recomputed = 2 * context * (layers + 16) * width + 6 * context * types + 2 * context * width
    assert dense.held == (16 * count, held)
    assert dense.least == (8 * count + 8 * types * width, recomputed)
    assert (sum(dense.least) <= 80e9) == fits
    *lines, last = too_large(run, 128, "a100")
    (line,) = [line for line in lines if line.startswith("dense does")]
    numbers = ("107GB", "19.5GB", "54.9GB", "1.4GB") if fits else ("206GB", "29.8GB", "105GB", "1.8GB")
    assert line == (
        "dense does not fit a100 (80.0GB): {} of weights, gradients and moments, {} of activations a rank; {} and {} "
        "with shard_optimizer, checkpoint_activations, micro_sequences: 1"
    ).format(*numbers)
    # Adaptation of 6.7B keeps the best weights, too.
    assert last.startswith("where that is too much, weights and gradients must be divided among GPUs, too")


def test_what_fits_by_a_setting_needs_no_more() -> None:
    small = load_run(REPOSITORY / "config" / "cbtm-1.3b.yaml")
    lines = too_large(small, None, "v100")
    assert [line.split()[0] for line in lines] == ["btm-dapt-*", "dense-dapt-*"]
    assert too_large(small, None, "a100") == too_large(CBTM, None, "cpu") == []
    for key in ("shard_optimizer", "checkpoint_activations"):
        assert too_large(changed(small, adaptation={key: True}), None, "v100") == []


def test_the_command_warns_of_what_does_not_fit() -> None:
    path = REPOSITORY / "config" / "cbtm-6.7b.yaml"
    command = [sys.executable, "-m", "demix", "plan", str(path), "--hardware", "a100"]
    warned = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert f"{path}: dense does not fit a100 (80.0GB)" in warned


def test_a_sweep_of_adaptations_takes_the_time_of_all():
    runs = (changed(PAPER["paper-125m"], adaptation={"sweep": sweep}) for sweep in (None, {"factors": [0.1, 0.3, 1.0]}))
    once, thrice = ({plan.name: plan for plan in plan_training(run, None, HARDWARE["a100"])} for run in runs)
    for name, plan in once.items():
        times = 3 if "-dapt-" in name else 1
        assert (thrice[name].steps, thrice[name].hours) == (times * plan.steps, times * plan.hours)


def test_a_rank_holds_the_experts_of_several_domains():
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
    for ranks in (3, 12, 8 * 65):
        with pytest.raises(DemixError, match=f"ranks: .*{ranks // 8 if ranks > 12 else ranks}"):
            plan_training(config, ranks, HARDWARE["a100"])


def test_a_model_plans_with_its_own_settings():
    paper = {"preset": "paper", "inner": 512, "context": 256}
    models = {"dense": {"tokens": 2_000_000, "sequences": 2}, "demix": {"sequences": 1}}
    config = changed(SAMPLE, architecture=paper, models=models)
    plans = {plan.name: plan for plan in plan_training(config, 1, HARDWARE["cpu"])}
    assert (plans["demix"].steps, plans["demix"].sequences) == (1_000_000 // (8 * 256), 8)
    assert (plans["dense"].steps, plans["dense"].sequences) == (2_000_000 // (16 * 256), 16)
    # The sample's config computes in fp32.
    assert plans["demix"].activations == 8 * 256 * (3 * 128 * 64 + 8 * 4096)


def test_a_seed_counts_for_each_model_that_begins_with_it_and_is_trained_once():
    without = {plan.name: plan for plan in plan_training(SAMPLE, 1, HARDWARE["cpu"])}
    config = changed(SAMPLE, models={"branch": {"kind": "demix", "parent": "dense", "seed_tokens": 250_000}})
    plans = {plan.name: plan for plan in plan_training(config, 1, HARDWARE["cpu"])}
    branch, demix = plans["branch"], plans["demix"]
    assert (branch.tokens, branch.steps, branch.flops) == (demix.tokens, demix.steps, demix.flops)
    assert branch.begin == 250_000 // (16 * 128)
    assert branch.hours == pytest.approx(demix.hours * (demix.steps - branch.begin) / demix.steps)
    assert {name: plans[name] for name in without} == without
    total = sum(plan.flops * plan.steps for plan in without.values()) + demix.flops * (demix.steps - branch.begin)
    # With further rows of a seed phase in the sample, their seeds are left out too.
    total -= sum(plan.flops * plan.begin for plan in without.values())
    work, _ = training_tables(config, 1, "cpu")
    assert float(work.columns[-1].footer) == pytest.approx(total / 1e15, abs=0.006)
    assert "once in the total" in work.caption


def test_wrong_options_of_the_plan_are_told():
    with pytest.raises(DemixError, match=r"--hardware tpu.*v100, a100, h100, cpu"):
        training_tables(PAPER["paper-125m"], None, "tpu")
    with pytest.raises(DemixError, match="--ranks: is 0"):
        training_tables(PAPER["paper-125m"], 0, "v100")


def test_the_command_prints_the_papers_numbers():
    path = REPOSITORY / "config" / "paper-1.3b.yaml"
    command = [sys.executable, "-m", "demix", "plan", str(path), "--ranks", "128", "--hardware", "v100"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = {}
    for line in shown.splitlines():
        if line.startswith("│"):
            name, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            rows.setdefault(name, []).append(cells)
    work, takes, sent, job = rows["demix"]
    assert job[:4] == ["1", "16", "128", "128"]
    assert job[-2] == "5,900"
    assert work == ["8", "105G", "50,000", "2,048", "508M", "806M", "7.0G", "23250.34", "1162517.08"]
    assert takes == ["128", "1", "21.0GB", "3.8GB", "953MB", "83.4GB", "263TB", "46", "5,900"]
    assert rows["dense"][1][-2:] == ["49", "6,300"]
    assert sent[:4] == ["16", "5.3GB", "10.1GB", "504TB"]
    # Eight models trained without a domain, and eight adaptations of a kind, are one row of each table.
    for one in (*PAPER["paper-1.3b"].trained, *PAPER["paper-1.3b"].adaptations):
        stem, dash, _ = one.name.rpartition("-")
        assert len(rows[f"{stem}-* × 8" if dash else one.name]) == 4
    assert "Table 2" in shown
    *_, last, lever = shown.splitlines()
    assert re.fullmatch(
        r"paper-1\.3b takes [\d,.]+ GPU-hours \(v100\) of training and scoring, at most [\d,.]+ GB of disk, "
        r"[\d.]+ days on 16 nodes with 8 GPUs",
        last,
    )
    assert lever == "models.domain_token: null spares 6,500 of 26,000 GPU-hours"


def test_rows_that_are_alike_are_one() -> None:
    rows = [("a", "1"), ("a-x", "1"), ("a-y", "1"), ("a-z", "2"), ("b-x", "1"), ("a-v", "1")]
    assert folded(rows) == [("a", "1"), ("a-* × 3", "1"), ("a-z", "2"), ("b-x", "1")]


def test_the_number_of_ranks_reaches_the_jobs() -> None:
    config = PAPER["paper-125m"]
    jobs = {job.name: job for job in plan_jobs(config, "a100", 64)}
    assert (jobs["demix"].ranks, jobs["demix"].nodes, jobs["demix"].gpus) == (64, 8, 64)
    # A step of an adaptation has 128 sequences.
    assert jobs["demix-dapt-yelp"].ranks == 64
    assert list(jobs_table(config, "a100", 64).columns[3].cells).count("64") == 11
    assert in_one_line(config, "a100", 64).endswith(" on 8 nodes with 8 GPUs")


def test_the_last_line_sums_hours_disk_and_days() -> None:
    config = PAPER["paper-125m"]
    plans, jobs = plan_training(config, None, HARDWARE["v100"]), plan_jobs(config, "v100")
    scoring = sum(job.hours for job in jobs if job.stage == "score" and job.hours)
    hours = sum(plan.rank_hours for plan in plans) + scoring
    assert scoring > 1
    demix, expert = (next(plan for plan in plans if plan.name == name) for name in ("demix", "demix-dapt-yelp"))
    assert (demix.weights, demix.checkpoints) == (4 * (demix.shared + 8 * demix.expert), 2)
    assert (expert.weights, sum(plan.weights for plan in plans if "rates" in plan.name)) == (4 * expert.expert, 0)
    kept = sum(plan.weights + plan.jobs * 2 * plan.checkpoint for plan in plans)
    disk = 650e9 + 214e9 + kept + sum(job.disk for job in jobs)
    found = re.findall(r"[\d,.]*\d", in_one_line(config, "v100").partition("takes")[2].replace("(v100)", ""))
    numbers = [float(number.replace(",", "")) for number in found]
    # The table rounds the text to 650 and 214 GB.
    assert numbers[1] == pytest.approx(disk / 1e9, rel=2e-3)
    assert numbers == pytest.approx([float(f"{hours:.2g}"), numbers[1], float(f"{hours / 32 / 24:.2g}"), 4, 8])
    assert "of disk plus" not in in_one_line(config, "v100")


def test_levers_are_the_keys_that_spare_most() -> None:
    """The models without a domain, worked out from the rows; a row that is adapted is none."""
    config = PAPER["paper-125m"]
    plans = plan_training(config, None, HARDWARE["a100"])
    eight = [plan.rank_hours for plan in plans if plan.name.startswith("without-")]
    assert len(eight) == 8
    first, second = levers(config, "a100")
    assert first == f"removal.retrain_without: [] spares {decimal(sum(eight))} of 4,100 GPU-hours"
    assert re.fullmatch(r"models\.domain_token: null spares 350 of 4,100 GPU-hours", second)
    (seeds, *_) = levers(changed(SAMPLE, seeds=[1, 2, 3], removal={"retrain_without": []}), "cpu")
    assert seeds.startswith("seeds: [] spares ")
    assert len(levers(SAMPLE, "cpu")) == 3


def test_bf16_is_told_where_the_hardware_lacks_it() -> None:
    paper = PAPER["paper-125m"]
    keys = (
        "config keys training.precision, adaptation.precision, evaluation.precision: bf16, which v100 lacks; set fp16"
    )
    assert lacking(paper, "v100").startswith(keys)
    assert lacking(paper, "a100") == lacking(paper, "cpu") == lacking(SAMPLE, "v100") == ""
    seeded = SAMPLE.config.values["models"]["demix_seeded"]
    row = changed(SAMPLE, models={"demix_seeded": seeded | {"precision": "bf16"}})
    assert lacking(row, "v100").startswith("config key models.demix_seeded.precision: bf16")


def test_where_no_gpu_is_given_cores_are_counted() -> None:
    config = SAMPLE
    assert usual_hardware(config) == "cpu"
    assert usual_hardware(PAPER["paper-125m"]) == "v100"
    takes = training_tables(config, None, "cpu")[1]
    total = sum(plan.rank_hours for plan in plan_training(config, None, HARDWARE["cpu"]))
    assert (takes.columns[-1].header, takes.columns[-1].footer) == ("core-hours", f"{2 * total:.2g}")
    line = in_one_line(config, "cpu")
    both = sum(job.rank_hours for job in plan_jobs(config, "cpu"))
    assert line.startswith(f"sample takes {2 * both:.2g} core-hours (cpu) ")
    assert re.search(rf"plus the text of 16 domains, {both:.2g} hours on 2 cores$", line)


def test_the_cost_of_scoring_counts_every_text_under_every_column() -> None:
    rules, costs = scoring_jobs(SAMPLE), ScoringCosts(SAMPLE, HARDWARE["cpu"])
    jobs = {
        (job.rule, part.folder): costs.of_part(part, job.jobs)[1] for job in rules for part in job.parts if part.shared
    }
    dev, test = 60 * 128, 15360
    # Eight domains under eight experts; a domain under its own token alone, and new ones under all eight.
    known, new = (jobs[f"score_{which}demix_seeded", "demix_seeded"] for which in ("known_", ""))
    assert known == new == 8 * (dev + test) * (8 * 4 + 18)
    assert jobs["score_known_others", "domain_token"] == 8 * test * (4 + 18)
    assert jobs["score_known_others", "without-licenses"] == (dev + test) * (8 * 4 + 18)
    # Beside tables that have the tokens: the first new expert on eight domains, the second on nine; and one, then two
    # new experts on the new domain. Dense-DAPT makes tables of its own.
    added = {job.rule: costs.of_job(job)[1] for job in rules if job.added}
    assert [added[f"score_adapted_{name}"] for name in ("wiki", "code")] == [
        (n + k) * (dev + test) * 4 + 9 * test * (4 + 18) for n, k in ((8, 1), (9, 2))
    ]
    of_all = sum(job.disk for job in plan_jobs(SAMPLE, "cpu"))
    # Of two orders of n-grams one model of all text scores test, and one of each training domain all splits.
    of_ngrams = 2 * 16 * (test * (4 + 18) + (dev + test) * (8 * 4 + 18))
    assert of_all == sum(costs.of_job(job)[1] for job in rules) + of_ngrams


def test_what_a_source_needs_is_asked_for(tmp_path):
    config = PAPER["paper-125m"].config.values
    novel = config["domains"]["novel"]
    for domain, change, message in (
        ("contracts", {"parts": 2}, r"contracts\.source\.parts: is 2 for 1 addresses; set at most one"),
        ("contracts", {"path": "data/x.zip"}, r"contracts\.source\.path: is not an address"),
        ("github", {"data_files": []}, r"github\.source\.data_files: is missing"),
        ("github", {"revision": None}, r"github\.source\.revision: is missing; pin a commit"),
        ("github", {"bytes": {"a": 1}}, r"github\.source\.sha256: is for the kinds files, url and store; pin a commit"),
        ("github", {"where": {"license": None}}, r"github\.source\.where\.license: is None"),
        ("github", {"sha256": {"a": "xyz"}}, r"github\.source\.sha256\.a: is 'xyz'"),
        ("github", {"kind": "s3"}, r"github\.source\.kind: is 's3'; allowed is one of"),
    ):
        other = copy.deepcopy(config)
        other["domains"]["novel"][domain]["source"] = novel[domain]["source"] | change
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(other))
        with pytest.raises(DemixError, match=message):
            load_run(tmp_path / "config.yaml")


def test_the_files_that_sbatch_would_get(tmp_path):
    """Whole nodes, a GPU and its memory each rank, and the site's own lines."""
    site = {"partition": "gpu", "account": "lab", "qos": "long", "setup": ["module load cuda"]}
    stages = PAPER["paper-125m"].config.values["cluster"]["stages"] | {"adapt": {"minutes": 90, "partition": "short"}}
    config = changed(PAPER["paper-125m"], cluster=site | {"stages": stages})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.config.values))
    # No command of SLURM is there.
    command = [sys.executable, "-m", "demix", "plan", "config.yaml", "--dry-run"]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PATH": "/nowhere"})
    assert [path.name for path in (tmp_path / "results/paper-125m").iterdir()] == ["sbatch"]
    written = {path.stem: path.read_text().splitlines() for path in (tmp_path / "results/paper-125m/sbatch").iterdir()}
    assert set(written) == {one.name for one in (*config.trained, *config.adaptations)}
    asked = {line.removeprefix("#SBATCH --") for line in written["demix"] if line.startswith("#SBATCH")}
    assert asked >= {
        "nodes=4",
        "ntasks-per-node=8",
        "gpus-per-node=8",
        "mem=256000M",
        "time=1440",
        "signal=USR2@120",
        "requeue",
        "partition=gpu",
        "account=lab",
        "qos=long",
    }
    assert "module load cuda" in written["demix"]
    assert {"#SBATCH --nodes=1", "#SBATCH --time=90", "#SBATCH --partition=short"} <= set(
        written["dense_unbalanced-dapt-yelp"]
    )


def test_scoring_jobs_count_the_models_of_further_seeds():
    """As `test_a_further_seed_trains_and_scores_only_its_models` finds them in the workflow."""
    removed = len(SAMPLE.config.removal.retrain_without)
    for seeds, number in (([], 6), ([SAMPLE.seed], 6), ([1, 2, 5], 18)):
        # On one machine two jobs for all training domains, and two for each novel one, whatever the models.
        for launch, jobs in (("local", 2 + 2 * 8), ("slurm", 16 * number + removed)):
            config = changed(SAMPLE, seeds=seeds, cluster={"launch": launch})
            assert next(job.count for job in plan_jobs(config, "cpu") if job.name == "score") == jobs


def test_ranks_that_do_not_fill_their_nodes_are_refused():
    config = changed(PAPER["paper-125m"], cluster={"ranks_per_node": 5})
    with pytest.raises(DemixError, match=r"cluster\.ranks_per_node: is 5, and 32 ranks do not fill 7 nodes evenly"):
        jobs_table(config, "v100")
