"""docs/performance.md: its numbers are those that `demix plan` prints and that the code assumes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demix.config.architecture import PRESETS
from demix.config.counts import parameters
from demix.plan.cells import decimal, folded, short
from demix.plan.cost import plan_training
from demix.plan.domains import TEXT_BYTES, TOKENS_PER_WORD
from demix.plan.flops import HARDWARE, PAPER_TFLOPS, hours, update_flops
from demix.plan.jobs import in_one_line
from demix.plan.network import NETWORKS, Ring, out_of_a_node, rings_of, synchronizing
from demix.plan.stages import RATES, WORD_BYTES, StageCost, plan_stages, saving_hours, stages_table, sync_table
from demix.run.check import load_run
from demix.run.placement import place_experts
from demix.run.run import Run
from support.configs import changed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text()
PAPER, BTM, LARGE = (load_run(ROOT / "config" / f"{name}.yaml") for name in ("paper-1.3b", "cbtm-1.3b", "cbtm-6.7b"))
# GPUs of a training: the config's own, and sixteen.
MACHINES = {"a100": None, "h100": 16}
V100_PEAK = 125


def section(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of the page, without its head."""
    text = re.split(rf"^## {re.escape(heading)}\n", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.M)][2:]


def cells(table: Any, *columns: int) -> list[list[str]]:
    """Columns of a table that `demix plan` prints, row by row."""
    return [list(row) for row in zip(*(list(table.columns[number].cells) for number in columns), strict=True)]


def stage_rows() -> list[list[str]]:
    """Name, written and core-hours, which no GPU changes; then GPU-hours, longest job and network on each machine."""
    a100, h100 = (cells(stages_table(PAPER, kind, ranks), *range(7)) for kind, ranks in MACHINES.items())
    assert [[row[0], row[2], row[6]] for row in a100] == [[row[0], row[2], row[6]] for row in h100]
    return [[a[0], a[6], a[2], *a[3:6], *h[3:6]] for a, h in zip(a100, h100, strict=True)]


def model_rows(run: Run) -> list[list[str]]:
    """By training, all but the trials of learning rates; five columns on each machine."""
    rows = []
    for kind, ranks in MACHINES.items():
        plans = plan_training(run, ranks, HARDWARE[kind])
        took = [row[1:] for row in folded((plan.name, decimal(plan.hours), decimal(plan.rank_hours)) for plan in plans)]
        sent = cells(sync_table(run, kind, ranks), 0, 3, 5, 6)
        rows.append([[name, *a, *b] for a, (name, *b) in zip(took, sent, strict=True)])
    return [[*a, *h[1:]] for a, h in zip(*rows, strict=True) if "rates" not in a[0]]


