"""Checkpoints that cannot come in, and models that cannot go out: the subject of each error, and no file left."""

import codecs
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from demix.config.architecture import architecture_from
from demix.data.tokenizer import Tokenizer
from demix.model.export import export_hf, format_of
from demix.model.import_hf import INDEX, import_hf
from support.checkpoints import LLAMA3, change, checkpoint
from support.cli import refusal
from support.errors import refused
from support.models import SMALL, THREE, model_of, save_model

# Keys of config.json, by the one that the error names; or the file that they do not fit.
WEIGHTS = "model.safetensors"
KEYS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gpt2": [
        ({"model_type": "gemma2"}, "model_type"),
        ({"activation_function": "relu"}, "activation_function"),
        ({"n_inner": 64}, WEIGHTS),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"tie_word_embeddings": False}, "hf"),
        ({"n_positions": 32}, WEIGHTS),
        ({"n_head": 3}, "n_head"),
        ({"n_layer": 10**9}, "n_layer"),
    ],
    "llama": [
        ({"rope_parameters": LLAMA3 | {"rope_type": "yarn"}}, "rope_parameters.rope_type"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_scaling.short_factor"),
        ({"rope_parameters": LLAMA3 | {"attention_factor": 1.5}}, "rope_parameters.attention_factor"),
        ({"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 1}, WEIGHTS),
    ],
    "qwen3": [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
    "mistral": [({"sliding_window": 32}, "attention")],
    "opt": [
        ({"do_layer_norm_before": False}, "do_layer_norm_before"),
        ({"word_embed_proj_dim": 16}, "word_embed_proj_dim"),
    ],
    "gpt_neox": [({"attention_bias": False}, "attention_bias")],
    "olmo2": [({"clip_qkv": 8.0}, "clip_qkv")],
    "hub/Qwen3-30B-A3B": [({"mlp_only_layers": [0]}, "mlp_only_layers")],
}


@pytest.mark.parametrize("family", KEYS)
def test_what_demix_lacks_is_refused_by_its_key(family: str, tokens: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "hf", tokens, family)
    whole = (tmp_path / "hf" / "config.json").read_text()
    for keys, subject in KEYS[family]:
        (tmp_path / "hf" / "config.json").write_text(whole)
        change(tmp_path / "hf", **keys)
        with refused(subject) as error:
            import_hf(tmp_path / "hf", tmp_path / "in")
        assert str(tmp_path / "hf") in error.value.subject
        assert [path.name for path in tmp_path.iterdir()] == ["hf"], keys
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    without = {key: value for key, value in json.loads(whole).items() if key != layers}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(without))
    with refused(f"config.json: {layers}"):
        import_hf(tmp_path / "hf", tmp_path / "in")


TENSORS = {
    "integers": {"model.norm.weight": torch.ones(32, dtype=torch.int32)},
    "a number": {"model.norm.weight": torch.tensor(1.0)},
    "infinite": {"model.norm.weight": torch.full((32,), torch.inf)},
    "no number in a part": {"model.layers.1.mlp.up_proj.weight": torch.full((88, 32), torch.nan)},
    "another shape": {"model.layers.1.mlp.up_proj.weight": torch.ones(87, 32)},
}


def test_damaged_files_are_refused(tokens: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    checkpoint(hf, tokens, "llama")
    path, tokenizer = hf / WEIGHTS, json.loads((hf / "tokenizer.json").read_text())
    content, tensors = path.read_bytes(), load_file(path)
    for name, damaged in TENSORS.items():
        save_file(tensors | damaged, path)
        with refused(WEIGHTS) as error:
            import_hf(hf, tmp_path / name)
        assert next(iter(damaged)) in error.value.cause
    for cut in (content[:1000], b""):
        path.write_bytes(cut)
        with refused(WEIGHTS):
            import_hf(hf, tmp_path / "in")
    path.unlink()
    with refused(WEIGHTS):
        import_hf(hf, tmp_path / "in")
    path.write_bytes(content)
    model, merges = tokenizer["model"], tokenizer["model"]["merges"]
    for damaged in (["BPE"], model | {"merges": [["a"], *merges[1:]]}, model | {"merges": ["ab", *merges[1:]]}):
        (hf / "tokenizer.json").write_text(json.dumps(tokenizer | {"model": damaged}))
        with refused("tokenizer.json"):
            import_hf(hf, tmp_path / "in")
    (hf / "tokenizer.json").unlink()
    (hf / "vocab.json").write_text('{"a": 0}')
    with refused("vocab.json", "hf", "tokenizer.json"):
        import_hf(hf, tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_index_is_distrusted(tokens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    checkpoint(folder, tokens, "llama", shard="20KB")
    index = folder / INDEX
    whole = json.loads(index.read_text())
    files = list(whole["weight_map"].values())
    name, file = next((name, file) for name, file in whole["weight_map"].items() if files.count(file) > 1)
    others = {key: value for key, value in whole["weight_map"].items() if key != name}
    key = f"weight_map.{name}"
    for weight_map, subject in (
        (others | {name: "../" + file}, key),
        (others | {name: "sub/" + file}, key),
        (others | {name: "pytorch_model.bin"}, key),
        ({}, "weight_map"),
        (others | {name: "absent.safetensors"}, "absent.safetensors"),
    ):
        index.write_text(json.dumps(whole | {"weight_map": weight_map}))
        with refused(subject):
            import_hf(folder, tmp_path / "in")
    index.write_text(json.dumps(whole).replace(f'"{name}"', f'"{name}": "{file}", "{name}"'))
    with refused(index):
        import_hf(folder, tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    index.write_text(json.dumps(whole))
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with refused(file):
        import_hf(folder, tmp_path / "in")


def test_links_out_of_a_folder_are_not_followed(tokens: Path, tmp_path: Path) -> None:
    """But for the blobs of a cache of the hub, of whose snapshots all files are links."""
    folder, blobs = tmp_path / "cache" / "snapshots" / "abc", tmp_path / "cache" / "blobs"
    checkpoint(folder, tokens, "llama", shard="20KB")
    blobs.mkdir()
    for path in [*folder.iterdir()]:
        path.rename(blobs / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    import_hf(folder, tmp_path / "in", verify=True)
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "config.json", WEIGHTS):
        other = tmp_path / f"with-{name}"
        checkpoint(other, tokens, "llama")
        (tmp_path / name).write_bytes((blobs / name).read_bytes() if (blobs / name).exists() else b"secret")
        (other / name).unlink(missing_ok=True)
        (other / name).symlink_to(tmp_path / name)
        with refused(other / name):
            import_hf(other, tmp_path / "out")
    (tmp_path / "in" / "imported" / "chat_template.jinja").symlink_to(tmp_path / "chat_template.jinja")
    with refused("imported/chat_template.jinja"):
        export_hf(tmp_path / "in", "dense", None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _renamed(folder: Path, beginning: str) -> None:
    path = folder / WEIGHTS
    save_file({f"{beginning}{name}": tensor for name, tensor in load_file(path).items()}, path)


def _doubled(folder: Path, name: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensors[name]}, folder / "again.safetensors")
    (folder / WEIGHTS).rename(folder / "whole.safetensors")
    files = dict.fromkeys(tensors, "whole.safetensors") | {name: "again.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def _replaced(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
DEFAULTS = {"is_encoder_decoder": False, "pruned_heads": {}, "temperature": 1.0, "chunk_size_feed_forward": 0}
PAD = {"id": 400, "content": "[PAD]", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
CAUSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "hf"),
    "unknown keys": (lambda folder: change(folder, **DEFAULTS, b_key=2, a_key=1), "a_key, b_key"),
    "an encoder": (lambda folder: change(folder, is_encoder_decoder=True), "is_encoder_decoder"),
    "compiled": (lambda folder: _renamed(folder, "_orig_mod."), "hf"),
    "a tensor twice": (lambda folder: _doubled(folder, "model.norm.weight"), "again.safetensors"),
    "no tensors": (lambda folder: save_file({}, folder / WEIGHTS), WEIGHTS),
    "a pointer": (lambda folder: _replaced(folder, WEIGHTS, POINTER), WEIGHTS),
    "a pointer to a tokenizer": (lambda folder: _replaced(folder, "tokenizer.json", POINTER), "tokenizer.json"),
    "a page": (lambda folder: _replaced(folder, "config.json", b"<!DOCTYPE html><html>"), "config.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "a circle": (lambda folder: (folder / "merges.txt").symlink_to("merges.txt"), "merges.txt"),
    "a row too few": (lambda folder: _with_added(folder, PAD), "tokenizer.json"),
}


def _with_added(folder: Path, token: dict[str, Any]) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    _replaced(folder, "tokenizer.json", json.dumps(content | {"added_tokens": [token]}).encode())


@pytest.mark.parametrize("cause", CAUSES)
def test_an_error_names_the_cause_and_no_stage_of_a_run(cause: str, tokens: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "hf", tokens, "llama")
    spoil, subject = CAUSES[cause]
    spoil(tmp_path / "hf")
    with refused(subject, f"config.json: {subject}") as error:
        import_hf(tmp_path / "hf", tmp_path / "in")
    assert not {"stage", "byte-level"} & {*error.value.cure.split()}
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_changes_nothing_is_passed_over(tokens: Path, tmp_path: Path) -> None:
    """Defaults of transformers, the mark with which Windows begins UTF-8, and buffers in any shard."""
    hf = tmp_path / "hf"
    checkpoint(hf, tokens, "llama", shard="20KB")
    change(hf, **DEFAULTS)
    for name in ("config.json", "tokenizer.json"):
        _replaced(hf, name, codecs.BOM_UTF8 + (hf / name).read_bytes())
    shard = min(hf.glob("*.safetensors"))
    save_file(load_file(shard) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, shard)
    verified = import_hf(hf, tmp_path / "in", verify=True)
    assert verified is not None
    export_hf(tmp_path / "in", "dense", None, tmp_path / "out")
    json.loads((tmp_path / "out" / "tokenizer.json").read_text("utf-8"))


MASKED_LM = {"objective": "mlm"}
ROPE = {"position": "rope", "norm": "rms", "gated": True, "activation": "silu", "biases": "none"}
ROBERTA = {"preset": "roberta"}
ROUTED = {"routed": {"experts": 4, "top_k": 2, "capacity": 2.0, "balance": 0.01, "every": 1}}
# Options that the nearest format cannot hold.
OPTIONS: list[dict[str, Any]] = [
    {"position": "alibi"},
    MASKED_LM,
    {"position": "rope", "biases": "qkv"},
    {**ROPE, "residual": "parallel"},
    {**ROPE, "norm_place": "after"},
    ROUTED,
    {**ROPE, "routed": ROUTED["routed"] | {"renormalise": False}},
    ROBERTA | {"position": "alibi"},
    ROBERTA | {"head": "clap"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_architecture_without_a_class_does_not_go_out(options: dict[str, Any], tmp_path: Path) -> None:
    architecture = architecture_from({"layers": 2, "width": 32, "heads": 4, "context": 64} | options)
    save_model(model_of(architecture=architecture), tmp_path / "m")
    with refused(tmp_path / "m"):
        format_of(tmp_path / "m")


@pytest.mark.parametrize(
    ("experts", "options"),
    [(("dense",), {}), (THREE, {"position": "alibi"}), (THREE, MASKED_LM), (("dense",), ROUTED)],
    ids=["dense", "alibi", "mlm", "routed"],
)
def test_what_is_no_mixture_does_not_go_out_as_one(
    experts: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    save_model(model_of(experts, architecture=SMALL.replace(**options)), tmp_path / "m")
    words = ("export", tmp_path / "m", "--output", tmp_path / "out")
    refusal(*words, "--mixture", of=tmp_path / "m")
    for wrong in ((), ("--mixture", "--expert", experts[0])):
        refusal(*words, *wrong, of="--")
    assert not (tmp_path / "out").exists()


def test_numbers_that_a_type_cannot_hold_are_refused(tokens: Path, tmp_path: Path) -> None:
    tokenizer = tokens / "tokenizer.json"
    encoder = Tokenizer.load(tokenizer)
    model = model_of(dtype=torch.float32, vocab_size=encoder.vocab_size)
    with torch.no_grad():
        model.token_embedding[3, 3] = 1e5
    save_model(model, tmp_path / "m", encoder.sha256)
    with refused(tmp_path / "m"):
        export_hf(tmp_path / "m", "dense", tokenizer, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    export_hf(tmp_path / "m", "dense", tokenizer, tmp_path / "out", dtype="bfloat16")
