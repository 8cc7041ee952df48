"""Importing GPT-2 checkpoints: the logits of transformers, the tensors of an export, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.model.checkpoint import describe, load_model
from demix.model.experts import find_faults
from demix.model.export import export_hf
from demix.model.gpt import GPT
from demix.model.import_hf import import_hf
from support.cli import demix
from support.models import REAL_TEXT, write_model

os.environ["HF_HUB_OFFLINE"] = "1"
SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 50257}


def write_checkpoint(folder: Path, **more: Any) -> Any:
    """A GPT-2 checkpoint of transformers with made-up weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES | {"initializer_range": 0.3} | more)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return model


def logits(model: GPT, ids: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(torch.from_numpy(ids)[None, None]))[0, 0]


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_the_logits_are_those_of_transformers(activation: str, tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path / "hf", activation_function=activation)
    done = demix("import", tmp_path / "hf", "--output", tmp_path / "models" / "x")
    assert done.exit_code == 0, done.exception
    directory = tmp_path / "models" / "x"
    assert not find_faults(directory)
    encoder, model = Tokenizer.load(directory / "tokenizer.json"), load_model(directory)
    ids = np.concatenate([[encoder.end_of_text], encoder.encode(REAL_TEXT)]).astype(np.int64)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids)[None]).logits[0]
    torch.testing.assert_close(logits(model, ids), wanted, rtol=0, atol=1e-4)
    assert describe(directory)["architecture"].get("activation", "gelu") == activation
    assert "tokens" not in describe(directory), "nobody knows how many"
    # The other GELU is told apart.
    model.blocks[0].feedforward.activation = {"gelu": "gelu_new", "gelu_new": "gelu"}[activation]
    assert (logits(model, ids) - wanted).abs().max() > 1e-4

    export_hf(directory, "dense", directory / "tokenizer.json", tmp_path / "again")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["activation_function"] == activation

    (tmp_path / "my.txt").write_text(REAL_TEXT * 5)
    done = demix("eval", directory, tmp_path / "my.txt", "--json")
    assert done.exit_code == 0, done.exception
    assert [line["name"] for line in json.loads(done.stdout)["experts"]] == ["dense"]


def test_an_export_of_demix_comes_back_with_its_own_tokenizer(tokens: Path, tmp_path: Path) -> None:
    encoder = Tokenizer.load(tokens / "tokenizer.json")
    written = write_model(tmp_path / "m", ("law",), encoder.sha256, encoder.vocab_size)
    export_hf(tmp_path / "m", "law", tokens / "tokenizer.json", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "x")
    assert describe(tmp_path / "x")["tokenizer_sha256"] == encoder.sha256
    assert "activation" not in describe(tmp_path / "x")["architecture"]
    for name, parameter in load_model(tmp_path / "x").named_parameters():
        assert torch.equal(parameter, written.get_parameter(name)), name


def test_checkpoints_without_a_prefix_and_with_masks_are_read(tmp_path: Path) -> None:
    """As `gpt2` of the hub has them."""
    write_checkpoint(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "x")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    mask = torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril()
    head = {"lm_head.weight": tensors["wte.weight"].clone()}
    save_file(tensors | head | {f"h.{n}.attn.bias": mask.clone() for n in range(2)}, path)
    import_hf(tmp_path / "hf", tmp_path / "y")
    for name in ("shared", "experts/dense"):
        assert (tmp_path / "x" / f"{name}.safetensors").read_bytes() == (
            tmp_path / "y" / f"{name}.safetensors"
        ).read_bytes()
    save_file(tensors | {"lm_head.weight": torch.zeros(50257, 32)}, path)
    with pytest.raises(DemixError, match=r"holds lm_head\.weight, which GPT-2 with tied embeddings lacks"):
        import_hf(tmp_path / "hf", tmp_path / "z")


