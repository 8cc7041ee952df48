"""Exported mixtures, loaded by transformers in a process that cannot import demix, against demix's own decoding."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demix.config.architecture import Architecture
from demix.data.tokenizer import Tokenizer
from demix.files import write_json
from demix.model.checkpoint import load_model
from demix.model.decode import Decoder, named_prior, open_model, posterior_of, weights_of
from support.cli import demix
from support.models import SMALL, THREE, alone, model_of, save_model, write_trunks

CONTEXT, ROPE = SMALL.context, {"norm": "rms", "position": "rope", "biases": "none", "gated": True, "activation": "silu"}
# By name: the architecture, and whether experts are whole models.
MODELS = {
    "gpt2": (SMALL, False),
    "gpt2_btm": (SMALL, True),
    "clap": (dataclasses.replace(SMALL, head="clap"), False),
    "opt": (dataclasses.replace(SMALL, activation="relu"), False),
    "gpt_neox": (
        Architecture(
            2, 32, 4, CONTEXT, position="rope", rope_share=0.5, activation="gelu", residual="parallel", head="untied"
        ),
        False,
    ),
    "llama": (Architecture(2, 32, 4, CONTEXT, head="untied", key_heads=2, inner=48, **ROPE), False),
    "qwen3": (Architecture(2, 32, 4, CONTEXT, key_heads=2, inner=48, query_norm="head", **ROPE), False),
    "qwen3_btm": (Architecture(2, 32, 4, CONTEXT, key_heads=2, inner=48, query_norm="head", **ROPE), True),
    "olmo2": (
        Architecture(2, 32, 4, CONTEXT, inner=48, query_norm="all", norm_place="after", head="untied", **ROPE), True
    ),
}  # fmt: skip
BETA, GAMMA, LENGTHS = 0.35, 0.9, (2 * CONTEXT + 7, 9, CONTEXT + 1)
# What a harness does with a folder, in a process of its own. Padding stands on the left, as in generation.
SCRIPT = """
import json, sys
sys.modules["demix"] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache
folder, given, out = sys.argv[1:]
texts, found = [row[:n] for row, n in zip(*(load_file(given)[key] for key in ("ids", "lengths")))], {}
model, told = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert not any(told.values()), told
width = max(map(len, texts))
ids = torch.stack([torch.nn.functional.pad(text, (width - len(text), 0)) for text in texts])
mask = torch.stack([torch.arange(width) >= width - len(text) for text in texts]).long()
with torch.no_grad():
    for number, text in enumerate(texts):
        found[f"alone.{number}"] = model(text[None]).logits[0]
    found["batch"] = model(ids, attention_mask=mask).logits
    right = torch.stack([torch.nn.functional.pad(text, (0, width - len(text))) for text in texts])
    found["right"] = model(right, attention_mask=mask.flip(1)).logits
    cache, parts = DynamicCache(config=model.config), []
    for start, end in zip((0, 7, 8, 30), (7, 8, 30, width)):
        parts.append(model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits)
    found["pieces"] = torch.cat(parts, 1)
    cache.crop(-5)
    found["again"] = model(ids[:, -5:], attention_mask=mask, past_key_values=cache).logits
    # A text in two parts, with the padding of a batch between them.
    gap = torch.cat([right[1:2], texts[1][None, -2:]], 1)
    seen = torch.cat([mask.flip(1)[1:2], torch.ones(1, 2, dtype=torch.long)], 1)
    seen[0, len(texts[1]) - 2 : width] = 0
    found["gap"] = model(gap, attention_mask=seen).logits[0, -2:]
    found["last"] = model(ids, attention_mask=mask, logits_to_keep=1).logits
    found["loss"] = model(texts[0][None], labels=texts[0][None]).loss
for name, more in {"greedy": {}, "beams": {"num_beams": 3}}.items():
    for cached in (True, False):
        made = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, use_cache=cached,
                              eos_token_id=None, pad_token_id=0, **more)
        found[f"{name}.{cached}"] = made[:, width:]
one = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, prior=[0.0, 1.0, 0.0])
with torch.no_grad():
    found["second"] = one(texts[0][None]).logits[0]
