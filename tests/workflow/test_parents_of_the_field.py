"""Models that transformers made come in, become experts of domains and of clusters, and go out again."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from demix.data.tokenizer import Tokenizer
from demix.files import read_json
from demix.model.checkpoint import load_model
from demix.model.gpt import GPT
from support.byte_level import definition, sample
from support.cli import demix
from support.dry_run import REPOSITORY, ran

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.workflow

CONTEXT = 32
WORDS = {"train": 6000, "dev": 900, "test": 900}
TRAINING, NOVEL = ("licenses", "scripture", "parliament"), "fantasy"
CONFIG: dict[str, Any] = {
    "domains": {
        "training": {
            name: {"source": {"kind": "files", "path": f"resources/sample/{name}.jsonl.zst"}, "words": WORDS}
            for name in TRAINING
        },
        "novel": {
            NOVEL: {"source": {"kind": "files", "path": f"resources/sample/{NOVEL}.jsonl.zst"}, "words": WORDS}
        },
    },
    "tokenizer": {"kind": "parent"},
    "architecture": {"preset": "parent", "context": CONTEXT},
    "training": {"tokens": 6144, "sequences": 2, "learning_rate": 3e-4, "clip": 1.0, "warmup": 0.1},
    "evaluation": {"dev_blocks": 4, "test_tokens": 400, "weights": ["history"]},
    "adaptation": {"tokens": 1024, "sequences": 4, "evaluate_every": 4, "dev_blocks": 4, "forgetting_blocks": 2},
    "removal": {"retrain_without": []},
}  # fmt: skip


def written(folder: Path, model: Any, kind: str) -> Any:
    """The folder that transformers writes of a model, with a tokenizer of this kind; returns the tokenizer."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(definition(kind))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=eos_of(kind), bos_token=eos_of(kind)
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return tokenizer


def eos_of(kind: str) -> str:
    return {"llama3": "<|end_of_text|>", "gpt2": "<|endoftext|>"}[kind]


def types_of(kind: str) -> int:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    return HuggingFaceTokenizer.from_str(definition(kind)).get_vocab_size()


def run_of(folder: Path, **sections: Any) -> Path:
    """The finished run of `CONFIG` with these sections."""
    if not (folder / "resources").exists():
        (folder / "resources").symlink_to(REPOSITORY / "resources")
    own = CONFIG | {"run": "own", "tracking": {"uri": "sqlite:///results/own/mlflow.db"}} | sections
    (folder / "config.yaml").write_text(yaml.safe_dump(own, sort_keys=False))
    ran(folder, "config.yaml")
    return folder / "results" / "own"


def own_logits(model: GPT, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(torch.tensor(tokens)[None, None]))[0, 0]


def exported(run: Path, model: str, expert: str, folder: Path) -> Any:
    """The expert as a model of transformers, whose logits and ids are ours."""
    directory = run / "models" / model
    done = demix("export", directory, "--expert", expert, "--output", folder)
    assert done.exit_code == 0, (done.output, done.exception)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    text = "".join(pq.read_table(run / "corpus" / "licenses" / "test.parquet")["text"].to_pylist())[:400]
    ours, ids = Tokenizer.load(run / "tokenizer.json"), transformers.AutoTokenizer.from_pretrained(folder)(text)
    tokens = ids["input_ids"][-CONTEXT:]
    assert ours.encode(text).tolist()[-CONTEXT:] == tokens
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens])).logits[0]
    mine = own_logits(load_model(directory, (expert,)), tokens)
    torch.testing.assert_close(mine, logits, rtol=0, atol=1e-5 * float(logits.abs().max()))
    return theirs


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small Llama that transformers trained on a domain of the sample, and a run whose models begin with it."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=types_of("llama3"), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=0, pad_token_id=None,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    parent = folder / "hub" / "llama"
    tokenizer = written(parent, model, "llama3")
    ids = [number for text in sample()[:60] for number in tokenizer(text)["input_ids"]]
    blocks = [{"input_ids": ids[at : at + 64], "labels": ids[at : at + 64]} for at in range(0, 64 * 200, 64)]
    arguments = transformers.TrainingArguments(
        str(folder / "trainer"), max_steps=60, per_device_train_batch_size=8, learning_rate=1e-2, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, seed=1,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=blocks).train()
    model.save_pretrained(parent)
    done = demix("import", parent, "--output", folder / "imported" / "llama", "--context", 128, "--verify")
    assert done.exit_code == 0, (done.output, done.exception)
    imported = "imported/llama"
    models = {
        "demix": {"parent": imported},
        "dense": {"parent": imported},
        "dense_unbalanced": None,
        "domain_token": None,
        "btm": {"kind": "branched", "parent": imported, "experts_per_job": 3},
    }
    return folder, run_of(folder, models=models)