CONFIGS = [
    ({"model_type": "gemma2"}, r"model_type: is 'gemma2'; families that come in are gpt2, gpt_neox, llama, mistral,"),
    ({"model_type": ["gpt2"]}, r"model_type: is \['gpt2'\]; families that come in are gpt2"),
    ({"activation_function": "relu"}, r"activation_function: is 'relu'; allowed is one of gelu, gelu_new"),
    ({"n_inner": 64}, r"holds transformer\.h\.0\.mlp\.c_fc\.weight as \(32, 128\), of which .* makes \(1, 64, 32\)"),
    ({"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx: is True"),
    ({"tie_word_embeddings": False}, r"hf: has no tensor lm_head\.weight; import a checkpoint of GPT-2"),
    (
        {"attention_sinks": 4},
        r"config\.json: attention_sinks: is 4, and whether this changes what GPT-2 computes is not",
    ),
    ({"n_positions": 32}, r"holds transformer\.wpe\.weight as \(64, 32\), of which config\.json makes \(32, 32\)"),
    ({"n_layer": 3}, r"has no tensor transformer\.h\.2\."),
    ({"n_layer": 1}, r"holds transformer\.h\.1\."),
    ({"n_head": 3}, r"config\.json: heads: 3 does not divide the width 32"),
    ({"n_layer": 10**9}, r"layers: is 1000000000; allowed is"),
]


def test_a_damaged_tokenizer_is_one_line(tokens: Path, tmp_path: Path) -> None:
    encoder = Tokenizer.load(tokens / "tokenizer.json")
    write_model(tmp_path / "m", ("law",), encoder.sha256, encoder.vocab_size)
    export_hf(tmp_path / "m", "law", tokens / "tokenizer.json", tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer.json"
    whole = json.loads(path.read_text())
    merges = whole["model"]["merges"]
    for damaged, cause in (
        ("BPE", "has a model that is 'BPE'; get it again"),
        (["BPE"], r"has a model that is \['BPE'\]; get it again"),
        (whole["model"] | {"merges": [["a"], *merges[1:]]}, r"is no tokenizer of this project \(.*Merge"),
        (whole["model"] | {"merges": ["ab", *merges[1:]]}, r"is no tokenizer of this project \(.*merge"),
        (whole["model"] | {"merges": None}, r"is no tokenizer of this project \(.*null"),
    ):
        path.write_text(json.dumps(whole | {"model": damaged}))
        with pytest.raises(DemixError, match=f"^{path}: {cause}"):
            import_hf(tmp_path / "hf", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_what_demix_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    path, weights = tmp_path / "hf" / "config.json", tmp_path / "hf" / "model.safetensors"
    whole, content = json.loads(path.read_text()), weights.read_bytes()
    for change, message in CONFIGS:
        path.write_text(json.dumps(whole | change))
        with pytest.raises(DemixError, match=message):
            import_hf(tmp_path / "hf", tmp_path / "x")
    path.write_text(json.dumps(whole))
    for damaged, message in ((content[:1000], "is not a safetensors file"), (b"", "is not a safetensors file")):
        weights.write_bytes(damaged)
        with pytest.raises(DemixError, match=message):
            import_hf(tmp_path / "hf", tmp_path / "x")
    weights.write_bytes(content)
    tensors = load_file(weights)
    tensors["transformer.wte.weight"][5, 5] = float("nan")
    save_file(tensors, weights)
    with pytest.raises(DemixError, match="which no training makes"):
        import_hf(tmp_path / "hf", tmp_path / "x")
    weights.write_bytes(content)
    (tmp_path / "hf" / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(DemixError, match=r"vocab\.json: is another vocabulary than GPT-2's"):
        import_hf(tmp_path / "hf", tmp_path / "x")
    weights.unlink()
    with pytest.raises(DemixError, match=r"model\.safetensors: is missing; convert the checkpoint to safetensors"):
        import_hf(tmp_path / "hf", tmp_path / "x")
    assert sorted(place.name for place in tmp_path.iterdir()) == ["hf"]
