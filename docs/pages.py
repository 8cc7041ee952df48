"""Fills the marked numbers of README and the pages: `python docs/pages.py`, or `make pages`.

A mark is `<!-- name -->…<!-- end -->`, around a table or a few words. `results` marks come from the finished run of
`make demo` in results/sample, `plan` marks from `demix plan` of the configs. Without the run of the sample its marks
stay as they are. `report.png`, the first page of that run's report, is drawn by chromium. With `--check` nothing is
written: the `plan` marks that would change are listed, and the exit status is 1. The last digits of `results` depend on
the processor.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from demix.api import open_run
from demix.config.architecture import PRESETS
from demix.config.config import Config
from demix.plan.cost import TEXT_BYTES, TOKENS_PER_WORD, WORD_BYTES, ScoringCosts, TrainingPlan, plan_training
from demix.plan.flops import HARDWARE, PAPER_TFLOPS, hours, update_flops
from demix.plan.jobs import decimal, in_one_line, short
from demix.plan.tables import folded
from demix.report.cells import adapting, changed_bytes
from demix.report.run_data import RunData
from demix.run.check import load_run
from demix.run.run import Run

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "results" / "sample"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PICTURE, SIZE = ROOT / "docs" / "report.png", (1400, 1000)
MARK = re.compile(r"<!-- ([\w.-]+) -->(.*?)<!-- end -->", re.DOTALL)
# GPUs of a training of the paper's size: the config's own number, and sixteen.
MACHINES = {"a100": None, "h100": 16}
V100_PEAK = 125

# Rows of README's first table: label, and the system by model entry, method and mixing rule; * marks an oracle.
SYSTEMS = {
    "5-grams, same tokens": ("ngram5", "dense", ""),
    "5-grams by domain, same tokens, tempered": ("ngram5_domains", "uniform", "tempered"),
    "5-grams by domain, all text, tempered": ("ngram5_all_domains", "uniform", "tempered"),
    "Dense (Balanced)": ("dense", "dense", ""),
    "DEMix, cached prior": ("demix", "cached", "history"),
    "DEMix, tempered": ("demix", "uniform", "tempered"),
    "DEMix after a dense warm start, tempered": ("demix_seeded", "uniform", "tempered"),
    "Dense + unigram cache": ("dense_cache", "dense", ""),
    "Dense + 5-grams": ("dense_ngrams", "dense", ""),
    "DEMix + 5-grams": ("demix_scratch_ngrams", "dense", ""),
    "DEMix after a warm start + 5-grams": ("demix_ngrams", "dense", ""),
    "Dense + 5-grams, also by domain, + cache": ("dense_counts", "dense", ""),
    "DEMix after a warm start + 5-grams, also by domain, + cache": ("demix_counts", "dense", ""),
    "Dense + 5-grams of all text, also by domain, + cache": ("dense_counts_all", "dense", ""),
    "DEMix after a warm start + 5-grams of all text, also by domain, + cache": ("demix_counts_all", "dense", ""),
}
MEANS = """
    select avg(perplexity) filter (kind = 'training'), avg(perplexity) filter (kind = 'novel'), bool_or(oracle)
    from results where variant = '' and experts in ('training', 'dense') and top_k is null and split = 'test'
    and model = '{}' and method = '{}' and weights = '{}'
"""
NGRAMS = {
    "pooled": ("ngram{}", "dense", ""),
    "by domain, the domain's own (novel: the best, an oracle)": ("ngram{}_domains", "naive", ""),
    "by domain, cached prior": ("ngram{}_domains", "cached", "history"),
    "by domain, tempered": ("ngram{}_domains", "uniform", "tempered"),
}
ADAPTED = {
    "Dense-DAPT, a tenth of the learning rate": "Dense-DAPT",
    "Dense and Dense-DAPT, a tenth of the learning rate, both kept (tempered)": "Dense and Dense-DAPT",
    "DEMix-DAPT, the full learning rate (old domains by their own experts)": "DEMix-DAPT",
}


def table(heads: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table between blank lines; all but the first `left` columns are numbers."""
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in (heads, *rows)]
    return "\n".join(["\n", lines[0], f"|{'|'.join(rule)}|", *lines[1:], "\n"])


def sample_means() -> str:
    """Mean test perplexity of each system of README over the training and over the novel domains."""
    rows = []
    run = open_run(SAMPLE)
    for label, system in SYSTEMS.items():
        training, novel, oracle = run.sql(MEANS.format(*system)).iloc[0]
        rows.append([label, f"{training:.1f}", f"{novel:.1f}{'*' if oracle else ''}"])
    return table(["mean test perplexity", "8 training domains", "8 novel domains"], rows)


