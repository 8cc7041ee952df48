"""ALiBi and the head CLAP: against Hugging Face and plain formulas, in files, cached, trained and refused."""

import copy
import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import MptConfig, MptForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError, StoppedError
from demix.files import read_json
from demix.launch.job import Places
from demix.mix.stream import Posterior
from demix.model import softmax
from demix.model.checkpoint import describe, load_experts, load_model
from demix.model.decode import Decoder
from demix.model.export import export_hf
from demix.model.gpt import GPT
from demix.model.layers import attention_bias
from demix.model.layers.attention import alibi_slopes
from demix.model.merge import merge_experts
from demix.model.scoring import log_probabilities, trunk_log_probabilities
from demix.plan.flops import activation_bytes
from demix.train.adapt import adapt_dense, adapt_expert
from support.models import SMALL, THREE, model_of, save_model
from support.tokens import TRAINING
from support.training import ADAPT, SIZES, TRAIN, opened, shard_paths, stop_at, train_model

ALIBI = dataclasses.replace(SMALL, position="alibi")
CLAP = dataclasses.replace(SMALL, head="clap")
BOTH = dataclasses.replace(ALIBI, head="clap")
IDS = torch.randint(0, 50, (1, 3, 16), generator=torch.Generator().manual_seed(4))


def frozen(architecture: Architecture, *experts: str, **more: object) -> GPT:
    return model_of(experts or ("dense",), architecture=architecture, **more).requires_grad_(False)


@pytest.mark.parametrize("heads", range(1, 33))
def test_slopes_are_those_of_mpt_and_bloom(heads: int) -> None:
    mpt = build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    ours = torch.tensor(alibi_slopes(heads))
    torch.testing.assert_close(ours, -mpt, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, bloom, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("width", "heads"), [(32, 4), (48, 6)])
@pytest.mark.parametrize("length", [16, 41])
def test_a_model_with_alibi_is_mpt_at_any_length(width: int, heads: int, length: int) -> None:
    """MPT has neither biases nor those of norms, and takes softmax in fp32. 41 positions are more than the context."""
    ours = frozen(Architecture(2, width, heads, 16, position="alibi"))
    for name, parameter in ours.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    sizes = {"d_model": width, "n_heads": heads, "n_layers": 2, "vocab_size": 50, "max_seq_len": 64}
    theirs = MptForCausalLM(MptConfig(**sizes)).double().eval()
    names = {
        "attention_norm.weight": "norm_1.weight", "feedforward_norm.weight": "norm_2.weight",
        "attention.qkv.weight": "attn.Wqkv.weight", "attention.out.weight": "attn.out_proj.weight",
        "feedforward.up": "ffn.up_proj.weight", "feedforward.down": "ffn.down_proj.weight",
    }  # fmt: skip
    own = dict(ours.named_parameters())
    state = {"transformer.wte.weight": own["token_embedding"], "lm_head.weight": own["token_embedding"]}
    state["transformer.norm_f.weight"] = own["final_norm.weight"]
    for layer in range(2):
        for mine, name in names.items():
            tensor = own[f"blocks.{layer}.{mine}"]
            state[f"transformer.blocks.{layer}.{name}"] = tensor[0] if "feedforward." in mine else tensor
    theirs.load_state_dict(state)
    ids = torch.randint(0, 50, (3, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        reference = theirs(ids).logits.log_softmax(-1)
        found = ours.logits(ours(ids[None]))[0].log_softmax(-1)
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-5)


def test_only_alibi_needs_a_bias_and_learned_positions_keep_the_causal_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    kernel = F.scaled_dot_product_attention

    def told(*arguments: torch.Tensor, **named: object) -> torch.Tensor:
        asked.append((named["attn_mask"] is not None, named["is_causal"]))
        return kernel(*arguments, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", told)
    for architecture, wanted in ((SMALL, (False, True)), (ALIBI, (True, False))):
        asked.clear()
        frozen(architecture)(IDS)
        assert asked == [wanted] * 2
    cpu = torch.device("cpu")
    bias = attention_bias(ALIBI, 3, None, cpu, torch.float32)
    assert bias.dtype == torch.float32
    quarter = torch.tensor([[0, -torch.inf, -torch.inf], [-0.25, 0, -torch.inf], [-0.5, -0.25, 0]])
    torch.testing.assert_close(bias[0, 0], quarter, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", [ALIBI, CLAP, BOTH], ids=lambda one: one.position + one.head)
@pytest.mark.parametrize("pieces", [[1] * 16, [3, 1, 7, 5], [15, 1]], ids=str)
def test_a_cache_gives_what_a_whole_pass_gives(architecture: Architecture, pieces: list[int]) -> None:
    model = frozen(architecture, *THREE)
    with torch.no_grad():
        whole, past = model(IDS), model.no_past()
        parts = [model(piece, past=past) for piece in IDS.split(pieces, 2)]
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("architecture", [ALIBI, BOTH], ids=lambda one: one.head)
def test_texts_of_several_blocks_are_decoded_as_they_are_scored(architecture: Architecture) -> None:
    model, text = (
        frozen(architecture, *THREE),
        torch.randint(0, 50, (2, 37), generator=torch.Generator().manual_seed(1)),
    )
    decoder = Decoder([model], torch.tensor([7, 49]), Posterior(torch.zeros(3), 16, 2))
    found = [decoder.read(piece)[0] for piece in text.split([5, 1, 20, 11], 1)]
    seen = torch.cat([torch.tensor([[7], [49]]), text], 1)
    wanted = [
        model.log_probabilities(model(seen[None, :, start:end]), text[None, :, start:end])
        for start, end in ((0, 16), (16, 32), (32, 37))
    ]
    torch.testing.assert_close(torch.cat(found, 2), torch.cat(wanted, 2), rtol=0, atol=1e-10)


def test_a_domain_token_stands_before_the_text() -> None:
    """It is what a dense model reads whose vocabulary has the domains too."""
    model = frozen(BOTH, domain_tokens=("law", "news"))
    domains = torch.tensor([[1, 0, 1]])
    wide = frozen(BOTH)
    joined = torch.cat([model.token_embedding, model.domain_embedding])
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "domain_embedding"}
    wide = GPT(BOTH, 52, ("dense",)).double()
    wide.load_state_dict(state | {"token_embedding": joined})
    with torch.no_grad():
        found, wanted = model(IDS, domains), wide(torch.cat([domains[..., None] + 50, IDS], 2))[:, :, 1:]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [7, 512])
def test_clap_and_its_gradients_are_those_of_the_plain_formula(
    rows: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(softmax.ROWS_AT_ONCE, "cpu", rows)
    model = model_of(("a", "b"), architecture=CLAP)
    targets = torch.randint(0, 50, (2, 3, 16), generator=torch.Generator().manual_seed(5))
    factors = torch.rand(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(6)) if weighted else 1.0
    plain = copy.deepcopy(model)
    rows_of_length_one = plain.token_embedding / plain.token_embedding.square().sum(1, keepdim=True).sqrt()
    x = rows_of_length_one[IDS] + plain.position_embedding
    for block in plain.blocks:
        x = block(x)
    logits = plain.logit_scale * (plain.final_norm(x) @ rows_of_length_one.T)
    reference = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    found = model.log_probabilities(model(IDS), targets)
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-12)
    torch.testing.assert_close(model.logits(model(IDS)), logits, rtol=0, atol=1e-12)
    (found * factors).sum().backward()
    (reference * factors).sum().backward()
    assert abs(model.logit_scale.grad.item()) > 0.1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-9, atol=1e-10)


