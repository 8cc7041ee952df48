"""Writes a random checkpoint in the layout of Qwen 3 to tiny-qwen3/, and two texts: scripture.txt and unknown.txt."""

import json
from pathlib import Path

import torch
import zstandard
from tokenizers import ByteLevelBPETokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM


def documents(domain):
    sample = f"resources/sample/{domain}.jsonl.zst"
    with zstandard.open(sample, "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


folder = Path("tiny-qwen3")
folder.mkdir()
tokenizer = ByteLevelBPETokenizer()
special = ["<|endoftext|>"]
tokenizer.train_from_iterator(documents("novels"), vocab_size=1000, special_tokens=special)
tokenizer.save(str(folder / "tokenizer.json"))
sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2}
sizes |= {"max_position_embeddings": 256}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
torch.manual_seed(1)
config = Qwen3Config(vocab_size=1000, bos_token_id=0, eos_token_id=0, **sizes, **heads)
Qwen3ForCausalLM(config).save_pretrained(folder)

*first, last = documents("scripture")
Path("scripture.txt").write_text("\n\n".join(first[:34]))
Path("unknown.txt").write_text(last)
