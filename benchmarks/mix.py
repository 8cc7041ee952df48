"""All mixtures of a domain in one streamed pass, against the plain arithmetic on a whole table in memory.

    python benchmarks/mix.py [--json rows.json] [--tokens 10000000] [--experts 16] [--folder /tmp]

A made-up table in blocks of 1,024 tokens, documents of 600 on average, written to a temporary folder (60 bytes a token)
and removed. Mixed: every method by the weights `history` and `released`, with and without top-k, with a grid of four
decays and five priors, the released scorer, `tempered`, the prior `fitted`, and apart from these `switching`; for each
of them the sums by document. The peer is log weights and logsumexp of scipy for one mixture at a time, on a table that
is in memory whole, at a size where it fits. Each side is a process of its own. About three
minutes on two cores.
"""

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import alone, arguments, peak, row, show
from scipy.special import logsumexp

from demix.evaluate.domain import Evaluation
from demix.evaluate.losses import Plan, PlannedMixture, dev_priors, document_losses
from demix.evaluate.score_tables import read_scores, tokens_sha256, write_scores, write_tokens
from demix.mix.mixtures import FLOORS, keep_top, log_weights
from demix.mix.rules import Chunk, History, Switching
from demix.run.systems import ExpertSet

LENGTH, DEV_BLOCKS, DOCUMENT = 1024, 100, 600
PLAIN_TOKENS = 500_000


def write_table(folder: Path, experts: tuple[str, ...], tokens: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 50257, tokens, dtype=np.uint16)
    offsets = np.append(0, np.flatnonzero(generator.random(tokens) < 1 / DOCUMENT))
    write_tokens(folder, ids, np.unique(offsets), LENGTH)
    metadata = {"tokens_sha256": tokens_sha256(ids), "shared_sha256": "0"}
    hard = -generator.exponential(3, tokens).astype(np.float32)
    for number, expert in enumerate(experts):
        scores = hard - 0.02 * number - 0.5 * generator.exponential(1, tokens).astype(np.float32)
        write_scores(folder / f"{expert}.parquet", [scores], metadata)


def mixtures(experts: tuple[str, ...]) -> list[PlannedMixture]:
    evaluation = Evaluation(
        kind="training", tables=(), seed=1, decay=0.3, dev_blocks=DEV_BLOCKS,
        weights=("history", "released", "tempered(0.1,0.99)"), top_k=(2,), decays=(0.1, 0.3, 0.5, 1.0),
        prior_blocks=(1, 5, 10, 50, 100),
    )  # fmt: skip
    planned = Plan(evaluation, ExpertSet("training", experts, variants=True), DEV_BLOCKS).mixtures()
    return [mixture for mixture in dict.fromkeys(mixture for mixture, _ in planned) if mixture.method not in FLOORS]


def switching(experts: tuple[str, ...]) -> list[PlannedMixture]:
    return [PlannedMixture("fitted", experts, Switching(0.2), "switching(0.2)", dev_blocks=DEV_BLOCKS)]


def ours(folder: Path, experts: tuple[str, ...]) -> tuple[dict[str, float], dict[PlannedMixture, float]]:
    """Times of the passes, and the nll of each mixture."""
    planned, chain = mixtures(experts), switching(experts)
    priors = dev_priors(read_scores(folder / "x.dev", experts), [*planned, *chain])
    traced = replace(planned[0], method="updating", rule=History(), weights="history", top_k=None)
    began, cpu = time.perf_counter(), time.process_time()
    totals = document_losses(folder / "x.test", experts, planned, priors, None, traced)
    ended, cpu_ended = time.perf_counter(), time.process_time()
    chained = document_losses(folder / "x.test", experts, chain, priors)
    times = {
        "pass": ended - began, "cpu": cpu_ended - cpu,
        "switching": time.perf_counter() - ended, "switching cpu": time.process_time() - cpu_ended,
    }  # fmt: skip
    return times, {one: float((totals.nll | chained.nll)[one].sum()) for one in (*planned, *chain)}


def plain(folder: Path, experts: tuple[str, ...]) -> tuple[dict[str, float], dict[PlannedMixture, float]]:
    started, cpu = time.perf_counter(), time.process_time()
    test, dev = (read_scores(folder / f"x.{split}", experts) for split in ("test", "dev"))
    nlls = {}
    priors = dev_priors(dev, [*mixtures(experts), *switching(experts)])
    for mixture in [*mixtures(experts), *switching(experts)]:
        log_priors = np.full((len(test.mask), len(experts)), -np.log(len(experts)))
        if mixture in priors:
            log_priors[:] = priors[mixture]
        elif mixture.method == "updating":
            log_priors = mixture.rule.log_priors(test.scores, test.mask, mixture.decay)[:-1]
        rule = mixture.rule
        evidence, _ = rule.evidence(Chunk(test.scores, test.mask), rule.begin(log_priors[0]))
        log_g = log_weights(log_priors, evidence, rule.uniform_start)
        log_g = log_g if mixture.top_k is None else keep_top(log_g, mixture.top_k)
        nlls[mixture] = -float(logsumexp(log_g + test.scores, axis=-1)[test.mask].sum())
    return {"pass": time.perf_counter() - started, "cpu": time.process_time() - cpu}, nlls


def side(name: str, folder: str, experts: int) -> dict:
    """One side in this process: times, peak memory in GiB, and the nll of each mixture."""
    times, nlls = {"ours": ours, "plain": plain}[name](Path(folder), names_of(experts))
    return times | {"peak": peak() / 1024, "nlls": list(nlls.values())}


def names_of(experts: int) -> tuple[str, ...]:
    return tuple(f"expert{number:02}" for number in range(experts))


def main(tokens: int, experts: int, path: Path | None, place: str) -> None:
    plain_tokens = min(PLAIN_TOKENS, tokens)
    with tempfile.TemporaryDirectory(dir=place or None) as name:
        big, small = Path(name) / "big", Path(name) / "small"
        for folder, count in ((big, tokens), (small, plain_tokens)):
            write_table(folder / "x.test", names_of(experts), count, 0)
            write_table(folder / "x.dev", names_of(experts), DEV_BLOCKS * LENGTH, 1)
        large, few = (alone(__file__, "ours", str(folder), experts) for folder in (big, small))
        peer = alone(__file__, "plain", str(small), experts)
    apart = max(abs(a / b - 1) for a, b in zip(sorted(few["nlls"]), sorted(peer["nlls"]), strict=True))
    size, smaller = f"{tokens / 1e6:g}M tokens", f"{plain_tokens / 1e6:g}M tokens"
    rows = [
        row(f"{len(large['nlls'])} mixtures, {size} x {experts}: seconds", large["pass"], None, "s"),
        row("  CPU", large["cpu"], None, "s"),
        row("  peak memory", large["peak"], None, "GiB"),
        row("switching, fitted prior, alone", large["switching"], None, "s"),
        row("  CPU", large["switching cpu"], None, "s"),
        row(f"the same, {smaller}: seconds", few["pass"], peer["pass"], "s"),
        row("  CPU", few["cpu"], peer["cpu"], "s"),
        row("  peak memory", few["peak"], peer["peak"], "GiB"),
        row("  largest relative difference of an nll, times 1e12", 1e12 * apart, None, "1e-12"),
    ]
    show(rows, path)


if __name__ == "__main__":
    given = arguments(__doc__, tokens=10_000_000, experts=16, folder="")
    if given.alone:
        print(json.dumps(side(*given.alone)))
    else:
        main(given.tokens, given.experts, given.json, given.folder)
