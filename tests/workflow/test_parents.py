"""A model that transformers made becomes experts of domains with its tokenizer, and an expert goes out again."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from demix.data.shards import TokenShard
from demix.files import read_json
from demix.model.directory import load_model
from support.byte_level import definition
from support.cli import succeeds
from support.dry_run import ran, write_config

transformers = pytest.importorskip("transformers")

# More than two bytes of a token can number.
TYPES, CONTEXT, PARENT = 65_600, 32, "imported/llama"
WORDS = {"train": 6000, "dev": 900, "test": 900}
CONFIG = {
    "run": "own",
    "tracking": {"uri": "sqlite:///results/own/mlflow.db"},
    "domains": {
        kind: {name: {"source": {"path": f"resources/sample/{name}.jsonl.zst"}, "words": WORDS} for name in names}
        for kind, names in {"training": ("licenses", "scripture"), "novel": ("fantasy",)}.items()
    },
    "tokenizer": {"kind": "file", "path": f"{PARENT}/tokenizer.json"},
    "training": {"tokens": 2048, "sequences": 2, "learning_rate": 3e-3, "clip": 1.0},
    "models": {
        "demix": {"parent": PARENT},
        "dense": {"parent": PARENT},
        "dense_unbalanced": None,
        "domain_token": None,
        "btm": {"kind": "branched", "parent": PARENT},
    },
    "evaluation": {"dev_blocks": 4, "test_tokens": 300, "weights": ["history"]},
    "adaptation": {"tokens": 512, "sequences": 4, "evaluate_every": 4, "dev_blocks": 2, "forgetting_blocks": 2},
    "removal": {},
}


def write_llama(folder: Path) -> None:
    """What transformers writes of a small Llama and a tokenizer, of fewer types than the rows of its embedding."""
    (folder / "tokenizer.json").parent.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(definition("llama3"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|end_of_text|>", bos_token="<|begin_of_text|>"
    )
    tokenizer.save_pretrained(folder)
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=TYPES,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=12,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        rope_parameters=rope,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_experts_of_a_llama_go_out_as_a_llama(tmp_path: Path) -> None:
    write_llama(tmp_path / "hub" / "llama")
    succeeds("import", tmp_path / "hub" / "llama", "--output", tmp_path / PARENT, "--verify")
    parent = json.loads((tmp_path / PARENT / "model.json").read_text())["architecture"]
    ran(tmp_path, write_config(tmp_path, CONFIG | {"architecture": parent | {"context": CONTEXT}}))
    run = tmp_path / "results" / "own"
    assert read_json(run / "config.json")["tokenizer"]["types"] == TYPES
    results = pd.read_parquet(run / "results.parquet").query("split == 'test'")
    assert {"demix", "dense", "btm", "dense-dapt-fantasy"} <= {*results["model"]}
    assert np.isfinite(results["perplexity"]).all()
    trained = load_model(run / "models" / "demix", ("licenses",)).state_dict()
    begun = load_model(tmp_path / PARENT).state_dict()
    assert trained.keys() == begun.keys()
    assert 0 < max(float((trained[name] - begun[name]).abs().max()) for name in begun) < 1

    # The tokens of the workflow are those of the tokenizer of transformers, of the exported expert too.
    for model, expert in (("demix", "scripture"), ("demix", "fantasy"), ("btm", "licenses")):
        folder = tmp_path / f"{model}-{expert}"
        succeeds("export", run / "models" / model, "--expert", expert, "--output", folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert type(theirs).__name__ == "LlamaForCausalLM"
        text = pq.read_table(run / "corpus" / expert / "test.parquet")["text"][0].as_py()
        ids = transformers.AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
        shard = TokenShard.open(run / "tokens" / expert / "test.arrow", verify=True)
        tokens = shard.read(0, len(shard))
        assert tokens.dtype == np.uint32
        assert tokens[1 : 1 + len(ids)].tolist() == ids
        asked = torch.tensor([ids[:CONTEXT]])
        mine = load_model(run / "models" / model, (expert,))
        with torch.no_grad():
            logits = theirs(asked).logits[0]
            ours = mine.logits(mine(asked[None]))[0, 0]
        torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5 * float(logits.abs().max()))
