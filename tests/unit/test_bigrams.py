"""Bigrams and value embeddings against a loop over tokens, and the files of experts with tables of their own."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from demix.config.architecture import DECODERS, Architecture, architecture_from
from demix.config.counts import parameters
from demix.files import read_json
from demix.model.directory import load_model
from demix.model.experts import add_expert, find_faults
from demix.model.gpt import GPT, hashed
from demix.model.merge import averaged
from demix.train import stage
from demix.train.adapt import adapt
from demix.train.stage import ModelTraining
from support.cli import refusal
from support.contents import contents
from support.errors import refused
from support.models import THREE, model_of, own_tensors, write_model
from support.tokens import TRAINING
from support.training import (
    ADAPT,
    SIZES,
    TRAIN,
    dense_with_seeds,
    novel_shards,
    places,
    shard_paths,
    train_into,
)

VOCAB, WIDTH, HEADS, UNITS = 12, 28, 4, 7
PLAIN = Architecture(layers=2, width=WIDTH, heads=HEADS, context=9, norm="rms", biases="none", value_embeddings=True)
COMPACT = TRAIN.replace(architecture={**SIZES, **DECODERS["compact"]})


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + PLAIN.epsilon).sqrt() * weight


def by_loops(model: GPT, expert: int, ids: list[int]) -> torch.Tensor:
    """Final states [T, D] of one text under an expert, token by token."""
    named = dict(model.named_parameters())
    table = named["bigrams.expert_table"][expert] if "bigrams.expert_table" in named else named["bigrams.table"]
    states = [named["token_embedding"][token] + named["position_embedding"][n] for n, token in enumerate(ids)]
    for layer in range(2):
        of = {name.removeprefix(f"blocks.{layer}."): tensor for name, tensor in named.items()}
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for n, token in enumerate(ids):
            previous = ids[n - 1] if n else 0
            row = ((token * 1_000_003) ^ (previous * 7_919)) % (5 * VOCAB)
            states[n] = states[n] + named["bigrams.scale"][layer] * table[row]
            x = rms(states[n], of["attention_norm.weight"])
            query, key, value = (of["attention.qkv.weight"] @ x).view(3, HEADS, UNITS)
            more = named["value_embedding"][layer, token].view(HEADS, UNITS)
            keys.append(key)
            values.append(
                torch.stack(
                    [
                        value[head] + 2 / (1 + torch.exp(-(of["attention.value_gate"][head] @ x[:24]))) * more[head]
                        for head in range(HEADS)
                    ]
                )
            )
            mixed = []
            for head in range(HEADS):
                weights = torch.stack([query[head] @ earlier[head] / math.sqrt(UNITS) for earlier in keys]).softmax(0)
                mixed.append(sum(weight * earlier[head] for weight, earlier in zip(weights, values, strict=True)))
            states[n] = states[n] + of["attention.out.weight"] @ torch.cat(mixed)
            x = rms(states[n], of["feedforward_norm.weight"])
            up, down = of["feedforward.up"][expert], of["feedforward.down"][expert]
            states[n] = states[n] + down @ torch.nn.functional.gelu(up @ x)
    return torch.stack([rms(state, named["final_norm.weight"]) for state in states])


@pytest.mark.parametrize("bigrams", ["shared", "experts"])
@torch.no_grad()
def test_states_are_those_of_a_loop_over_tokens(bigrams: str) -> None:
    model = model_of(THREE, architecture=PLAIN.replace(bigrams=bigrams), vocab_size=VOCAB)
    ids = torch.randint(VOCAB, (3, 2, 9), generator=torch.Generator().manual_seed(3))
    found = model(ids)
    for expert in range(3):
        for text in range(2):
            wanted = by_loops(model, expert, ids[expert, text].tolist())
            torch.testing.assert_close(found[expert, text], wanted, rtol=0, atol=1e-12)


@given(st.lists(st.tuples(st.integers(0, (1 << 24) - 1), st.integers(0, (1 << 24) - 1))), st.integers(1, 5 << 24))
def test_rows_are_in_the_table_and_exact(pairs: list[tuple[int, int]], rows: int) -> None:
    for dtype in (torch.int32, torch.int64):
        tokens, previous = torch.tensor(pairs, dtype=dtype).view(-1, 2).T
        found = hashed(tokens, previous, rows).tolist()
        assert found == [(token * 1_000_003 ^ before * 7_919) % rows for token, before in pairs]
        assert all(0 <= row < rows for row in found)


@given(st.integers(0, 11), st.integers(0, (1 << 24) - 1))
def test_pairs_with_a_token_in_common_have_rows_of_their_own(bits: int, token: int) -> None:
    types = 1 << bits
    one, others = torch.full((types,), token % types), torch.arange(types)
    assert len({*hashed(one, others, 5 * types).tolist()}) == types
    assert len({*hashed(others, one, 5 * types).tolist()}) == types


def test_at_first_a_decoder_with_tables_is_one_without() -> None:
    whole = Architecture(layers=2, width=32, heads=4, context=16, **DECODERS["compact"])
    plain = whole.replace(bigrams="none", value_embeddings=False)
    ids = torch.randint(50, (2, 3, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        states = [GPT(one, 50, ("a", "b")).initialise(1)(ids) for one in (whole, plain)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-7)


@pytest.mark.parametrize("key", ["bigrams", "value_embeddings"])
@pytest.mark.parametrize(
    "other", [{"objective": "mlm"}, {"routed": {"experts": 2, "top_k": 1, "every": 1, "capacity": 2.0, "balance": 0.0}}]
)
def test_masked_and_token_routed_models_have_none(key: str, other: dict[str, Any]) -> None:
    with refused(f"architecture.{key}"):
        architecture_from({**SIZES, key: DECODERS["compact"][key], **other})


def test_experts_own_their_tables(tokens: Path, tmp_path: Path) -> None:
    """They begin as the dense parent's, and adapt, average and move as files of experts."""
    shards = shard_paths(tokens)
    seeds = dense_with_seeds(tmp_path / "run", shards, [10], COMPACT)
    run = train_into(tmp_path / "demix", "demix", shards, COMPACT, branch=seeds[10])
    begun = load_file(seeds[10] / "expert-dense.safetensors")["parameter/bigrams.expert_table"]
    model, shared = load_model(run / "model", TRAINING), load_file(run / "model" / "shared.safetensors")
    assert begun.any()
    assert "bigrams.expert_table" not in shared
    assert {"value_embedding", "bigrams.scale"} <= shared.keys()
    tables = {}
    for number, expert in enumerate(TRAINING):
        tables[expert] = load_file(run / "model" / "experts" / f"{expert}.safetensors")["bigrams.expert_table"]
        assert torch.equal(tables[expert], model.bigrams.expert_table[number])
        # Rows of pairs that no text of the domain has go on with the parent's momentum only.
        assert not torch.equal(tables[expert], begun)
    manifest = read_json(run / "model" / "model.json")
    own = sum(p[0].numel() for p in own_tensors(model).values())
    counted = parameters(model.architecture, model.vocab_size)
    assert (manifest["shared_parameters"], manifest["expert_parameters"]) == counted
    assert counted == (sum(tensor.numel() for tensor in shared.values()), own)
    mean = sum(table.double() for table in tables.values()) / 3
    average = averaged(run / "model", dict.fromkeys(TRAINING, 1 / 3))
    torch.testing.assert_close(average.bigrams.expert_table[0].double(), mean, rtol=0, atol=1e-7)

    before, chosen = contents(run / "model"), {"parent": TRAINING[0], "parent_prior": 0.9}
    (tmp_path / "new" / "model" / "experts").mkdir(parents=True)
    adapt(run / "model", novel_shards(tokens), ADAPT, places(tmp_path / "new"), chosen=chosen)
    assert contents(run / "model") == before
    (added,) = (tmp_path / "new" / "model" / "experts").glob("*.safetensors")
    assert not torch.equal(load_file(added)["bigrams.expert_table"], tables[TRAINING[0]])


def test_whole_models_have_tables_too(tokens: Path, tmp_path: Path) -> None:
    shards = shard_paths(tokens)
    stage.train_model(ModelTraining("branched", COMPACT, shards).of_expert(TRAINING[0]), places(tmp_path))
    own = load_file(tmp_path / "model" / "experts" / f"{TRAINING[0]}.safetensors")
    assert {"bigrams.expert_table", "bigrams.scale", "value_embedding"} <= own.keys()
    assert not load_file(tmp_path / "model" / "shared.safetensors")
    assert not find_faults(tmp_path / "model")


def test_an_expert_with_tables_moves_and_does_not_leave(tmp_path: Path) -> None:
    architecture = architecture_from({**SIZES, "preset": "compact"})
    for name in ("one", "other"):
        write_model(tmp_path / name, architecture=architecture)
    assert add_expert(tmp_path / "one", tmp_path / "other" / "experts" / "law.safetensors", "moved") == "moved"
    assert not find_faults(tmp_path / "one")
    assert len(load_model(tmp_path / "one").bigrams.expert_table) == 4
    cause = refusal("export", tmp_path / "one", "--expert", "law", "--output", tmp_path / "hf", of=tmp_path / "one")
    assert "has bigrams experts" in cause