def test_experts_of_a_llama_begin_with_what_it_knows(llama: tuple[Path, Path]) -> None:
    folder, run = llama
    section = read_json(run / "config.json")["architecture"]
    parent = read_json(folder / "imported" / "llama" / "model.json")["architecture"]
    assert section == parent | {"context": CONTEXT}
    assert (parent["norm"], parent["key_heads"], parent["rope_scaling"]["kind"]) == ("rms", 2, "llama3")
    results = pd.read_parquet(run / "results.parquet").query("split == 'test'")
    types = types_of("llama3")
    means = results.groupby("model")["perplexity"].mean()
    assert {"demix", "dense", "btm"} <= {*means.index}
    assert (means < types / 2).all(), means
    assert NOVEL in {path.stem for path in (run / "models" / "demix" / "experts").glob("*.json")}, "adapted"


@pytest.mark.parametrize(("model", "expert"), [("demix", "scripture"), ("demix", NOVEL), ("btm", "parliament")])
def test_an_expert_of_a_llama_goes_out_as_a_llama(
    llama: tuple[Path, Path], tmp_path: Path, model: str, expert: str
) -> None:
    theirs = exported(llama[1], model, expert, tmp_path / "out")
    assert type(theirs).__name__ == "LlamaForCausalLM"
    # The rotation is that of the parent, whatever the length of blocks in training.
    assert theirs.config.rope_parameters["original_max_position_embeddings"] == 64


def test_an_expert_of_ones_own_in_one_command(llama: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "letters.txt"
    text.write_text("\n\n".join(sample("jargon")[:40]))
    done = demix(
        "experts", "train", llama[0] / "imported" / "llama", "letters", "--text", text, "--output", tmp_path / "grown",
        "--tokens", 8192, "--learning-rate", 1e-3,
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    assert "peak learning rate 0.001" in " ".join(done.output.split())


def test_experts_of_clusters_begin_with_an_opt(tmp_path: Path) -> None:
    """The small form of config/cbtm-1.3b.yaml."""
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=types_of("gpt2"), hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,
        max_position_embeddings=CONTEXT, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0,
        bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    written(tmp_path / "hub" / "opt", transformers.OPTForCausalLM(config), "gpt2")
    done = demix("import", tmp_path / "hub" / "opt", "--output", tmp_path / "imported" / "opt", "--verify")
    assert done.exit_code == 0, (done.output, done.exception)
    parent = "imported/opt"
    run = run_of(
        tmp_path,
        models={
            "dense_unbalanced": None,
            "domain_token": None,
            "btm": {"kind": "branched", "parent": parent, "warmup": 0.0, "experts_per_job": 3},
            "cbtm_2": {"kind": "branched", "data": "k2", "parent": parent, "warmup": 0.0, "experts_per_job": 2},
        },
        clusterings={"k2": {"clusters": 2, "dimensions": 8}, "by_domain": {"method": "metadata", "dimensions": 8}},
        evaluation=CONFIG["evaluation"] | {"weights": ["history", "cluster"], "top_k": [1, 2]},
        adaptation=CONFIG["adaptation"] | {"model": "btm"},
    )
    results = pd.read_parquet(run / "results.parquet").query("split == 'test'")
    assert {"btm", "cbtm_2"} <= {*results["model"]}
    assert np.isfinite(results["perplexity"]).all()
    theirs = exported(run, "cbtm_2", "c00", tmp_path / "out")
    assert type(theirs).__name__ == "OPTForCausalLM"
