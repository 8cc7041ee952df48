"""The files of checkpoints of any family: what is read of them, and what is refused."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from demix.errors import DemixError
from demix.model.checkpoint import describe, load_model
from demix.model.experts import find_faults
from demix.model.export import export_hf
from demix.model.formats import FORMATS
from demix.model.import_hf import INDEX, architecture_of, import_hf, read_config
from support.checkpoints import LLAMA3, change, checkpoint
from support.cli import demix


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox_sequential", "llama_tied", "opt"])
def test_a_tied_head_may_lie_in_the_file_once_more(family: str, tokens: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "hf", tokens, family)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    head = "embed_out.weight" if family.startswith("gpt_neox") else "lm_head.weight"
    ends = ("wte.weight", "embed_in.weight", "embed_tokens.weight")
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith(ends))
    save_file(tensors | {head: embedding.clone()}, path)
    import_hf(tmp_path / "hf", tmp_path / "in")
    assert describe(tmp_path / "in")["architecture"].get("head", "tied") == "tied"
    save_file(tensors | {head: embedding + 1}, path)
    with pytest.raises(DemixError, match=rf"holds {head}, which .* with tied embeddings lacks; import another"):
        import_hf(tmp_path / "hf", tmp_path / "other")
    change(tmp_path / "hf", tie_word_embeddings=False)
    import_hf(tmp_path / "hf", tmp_path / "other")
    assert torch.equal(load_model(tmp_path / "other").output_embedding, embedding + 1)


def test_files_without_prefix_and_with_buffers_are_read(tokens: Path, tmp_path: Path) -> None:
    """As Pythia's on the hub, which hold the causal mask and frequencies, and base models, whose names are shorter."""
    for family, prefix, buffers in (
        ("gpt_neox_sequential", "gpt_neox.", ("attention.bias", "attention.masked_bias")),
        ("llama_tied", "model.", ("self_attn.rotary_emb.inv_freq",)),
    ):  # fmt: skip
        checkpoint(tmp_path / family, tokens, family)
        path = tmp_path / family / "model.safetensors"
        tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(path).items()}
        more = {f"layers.{n}.{name}": torch.zeros(4, dtype=torch.uint8) for n in range(3) for name in buffers}
        import_hf(tmp_path / family, tmp_path / f"{family}-in")
        save_file(tensors | more, path)
        import_hf(tmp_path / family, tmp_path / f"{family}-again")
        for name in ("shared", "experts/dense"):
            found = [(tmp_path / f"{family}-{end}" / f"{name}.safetensors").read_bytes() for end in ("in", "again")]
            assert found[0] == found[1]
        save_file(tensors | {"layers.0.attention.scale": torch.zeros(4)}, path)
        with pytest.raises(DemixError, match=r"holds layers\.0\.attention\.scale, which .* lacks"):
            import_hf(tmp_path / family, tmp_path / "refused")


