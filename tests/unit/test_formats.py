"""Checkpoint formats: the classes of transformers are the oracles, through files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.model.checkpoint import load_model
from demix.model.experts import find_faults
from demix.model.export import export_hf
from demix.model.formats import FORMATS
from demix.model.gpt import GPT
from demix.model.import_hf import architecture_of, import_hf, read_config
from support.checkpoints import FAMILIES, all_tensors, checkpoint, farthest
from support.cli import demix
from support.models import model_of, save_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_comes_in_and_goes_out_exactly(family: str, tokens: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = checkpoint(tmp_path / "hf", tokens, family)
    assert import_hf(tmp_path / "hf", tmp_path / "in") is None
    assert not find_faults(tmp_path / "in")
    model = load_model(tmp_path / "in")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sum(parameters(model.architecture, 400))
    # OPT's table has two rows that nothing reads.
    assert count == sum(p.numel() for p in theirs.parameters()) - (64 if family.startswith("opt") else 0)

    ids = torch.randint(2, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(ids).logits
        assert farthest(model.logits(model(ids[None]))[0], wanted) < 1e-5
        past, pieces = model.no_past(), ids.split([7, 1, 32], 1)
        pieced = torch.cat([model(piece[None], past=past) for piece in pieces], 2)
        assert farthest(model.logits(pieced)[0], wanted) < 1e-5

    model.requires_grad_(True)
    hidden = model(ids[None])
    model.log_probabilities(hidden[:, :, :-1], ids[None, :, 1:]).mean().neg().backward()
    theirs(ids, labels=ids).loss.backward()
    theirs.save_pretrained(tmp_path / "gradients", state_dict={n: p.grad for n, p in theirs.named_parameters()})
    export_hf(tmp_path / "in", "dense", None, tmp_path / "out")
    before, after = all_tensors(tmp_path / "hf"), all_tensors(tmp_path / "out")
    before.pop("lm_head.weight" if model.architecture.head == "tied" else "", None)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        rows = slice(2, None) if "embed_positions" in name else slice(None)
        assert torch.equal(tensor[rows], after[name][rows]), name
    # Gradients have the names of tensors.
    grads = {n: (p.grad[0] if ".feedforward." in n else p.grad) for n, p in model.named_parameters()}
    ours = FORMATS[FAMILIES[family][0]].theirs_of(model.architecture, grads)
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    for name, gradient in all_tensors(tmp_path / "gradients").items():
        if name in ours and "embed_positions" not in name:
            # The bias of keys has no gradient but for rounding.
            scale = max(float(gradient.abs().max()), 1e-3 * largest)
            assert float((ours[name] - gradient).abs().max()) < 2e-5 * scale, name

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(again) is type(theirs)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)
        cached = theirs.generation_config.to_diff_dict() == again.generation_config.to_diff_dict()
    assert cached
    for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters", "head_dim", "vocab_size"):
        found, wanted_value = (getattr(one.config, key, None) for one in (again, theirs))
        if key != "head_dim" or wanted_value is not None:
            assert found == wanted_value, key


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox_sequential", "llama_tied", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_in_and_goes_out_to_the_bit(
    family: str, dtype: torch.dtype, tokens: Path, tmp_path: Path
) -> None:
    """Products in bf16 are rounded, so logits of the whole model in bf16 agree to 2e-2."""
    from transformers import AutoModelForCausalLM

    theirs = checkpoint(tmp_path / "hf", tokens, family)
    theirs.to(dtype).save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    import_hf(tmp_path / "hf", tmp_path / "in")
    model, ids = load_model(tmp_path / "in"), torch.arange(2, 42)[None]

    def read(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=dtype, attn_implementation="eager")

    assert model.token_embedding.dtype == torch.float32
    with torch.no_grad():
        assert farthest(model.logits(model(ids[None]))[0], read(torch.float32)(ids).logits) < 1e-5
        if dtype == torch.bfloat16:
            found = model.to(dtype).logits(model(ids[None]))[0]
            assert farthest(found.float(), read(dtype)(ids).logits.float()) < 2e-2
    name = str(dtype).removeprefix("torch.")
    done = demix("export", tmp_path / "in", "--expert", "dense", "--output", tmp_path / "out", "--dtype", name)
    assert done.exit_code == 0, done.exception
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == name
    before, after = all_tensors(tmp_path / "hf"), all_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        rows = slice(2, None) if "embed_positions" in key else slice(None)
        assert after[key].dtype == dtype
        assert torch.equal(tensor[rows], after[key][rows]), key


def test_numbers_that_a_type_cannot_hold_are_refused(tokens: Path, tmp_path: Path) -> None:
    encoder = Tokenizer.load(tokens / "tokenizer.json")
    model = model_of(dtype=torch.float32, vocab_size=encoder.vocab_size)
    with torch.no_grad():
        model.token_embedding[3, 3] = 1e5
    save_model(model, tmp_path / "m", encoder.sha256)
    with pytest.raises(DemixError, match=r"has numbers beyond 65504 in transformer\.wte\.weight; use --dtype bfloat16"):
        export_hf(tmp_path / "m", "dense", tokens / "tokenizer.json", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    export_hf(tmp_path / "m", "dense", tokens / "tokenizer.json", tmp_path / "out", dtype="bfloat16")


def test_configs_of_the_hub_give_the_shapes_of_transformers(tmp_path: Path) -> None:
    """The texts are those of the hub's files; no weights are needed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    configs = json.loads((Path(__file__).parent / "data" / "hub_configs.json").read_text())
    assert {config["model_type"] for config in configs.values()} == {one.name for one in FORMATS.values() if one.keys}
    for name, config in configs.items():
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        with torch.device("meta"):
            # It changes what it is given.
            theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(path.read_text())))
        form, keys = read_config(path)
        architecture, positions = architecture_of(path, keys, None)
        with torch.device("meta"):
            ours = GPT(architecture, keys.vocab_size, ("dense",))
        cut = (positions - architecture.context) * architecture.width if architecture.position == "learned" else 0
        unread = 2 * architecture.width if form.name == "opt" else 0
        count = sum(p.numel() for p in ours.parameters())
        assert sum(parameters(architecture, keys.vocab_size)) == count
        assert count == sum(p.numel() for p in theirs.parameters()) - cut - unread, name
        tensors = {n: (p[0] if ".feedforward." in n else p) for n, p in ours.named_parameters()}
        shapes = {n: tuple(t.shape) for n, t in form.theirs_of(architecture, tensors).items()}
        wanted = {n.replace("lm_head", "embed_out") if form.name == "gpt_neox" else n: tuple(p.shape)
                  for n, p in theirs.named_parameters()}  # fmt: skip
        # In memory transformers stacks experts; small checkpoints above hold their names on disk.
        assert form.routed or shapes == wanted, name
        # What we write says the same to transformers.
        written = form.config(architecture, keys.vocab_size)
        # Software of version 4 reads these.
        for key in {"rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base"} & config.keys():
            assert written[key] == config[key], (name, key)
        again = AutoConfig.for_model(**written)
        for key in ("rope_parameters", "hidden_size", "head_dim", "num_key_value_heads", "tie_word_embeddings"):
            assert getattr(again, key, None) == getattr(theirs.config, key, None), (name, key)


