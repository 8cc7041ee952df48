"""Masked language models: bidirectional attention, what is masked, and scoring in folds."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import RobertaPreLayerNormConfig
from transformers.models.roberta_prelayernorm.modeling_roberta_prelayernorm import RobertaPreLayerNormEncoder

from demix.config.counts import masked_places
from demix.data.shards import blocks
from demix.errors import DemixError
from demix.files import seed_for
from demix.model.gpt import GPT, MASKED
from demix.model.layers import KeyValues, attention_bias
from demix.model.scoring import FOLDS, folds_of, log_probabilities, masked_log_probabilities
from demix.train.batches import balanced_batches, mixed_batches, proportional_batches
from support.models import SMALL, THREE, alone, model_of
from support.tokens import TRAINING
from support.training import opened

ENCODER = dataclasses.replace(SMALL, attention="bidirectional", objective="mlm")


def of_hugging_face(model: GPT) -> RobertaPreLayerNormEncoder:
    """The blocks of a model of one expert as the encoder of RoBERTa-PreLayerNorm."""
    sizes = model.architecture
    config = RobertaPreLayerNormConfig(
        hidden_size=sizes.width, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width, hidden_act="gelu", layer_norm_eps=model.final_norm.eps,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    encoder = RobertaPreLayerNormEncoder(config).to(model.token_embedding.dtype).eval()
    for ours, theirs in zip(model.blocks, encoder.layer, strict=True):
        attention, up, down = theirs.attention, theirs.intermediate, theirs.output
        qkv = (attention.self.query, attention.self.key, attention.self.value)
        for number, linear in enumerate(qkv):
            linear.weight.data = ours.attention.qkv.weight.data.chunk(3)[number]
            linear.bias.data = ours.attention.qkv.bias.data.chunk(3)[number]
        attention.output.dense.load_state_dict(ours.attention.out.state_dict())
        attention.LayerNorm.load_state_dict(ours.attention_norm.state_dict())
        up.LayerNorm.load_state_dict(ours.feedforward_norm.state_dict())
        feedforward = ours.feedforward
        up.dense.weight.data, up.dense.bias.data = feedforward.up.data[0], feedforward.up_bias.data[0]
        down.dense.weight.data, down.dense.bias.data = feedforward.down.data[0], feedforward.down_bias.data[0]
    return encoder


@torch.no_grad()
def test_the_states_are_those_of_an_encoder_of_hugging_face_for_short_blocks_too() -> None:
    model = model_of(architecture=ENCODER)
    encoder = of_hugging_face(model)
    T, short = SMALL.context, 11
    ids = torch.randint(0, 50, (3, T), generator=torch.Generator().manual_seed(0))
    ids[:, 4] = ids[1, 7] = MASKED
    embedded = model.token_embedding[ids.clamp(min=0)] * (ids != MASKED)[..., None] + model.position_embedding
    whole = model.final_norm(encoder(embedded).last_hidden_state)
    torch.testing.assert_close(model(ids[None])[0], whole, rtol=0, atol=1e-12)
    # Their padding is masked away. Ours is cut off.
    keys = (torch.arange(T) < short).double()[None, None, None]
    padded = encoder(embedded, attention_mask=(1 - keys) * torch.finfo(torch.float64).min)
    found = model(ids[None, :, :short])[0]
    torch.testing.assert_close(found, model.final_norm(padded.last_hidden_state)[:, :short], rtol=0, atol=1e-12)
    assert (found - whole[:, :short]).abs().max() > 1e-3


@torch.no_grad()
def test_every_position_sees_the_whole_block_and_nothing_goes_on_from_the_past() -> None:
    model = model_of(THREE, architecture=ENCODER)
    ids = torch.randint(0, 50, (1, 2, SMALL.context), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[..., -1] = (ids[..., -1] + 1) % 50
    assert ((model(ids) - model(other)).abs().amax(-1) > 1e-9).all()
    with pytest.raises(DemixError, match="a model with bidirectional attention: cannot go on with a text"):
        model(ids, past=[KeyValues(SMALL.context) for _ in model.blocks])


# Rows are positions i and columns positions j; to be multiplied by the slope of a head.
DISTANCES = {
    "symmetric": [
        [0, -1, -2, -3, -4],
        [-1, 0, -1, -2, -3],
        [-2, -1, 0, -1, -2],
        [-3, -2, -1, 0, -1],
        [-4, -3, -2, -1, 0],
    ],
    "asymmetric": [
        [0, -0.5, -1.5, -2.5, -3.5],
        [-1, 0, -0.5, -1.5, -2.5],
        [-2, -1, 0, -0.5, -1.5],
        [-3, -2, -1, 0, -0.5],
        [-4, -3, -2, -1, 0],
    ],
}


@torch.no_grad()
@pytest.mark.parametrize("form", DISTANCES)
def test_alibi_of_an_encoder_is_the_printed_matrix_and_that_of_hugging_face_with_this_bias(form: str) -> None:
    sizes = dataclasses.replace(ENCODER, position="alibi", alibi=form)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256], dtype=torch.float64)
    expected = slopes[:, None, None] * torch.tensor(DISTANCES[form], dtype=torch.float64)
    bias = attention_bias(sizes, 5, None, torch.device("cpu"), torch.float64)
    torch.testing.assert_close(bias[0], expected, rtol=0, atol=0)
    model = model_of(architecture=sizes)
    ids = torch.randint(0, 50, (3, 5), generator=torch.Generator().manual_seed(0))
    states = of_hugging_face(model)(model.token_embedding[ids], attention_mask=expected[None]).last_hidden_state
    torch.testing.assert_close(model(ids[None])[0], model.final_norm(states), rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_masked_input_is_zero_under_the_head_clap_too() -> None:
    model = model_of(architecture=dataclasses.replace(ENCODER, head="clap"))
    ids = torch.tensor([[[3, MASKED, 7]]])
    embedded = F.normalize(model.token_embedding, dim=-1)[ids[0].clamp(min=0)]
    embedded[0, 1] = 0
    states = of_hugging_face(model)(embedded + model.position_embedding[:3]).last_hidden_state
    torch.testing.assert_close(model(ids)[0], model.final_norm(states), rtol=0, atol=1e-12)


def text_of(numbers: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """`numbers` blocks of a text whose last one is short, and their mask."""
    T = SMALL.context
    ids = np.random.default_rng(2).integers(50, size=(numbers, T))
    return ids, np.arange(numbers * T).reshape(numbers, T) < tokens


@torch.no_grad()
def by_folds(model: GPT, ids: np.ndarray, mask: np.ndarray, folds: int, first: int) -> np.ndarray:
    """A plain loop over experts, blocks, folds and tokens."""
    rows = []
    for expert in model.experts:
        single, row = alone(model, expert), []
        for block in range(len(ids)):
            n = int(mask[block].sum())
            order = np.random.Generator(np.random.PCG64(seed_for(0, "folds", first + block))).permutation(n).tolist()
            found = {}
            for fold in range(folds):
                hidden = order[fold::folds]
                inputs = [MASKED if place in hidden else int(ids[block, place]) for place in range(n)]
                states = single(torch.tensor(inputs)[None, None])[0, 0]
                for place in hidden:
                    logits = states[place] @ single.token_embedding.T
                    found[place] = F.log_softmax(logits, -1)[ids[block, place]].item()
            row += [found[place] for place in range(n)]
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("folds", [FOLDS, SMALL.context])
@pytest.mark.parametrize("tokens", [3 * 16, 2 * 16 + 5, 2 * 16 + 1])
def test_scores_are_those_of_a_plain_loop_in_folds_and_one_position_a_pass(folds: int, tokens: int) -> None:
    model, (ids, mask) = model_of(THREE, architecture=ENCODER), text_of(3, tokens)
    told: list[int] = []
    scored = masked_log_probabilities(model, ids, mask, None, told.append, 8, folds)
    assert sum(told) == scored.shape[1] == tokens
    np.testing.assert_allclose(scored, by_folds(model, ids, mask, folds, 8), rtol=0, atol=1e-12)


def test_seven_folds_mask_each_token_once_by_the_number_of_the_block_alone() -> None:
    folds = [folds_of(256, number) for number in (0, 1, 0)]
    assert sorted(Counter(folds[0].tolist()).values()) == [36] * 3 + [37] * 4
    assert (folds[0] == folds[2]).all()
    assert (folds[0] != folds[1]).mean() > 0.7
    assert sorted(folds_of(3, 5).tolist()) == [0, 1, 2], "a short block has a token a pass"


def test_a_text_is_scored_alike_in_pieces_and_needs_no_token_before_its_blocks(tokens: Path) -> None:
    model, shard = model_of(THREE, architecture=ENCODER, vocab_size=400), opened(tokens)[0]
    T, limit = SMALL.context, 5 * SMALL.context + 3
    whole = log_probabilities(model, *blocks(shard, T, limit))
    assert whole.shape == (3, limit)
    parts = [log_probabilities(model, *blocks(shard, T, end, begin), first=begin // T)
             for begin, end in ((0, 2 * T), (2 * T, limit))]  # fmt: skip
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=0, atol=1e-12)
    inputs, targets, mask = blocks(shard, T, limit)
    np.testing.assert_array_equal(log_probabilities(model, inputs * 0, targets, mask), whole)
    single = masked_log_probabilities(model, targets, mask, folds=T)
    assert abs(single - whole).max() > 1e-3
    assert abs(single.mean() - whole.mean()) < 0.5


DRAWS = {"balanced": balanced_batches, "mixed": mixed_batches, "proportional": proportional_batches}


@pytest.mark.parametrize("draw", DRAWS)
def test_masked_batches_hide_a_fixed_number_of_the_blocks_own_tokens(draw: str, tokens: Path) -> None:
    shards, T, M = opened(tokens), 32, round(0.15 * 32)
    batches = DRAWS[draw](shards, TRAINING, 4, T, seed=5, objective="mlm")
    plain = DRAWS[draw](shards, TRAINING, 4, T, seed=5)
    assert (batches.tokens, batches.targets) == (plain.tokens, 4 * 3 * M)
    done: Counter[str] = Counter()
    for step in range(40):
        batch, causal = batches.draw(step), plain.draw(step)
        # The same blocks as a causal model's, without the token before.
        text = causal.targets
        assert batch.inputs.shape == text.shape
        assert batch.places.shape == batch.targets.shape == (*text.shape[:2], M)
        assert torch.equal(batch.targets, text.gather(2, batch.places))
        assert all(len(set(row.tolist())) == M for row in batch.places.flatten(0, 1))
        kept = torch.ones_like(text, dtype=torch.bool).scatter(2, batch.places, False)
        assert torch.equal(batch.inputs[kept], text[kept])
        assert torch.equal(batch.domains, causal.domains)
        inputs = batch.inputs.gather(2, batch.places)
        done += Counter(
            "masked" if read == MASKED else "kept" if read == target else "random"
            for read, target in zip(inputs.flatten().tolist(), batch.targets.flatten().tolist(), strict=True)
        )
        assert inputs.max() < shards[0].vocab_size
    total = 40 * 4 * 3 * M
    for what, share in (("masked", 0.8), ("random", 0.1), ("kept", 0.1)):
        assert abs(done[what] / total - share) < 4 * (share * (1 - share) / total) ** 0.5 + 0.1 / 400, done


def test_masks_depend_on_seed_step_domain_and_sequence_and_on_nothing_else(tokens: Path) -> None:
    shards = opened(tokens)
    batches = balanced_batches(shards, TRAINING, 4, 32, seed=5, objective="mlm")
    first, mixed = batches.draw(3), mixed_batches(shards, TRAINING, 4, 32, seed=5, objective="mlm").draw(3)
    for name in ("inputs", "targets", "places"):
        ours, theirs = getattr(first, name), getattr(mixed, name)
        assert torch.equal(ours, getattr(batches.draw(3), name))
        assert torch.equal(ours.flatten(0, 1), theirs[0]), "a dense model masks the same tokens"
    one = balanced_batches(shards[1:2], TRAINING[1:2], 4, 32, seed=5, objective="mlm").draw(3)
    assert torch.equal(one.places[0], first.places[1])
    rows = {tuple(row.tolist()) for row in first.places.flatten(0, 1)}
    assert len(rows) > 10, "sequences differ"
    for other in (batches.draw(4), balanced_batches(shards, TRAINING, 4, 32, seed=6, objective="mlm").draw(3)):
        assert not torch.equal(other.places, first.places)
    part = first.part(1, 3)
    assert torch.equal(part.places, first.places[:, 1:3])
    assert [masked_places(length) for length in (2, 10, 32, 256, 1024)] == [1, 2, 5, 38, 154]
