"""Domain experts merged into a model whose tokens choose among them, against loops and Hugging Face's GPT-2."""

import dataclasses
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy.special import erf, softmax
from sklearn.linear_model import Ridge
from transformers import GPT2LMHeadModel

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.data.shards import TokenShard, blocks
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_json, sha256_file, write_json
from demix.model.checkpoint import describe, load_model, save_expert
from demix.model.description import parent_of
from demix.model.experts import find_faults, read_experts
from demix.model.export import export_hf
from demix.model.gpt import GPT
from demix.model.import_hf import import_hf
from demix.model.merge_routed import FACTORS, PENALTIES, dev_shards, merge_routed, moments, solved
from demix.model.scoring import log_probabilities
from support.checkpoints import farthest
from support.cli import demix
from support.models import SMALL, model_of, save_model, write_model
from support.tokens import TRAINING

# The order of the experts in the merged layers: that of the names in the folder.
ORDER = tuple(sorted(TRAINING))
LAYERS, WIDTH, T = SMALL.layers, SMALL.width, SMALL.context


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the tokens of three domains, a DEMix model of their experts, and the model merged of it."""
    folder = tmp_path_factory.mktemp("runs") / "results" / "small"
    shutil.copytree(tokens / "tokens", folder / "tokens")
    shutil.copy(tokens / "tokenizer.json", folder)
    encoder = Tokenizer.load(folder / "tokenizer.json")
    write_model(folder / "models" / "demix", TRAINING, encoder.sha256, encoder.vocab_size)
    done = demix("merge", folder / "models" / "demix", "--routed", "--output", folder / "models" / "demix-routed")
    assert done.exit_code == 0, done.exception
    return folder


def expert_of(run: Path, name: str) -> dict[str, np.ndarray]:
    path = run / "models" / "demix" / "experts" / f"{name}.safetensors"
    return {key: tensor.astype(np.float64) for key, tensor in load_file(path).items()}


def routers_of(directory: Path) -> list[np.ndarray]:
    """The router [E, D] of each layer, in float64."""
    tensors = load_file(directory / "experts" / "dense.safetensors")
    return [tensors[f"blocks.{layer}.feedforward.router"].astype(np.float64) for layer in range(LAYERS)]


@pytest.fixture(scope="module")
def states(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[np.ndarray]]:
    """The states [tokens, D] of each layer before its feedforward, by domain, in Hugging Face's GPT-2 of its expert."""
    folder, found = tmp_path_factory.mktemp("hf"), {}
    for domain in ORDER:
        export_hf(run / "models" / "demix", domain, None, folder / domain)
        theirs = GPT2LMHeadModel.from_pretrained(folder / domain).double().eval()
        seen: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
        for of_layer, block in zip(seen, theirs.transformer.h, strict=True):
            block.ln_2.register_forward_hook(lambda _, __, out, into=of_layer: into.append(out[0].numpy()))
        shard = TokenShard.open(run / "tokens" / domain / "dev.arrow")
        ids = [shard.end_of_text, *shard.read(0, len(shard)).tolist()]
        for start in range(0, len(ids) - 1, T):
            with torch.no_grad():
                theirs(torch.tensor([ids[start : min(start + T, len(ids) - 1)]]))
        found[domain] = [np.concatenate(of_layer) for of_layer in seen]
    return found


@pytest.mark.parametrize("count", [40, 10**6], ids=["40 blocks", "the whole split"])
def test_moments_are_those_of_hugging_faces_gpt2_of_the_domains_own_expert(
    run: Path, states: dict[str, list[np.ndarray]], count: int
) -> None:
    for domain in ORDER:
        own = load_model(run / "models" / "demix", (domain,))
        squares, sums = moments(own, TokenShard.open(run / "tokens" / domain / "dev.arrow"), count)
        for layer, x in enumerate(states[domain]):
            np.testing.assert_allclose(squares[layer], x[: count * T].T @ x[: count * T], rtol=1e-5, atol=2e-2)
            np.testing.assert_allclose(sums[layer], x[: count * T].sum(0), rtol=1e-5, atol=2e-2)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_routers_are_scikit_learns_ridge_regressions_of_the_domain(penalty: float) -> None:
    generator = np.random.default_rng(5)
    texts = [generator.normal(loc=generator.normal(size=6), size=(n, 6)) for n in (40, 25, 60)]
    whole, domain = np.concatenate(texts), np.repeat(np.arange(3), [40, 25, 60])
    squares = torch.from_numpy(whole.T @ whole)[None]
    sums = torch.from_numpy(np.stack([x.sum(0) for x in texts]))[None]
    alpha = penalty * np.trace(whole.T @ whole) / 6
    ridge = Ridge(alpha=alpha, fit_intercept=False).fit(whole, np.eye(3)[domain])
    np.testing.assert_allclose(solved(squares, sums, penalty, 7.0)[0], 7 * ridge.coef_, rtol=1e-9, atol=1e-12)