model.save_pretrained(out + ".again")
save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)
"""


def write(folder: Path, name: str, tokenizer: Path) -> Path:
    """A model of three experts with a tokenizer and the parameters of its mixture."""
    (architecture, whole), encoder = MODELS[name], Tokenizer.load(tokenizer)
    model = model_of(THREE, torch.float32, architecture=architecture, vocab_size=encoder.vocab_size)
    directory = folder / name
    save_model(model, directory, encoder.sha256)
    if whole:
        # Each expert is drawn anew, so that experts differ in every tensor.
        shutil.rmtree(directory)
        for number, expert in enumerate(THREE):
            own = alone(model, expert, "model")
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.add_(0.05 * number * parameter.flip(0))
            save_model(own, directory, encoder.sha256, kind="branched")
    shutil.copy(tokenizer, directory / "tokenizer.json")
    write_json(directory / "mixing.json", {"beta": BETA, "gamma": GAMMA})
    return directory


def transformed(folder: Path, texts: list[Tensor], out: Path, script: str = SCRIPT) -> dict[str, Tensor]:
    """What `script` finds of the exported `folder`."""
    width = max(map(len, texts))
    ids = torch.stack([torch.nn.functional.pad(text, (0, width - len(text))) for text in texts])
    save_file({"ids": ids, "lengths": torch.tensor([len(text) for text in texts])}, out.with_suffix(".given"))
    keep = ("PATH", "HOME", "LD_LIBRARY_PATH")
    own = {"HF_HOME": str(out.parent / "hf"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, str(folder), str(out.with_suffix(".given")), str(out)],
        cwd=out.parent, env={key: os.environ[key] for key in keep if key in os.environ} | own,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out)


def mixed(directory: Path, texts: list[Tensor]) -> list[Tensor]:
    """log p [N, V] of what may follow each token of each text, the first of which is the one before it."""
    trunks, encoder = open_model(directory)
    rule, experts = weights_of("tempered", directory), [name for trunk in trunks for name in trunk.experts]
    assert rule.parameters == (BETA, GAMMA)
    log_prior, decay = named_prior("", directory, experts, rule)
    found = []
    for text in texts:
        posterior = posterior_of(rule, log_prior, directory, experts, encoder, CONTEXT, decay)
        decoder, rows = Decoder(trunks, text[:1], posterior), []
        for token in text[1:]:
            rows.append(decoder.next_log_probabilities()[0])
            decoder.read(token[None, None])
        found.append(torch.stack([*rows, decoder.next_log_probabilities()[0]]))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_mixture_of_demix(name: str, tokens: Path, tmp_path: Path) -> None:
    directory = write(tmp_path, name, tokens / "tokenizer.json")
    done = demix("export", directory, "--mixture", "--output", tmp_path / "hf-model")
    assert done.exit_code == 0, done.exception
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(2, 399, (length,), generator=generator) for length in LENGTHS]
    found, wanted = transformed(tmp_path / "hf-model", texts, tmp_path / "found"), mixed(directory, texts)
    width = max(LENGTHS)
    for number, rows in enumerate(wanted):
        length = len(rows)
        for way in (found[f"alone.{number}"], found["batch"][number, -length:], found["right"][number, :length],
                    found["pieces"][number, -length:]):  # fmt: skip
            assert float((way - rows).abs().max()) < 1e-5
        assert float((found["again"][number] - rows[-5:]).abs().max()) < 1e-5
        assert float((found["last"][number, 0] - rows[-1]).abs().max()) < 1e-5
        assert float((rows.exp().sum(1) - 1).abs().max()) < 1e-5
    assert float((found["gap"] - wanted[1][-2:]).abs().max()) < 1e-5
    predicted = wanted[0][:-1].gather(1, texts[0][1:, None])
    assert float(found["loss"] + predicted.mean()) == pytest.approx(0, abs=1e-5)
    for way in ("greedy", "beams"):
        assert torch.equal(found[f"{way}.True"], found[f"{way}.False"])
    # Greedy texts are those of demix.
    assert width == LENGTHS[0]
    rows = mixed(directory, [torch.cat([texts[1], found["greedy.True"][1]])])[0]
    assert torch.equal(rows[len(texts[1]) - 1 : -1].argmax(-1), found["greedy.True"][1])
    # A prior of 0 leaves an expert out.
    only = load_model(directory, (THREE[1],)) if MODELS[name][1] else load_model(directory, (sorted(THREE)[1],))
    del only, width