LONG = Architecture(layers=2, width=32, heads=4, context=64)
ROPE = {"position": "rope", "norm": "rms", "gated": True, "activation": "silu", "biases": "none"}


@pytest.mark.parametrize(
    ("options", "model_class"),
    [
        ({"head": "clap"}, "GPT2LMHeadModel"),
        ({"head": "clap", "activation": "relu"}, "OPTForCausalLM"),
        ({"head": "clap", "position": "rope", "rope_share": 0.5}, "GPTNeoXForCausalLM"),
        ({"head": "clap", **ROPE, "query_norm": "head"}, "Qwen3ForCausalLM"),
        ({**ROPE, "heads": 3, "head_width": 8}, "MistralForCausalLM"),
        ({**ROPE, "norm_place": "after", "query_norm": "all", "head": "untied"}, "Olmo2ForCausalLM"),
    ],
)
def test_an_expert_goes_out_as_the_class_of_its_architecture(
    options: dict[str, Any], model_class: str, tokens: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    encoder = Tokenizer.load(tokens / "tokenizer.json")
    architecture = dataclasses.replace(LONG, **options)
    model = model_of(("law", "news"), torch.float32, architecture=architecture, vocab_size=encoder.vocab_size)
    save_model(model, tmp_path / "m", encoder.sha256)
    export_hf(tmp_path / "m", "news", tokens / "tokenizer.json", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == model_class
    assert theirs.config.tie_word_embeddings == (architecture.head == "tied")
    ids = torch.arange(2, 60)[None]
    with torch.no_grad():
        assert farthest(theirs(ids).logits, model.logits(model(ids[None]))[1]) < 1e-5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"position": "alibi"}, "has position alibi, which GPT-2's format cannot hold; export another model"),
        ({"position": "rope", "biases": "qkv"}, "has biases qkv, which GPT-NeoX's format cannot hold"),
        ({**ROPE, "residual": "parallel"}, "has residual parallel, which Llama's format cannot hold"),
        ({**ROPE, "norm_place": "after"}, "has norm_place after, which Llama's format cannot hold"),
    ],
)
def test_an_architecture_without_a_class_is_refused_by_an_option(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    save_model(model_of(architecture=dataclasses.replace(LONG, **options)), tmp_path / "m")
    done = demix("export", tmp_path / "m", "--expert", "dense", "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert told in str(done.exception)
    assert not (tmp_path / "out").exists()