def bytes_rows() -> list[list[str]]:
    rows = []
    for ranks in (16, 32, 64, 128):
        shared, expert = parameters(replace(PRESETS["gpt3-xl"], context=1024), 50257)
        dense = out_of_a_node(rings_of(4 * shared, 4 * expert, place_experts(["all"], ranks, ranks)), 8)
        demix = out_of_a_node(rings_of(4 * shared, 4 * expert, place_experts("abcdefgh", ranks, ranks)), 8)
        sizes = (f"{short(round(size))}B" for size in (dense, demix))
        rows.append([str(ranks), str(ranks // 8), *sizes, f"{100 * demix / dense:.0f}%"])
    return rows


def paper_rows() -> list[list[str]]:
    rows = []
    for name, (size, gpus, steps, printed) in {
        "gpt3-small": ("125M", 32, 300_000, 556),
        "gpt3-medium": ("350M", 64, 120_000, 3279),
        "gpt3-large": ("760M", 128, 65_000, 13637),
        "gpt3-xl": ("1.3B", 128, 50_000, 23250),
    }.items():
        flops = update_flops(PRESETS[name], 50264, 16 * gpus, 1024)
        dense, demix = PAPER_TFLOPS[name]
        shared, expert = (2 * number for number in parameters(PRESETS[name], 50257))
        step = flops / gpus / dense / 1e12
        whole = synchronizing([Ring(shared + expert, range(gpus))], NETWORKS["v100"])
        part = synchronizing(rings_of(shared, expert, place_experts("abcdefgh", gpus, gpus)), NETWORKS["v100"])
        rows.append([
            size, str(gpus), f"{flops / 1e12:,.2f}", f"{printed:,}", f"{100 * (flops / 1e12 / printed - 1):+.2f}%",
            *(f"{hours(flops, steps, gpus, tflops):.1f}" for tflops in (dense, demix)),
            str(dense), f"{100 * (0.4 * V100_PEAK / dense - 1):+.0f}%",
            f"{100 * (whole - part) / (step - whole + part):+.1f}%", f"{100 * (demix / dense - 1):+.1f}%",
        ])  # fmt: skip
    return rows


def assumed_rows() -> list[list[str]]:
    rows = [[f"achieved, {kind}", HARDWARE[kind].assumption] for kind in MACHINES]
    for kind, network in NETWORKS.items():
        links = f"{network.inner_beta / 1e9:.0f} GB/s inside a node, {network.outer_beta / 1e9:g} GB/s out of it"
        rows.append([f"network, {kind}", f"{links} ({network.assumption}); nodes of {network.node}"])
    for name, rate in RATES.items():
        known = f"measured, {rate.source}" if not rate.source.startswith("assumed") else rate.source
        rows.append([name, f"{short(round(rate.per_second))} {rate.unit} a second; {known}"])
    words = f"{WORD_BYTES} bytes of text, {TEXT_BYTES} bytes on disk (zstd), {TOKENS_PER_WORD} tokens"
    return [*rows, ["a word", words]]


TABLES = {
    "By stage": stage_rows,
    "Each model": lambda: model_rows(PAPER),
    "The family": lambda: [row for row in model_rows(BTM) if "dapt" not in row[0]],
    "Where DEMix moves fewer bytes": bytes_rows,
    "The same model on the paper's runs": paper_rows,
    "What is assumed": assumed_rows,
}


@pytest.mark.parametrize("heading", TABLES)
def test_the_pages_tables_are_the_plans(heading: str) -> None:
    assert section(heading) == TABLES[heading]()


def test_the_page_quotes_the_last_lines_of_the_plans() -> None:
    for config in (PAPER, BTM):
        for kind, ranks in MACHINES.items():
            assert in_one_line(config, kind, ranks) in PAGE
    assert in_one_line(LARGE, "a100") in PAGE
    assert len(PAGE.splitlines()) <= 175


def test_the_numbers_in_the_pages_sentences() -> None:
    def stages(kind: str, ranks: int | None) -> dict[str, StageCost]:
        return {stage.name: stage for stage in plan_stages(PAPER, kind, ranks)}

    text = " ".join(PAGE.split())
    plans = {kind: {one.name: one for one in plan_training(PAPER, n, HARDWARE[kind])} for kind, n in MACHINES.items()}
    for kind, ranks in MACHINES.items():
        found = stages(kind, ranks)
        share = found["train"].hours / sum(stage.hours for stage in found.values() if stage.on_device)
        assert f"{100 * share:.0f}% of the GPU-hours on {kind.upper()}s" in text
    demix = plans["a100"]["demix"]
    one = 3600 * saving_hours(demix) * demix.checkpoint / demix.saved
    assert f"DEMix's checkpoint of {short(demix.checkpoint)}B takes {one:.0f} seconds" in text
    rare = changed(PAPER, training={"checkpoint_every": 5000})
    spent = [sum(saving_hours(p) * p.ranks for p in plan_training(c, None, HARDWARE["a100"])) for c in (PAPER, rare)]
    assert "from {} to {} GPU-hours".format(*map(decimal, spent)) in text
    larger = changed(PAPER, training={"micro_sequences": 16})
    (most,) = (p.activations for p in plan_training(larger, None, HARDWARE["a100"]) if p.name == "demix")
    memory = [f"{short(size)}B" for size in (demix.activations, most, demix.state)]
    assert "activations grow from {} to {} beside {} of state".format(*memory) in text
    large = {one.name: one for one in plan_training(LARGE, None, HARDWARE["a100"])}
    expert, adapted = large["btm-1b"], large["btm-dapt-github"]
    sizes = (expert.state, expert.activations, expert.recomputed, adapted.state)
    told = "take {} of each, activations {} more ({} where recomputed); adaptation takes {}"
    assert told.format(*(f"{short(size)}B" for size in sizes)) in text
    assert min(sizes[0], sizes[3]) > 80e9
    assert max(expert.state + expert.activations, adapted.state + adapted.recomputed) < 141e9
    core = sum(stage.hours for stage in stages("a100", None).values() if stage.hours and not stage.on_device)
    assert f"{core:.0f} core-hours in all" in text
    few = [stages("a100", None)["train"].hours, sum(plans["a100"][name].rank_hours for name in ("demix", "dense"))]
    assert "from {} to {} GPU-hours".format(*map(decimal, few)) in text


def test_one_gpu_takes_what_its_config_and_the_page_say() -> None:
    file = ROOT / "config" / "one-gpu.yaml"
    run, head = load_run(file), " ".join(file.read_text().split("\nrun:")[0].split())
    hours, disk = {}, ""
    for kind in MACHINES:
        told = re.match(
            r"one-gpu takes (\S+) GPU-hours .* at most (\S+) GB of disk.* on 1 GPU$", in_one_line(run, kind)
        )
        assert told
        hours[kind], disk = told[1], f"{float(told[2]):.0f} GB of disk"
    assert float(hours["a100"]) <= 24, "a day"
    plans = plan_training(run, None, HARDWARE["a100"])
    gigabytes = max(plan.state + plan.activations for plan in plans) / 1e9
    assert gigabytes < 20 < 1.1 * gigabytes
    (dense,) = (plan for plan in plans if plan.name == "dense")
    size = f"{short(dense.shared + dense.expert)} parameters"
    for text in (head, " ".join(PAGE.split())):
        assert size in text
        assert f"{hours['a100']} hours of an A100" in text
        assert f"{hours['h100']} of an H100" in text
        assert disk in text
        assert "20 GB of its memory" in text
    assert {domain.access for domain in run.domains.values()} == {"open"}
    assert {domain.source.kind for domain in run.config.domains.training.values()} == {"hub"}


def test_experts_of_models_of_today_are_those_of_the_plan() -> None:
    rows = section("Experts of a model of today")
    for column, name in ((1, "olmo2-1b"), (2, "qwen3-0.6b")):
        run = load_run(ROOT / "config" / f"{name}.yaml")
        plans = {plan.name: plan for plan in plan_training(run, None, HARDWARE["h100"])}
        told = [row[column] for row in rows]
        demix = plans["demix"]
        own = next(plan for each, plan in plans.items() if each.startswith("btm-"))
        hours = [decimal(plan.hours) for plan in (demix, plans["dense"], own)]
        assert told[0] == f"{short(demix.shared)}, {short(demix.expert)}"
        assert told[3] == "{}, {}, 8 × {}".format(*hours)
        assert f"takes {told[5]} GPU-hours (h100) of training and scoring" in in_one_line(run, "h100")