def test_clap_in_half_precision_keeps_the_scale_exact() -> None:
    model = GPT(CLAP, 50, ("dense",)).initialise(1)
    assert model.logit_scale.tolist() == [1.0]
    # 1.003 is 1 in bf16.
    model.logit_scale.data.fill_(1.003)
    hidden = torch.randn(1, 1, 4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    unit = F.normalize(model.token_embedding, dim=-1).bfloat16()
    states = (hidden.float() * 1.003).bfloat16()
    assert not torch.equal(states, hidden)
    torch.testing.assert_close(model.logits(hidden), states @ unit.T)


@pytest.mark.parametrize("architecture", [ALIBI, CLAP, BOTH], ids=lambda one: one.position + one.head)
@pytest.mark.parametrize(("scope", "domains"), [("feedforward", 0), ("feedforward", 2), ("model", 0)])
def test_parameters_are_counted(architecture: Architecture, scope: str, domains: int) -> None:
    model = GPT(architecture, 50, ("dense",), ("law", "news")[:domains], scope)
    shared, own = parameters(architecture, 50, domains, scope)
    assert shared == sum(p.numel() for p in model.shared_tensors().values())
    assert own == sum(p.numel() for p in model.expert_tensors().values())
    assert ("position_embedding" in model.state_dict()) == (architecture.position == "learned")
    assert ("logit_scale" in model.expert_tensors()) == (scope == "model" and architecture.head == "clap")
    more = activation_bytes(architecture, 50, 1, 4, checkpointing=False) - activation_bytes(
        SMALL, 50, 1, 4, checkpointing=False
    )
    assert more == (4 * 16 * 16 * 4 if architecture.position == "alibi" else 0)


VARIED = dataclasses.replace(TRAIN, architecture=SIZES | {"position": "alibi", "head": "clap"})
ROUTED = {"experts": 4, "top_k": 2, "every": 2, "capacity": 2.0, "balance": 0.01}


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """results/<run>/ with models of each kind that have both options."""
    folder = tmp_path_factory.mktemp("varied")
    for kind in ("demix", "dense", "domain_token", "routed"):
        routed = {"routed": ROUTED} if kind == "routed" else {}
        training = dataclasses.replace(VARIED, architecture=VARIED.architecture | routed)
        places = folder / "models" / kind, folder / "metrics" / f"{kind}.jsonl", folder / "checkpoints" / kind
        train_model(kind, training, shard_paths(tokens), *places)
    for domain in TRAINING:
        places = folder / "btm" / domain, None, folder / "checkpoints" / domain
        train_model("branched", VARIED, shard_paths(tokens, [domain]), *places, share=3)
    return folder


@pytest.mark.parametrize("kind", ["demix", "dense", "domain_token", "routed"])
def test_a_trained_model_is_whole_and_has_learned(kind: str, run: Path, tokens: Path) -> None:
    directory = run / "models" / kind
    assert not any("position" in name for name in load_file(directory / "shared.safetensors"))
    about = describe(directory)
    assert {key: about["architecture"][key] for key in ("position", "head")} == {"position": "alibi", "head": "clap"}
    model = load_model(directory)
    assert about["shared_parameters"] == sum(p.numel() for p in model.shared_tensors().values())
    assert 0.5 < model.logit_scale.item() < 2
    assert model.logit_scale.item() != 1
    scored = trunk_log_probabilities(load_experts(directory), *blocks(opened(tokens)[0], 32, 640))
    assert np.isfinite(scored).all()
    assert -scored[0].mean() < 5.6 < np.log(400)


def test_an_expert_that_is_a_whole_model_owns_its_scale(run: Path) -> None:
    expert = run / "btm" / TRAINING[0] / "experts" / f"{TRAINING[0]}.safetensors"
    assert "logit_scale" in load_file(expert)
    assert not load_file(run / "btm" / TRAINING[0] / "shared.safetensors")


def test_a_stopped_training_goes_on_to_the_bit(
    run: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, {8})
    places = tmp_path / "model", tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    with pytest.raises(StoppedError):
        train_model("demix", VARIED, shard_paths(tokens), *places)
    train_model("demix", VARIED, shard_paths(tokens), *places)
    for name in ("shared.safetensors", f"experts/{TRAINING[1]}.safetensors"):
        assert (tmp_path / "model" / name).read_bytes() == (run / "models" / "demix" / name).read_bytes()


@pytest.mark.parametrize("kind", ["demix", "dense"])
def test_adaptation_begins_with_its_parent(kind: str, run: Path, tokens: Path, tmp_path: Path) -> None:
    shards = tuple(tokens / "tokens" / "fantasy" / f"{split}.arrow" for split in ("train", "dev"))
    directory, places = run / "models" / kind, Places(tmp_path / "out", tmp_path / "m.jsonl", tmp_path / "checkpoints")
    ids = blocks(TokenShard.open(shards[1]), 32, 192)
    if kind == "dense":
        adapt_dense(directory, shards, [], ADAPT, places)
        adapted, before = load_model(tmp_path / "out"), load_model(directory)
    else:
        chosen = {"parent": TRAINING[1], "parent_prior": 0.9}
        adapt_expert(directory, shards, chosen, {}, ADAPT, places)
        for path in (directory / "model.json", directory / "shared.safetensors"):
            shutil.copy(path, tmp_path / "out")
        adapted, before = load_model(tmp_path / "out", ("fantasy",)), load_model(directory, (TRAINING[1],))
        assert torch.equal(adapted.logit_scale, before.logit_scale)
    assert -log_probabilities(adapted, *ids).mean() < -log_probabilities(before, *ids).mean()


def test_experts_are_merged_with_their_scale(run: Path, tmp_path: Path) -> None:
    merge_experts(run / "models" / "demix", dict.fromkeys(TRAINING, 1 / 3), tmp_path / "merged")
    merged, own = load_model(tmp_path / "merged"), load_model(run / "models" / "demix")
    assert torch.equal(merged.logit_scale, own.logit_scale)
    torch.testing.assert_close(merged.blocks[0].feedforward.up[0], own.blocks[0].feedforward.up.mean(0))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"position": "alibi"}, "has position alibi, which GPT-2's format cannot hold"),
        ({"attention": "bidirectional", "objective": "mlm"}, "has objective mlm, which GPT-2's format cannot hold"),
    ],
)
def test_gpt2_export_refuses_what_gpt2_lacks(options: dict[str, str], told: str, tmp_path: Path) -> None:
    save_model(model_of(architecture=dataclasses.replace(SMALL, **options)), tmp_path / "model", kind="dense")
    with pytest.raises(DemixError, match=told):
        export_hf(tmp_path / "model", "dense", None, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert read_json(tmp_path / "model" / "model.json")["architecture"].keys() >= options.keys()
