"""Loads of routers by domain, counted by plain loops, and what they say of the domain."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import mutual_info_score

from demix.config.architecture import Architecture
from demix.data.shards import TokenShard, blocks
from demix.evaluate import score_tables
from demix.evaluate.loads import write_loads
from demix.evaluate.score import Scoring
from demix.files import read_parquet
from demix.model.gpt import GPT
from demix.report.routers import told
from support.errors import refused
from support.models import model_of, save_model
from support.tokens import TRAINING as LEARNED

SCORING = Scoring(dev_blocks=3, test_tokens=300, precision="fp32", threads=1)
TOP2 = {"experts": 4, "top_k": 2, "every": 2, "capacity": 0.5, "balance": 0.01}


def saved(tokens: Path, path: Path, **architecture: Any) -> GPT:
    """A model with random weights in the folder `path`."""
    shard = TokenShard.open(tokens / "tokens" / LEARNED[0] / "test.arrow")
    sizes = Architecture(4, 16, 2, 32, **architecture)
    model = model_of(dtype=torch.float32, architecture=sizes, vocab_size=shard.vocab_size)
    save_model(model, path, shard.tokenizer_sha256)
    return model


def test_loads_are_those_of_a_loop_over_tokens(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tokens, tmp_path / "models" / "x", routed=TOP2)
    shards = [tokens / "tokens" / LEARNED[0] / "test.arrow", tokens / "tokens" / LEARNED[1] / "dev.arrow"]
    monkeypatch.setattr(score_tables, "ROW_GROUP_TOKENS", 128)
    write_loads(tmp_path / "models" / "x", shards, SCORING, tmp_path / "loads" / "x.parquet")
    found = read_parquet(tmp_path / "loads" / "x.parquet").to_pandas().set_index(["domain", "layer", "expert"])
    assert set(found.index.get_level_values("layer")) == {2, 4}
    for shard, count in zip(shards, (300, 96), strict=True):
        expected = np.zeros((5, 4), int)
        inputs, _, mask = blocks(TokenShard.open(shard), 32, count)
        with torch.no_grad():
            for row, there in zip(inputs, mask, strict=True):
                x = model.token_embedding[torch.from_numpy(row)[None, None]] + model.position_embedding[:32]
                for layer, block in enumerate(model.blocks, start=1):
                    if layer % 2 == 0:
                        state = torch.nn.functional.layer_norm(
                            x + block.attention(block.attention_norm(x), None, None), (16,)
                        )
                        normed = state * block.feedforward_norm.weight + block.feedforward_norm.bias
                        logits = normed[0, 0] @ block.feedforward.router[0].T
                        for position in np.flatnonzero(there):
                            for expert in logits[position].argsort(descending=True)[:2].tolist():
                                expected[layer, expert] += 1
                    x = block(x)
        for layer in (2, 4):
            assert found.loc[(shard.parent.name, layer), "choices"].tolist() == expected[layer].tolist()
            assert expected[layer].sum() == 2 * count
            assert expected[layer].max() > 0.5 * 2 * count / 4, "more than the capacity of training would let in"


def test_a_model_without_routers_has_no_loads(tokens: Path, tmp_path: Path) -> None:
    saved(tokens, tmp_path / "x")
    with refused(tmp_path / "x"):
        write_loads(tmp_path / "x", [tokens / "tokens" / LEARNED[0] / "test.arrow"], SCORING, tmp_path / "l.parquet")
    assert not (tmp_path / "l.parquet").exists()


def test_what_a_choice_tells_of_the_domain() -> None:
    counts = np.random.default_rng(1).integers(1, 50, (3, 4)) * np.array([[1], [3], [2]])
    equal = counts * np.prod(counts.sum(1)) // counts.sum(1, keepdims=True)
    shares = pd.DataFrame(equal / equal.sum(1, keepdims=True))
    assert told(shares, 1) == pytest.approx(mutual_info_score(None, None, contingency=equal) / np.log(3))
    assert told(pd.DataFrame(np.eye(3)), 1) == pytest.approx(1)
    assert told(pd.DataFrame(np.full((3, 4), 0.25)), 1) == pytest.approx(0)
    assert told(pd.DataFrame(np.repeat(np.eye(4), 2, axis=1) / 2), 2) == pytest.approx(1), "a pair for each domain"
    assert np.isnan(told(pd.DataFrame(np.ones((3, 1))), 1))
    assert np.isnan(told(pd.DataFrame(np.full((3, 2), 0.5)), 2)), "both experts see every token"
