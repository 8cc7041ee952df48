"""One job that scores under several models: the bytes of single jobs, and no column that is there computed again."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import demix.evaluate.score as module
import demix.model.scoring as passing
from demix.config.architecture import Architecture
from demix.data.shards import TokenShard
from demix.evaluate.score import Scoring, score_models
from demix.model.directory import describe, load_model, save_expert, save_manifest
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities, trunk_log_probabilities
from demix.run.scoring import ScoringPart
from support.errors import refused
from support.models import own_tensors, save_model
from support.scored import score
from support.tokens import NOVEL, TRAINING

SETTINGS: dict[str, Any] = {"dev_blocks": 4, "test_tokens": 100, "precision": "fp32", "threads": 1}
SPLITS = ("dev", "test")
SHAPE = Architecture(layers=2, width=16, heads=2, context=32)
MODELS = (
    ScoringPart(model="demix", experts=("law", "news"), domains=(TRAINING[0], NOVEL[0]), splits=SPLITS),
    # Under a domain's own token, in blocks of the length of training and in shorter ones.
    ScoringPart(model="token", experts=(), domains=TRAINING[:1], splits=("test",)),
    ScoringPart(model="token", experts=(), domains=TRAINING[:1], splits=("test",), context=16),
    ScoringPart(model="plain", experts=("dense",), domains=(TRAINING[0], NOVEL[0]), splits=("test",)),
)
SCORING = Scoring(**SETTINGS, models=MODELS)
Passes = list[tuple[str, int]]


@pytest.fixture
def models(tokens: Path, tmp_path: Path) -> Path:
    shard = TokenShard.open(tokens / "tokens" / NOVEL[0] / "dev.arrow")
    made = {
        "demix": GPT(SHAPE, shard.vocab_size, ("law", "news")).initialise(1),
        "token": GPT(SHAPE, shard.vocab_size, ("dense",), TRAINING).initialise(2),
        "plain": GPT(SHAPE, shard.vocab_size, ("dense",)).initialise(3),
    }
    for name, model in made.items():
        save_model(model, tmp_path / "models" / name, shard.tokenizer_sha256)
    return tmp_path / "models"


@pytest.fixture
def shards(tokens: Path) -> list[Path]:
    return [tokens / "tokens" / domain / f"{split}.arrow" for domain in (TRAINING[0], NOVEL[0]) for split in SPLITS]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """The first expert and the tokens of every call that computes."""
    done: Passes = []

    def counted(trunks: list[GPT], inputs: Any, *rest: Any) -> Any:
        found = trunk_log_probabilities(trunks, inputs, *rest)
        done.append((trunks[0].experts[0] + "+token" * bool(trunks[0].domain_tokens), inputs.shape[1]))
        return found

    monkeypatch.setattr(module, "trunk_log_probabilities", counted)
    return done


def tables(folder: Path) -> dict[str, bytes]:
    """The files that Snakemake knows."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.glob("*/*/*.parquet")}


def changed(models: Path, name: str, expert: str) -> None:
    """Give a model another expert of the same name."""
    model = load_model(models / name)
    own_tensors(model)["blocks.0.feedforward.up"].data += 1
    described = describe(models / name)
    about = {"tokenizer_sha256": described.tokenizer_sha256, "shared_sha256": described.shared_sha256}
    save_expert(model, expert, models / name, about)
    save_manifest(model, models / name, described.experts, described.content)


def test_it_writes_the_bytes_of_single_jobs(models: Path, shards: list[Path], tmp_path: Path) -> None:
    score_models(models, shards, SCORING, tmp_path / "together" / "scores", tmp_path / "scores.json")
    for one in MODELS:
        paths = [path for path in shards if path.parent.name in one.domains and path.stem in one.splits]
        folder = tmp_path / "alone" / "scores" / (f"{one.model}@16" if one.context else one.model)
        score(models / one.model, one.experts, paths, Scoring(**SETTINGS), folder, one.context)
    together, alone = (tables(tmp_path / name) for name in ("together/scores", "alone/scores"))
    assert together == alone
    assert len(together) == 4 * 3 + 2 + 2 + 2 * 2


def test_only_the_model_that_changed_is_computed_again(
    models: Path, shards: list[Path], tmp_path: Path, passes: Passes
) -> None:
    output = tmp_path / "scores"
    score_models(models, shards, SCORING, output, tmp_path / "scores.json")
    first, before = list(passes), tables(output)
    assert len(first) == 4 + 1 + 1 + 2
    changed(models, "plain", "dense")
    passes.clear()
    score_models(models, shards, SCORING, output, tmp_path / "scores.json")
    assert passes == [("dense", 32)] * 2
    after = tables(output)
    assert after.keys() == before.keys()
    assert {name.split("/")[0] for name in after if after[name] != before[name]} == {"plain"}
    # Another text length, another precision, and a column that is damaged: each is computed again.
    for more, expected in (
        ({"test_tokens": 90}, [first[1], first[3], *first[4:]]),
        ({"test_tokens": 90, "precision": "bf16"}, first),
    ):
        passes.clear()
        score_models(models, shards, Scoring(**SETTINGS | more, models=MODELS), output, tmp_path / "scores.json")
        assert passes == expected
    damaged = output / "plain" / f"{NOVEL[0]}.test" / "dense.parquet"
    content = bytearray(damaged.read_bytes())
    content[60] ^= 1
    damaged.write_bytes(content)
    passes.clear()
    score_models(models, shards, Scoring(**SETTINGS | more, models=MODELS), output, tmp_path / "scores.json")
    assert passes == [("dense", 32)]


def test_what_is_missing_or_wrong_ends_the_job_in_one_line_that_names_the_model(
    models: Path, shards: list[Path], tmp_path: Path, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("model demix"):
        score_models(models, shards[:3], SCORING, tmp_path / "scores", tmp_path / "scores.json")
    last, aside = models / "plain" / "experts" / "dense.json", tmp_path / "aside.json"
    shutil.move(last, aside)
    with refused("models/plain/experts/dense.json"):
        score_models(models, shards, SCORING, tmp_path / "scores", tmp_path / "scores.json")
    assert passes == []
    assert not (tmp_path / "scores").exists()
    shutil.move(aside, last)

    def compute(model: GPT, *rest: Any) -> np.ndarray:
        return log_probabilities(model, *rest) * (1.0 if model.domain_tokens or len(model.experts) > 1 else np.nan)

    monkeypatch.setattr(passing, "log_probabilities", compute)
    with refused("models/plain: expert dense"):
        score_models(models, shards, SCORING, tmp_path / "scores", tmp_path / "scores.json")