def sample_ngrams() -> str:
    """Means of the n-grams of the demo over the training and over the novel domains."""
    run, rows = open_run(SAMPLE), []
    for label, (folder, *system) in NGRAMS.items():
        found = (run.sql(MEANS.format(folder.format(order), *system)).iloc[0] for order in ("3", "5", "5_all"))
        rows.append([label, *(f"{mean:.1f}" for training, novel, _ in found for mean in (training, novel))])
    orders = ("order 3", "order 5", "order 5, all text")
    return table(["n-grams", *(f"{order}: {kind}" for order in orders for kind in ("training", "novel"))], rows)


def sample_adaptation() -> str:
    """Means over novel domains before and after the adaptation to each, and the bytes that change."""
    run, rows = Run.read(SAMPLE), []
    both = adapting(RunData(run))
    for label, name in ADAPTED.items():
        own_before, own_after = (found[f"{name}: own domain"].mean() for found in both)
        old_before, old_after = (found[f"{name}: training domains"].mean() for found in both)
        changed = changed_bytes(run)[name]
        cells = [f"{own_before:.1f} → {own_after:.1f}", f"{old_before:.1f} → {old_after:.1f}", f"{changed:,.0f}"]
        rows.append([label, *cells])
    heads = ["adapting to one novel domain (means over 8)", "that domain, before and after", "8 training domains"]
    return table([*heads, "bytes changed"], rows)


@cache
def config(name: str) -> Run:
    return load_run(ROOT / "config" / f"{name}.yaml")


@cache
def plans(name: str, kind: str) -> dict[str, TrainingPlan]:
    """The trainings of a config on a kind of GPU, by name; of the paper's size on as many as `MACHINES` says."""
    ranks = MACHINES[kind] if name == "paper-1.3b" else None
    return {plan.name: plan for plan in plan_training(config(name), ranks, HARDWARE[kind])}


def by_model(name: str) -> str:
    """Each training of a config but the trials of learning rates and, for c-BTM's, the adaptations."""
    run, kinds = config(name), []
    for kind, ranks in MACHINES.items():
        found = plan_training(run, ranks, HARDWARE[kind])
        kinds.append(folded((one.name, decimal(one.hours), decimal(one.rank_hours)) for one in found))
    rows = [[*a, *h[1:]] for a, h in zip(*kinds, strict=True) if "rates" not in a[0]]
    if name == "cbtm-1.3b":
        rows = [row for row in rows if "dapt" not in row[0]]
    else:
        scoring = [decimal(ScoringCosts(run, HARDWARE[kind]).of_all[0]) for kind in MACHINES]
        rows.append(["scoring", "", scoring[0], "", scoring[1]])
    heads = [f"{kind}, {unit}" for kind in ("A100", "H100") for unit in ("hours", "GPU-hours")]
    return table(["model", *heads], rows)


def papers_runs() -> str:
    rows = []
    for name, (size, gpus, steps, printed) in {
        "gpt3-small": ("125M", 32, 300_000, 556),
        "gpt3-medium": ("350M", 64, 120_000, 3279),
        "gpt3-large": ("760M", 128, 65_000, 13637),
        "gpt3-xl": ("1.3B", 128, 50_000, 23250),
    }.items():
        flops = update_flops(PRESETS[name], 50264, 16 * gpus, 1024)
        dense, demix = PAPER_TFLOPS[name]
        cost = [f"{flops / 1e12:,.2f}", f"{printed:,}", f"{100 * (flops / 1e12 / printed - 1):+.2f}%"]
        took = [f"{hours(flops, steps, gpus, tflops):.1f}" for tflops in (dense, demix)]
        speed = [str(dense), f"{100 * (0.4 * V100_PEAK / dense - 1):+.0f}%", f"{100 * (demix / dense - 1):+.1f}%"]
        rows.append([size, str(gpus), *cost, *took, *speed])
    heads = ["size", "GPUs", "TFLOPs an update", "printed", "error", "hours, dense", "hours, DEMix"]
    heads += ["TFLOPs/s a GPU", "40% of peak against it", "DEMix's gain in throughput"]
    return table(heads, rows)


def assumed() -> str:
    rows = [[f"achieved, {kind}", HARDWARE[kind].assumption] for kind in MACHINES]
    words = f"{WORD_BYTES} bytes of text, {TEXT_BYTES} bytes on disk (zstd), {TOKENS_PER_WORD} tokens"
    return table(["what", "value"], [*rows, ["a word", words]], left=2)


def last_lines(name: str, *kinds: str) -> str:
    """The last line of `demix plan` for each kind of GPU, as a block of code."""
    lines = (in_one_line(config(name), kind, MACHINES[kind] if len(kinds) > 1 else None) for kind in kinds)
    return "\n\n" + "\n".join(f"    {line}" for line in lines) + "\n\n"


def gpu_hours(kind: str) -> float:
    """The GPU-hours of the models of the paper's largest size that train from scratch."""
    return sum(one.rank_hours for one in plans("paper-1.3b", kind).values() if one.stage == "train" and one.jobs == 1)


