"""Attention within documents: a block of several gives each what it gives alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from demix.config.architecture import architecture_from
from demix.data.shards import TokenShard, blocks
from demix.model.directory import describe, load_model
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from support.errors import refused
from support.models import model_of
from support.training import TRAIN, shard_paths, train_into

END = 5
SIZES = {"layers": 2, "width": 24, "heads": 4, "context": 40, "attention": "documents"}
# The last document of a block goes on in the next, as the first one began before.
LENGTHS = (7, 1, 12, 9)
DECODERS = [
    {"position": "alibi"},
    {"preset": "llama", "key_heads": 2},
    {"preset": "modern"},
    {"position": "rope", "routed": {"experts": 4, "top_k": 2, "every": 2, "capacity": 4.0, "balance": 0.1}},
]


def within(options: dict, **more) -> GPT:
    architecture = architecture_from(SIZES | options)
    return model_of(("all",) if architecture.routed else ("a", "b"), architecture=architecture, end_of_text=END, **more)


def block() -> torch.Tensor:
    """Sequences [1, 2, T] of as many documents, each after the first behind the token between documents."""
    ids = torch.randint(6, 50, (1, 2, sum(LENGTHS)), generator=torch.Generator().manual_seed(2))
    for start in torch.tensor(LENGTHS).cumsum(0)[:-1].tolist():
        ids[..., start] = END
    return ids


@pytest.mark.parametrize("options", DECODERS, ids=lambda options: "-".join(map(str, options.values()))[:20])
def test_each_document_has_the_states_that_it_has_alone(options: dict) -> None:
    """As a causal model of the same weights has them."""
    model, causal, ids = within(options), within(options | {"attention": "causal"}), block()
    with torch.no_grad():
        alone = torch.cat([causal(part.contiguous()) for part in ids.split(LENGTHS, -1)], 2)
        torch.testing.assert_close(model(ids), alone, rtol=0, atol=1e-9)
        assert (causal(ids) - alone)[:, :, LENGTHS[0] :].abs().max() > 1e-3


def test_gradients_are_those_of_the_documents() -> None:
    ids = block()
    found = []
    for cuts in ([ids], ids.split(LENGTHS, -1)):
        model = within({"preset": "modern"})
        model.checkpoint_activations = True
        torch.stack([model(part.contiguous()).square().sum() for part in cuts]).sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-9, atol=1e-9)


def test_a_domain_token_stands_before_every_document() -> None:
    model, ids = within({"position": "alibi"}, domain_tokens=("x", "y")), block()
    with torch.no_grad():
        first, second = (model(ids, torch.full((1, 2), number)) for number in (0, 1))
    assert ((first - second).abs().amax((0, 1, 3)) > 1e-6).all()


def test_positions_that_count_from_the_block_are_refused() -> None:
    for options in ({"position": "learned"}, {"position": "sinusoidal"}, {"position": "alibi", "objective": "mlm"}):
        with refused("architecture.attention"):
            architecture_from(SIZES | options)


def test_a_trained_model_keeps_its_end_of_text_and_scores_documents_alone(tokens: Path, tmp_path: Path) -> None:
    """Dense, then DEMix from it as from an imported parent, which says causal."""
    parent = None
    for kind, attention in (("dense", "causal"), ("demix", "documents")):
        architecture = SIZES | {"position": "rope", "context": 32, "attention": attention}
        training = TRAIN.replace(architecture=architecture)
        parent = train_into(tmp_path / kind, kind, shard_paths(tokens), training, branch=parent) / "model"
    assert "end_of_text" not in describe(tmp_path / "dense" / "model").content
    model, shard = load_model(parent), TokenShard.open(shard_paths(tokens, split="test")[0])
    assert describe(parent).end_of_text == model.end_of_text == shard.end_of_text
    inputs, targets, mask = blocks(shard, 32, 32 * 6)
    scored = log_probabilities(model, inputs, targets, mask)
    row, begin = next((row, at) for row in range(6) for at in np.flatnonzero(inputs[row] == shard.end_of_text) if at)
    end = next(iter(begin + 1 + np.flatnonzero(inputs[row, begin + 1 :] == shard.end_of_text)), 32)
    alone = log_probabilities(model, *(each[row : row + 1, begin:end] for each in (inputs, targets, mask)))
    np.testing.assert_allclose(scored[:, 32 * row + begin : 32 * row + end], alone, rtol=1e-5)
