"""Exported mixtures, loaded by transformers in a process that cannot import demix, against demix's own decoding."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from safetensors.torch import load_file, save_file
from torch import Tensor

from demix.config.architecture import DECODERS
from demix.data.tokenizer import Tokenizer
from demix.evaluate.harness_model import DemixLM
from demix.files import write_json
from demix.model.continuations import mixture_of
from demix.model.decode import open_model, weights_of
from demix.model.directory import load_experts
from support.cli import demix, succeeds
from support.models import REAL_TEXT, SMALL, THREE, alone, model_of, save_model

CONTEXT = SMALL.context
LLAMA = SMALL.replace(**DECODERS["llama"], key_heads=2, inner=48)
PYTHIA = SMALL.replace(position="rope", rope_share=0.5, residual="parallel", head="untied")
# By name: the architecture, and whether experts are whole models.
MODELS = {
    "gpt2": (SMALL, False),
    "gpt2_btm": (SMALL, True),
    "clap": (SMALL.replace(head="clap"), False),
    "opt": (SMALL.replace(activation="relu"), False),
    "gpt_neox": (PYTHIA, False),
    "llama": (LLAMA, False),
    "compact": (LLAMA.replace(**DECODERS["compact"], key_heads=2), False),
    "compact_btm": (LLAMA.replace(query_norm="head", bigrams="shared", value_embeddings=True), True),
    "qwen3_btm": (LLAMA.replace(query_norm="head", head="tied"), True),
    "olmo2": (SMALL.replace(**DECODERS["olmo2"], inner=48), True),
}
BETA, GAMMA = 0.35, 0.9
LENGTHS = (2 * CONTEXT + 7, 9, CONTEXT + 1)
TEXTS = [torch.randint(2, 399, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
ASKED = [("the", " Lord"), ("", "Item 4"), (REAL_TEXT, " and more"), ("It is", " a truth universally")]
# What software that knows transformers alone does with the folders that are its arguments.
SCRIPT = """
import json, sys
sys.modules["demix"] = None
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, DynamicCache
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

torch.set_num_threads(1)
torch.set_grad_enabled(False)
texts = [load_file("texts.safetensors")[str(number)] for number in range(3)]
width = max(map(len, texts))
left = torch.stack([pad(text, (width - len(text), 0)) for text in texts])
right = torch.stack([pad(text, (0, width - len(text))) for text in texts])
mask = torch.stack([torch.arange(width) >= width - len(text) for text in texts]).long()


def load(folder, **more):
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **more)
    assert not any(told.values()), told
    return model


