"""A model whose experts are whole models says what the same experts say over shared layers."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from demix.evaluate.score import Scoring, score
from demix.evaluate.score_tables import read_scores
from demix.mix.mixtures import Mixture, Stream
from demix.mix.rules import History
from demix.model.decode import Decoder
from support.decoding import LENGTH, whole, write_run
from support.models import THREE, count_whole_models, model_of, randomise, write_trunks
from support.tokens import NOVEL

TEXT = "All happy families are alike; every unhappy family is unhappy in its own way. " * 3


@pytest.fixture(scope="module")
def models(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model over shared layers and one of three trunks, each in a run of its own."""
    run = write_run(tmp_path_factory.mktemp("stacked"), tokens)
    apart = tmp_path_factory.mktemp("apart")
    for name in ("tokenizer.json", "priors.parquet"):
        shutil.copy(run / name, apart)
    return run / "models" / "demix", write_trunks(run / "models" / "demix", apart / "models" / "demix")


def test_they_are_scored_alike(
    models: tuple[Path, Path], tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = count_whole_models(monkeypatch)
    shards = [tokens / "tokens" / NOVEL[0] / f"{split}.arrow" for split in ("dev", "test")]
    tables = []
    # Another order than that of the files.
    experts = (THREE[1], THREE[2], THREE[0])
    for number, model in enumerate(models):
        output = tmp_path / str(number)
        score(model, experts, shards, Scoring(dev_blocks=10, test_tokens=300, precision="fp32", threads=1), output)
        tables.append(read_scores(output / f"{NOVEL[0]}.test", experts))
    assert max(live) == 1
    assert not list(tmp_path.glob("*/*/.*"))
    np.testing.assert_allclose(tables[1].scores, tables[0].scores, rtol=1e-5)
    assert not np.allclose(tables[0].scores[..., 0], tables[0].scores[..., 1], atol=0.1)


def test_each_trunk_reads_with_its_own_weights() -> None:
    """Trunks that share nothing, their embeddings included, against whole forward passes."""
    trunks = [model_of((name,)) for name in ("law", "news")]
    randomise(trunks[1], seed=1)
    tokens = torch.randint(0, 50, (2, 2 * LENGTH + 5), generator=torch.Generator().manual_seed(0))
    decoder = Decoder(trunks, tokens[:, 0], Stream(Mixture(History(), np.zeros(2)), LENGTH, 2))
    found = torch.cat([decoder.read(piece)[0] for piece in tokens.split([3, 1, 20, 13], 1)], 2)
    expected = np.concatenate([whole(trunk, tokens, tokens[:, 0]) for trunk in trunks])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-10, rtol=0)
