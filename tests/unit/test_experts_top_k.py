"""Other numbers of experts than in training, of models whose tokens choose among them: in scores, plans and tables."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
import yaml
from click.testing import Result

from demix.config.architecture import Routed
from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.evaluate.score import ScoredModel, Scoring, score_models
from demix.files import read_json, write_json
from demix.model.layers import RoutedLayer
from demix.plan.flops import HARDWARE
from demix.plan.jobs import ScoringCosts
from demix.run.check import completed_run
from demix.run.run import Run
from demix.run.scoring import ScoringPart, scoring_jobs
from demix.run.systems import evaluated, other_top_k
from support.cli import demix
from support.models import SMALL, model_of, randomise, save_model
from support.tokens import TRAINING

TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
TOP2 = Routed(experts=4, top_k=2, every=1, capacity=2.0, balance=0.01)
SCORING = Scoring(dev_blocks=4, test_tokens=100, precision="fp32", threads=1)
WIDTH = 12


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("trained", "sums_to_one"),
    [(TOP2, True), (dataclasses.replace(TOP2, top_k=1), False), (dataclasses.replace(TOP2, renormalise=False), False)],
    ids=["top-2", "switch", "gates of OLMoE"],
)
def test_a_token_takes_the_likeliest_experts_with_gates_as_in_training(
    trained: Routed, sums_to_one: bool, top_k: int
) -> None:
    layer = RoutedLayer(trained, WIDTH).double()
    randomise(layer)
    layer.choose(top_k)
    x = torch.randn(1, 2, 5, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        found = layer(x)
        for token, out in zip(x.view(-1, WIDTH), found.view(-1, WIDTH), strict=True):
            scores = (layer.router[0] @ token).softmax(0)
            chosen = scores.argsort(descending=True)[:top_k].tolist()
            total = sum(scores[e] for e in chosen) if sums_to_one else 1.0
            wanted = sum(
                scores[e] / total
                * (layer.down[0, e] @ F.gelu(layer.up[0, e] @ token + layer.up_bias[0, e]) + layer.down_bias[0, e])
                for e in chosen
            )  # fmt: skip
            torch.testing.assert_close(out, wanted, rtol=0, atol=1e-10)


@pytest.fixture
def models(tokens: Path, tmp_path: Path) -> Path:
    shard = TokenShard.open(tokens / "tokens" / TRAINING[0] / "test.arrow")
    for name, routed in (("routed", TOP2), ("dense", None)):
        architecture = dataclasses.replace(SMALL, routed=routed)
        made = model_of(("dense",), torch.float32, architecture=architecture, vocab_size=shard.vocab_size)
        save_model(made, tmp_path / "models" / name, shard.tokenizer_sha256, "routed")
    return tmp_path / "models"


def column(scores: Path, folder: str) -> np.ndarray:
    return pq.read_table(scores / folder / f"{TRAINING[0]}.test" / "dense.parquet").column(0).to_numpy()


def test_scores_are_those_of_a_model_that_always_chose_so_many(models: Path, tokens: Path, tmp_path: Path) -> None:
    shards, scores = [tokens / "tokens" / TRAINING[0] / "test.arrow"], tmp_path / "scores"
    always = shutil.copytree(models / "routed", models / "always")
    about = read_json(always / "model.json")
    about["architecture"]["routed"]["top_k"] = 4
    write_json(always / "model.json", about)
    several = [
        ScoredModel(model=name, experts=("dense",), domains=TRAINING[:1], splits=("test",), top_k=top_k)
        for name, top_k in (("routed", 0), ("routed", 1), ("routed", 4), ("always", 0))
    ]
    score_models(models, shards, dataclasses.replace(SCORING, models=tuple(several)), scores)
    assert np.array_equal(column(scores, "routed@top-4"), column(scores, "always"))
    found = [column(scores, folder) for folder in ("routed", "routed@top-1", "routed@top-4")]
    assert len({values.tobytes() for values in found}) == 3
    # What is kept of one number is not taken for another one.
    for top_k, values in zip((0, 1, 4), found, strict=True):
        done = command(models / "routed", shards, scores / "one", top_k)
        assert done.exit_code == 0, done.exception
        assert np.array_equal(column(scores, "one"), values)


def command(model: Path, shards: list[Path], output: Path, top_k: int) -> Result:
    settings = json.dumps(dataclasses.asdict(SCORING))
    return demix(
        "score", model, *shards, "--experts", "dense", "--top-k", top_k, "--settings", settings, "--output", output
    )


@pytest.mark.parametrize(("model", "most"), [("routed", 4), ("dense", 0)])
def test_more_experts_than_there_are_are_refused(
    models: Path, tokens: Path, tmp_path: Path, model: str, most: int
) -> None:
    shards = [tokens / "tokens" / TRAINING[0] / "test.arrow"]
    with pytest.raises(DemixError, match=rf"^--top-k {most + 1}: is more than the {most} experts among which tokens"):
        raise command(models / model, shards, tmp_path / "scores", most + 1).exception
    assert not (tmp_path / "scores").exists()


def tiny(**evaluation: Any) -> Run:
    rows = {
        "demix": {"merged_routed": True},
        "switch": {"kind": "routed", "experts": 4},
        "btx": {"kind": "routed", "parent": "demix", "tokens": 6000},
    }
    config = copy.deepcopy(TINY) | {"models": rows, "seeds": [1, 2]}
    return completed_run(config | {"evaluation": TINY["evaluation"] | evaluation})


def test_routed_models_of_the_runs_own_seed_are_scored_with_each_other_number() -> None:
    run, before = tiny(experts_top_k=[1, 3, "all", 9]), tiny()
    assert other_top_k(run) == {"switch": (3, 4), "btx": (1, 3), "demix-routed": (1, 3)}
    assert other_top_k(before) == {}
    wanted = [(row, f"{row}{made}@top-{k}", k) for row, made, numbers in (
        ("switch", "", (3, 4)), ("btx", "", (1, 3)), ("demix", "-routed", (1, 3)),
    ) for k in numbers]  # fmt: skip
    for domain in run.domains:
        now, then = evaluated(run, domain), evaluated(before, domain)
        assert [(table.model, table.folder, table.top_k) for table in now[len(then) :]] == wanted
        assert now[: len(then)] == then
        assert all(("top_k" in table.told) == bool(table.top_k) for table in now)
    # On the training domains, and on a novel one.
    assert sorted(part.folder for part in parts(run) if part.top_k) == sorted(2 * [folder for _, folder, _ in wanted])
    assert {part for part in parts(run) if not part.top_k} == {*parts(before)}
    for part in (part for part in parts(run) if part.top_k):
        assert (part.splits, part.folder) == (("test",), f"{part.model}@top-{part.top_k}")
        assert part.settings({"novel": "x"})["top_k"] == part.top_k
    costs = ScoringCosts(run, HARDWARE["cpu"])
    one, all_of_them = (next(part for part in parts(run) if (part.model, part.top_k) == ("switch", k)) for k in (0, 4))
    of = [costs.of_part(dataclasses.replace(part, splits=("test",)), 1)[0] for part in (one, all_of_them)]
    assert of[1] > 1.5 * of[0]


def parts(run: Run) -> list[ScoringPart]:
    return [part for job in scoring_jobs(run) for part in job.parts]