for folder in sys.argv[1:]:
    model, found = load(folder), {}
    for number, text in enumerate(texts):
        found[f"alone.{number}"] = model(text[None]).logits[0]
    found["left"] = model(left, attention_mask=mask).logits
    found["right"] = model(right, attention_mask=mask.flip(1)).logits
    found["last"] = model(left, attention_mask=mask, logits_to_keep=1).logits
    found["loss"] = model(texts[0][None], labels=texts[0][None]).loss
    cache, parts = DynamicCache(config=model.config), []
    for start, end in zip((0, 7, 8, 30), (7, 8, 30, width)):
        parts.append(model(left[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits)
    found["pieces"] = torch.cat(parts, 1)
    cache.crop(-5)
    found["again"] = model(left[:, -5:], attention_mask=mask, past_key_values=cache).logits
    # The second text in two parts with padding between them, at once and in two passes.
    cut = len(texts[1]) - 2
    parted = torch.cat([texts[1][:cut], torch.zeros(4, dtype=torch.long), texts[1][cut:]])[None]
    seen = torch.ones_like(parted)
    seen[0, cut : cut + 4] = 0
    found["parted"] = model(parted, attention_mask=seen).logits[0, -2:]
    first = model(parted[:, :-2], attention_mask=seen[:, :-2], use_cache=True)
    found["continued"] = model(
        parted[:, -2:], attention_mask=seen, past_key_values=first.past_key_values).logits[0]
    for name, beams in (("greedy", 1), ("beams", 3)):
        for cached in (True, False):
            made = model.generate(left, attention_mask=mask, max_new_tokens=12, do_sample=False, num_beams=beams,
                                  use_cache=cached, eos_token_id=None, pad_token_id=0)
            found[f"{name}.{cached}"] = made[:, width:]
    found["second"] = load(folder, prior=[0.0, 1.0, 0.0])(texts[0][None]).logits[0]
    model.save_pretrained(folder + ".saved")
    found["saved"] = load(folder + ".saved")(texts[0][None]).logits[0]
    harness = HFLM(folder, trust_remote_code=True, device="cpu", add_bos_token=True, batch_size=2)
    asked = [Instance("loglikelihood", {}, tuple(pair), 0) for pair in json.load(open("asked.json"))]
    found["harness"] = torch.tensor(harness.loglikelihood(asked, disable_tqdm=True), dtype=torch.float64)
    save_file({name: tensor.clone() for name, tensor in found.items()}, folder + ".found")
"""


def write(directory: Path, name: str, tokenizer: Path) -> Path:
    """A model of three experts with a tokenizer and the parameters of its mixture."""
    (architecture, whole), encoder = MODELS[name], Tokenizer.load(tokenizer)
    model = model_of(THREE, torch.float32, architecture=architecture, vocab_size=encoder.vocab_size)
    for number, expert in enumerate(THREE) if whole else ():
        own = alone(model, expert, "model")
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.add_(0.05 * number * parameter.flip(0))
        save_model(own, directory, encoder.sha256, kind="branched")
    if not whole:
        save_model(model, directory, encoder.sha256)
    shutil.copy(tokenizer, directory / "tokenizer.json")
    write_json(directory / "mixing.json", {"beta": BETA, "gamma": GAMMA})
    return directory


QUICK = ("gpt2_btm", "clap", "compact")
OTHERS = tuple(name for name in MODELS if name not in QUICK)


@pytest.fixture(scope="module", params=[QUICK, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["quick", "others"])
def exported(
    request: pytest.FixtureRequest, tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """By name a model and its export, beside which lies what transformers computes of it (`….found`)."""
    folder = tmp_path_factory.mktemp("mixtures")
    for name in request.param:
        directory = write(folder / name, name, tokens / "tokenizer.json")
        done = succeeds("export", directory, "--mixture", "--output", folder / f"hf-{name}")
    save_file({str(number): text for number, text in enumerate(TEXTS)}, folder / "texts.safetensors")
    (folder / "asked.json").write_text(json.dumps(ASKED))
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LD_LIBRARY_PATH") if key in os.environ}
    quiet = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT, *(f"hf-{name}" for name in request.param)],
        cwd=folder,
        env=kept | quiet,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (folder / name, folder / f"hf-{name}") for name in request.param}


def mixed(directory: Path, text: Tensor, prior: str = "") -> Tensor:
    """log p [N, V] under demix's `tempered` of what may follow each of N tokens, the first the one before the text."""
    trunks, encoder = open_model(directory)
    assert weights_of("tempered", directory).parameters == (BETA, GAMMA)
    decoder, rows = mixture_of(directory, trunks, encoder, "tempered", prior).decoder(text[:1]), []
    for token in text[1:]:
        rows.append(decoder.next_log_probabilities()[0])
        decoder.read(token[None, None])
    return torch.stack([*rows, decoder.next_log_probabilities()[0]])


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and float((one - other).abs().max()) < 1e-5


def test_transformers_computes_the_mixture_of_demix(exported: dict[str, tuple[Path, Path]]) -> None:
    for directory, folder in exported.values():
        found, wanted = load_file(f"{folder}.found"), [mixed(directory, text) for text in TEXTS]
        for number, (rows, length) in enumerate(zip(wanted, LENGTHS, strict=True)):
            assert same(rows.exp().sum(1), torch.ones(length))
            assert same(found[f"alone.{number}"], rows)
            assert same(found["left"][number, -length:], rows)
            assert same(found["right"][number, :length], rows)
            assert same(found["pieces"][number, -length:], rows)
            assert same(found["again"][number], rows[-5:])
            assert same(found["last"][number], rows[-1:])
        assert same(found["parted"], wanted[1][-2:])
        assert same(found["continued"], wanted[1][-2:])
        assert same(found["saved"], wanted[0])
        assert same(found["loss"], -wanted[0][:-1].gather(1, TEXTS[0][1:, None]).mean())
        assert same(found["second"], mixed(directory, TEXTS[0], f"{sorted(THREE)[1]}=1"))
        assert not same(found["second"], wanted[0])


def test_texts_are_those_of_demix_with_and_without_a_cache(exported: dict[str, tuple[Path, Path]]) -> None:
    for directory, folder in exported.values():
        found = load_file(f"{folder}.found")
        for text, made in zip(TEXTS, found["greedy.True"], strict=True):
            assert torch.equal(mixed(directory, torch.cat([text, made]))[len(text) - 1 : -1].argmax(-1), made)
        assert torch.equal(found["greedy.True"], found["greedy.False"])
        assert torch.equal(found["beams.True"], found["beams.False"])


def test_the_harness_rates_it_as_demix_does(exported: dict[str, tuple[Path, Path]]) -> None:
    """Of a context that is empty, `hf` sees the token before the text, as demix does."""
    directory, folder = next(iter(exported.values()))
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in ASKED]
    wanted = torch.tensor(DemixLM(str(directory)).loglikelihood(asked), dtype=torch.float64)
    assert float((load_file(f"{folder}.found")["harness"] - wanted).abs().max()) < 1e-4


def test_a_tensor_is_written_once_and_the_config_has_the_rule(
    exported: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    # The scale of CLAP is in a head of its own, and OPT's table of positions has two rows that nothing reads.
    vocabulary = Tokenizer.load(next(iter(exported.values()))[0] / "tokenizer.json").vocab_size
    more = {"clap": vocabulary * SMALL.width - 1, "opt": 2 * SMALL.width}
    for name, (directory, folder) in exported.items():
        count = sum(p.numel() for trunk in load_experts(directory) for p in trunk.parameters())
        written = load_file(folder / "model.safetensors")
        assert sum(tensor.numel() for tensor in written.values()) == count + more.get(name, 0)
        config = json.loads((folder / "config.json").read_text())
        assert (config["experts"], config["beta"], config["gamma"]) == (sorted(THREE), BETA, GAMMA)
    demix("export", directory, "--mixture", "--output", tmp_path / "half", "--dtype", "bfloat16")
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