def training_share(kind: str) -> str:
    scoring = ScoringCosts(config("paper-1.3b"), HARDWARE[kind]).of_all[0]
    every = scoring + sum(one.rank_hours for one in plans("paper-1.3b", kind).values())
    return f"{100 * gpu_hours(kind) / every:.0f}%"


def with_training(name: str, model: str, **keys: int) -> TrainingPlan:
    """The training of a config's model on A100s with other `keys` of its section `training`."""
    values = config(name).config.values
    other = Config.complete(values | {"training": values["training"] | keys})
    found = plan_training(Run(other, Path()), None, HARDWARE["a100"])
    return next(one for one in found if one.name == model)


def sentences() -> dict[str, str]:
    """The numbers in the sentences of experiments/cost.md and how-to/one-gpu.md."""
    a100 = plans("paper-1.3b", "a100")
    demix, large = a100["demix"], plans("cbtm-6.7b", "a100")
    expert, adapted = large["btm-1b"], large["btm-dapt-github"]
    fuller = with_training("paper-1.3b", "demix", micro_sequences=16)
    recomputed = with_training("cbtm-6.7b", expert.name, checkpoint_activations=True)
    one_gpu = {f"plan-one-gpu-{kind}": in_one_line(config("one-gpu"), kind).split()[2] for kind in MACHINES}
    return one_gpu | {
        **{f"plan-training-share-{kind}": training_share(kind) for kind in MACHINES},
        "plan-training-hours": decimal(gpu_hours("a100")),
        "plan-two-models-hours": decimal(sum(a100[name].rank_hours for name in ("demix", "dense"))),
        "plan-checkpoint": f"{short(demix.checkpoint)}B",
        "plan-state": f"{short(demix.state)}B",
        "plan-activations": f"{short(demix.activations)}B",
        "plan-activations-16": f"{short(fuller.activations)}B",
        "plan-6.7b-state": f"{short(expert.state)}B",
        "plan-6.7b-activations": f"{short(expert.activations)}B",
        "plan-6.7b-recomputed": f"{short(recomputed.activations)}B",
        "plan-6.7b-adaptation": f"{short(adapted.state)}B",
    }


def fillings() -> dict[str, Callable[[], str]]:
    """What fills each mark, by its name."""
    numbers = sentences()
    return {
        "results-means": sample_means,
        "results-ngrams": sample_ngrams,
        "results-adaptation": sample_adaptation,
        "plan-by-model": lambda: by_model("paper-1.3b"),
        "plan-by-model-of-the-family": lambda: by_model("cbtm-1.3b"),
        "plan-papers-runs": papers_runs,
        "plan-assumed": assumed,
        "plan-line-125m": lambda: last_lines("paper-125m", "v100"),
        "plan-line-one-gpu": lambda: last_lines("one-gpu", "a100"),
        "plan-line-1.3b": lambda: last_lines("paper-1.3b", *MACHINES),
        "plan-line-cbtm-1.3b": lambda: last_lines("cbtm-1.3b", *MACHINES),
        "plan-line-cbtm-6.7b": lambda: last_lines("cbtm-6.7b", "a100"),
        **{name: lambda name=name: numbers[name] for name in numbers},
    }


def photograph(page: Path, picture: Path) -> None:
    """Draw the first SIZE pixels of an HTML page as a PNG. Without chromium a line says that nothing is drawn."""
    if (chromium := shutil.which("chromium")) is None:
        print(f"{picture}: left as it is; it needs chromium (apt-get install chromium)")
        return
    with TemporaryDirectory() as folder:
        size = "--window-size={},{}".format(*SIZE)
        settings = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1")
        # Scripts that sort the tables have run after so many milliseconds of the page's own time.
        settings += (size, f"--user-data-dir={folder}", "--virtual-time-budget=10000", f"--screenshot={picture}")
        subprocess.run([chromium, *settings, page.as_uri()], check=True, capture_output=True)


def main() -> int:
    """Fill the marks, or list those that would change. Returns the exit status."""
    known, check = fillings(), "--check" in sys.argv[1:]
    finished, changed = (SAMPLE / "report" / "index.html").exists(), []
    for page in PAGES:

        def filled(mark: re.Match[str], page: Path = page) -> str:
            name, before = mark.groups()
            if name not in known:
                raise SystemExit(f"{page}: mark {name}: is not known; docs/pages.py knows {', '.join(known)}")
            if name.startswith("results") and (check or not finished):
                return mark[0]
            after = known[name]()
            if after != before:
                changed.append(f"{page.relative_to(ROOT)}: {name}")
            return f"<!-- {name} -->{after}<!-- end -->"

        text = MARK.sub(filled, page.read_text())
        if not check:
            page.write_text(text)
    if finished and not check:
        photograph(SAMPLE / "report" / "index.html", PICTURE)
    print("\n".join(changed), end="\n" if changed else "")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