def test_an_index_is_distrusted(tokens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    checkpoint(folder, tokens, "llama", shard="20KB")
    index = folder / INDEX
    whole = json.loads(index.read_text())
    files = list(whole["weight_map"].values())
    name, file = next((name, file) for name, file in whole["weight_map"].items() if files.count(file) > 1)
    others = {key: value for key, value in whole["weight_map"].items() if key != name}
    for weight_map, told in (
        (
            others | {name: "../" + file},
            rf"index\.json: weight_map\.{name}: is '\.\./.*'; allowed is string that matches",
        ),
        (others | {name: "/etc/passwd"}, "is '/etc/passwd'"),
        (others | {name: "sub/" + file}, "is 'sub/"),
        (others | {name: "pytorch_model.bin"}, "is 'pytorch_model.bin'"),
        (others | {name: 5}, "is 5; allowed is string"),
        ({}, r"weight_map: is \{\}"),
        (others | {name: "absent.safetensors"}, r"absent\.safetensors: is missing, and model\.safetensors\.index"),
        (others, rf"holds {name}, which .* gives to no file or another"),
        (whole["weight_map"] | {"model.more": file}, r"lacks model\.more, which .* gives to it"),
    ):
        index.write_text(json.dumps(whole | {"weight_map": weight_map}))
        with pytest.raises(DemixError, match=told) as error:
            import_hf(folder, tmp_path / "in")
        assert "\n" not in str(error.value)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    index.write_text(json.dumps(whole).replace(f'"{name}"', f'"{name}": "{file}", "{name}"'))
    with pytest.raises(DemixError, match="twice"):
        import_hf(folder, tmp_path / "in")
    # The files on the hub are links to blobs in another folder.
    index.write_text(json.dumps(whole))
    for path in folder.glob("*.safetensors"):
        path.rename(tmp_path / f"{path.stem}.blob")
        path.symlink_to(tmp_path / f"{path.stem}.blob")
    import_hf(folder, tmp_path / "in")
    (tmp_path / f"{Path(file).stem}.blob").unlink()
    os.mkfifo(tmp_path / f"{Path(file).stem}.blob")
    with pytest.raises(DemixError, match="regular file"):
        import_hf(folder, tmp_path / "other")


REFUSED = [
    ("llama", {"rope_parameters": LLAMA3 | {"rope_type": "yarn"}}, r"rope_type: is 'yarn'; allowed is one of default,"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_scaling\.type: is 'dynamic'"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, r"rope_scaling"),
    ("llama", {"rope_parameters": LLAMA3 | {"attention_factor": 1.5}}, r"attention_factor: is not known"),
    ("llama", {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor: is 0\.5"),
    ("llama", {"attention_bias": True}, r"attention_bias: is True; allowed is False"),
    ("llama", {"mlp_bias": True}, r"mlp_bias: is True; allowed is False"),
    ("llama", {"hidden_act": "mish"}, r"hidden_act: is 'mish'; allowed is one of gelu,"),
    ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config: is \{'bits': 4\}, and whether this"),
    ("llama", {"auto_map": {"AutoModel": "code.Model"}}, r"auto_map: is .*, and whether this changes what"),
    ("llama", {"hidden_size": "32"}, r"hidden_size: is '32'; allowed is integer"),
    ("llama", {"num_key_value_heads": 3}, r"key_heads: 3 does not divide the 4 heads"),
    ("llama", {"num_key_value_heads": 1}, r"holds model\.layers\.0\.self_attn\.q_proj\.weight as"),
    ("llama", {"rms_norm_eps": 0.0}, r"epsilon: is 0\.0; allowed is number > 0"),
    ("llama", {"num_hidden_layers": 4}, r"hf: has no tensor model\.layers\.3\.input_layernorm\.weight"),
    ("llama", {"model_type": "gemma3_text"}, r"model_type: is 'gemma3_text'; families that come in are gpt2, gpt_neox"),
    ("qwen3", {"use_sliding_window": True}, r"use_sliding_window: is True; allowed is False"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types\.1: is 'sliding_attention'"),
    ("mistral", {"sliding_window": 32}, r"attention: sees 32 positions, and blocks have 64; import it with"),
    ("opt", {"do_layer_norm_before": False}, r"do_layer_norm_before: is False; allowed is True"),
    ("opt", {"word_embed_proj_dim": 16}, r"word_embed_proj_dim: is 16, and hidden_size 32"),
    ("gpt_neox", {"attention_bias": False}, r"attention_bias: is False; allowed is True"),
    ("olmo2", {"clip_qkv": 8.0}, r"clip_qkv: is 8\.0, and whether this changes what OLMo 2 computes is not known"),
]  # fmt: skip


def test_what_demix_lacks_is_refused_by_its_key(tokens: Path, tmp_path: Path) -> None:
    whole: dict[str, str] = {}
    for family, keys, told in REFUSED:
        folder = tmp_path / family / "hf"
        if family not in whole:
            checkpoint(folder, tokens, family)
            whole[family] = (folder / "config.json").read_text()
        (folder / "config.json").write_text(whole[family])
        change(folder, **keys)
        with pytest.raises(DemixError, match=told) as error:
            import_hf(folder, tmp_path / family / "in")
        assert "\n" not in str(error.value)
        assert str(folder) in str(error.value)
        assert [path.name for path in (tmp_path / family).iterdir()] == ["hf"], (family, keys)
    folder = tmp_path / "llama" / "hf"
    (folder / "config.json").write_text(whole["llama"])
    tensors = load_file(folder / "model.safetensors")
    for change_of, told in (
        ({"model.norm.weight": torch.ones(32, dtype=torch.int32)}, r"norm\.weight of type I32; import a checkpoint"),
        ({"model.norm.weight": torch.tensor(1.0)}, r"holds a single number as model\.norm\.weight"),
        ({"model.norm.weight": torch.full((32,), torch.inf)}, r"in model\.norm\.weight, which no training makes"),
        ({"model.layers.1.mlp.up_proj.weight": torch.ones(87, 32)}, r"mlp\.gate_proj\.weight as \(88, 32\)"),
    ):  # fmt: skip
        save_file(tensors | change_of, folder / "model.safetensors")
        with pytest.raises(DemixError, match=told):
            import_hf(folder, tmp_path / "llama" / "in")
        assert [path.name for path in (tmp_path / "llama").iterdir()] == ["hf"]


def test_blocks_have_the_length_that_is_asked_for(tokens: Path, tmp_path: Path) -> None:
    for family in ("opt", "llama", "mistral"):
        checkpoint(tmp_path / family, tokens, family)
    change(tmp_path / "llama", max_position_embeddings=131_072)
    change(tmp_path / "mistral", sliding_window=40)
    import_hf(tmp_path / "opt", tmp_path / "short", 16)
    import_hf(tmp_path / "opt", tmp_path / "whole")
    tables = [load_model(tmp_path / name).position_embedding for name in ("short", "whole")]
    assert len(tables[0]) == 16
    assert torch.equal(tables[0], tables[1][:16])
    with pytest.raises(DemixError, match=r"--context 65: is more than the 64 learned positions of .*; use 64 or less"):
        import_hf(tmp_path / "opt", tmp_path / "long", 65)
    done = demix("import", tmp_path / "llama", "--output", tmp_path / "usual")
    assert done.exit_code == 0, done.exception
    done = demix("import", tmp_path / "llama", "--output", tmp_path / "asked", "--context", 4096)
    assert done.exit_code == 0, done.exception
    assert [describe(tmp_path / name)["architecture"]["context"] for name in ("usual", "asked")] == [2048, 4096]
    # Within its window Mistral attends to all.
    import_hf(tmp_path / "mistral", tmp_path / "window", 40)
    assert describe(tmp_path / "window")["architecture"]["context"] == 40


def test_an_import_proves_itself(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "hf", tokens, "llama")
    (tmp_path / "my.txt").write_text("It is a truth universally acknowledged.")
    done = demix("import", tmp_path / "hf", "--output", tmp_path / "in", "--verify", "--text", tmp_path / "my.txt")
    assert done.exit_code == 0, done.exception
    assert "from those of transformers, which reach" in done.stdout
    assert not find_faults(tmp_path / "in")
    verified = import_hf(tmp_path / "hf", tmp_path / "usual", verify=True)
    assert verified is not None
    assert verified.tokens == 64
    assert verified.difference < 1e-5 * verified.largest
    for more, told in (
        (("--text", tmp_path / "my.txt"), "--text: is for --verify alone"),
        (("--verify", "--text", tmp_path / "absent.txt"), "absent.txt: is missing; name a text file with --text"),
    ):
        done = demix("import", tmp_path / "hf", "--output", tmp_path / "no", *more)
        assert told in str(done.exception)
    # A norm whose epsilon is read wrongly.
    real = FORMATS["llama"].keys.options
    monkeypatch.setattr(FORMATS["llama"].keys, "options", lambda keys: real(keys) | {"epsilon": 0.05})
    with pytest.raises(DemixError, match=r"hf: has logits that differ by up to .* from those of transformers"):
        import_hf(tmp_path / "hf", tmp_path / "no", verify=True)
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DemixError, match=r"needs transformers, which is not installed; pip install 'demix\[transf"):
        import_hf(tmp_path / "hf", tmp_path / "no", verify=True)
    assert not (tmp_path / "no").exists()


def test_files_beside_the_weights_go_out_as_they_came(tokens: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "hf", tokens, "qwen3", vocab_size=512, bos_token_id=5, eos_token_id=[399, 8])
    texts = {"tokenizer_config.json": '{"model_max_length": 9}', "generation_config.json": '{"temperature": 0.6}',
             "chat_template.jinja": "{{ messages }}"}  # fmt: skip
    for name, text in texts.items():
        (tmp_path / "hf" / name).write_text(text)
    import_hf(tmp_path / "hf", tmp_path / "in")
    export_hf(tmp_path / "in", "dense", None, tmp_path / "out")
    for name in (*texts, "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes(), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (5, [399, 8])
    assert config["vocab_size"] == 512
    assert "exported as Qwen 3" in (tmp_path / "out" / "README.md").read_text()
    assert not find_faults(tmp_path / "in")


def test_v4_and_v5_keys_of_rope_are_read(tmp_path: Path) -> None:
    """As in transformers: `rope_scaling` before `rope_parameters`, and an empty one says nothing."""
    path = tmp_path / "config.json"
    linear = {"rope_type": "linear", "factor": 2.0}
    for keys, theta, kind in (
        ({}, 10_000.0, None),
        ({"rope_theta": 500, "rope_scaling": None}, 500.0, None),
        ({"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2.0}}, 500.0, "linear"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}, 700.0, None),
        ({"rope_parameters": linear | {"rope_theta": 700.0}, "rope_theta": 500.0}, 700.0, "linear"),
        ({"rope_parameters": {"rope_theta": 700.0}, "rope_scaling": linear, "rope_theta": 500.0}, 500.0, "linear"),
        ({"rope_parameters": linear | {"rope_theta": 700.0}, "rope_scaling": {}}, 700.0, "linear"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}, "max_position_embeddings": 77},
            10_000.0,
            "llama3",
        ),
    ):
        path.write_text(json.dumps({"model_type": "llama", **keys}))
        architecture, _ = architecture_of(path, read_config(path)[1], 64)
        assert architecture.rope_theta == theta, keys
        scaling = architecture.rope_scaling
        assert (scaling and scaling.kind) == kind, keys
        if kind == "llama3":
            assert scaling is not None
            assert (scaling.factor, scaling.context) == (8.0, 77)
