"""Blocks of other lengths than those of training: what is scored, summed by position, shown and refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from demix.config.architecture import Architecture
from demix.data.shards import TokenShard, blocks
from demix.evaluate.domain import ContextEvaluation, evaluate_contexts, losses_by_position
from demix.evaluate.score import Scoring
from demix.evaluate.score_tables import read_scores
from demix.mix.rules import History
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from demix.plan.cost import ScoringCosts
from demix.plan.flops import HARDWARE, scoring_flops
from demix.plan.jobs import count_jobs
from demix.run.evaluated import contexts_of
from demix.run.run import Run
from demix.run.scoring import scoring_jobs
from demix.settings import settings_from
from support.entries import tiny
from support.errors import refused
from support.mixing import block_weights, log_mixture
from support.models import save_model
from support.scored import LENGTH, score, write_table
from support.tokens import TRAINING
from support.training import opened

ALIBI = {"architecture": {"position": "alibi"}}
ROWS = {"far": {"kind": "demix"} | ALIBI, "far_token": {"kind": "domain_token"} | ALIBI}
MASKED = {"kind": "dense", "architecture": {"objective": "mlm"}}


def run_of(contexts: list[int] | None = None, launch: str = "local", **rows: Any) -> Run:
    return tiny(rows, evaluation={"contexts": contexts} if contexts else {}, cluster={"launch": launch})


def test_learned_positions_end_at_the_length_of_training() -> None:
    config = run_of([64, 16, 32], **ROWS, masked=MASKED)
    lengths = {model.name: contexts_of(config, model) for model in config.planned}
    found = {some: {name for name, each in lengths.items() if each == some} for some in set(lengths.values())}
    unscored = {"without-licenses", "masked", "dense-dapt-fantasy", "dense-dapt-fortunes"}
    learned = {"demix", "dense", "dense_unbalanced", "domain_token"}
    assert found == {(16, 32, 64): {"far", "far_token"}, (16, 32): learned, (): unscored}
    with refused("config key evaluation.contexts"):
        run_of([16, 64])
    with refused("config key evaluation.contexts"):
        run_of([16, 16])


def test_the_plan_counts_jobs_and_costs_of_longer_blocks() -> None:
    plain, config = run_of(**ROWS), run_of([32, 64], **ROWS)
    before, after = (count_jobs(one) for one in (plain, config))
    assert after == before | {"contexts": 5}, "the jobs of the other models score them too"
    hours = [ScoringCosts(one, HARDWARE["cpu"]).of_all[0] for one in (plain, config)]
    assert hours[0] < hours[1]
    novel = [job for job in scoring_jobs(config) if job.name == f"others-{config.novel[0]}"]
    parts = {part.folder: part for job in novel for part in job.parts}
    far, base = (ScoringCosts(config, HARDWARE["cpu"]).of_part(parts[name])[0] for name in ("far@64", "far"))
    # The same novel domains, whose test splits are as long as their dev splits here, without these.
    sizes = [
        scoring_flops(Architecture(layers=2, width=32, heads=2, context=length, position="alibi"), 512, 3)
        for length in (64, 32)
    ]
    tokens = [1000, 1000 + 10 * 32]
    assert far / base == pytest.approx(sizes[0] * tokens[0] / sizes[1] / tokens[1], rel=1e-9)


def write_small(folder: Path, position: str, tokens: Path) -> GPT:
    shard = opened(tokens)[0]
    model = GPT(
        Architecture(layers=2, width=32, heads=4, context=16, position=position), shard.vocab_size, ("a", "b")
    ).initialise(1)
    save_model(model, folder, shard.tokenizer_sha256)
    return model


@pytest.mark.parametrize(("position", "context"), [("alibi", 48), ("alibi", 5), ("learned", 5)])
def test_scores_in_other_blocks_are_those_of_the_model(
    position: str, context: int, tokens: Path, tmp_path: Path
) -> None:
    model = write_small(tmp_path / "model", position, tokens)
    path = tokens / "tokens" / TRAINING[0] / "test.arrow"
    scoring = Scoring(dev_blocks=3, test_tokens=500, precision="fp32", threads=1)
    score(tmp_path / "model", ("a", "b"), [path], scoring, tmp_path / "scores", context)
    table = read_scores(tmp_path / "scores" / f"{TRAINING[0]}.test", ("a", "b"))
    assert table.mask.shape[1] == context
    assert table.tokens == 500
    wanted = log_probabilities(model, *blocks(TokenShard.open(path), context, 500))
    np.testing.assert_allclose(table.scores[table.mask].T, wanted, atol=1e-6)


def test_longer_blocks_than_learned_positions_are_refused(tokens: Path, tmp_path: Path) -> None:
    write_small(tmp_path / "model", "learned", tokens)
    scoring = Scoring(dev_blocks=3, test_tokens=500, precision="fp32", threads=1)
    shards = [tokens / "tokens" / TRAINING[0] / "test.arrow"]
    with refused("context 17"):
        score(tmp_path / "model", ("a",), shards, scoring, tmp_path / "scores", 17)
    assert not (tmp_path / "scores").exists()


def test_losses_by_position_are_those_of_a_loop_over_tokens(tmp_path: Path) -> None:
    """History by Equations 5 and 6 of the paper, block by block; the prior of dev as `cached` has it."""
    experts, scores = ("law", "news", "code"), tmp_path / "scores"
    for split, text in (("dev", 1), ("test", 2)):
        write_table(scores / "far" / f"law.{split}", experts, text=text)
    write_table(scores / "dense" / "law.test", ("dense",), seed=5, text=2)
    dev = read_scores(scores / "far" / "law.dev", experts)
    log_prior = History().cached_log_prior(dev.scores, dev.mask, decay=0.3, blocks=6)
    mixed = {"experts": "training", "method": "cached", "weights": "history", "prior": "far"}
    tables = [{"model": "far", "folder": "far", "context": LENGTH, "columns": experts} | mixed]
    alone = {"experts": "dense", "method": "dense"}
    tables.append({"model": "dense", "folder": "dense", "context": LENGTH, "columns": ["dense"]} | alone)
    given = {"kind": "training", "tables": tables, "width": 3, "decay": 0.3, "dev_blocks": 6, "seed": 7}
    evaluate_contexts(scores, "law", settings_from(ContextEvaluation, given), tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet").to_pandas()
    table = read_scores(scores / "far" / "law.test", experts)
    single = read_scores(scores / "dense" / "law.test", ["dense"])
    wanted: dict[tuple[str, int], list[float]] = {}
    for block, alone, mask in zip(table.scores, single.scores, table.mask, strict=True):
        mixed = log_mixture(block_weights(block, log_prior, "history")[:-1], block)
        for place in np.flatnonzero(mask):
            wanted.setdefault(("far", place // 3), []).append(-mixed[place])
            wanted.setdefault(("dense", place // 3), []).append(-alone[place, 0])
    assert len(found) == len(wanted) == 6
    for row in found.itertuples():
        some = wanted[row.model, row.begin // 3]
        assert (row.tokens, row.end) == (len(some), min(row.begin + 3, LENGTH))
        assert row.nll == pytest.approx(math.fsum(some), rel=1e-9)
    assert set(found["seed"]) == {7}
    # In pieces, as large tables are read.
    nll, counted = losses_by_position(scores / "far" / "law.test", experts, log_prior)
    assert nll.sum() == pytest.approx(found.query("model == 'far'")["nll"].sum(), rel=1e-12)
    assert counted.sum() == table.tokens
    tables[1]["context"] = 2 * LENGTH
    with refused("dense/law.test"):
        evaluate_contexts(scores, "law", settings_from(ContextEvaluation, given), tmp_path / "none.parquet")
    assert not (tmp_path / "none.parquet").exists()