def test_penalty_and_factor_are_the_best_of_all_on_the_blocks_that_choose(
    run: Path, states: dict[str, list[np.ndarray]]
) -> None:
    """The model that is written against models with the other routers, each made here, on other blocks of dev text."""
    model = load_model(run / "models" / "demix-routed").double()
    counts = {name: -(-len(states[name][0]) // T) for name in ORDER}
    ends = {name: min(count, 50) for name, count in counts.items()}
    starts = {name: max(1, end * 4 // 5) for name, end in ends.items()}
    shards = {name: TokenShard.open(run / "tokens" / name / "dev.arrow") for name in ORDER}
    cuts = [blocks(shards[name], T, ends[name] * T, min(starts[name], ends[name] - 1) * T) for name in ORDER]
    written, losses = routers_of(run / "models" / "demix-routed"), {}
    for penalty, factor in itertools.product(PENALTIES, FACTORS):
        for layer in range(LAYERS):
            texts = [states[name][layer][: starts[name] * T] for name in ORDER]
            whole, domain = np.concatenate(texts), np.repeat(np.arange(3), [len(x) for x in texts])
            alpha = penalty * np.trace(whole.T @ whole) / WIDTH
            ridge = Ridge(alpha=alpha, fit_intercept=False).fit(whole, np.eye(3)[domain])
            with torch.no_grad():
                router = model.blocks[layer].feedforward.router
                router.copy_(torch.from_numpy(factor * ridge.coef_)[None])
            if np.abs(factor * ridge.coef_ - written[layer]).max() < 1e-3 * np.abs(written[layer]).max():
                chosen = (penalty, factor)
        losses[penalty, factor] = -np.mean([log_probabilities(model, *cut).mean() for cut in cuts])
    assert losses[chosen] == pytest.approx(min(losses.values()), abs=1e-6)
    assert len(set(losses.values())) > 1


def by_hand(run: Path, layer: int, x: np.ndarray, router: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The output [D] of a layer for the state `x` [D] in float64, and the two experts that it chose."""
    logits = router @ x
    first, second = sorted(range(len(logits)), key=lambda e: -logits[e])[:2]
    gates = softmax([logits[first], logits[second]])
    out = np.zeros(WIDTH)
    for gate, e in zip(gates, (first, second), strict=True):
        own = {key.rpartition(".")[2]: value for key, value in expert_of(run, ORDER[e]).items() if f".{layer}." in key}
        inner = own["up"] @ x + own["up_bias"]
        out += gate * (own["down"] @ (inner * (1 + erf(inner / math.sqrt(2))) / 2) + own["down_bias"])
    return out, [first, second]


def test_a_merged_layer_is_the_top_two_experts_of_demix_by_hand(run: Path) -> None:
    merged, generator = load_model(run / "models" / "demix-routed").double(), np.random.default_rng(1)
    chosen = set()
    for layer, router in enumerate(routers_of(run / "models" / "demix-routed")):
        for x in generator.normal(size=(20, WIDTH)):
            wanted, choices = by_hand(run, layer, x, router)
            with torch.no_grad():
                found = merged.blocks[layer].feedforward(torch.from_numpy(x)[None, None, None])[0, 0, 0]
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)
            chosen.add(tuple(choices))
    assert len(chosen) > 3


def scores_of(model: GPT, inputs: np.ndarray) -> np.ndarray:
    targets = np.roll(inputs, -1, 1)
    (found,) = log_probabilities(model, inputs, targets, np.ones_like(inputs, bool))
    return found.reshape(inputs.shape)


def test_the_order_of_the_experts_changes_nothing(run: Path, tmp_path: Path) -> None:
    inputs = np.random.default_rng(2).integers(400, size=(3, T))
    wanted = scores_of(load_model(run / "models" / "demix-routed").double(), inputs)
    for number, names in enumerate(itertools.permutations(TRAINING)):
        shards = {name: run / "tokens" / name / "dev.arrow" for name in names}
        merge_routed(run / "models" / "demix", shards, tmp_path / str(number))
        model = load_model(tmp_path / str(number)).double()
        np.testing.assert_allclose(scores_of(model, inputs), wanted, rtol=0, atol=1e-9)
        choices = read_json(tmp_path / str(number) / "experts" / "dense.json")["choices"]
        assert tuple(choice["expert"] for choice in choices) == names


def test_equal_experts_merge_to_that_expert(run: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(run / "models" / "demix", model)
    for name in TRAINING[1:]:
        save_expert(
            load_model(model, TRAINING[:1]), TRAINING[0], model, read_json(model / f"experts/{name}.json"), name
        )
    merge_routed(model, dev_shards(model, run / "tokens"), tmp_path / "merged")
    inputs = np.random.default_rng(3).integers(400, size=(3, T))
    one, merged = (load_model(*place).double() for place in ((model, TRAINING[:1]), (tmp_path / "merged",)))
    np.testing.assert_allclose(scores_of(merged, inputs), scores_of(one, inputs), rtol=0, atol=1e-9)


def test_no_token_lacks_an_expert(run: Path) -> None:
    model = load_model(run / "models" / "demix-routed").double()
    # All tokens of a sequence like the same two experts, and each gets them.
    x = torch.randn(WIDTH, dtype=torch.float64).expand(1, 1, T, WIDTH)
    with torch.no_grad():
        out = model.blocks[0].feedforward(x)
        alone = model.blocks[0].feedforward(x[:, :, :1])
        trained = model.blocks[0].feedforward(x, [])
    torch.testing.assert_close(out, alone.expand_as(out), rtol=0, atol=1e-12)
    torch.testing.assert_close(trained, out, rtol=0, atol=1e-12)


def test_the_files_say_what_was_merged(run: Path) -> None:
    merged, demix_model = run / "models" / "demix-routed", run / "models" / "demix"
    assert find_faults(merged) == []
    about = describe(merged)
    routed = {"experts": 3, "top_k": 2, "every": 1, "capacity": 3.0, "balance": 0.0}
    assert (about["kind"], about["architecture"]["routed"]) == ("merged", routed)
    architecture = Architecture(**about["architecture"])
    assert architecture == SMALL.merged_routed(3)
    assert (about["shared_parameters"], about["expert_parameters"]) == parameters(architecture, about["vocab_size"])
    lineage = read_json(merged / "experts" / "dense.json")
    assert lineage["choices"] == [
        {
            "expert": name,
            "sha256": sha256_file(demix_model / "experts" / f"{name}.safetensors"),
            "data_sha256": read_json(run / "tokens" / name / "dev.json")["sha256"],
            "learned": {
                key: read_json(demix_model / "experts" / f"{name}.json")[key]
                for key in ("steps", "tokens", "data_sha256")
            },
        }
        for name in ORDER
    ]
    assert lineage["tokens"] == 30 + 31 + 32
    assert parent_of(lineage) == "choices"
    (expert,) = read_experts(merged)
    assert (expert.parent, expert.parameters) == (" or ".join(ORDER), about["expert_parameters"])
    for name in ("shared.safetensors", "tokenizer.json"):
        beside = demix_model if name.startswith("shared") else run
        assert (merged / name).read_bytes() == (beside / name).read_bytes()
    tensors = load_file(merged / "experts" / "dense.safetensors")
    for number, name in enumerate(ORDER):
        for key, tensor in load_file(demix_model / "experts" / f"{name}.safetensors").items():
            assert np.array_equal(tensors[key][number], tensor)
    card = (merged / "README.md").read_text()
    assert "choose two of 3 experts in every layer" in card
    assert "over 40 blocks of dev text" in card
    assert "weighted average" not in card


def test_commands_take_it_as_a_model_of_one_expert(run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(run / "models" / "demix-routed", tmp_path / "copied")
    (tmp_path / "own.txt").write_text("It is a truth universally acknowledged. " * 40)
    for words in (
        ("eval", copied, tmp_path / "own.txt"), ("experts", "verify", copied), ("experts", "list", copied),
        ("generate", copied, "--prompt", "It is", "--tokens", 3),
    ):  # fmt: skip
        done = demix(*words)
        assert done.exit_code == 0, (words, done.exception)
    told = "demix-routed|copied: has [a-z_]+ [a-z]+, which .* format cannot hold; export another model"
    with pytest.raises(DemixError, match=told):
        export_hf(copied, "dense", None, tmp_path / "hf")


def test_what_cannot_be_merged_is_refused_in_one_line(run: Path, tokens: Path, tmp_path: Path) -> None:
    model, merged = run / "models" / "demix", run / "models" / "demix-routed"
    encoder = Tokenizer.load(tokens / "tokenizer.json")
    write_model(tmp_path / "models" / "dense", ("dense",), encoder.sha256, encoder.vocab_size)
    write_model(tmp_path / "models" / "other", TRAINING, "0" * 64, encoder.vocab_size)
    write_model(tmp_path / "models" / "one", TRAINING[:1], encoder.sha256, encoder.vocab_size)
    told = tmp_path / "models" / "told"
    shutil.copytree(model, told)
    description = read_json(told / "model.json")
    (told / "model.json").unlink()
    write_json(told / "model.json", description | {"domain_tokens": list(TRAINING)})
    refused = {
        (merged,): "is a model whose tokens choose their experts, which are routed already; use another model",
        (told,): "is a domain-token model, which has one expert; merge a model of kind demix, branched or anchored",
        (
            tmp_path / "models" / "dense",
        ): "has one expert, and tokens choose among several; merge a model of kind demix",
        (tmp_path / "models" / "one",): "has one expert, and tokens choose among several",
        (tmp_path / "models" / "other", "--tokens", run / "tokens"): r"dev\.arrow: is of another tokenizer",
        (tmp_path / "models" / "other",): r"tokens/licenses/dev\.arrow: is missing, and routers are solved "
        r"from this text for the expert licenses; name the folder of <domain>/dev\.arrow of every expert with --tokens",
        (model, "--weights", "licenses=1"): "--routed: is given with weights, which make an average; leave one",
    }
    for words, message in refused.items():
        done = demix("merge", *words, "--routed", "--output", tmp_path / "out")
        assert isinstance(done.exception, DemixError), words
        assert "\n" not in str(done.exception)
        with pytest.raises(DemixError, match=message):
            raise done.exception
        assert not (tmp_path / "out").exists()
    with pytest.raises(DemixError, match="--tokens: is for --routed alone"):
        raise demix("merge", model, "--tokens", run / "tokens", "--output", tmp_path / "out").exception
    with pytest.raises(DemixError, match="exists and is not empty"):
        merge_routed(model, dev_shards(model), merged)


ROPE = {
    "position": "rope",
    "norm": "rms",
    "gated": True,
    "activation": "silu",
    "biases": "none",
    "head": "untied",
    "inner": 96,
}


@pytest.mark.parametrize(
    ("options", "model_class"),
    [
        ({}, "MixtralForCausalLM"),
        ({"query_norm": "head"}, "Qwen3MoeForCausalLM"),
        ({"query_norm": "all"}, "OlmoeForCausalLM"),
        ({"query_norm": "all", "norm_place": "after", "head": "tied"}, "FlexOlmoForCausalLM"),
    ],
)
def test_a_merged_model_goes_out_to_engines_and_comes_back_to_the_bit(
    run: Path, options: dict[str, Any], model_class: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    encoder = Tokenizer.load(run / "tokenizer.json")
    architecture = dataclasses.replace(SMALL, **ROPE | options)
    experts = model_of(TRAINING, torch.float32, architecture=architecture, vocab_size=encoder.vocab_size)
    save_model(experts, tmp_path / "demix", encoder.sha256)
    merge_routed(tmp_path / "demix", dev_shards(tmp_path / "demix", run / "tokens"), tmp_path / "merged")
    export_hf(tmp_path / "merged", "dense", run / "tokenizer.json", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == model_class
    ids, merged = torch.arange(2, 2 + T)[None], load_model(tmp_path / "merged")
    with torch.no_grad():
        assert farthest(theirs(ids).logits, merged.logits(merged(ids[None]))[0]) < 1e-5
    verified = import_hf(tmp_path / "out", tmp_path / "back", context=T, verify=True)
    assert verified is not None
    back = load_model(tmp_path / "back")
    assert back.architecture == merged.architecture
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name


def test_other_architectures_are_described_without_the_key(run: Path) -> None:
    own = describe(run / "models" / "demix")["architecture"]
    plain = {"experts": 4, "top_k": 2, "every": 1, "capacity": 2.0, "balance": 0.01}
    assert Architecture(**own, routed=plain).described["routed"] == plain
    for_each = plain | {"renormalise": False}
    assert Architecture(**own, routed=for_each).described["routed"] == for_each
    assert blocks(TokenShard.open(run / "tokens" / TRAINING[0] / "dev.arrow"), T, 20 * T)[2].all()
