"""Importing checkpoints from folders: what is read of their files, what goes out again, and the check of an import."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from demix.model.directory import describe, load_model
from demix.model.experts import find_faults
from demix.model.export import export_hf
from demix.model.import_hf import import_hf
from support.checkpoints import LLAMA3, change, checkpoint
from support.cli import refusal, succeeds
from support.errors import refused


def same_weights(model: Path, other: Path) -> bool:
    files = ("shared.safetensors", "experts/dense.safetensors")
    return all((model / name).read_bytes() == (other / name).read_bytes() for name in files)


@pytest.mark.parametrize(
    ("family", "prefix", "buffers", "head"),
    [
        ("gpt2", "transformer.", ("h.{}.attn.bias",), "lm_head.weight"),
        (
            "gpt_neox_sequential",
            "gpt_neox.",
            ("layers.{}.attention.bias", "layers.{}.attention.masked_bias"),
            "embed_out.weight",
        ),
        ("llama_tied", "model.", ("layers.{}.self_attn.rotary_emb.inv_freq",), "lm_head.weight"),
        ("opt", "model.", (), "lm_head.weight"),
    ],
)
def test_files_without_prefix_with_buffers_and_with_a_tied_head_once_more_are_read(
    family: str, prefix: str, buffers: tuple[str, ...], head: str, tokens: Path, tmp_path: Path
) -> None:
    """As GPT-2's and Pythia's on the hub, which hold the causal mask, and base models, whose names are shorter."""
    checkpoint(tmp_path / "hf", tokens, family)
    import_hf(tmp_path / "hf", tmp_path / "in")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(path).items()}
    ends = ("wte.weight", "embed_in.weight", "embed_tokens.weight")
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith(ends))
    more = {name.format(n): torch.zeros(4, dtype=torch.uint8) for n in range(3) for name in buffers}
    save_file(tensors | more | {head: embedding.clone()}, path)
    import_hf(tmp_path / "hf", tmp_path / "again")
    assert same_weights(tmp_path / "in", tmp_path / "again")
    assert describe(tmp_path / "again").content["architecture"].get("head", "tied") == "tied"
    for other in ({head: embedding + 1}, {"layers.0.attention.scale": torch.zeros(4)}):
        save_file(tensors | other, path)
        with refused("model.safetensors"):
            import_hf(tmp_path / "hf", tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_blocks_have_the_length_that_is_asked_for(tokens: Path, tmp_path: Path) -> None:
    for family in ("opt", "llama", "mistral"):
        checkpoint(tmp_path / family, tokens, family)
    change(tmp_path / "llama", max_position_embeddings=131_072)
    change(tmp_path / "mistral", sliding_window=40)
    import_hf(tmp_path / "opt", tmp_path / "short", 16)
    import_hf(tmp_path / "opt", tmp_path / "whole")
    short, whole = (load_model(tmp_path / name).position_embedding for name in ("short", "whole"))
    assert torch.equal(short, whole[:16])
    with refused("--context 65"):
        import_hf(tmp_path / "opt", tmp_path / "long", 65)
    # Within its window Mistral attends to all.
    for family, more, context in (("llama", (), 2048), ("llama", (4096,), 4096), ("mistral", (40,), 40)):
        words = [word for number in more for word in ("--context", number)]
        succeeds("import", tmp_path / family, "--output", tmp_path / f"{family}{context}", *words)
        assert describe(tmp_path / f"{family}{context}").content["architecture"]["context"] == context
    with refused("config.json: attention"):
        import_hf(tmp_path / "mistral", tmp_path / "wide")


def test_an_import_proves_itself(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    hf = tmp_path / "hf"
    checkpoint(hf, tokens, "llama")
    succeeds("import", hf, "--output", tmp_path / "in", "--verify")
    assert not find_faults(tmp_path / "in")
    verified = import_hf(hf, tmp_path / "usual", verify=True)
    assert verified is not None
    assert verified.tokens == 64
    assert verified.difference < 1e-5 * verified.largest
    no = ("import", hf, "--output", tmp_path / "no")
    # As if demix had read an epsilon wrongly: transformers reads another one.
    real = AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *a, **k: real(*a, **k, rms_norm_eps=0.05))
    refusal(*no, "--verify", of=hf)
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refusal(*no, "--verify", of="--verify")
    assert not (tmp_path / "no").exists()


def test_files_beside_the_weights_go_out_as_they_came(tokens: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "hf", tokens, "qwen3", vocab_size=512, bos_token_id=5, eos_token_id=[399, 8])
    texts = {
        "tokenizer_config.json": '{"model_max_length": 9}',
        "generation_config.json": '{"temperature": 0.6}',
        "chat_template.jinja": "{{ messages }}",
    }
    for name, text in texts.items():
        (tmp_path / "hf" / name).write_text(text)
    import_hf(tmp_path / "hf", tmp_path / "in")
    export_hf(tmp_path / "in", "dense", None, tmp_path / "out")
    for name in (*texts, "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes(), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (5, [399, 8], 512)
    assert not find_faults(tmp_path / "in")


LINEAR = {"rope_type": "linear", "factor": 2.0}
ROPES = [
    ({}, 10_000.0, None),
    ({"rope_theta": 500, "rope_scaling": None}, 500.0, None),
    ({"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2.0}}, 500.0, "linear"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}, 700.0, None),
    ({"rope_parameters": LINEAR | {"rope_theta": 700.0}, "rope_theta": 500.0}, 700.0, "linear"),
    ({"rope_parameters": {"rope_theta": 700.0}, "rope_scaling": LINEAR, "rope_theta": 500.0}, 500.0, "linear"),
    ({"rope_parameters": LINEAR | {"rope_theta": 700.0}, "rope_scaling": {}}, 700.0, "linear"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}, "max_position_embeddings": 77}, 10_000.0, "llama3"),
]


def test_keys_of_rope_of_versions_4_and_5_are_read(tokens: Path, tmp_path: Path) -> None:
    """As in transformers: `rope_scaling` before `rope_parameters`, and an empty one says nothing."""
    checkpoint(tmp_path / "hf", tokens, "llama", rope_parameters=LLAMA3)
    path = tmp_path / "hf" / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("rope")}
    for number, (keys, theta, kind) in enumerate(ROPES):
        path.write_text(json.dumps(config | keys))
        import_hf(tmp_path / "hf", tmp_path / str(number))
        found: dict[str, Any] = describe(tmp_path / str(number)).content["architecture"]
        assert found.get("rope_theta", 10_000.0) == theta, keys
        assert found.get("rope_scaling", {}).get("kind") == kind, keys
    assert (found["rope_scaling"]["factor"], found["rope_scaling"]["context"]) == (8.0, 77)
