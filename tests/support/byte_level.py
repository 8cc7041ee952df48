"""Small byte-level BPEs whose rules are those of tokenizers of the field."""

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from demix.data.sources import Source, download

SAMPLE = Path(__file__).parents[2] / "resources" / "sample"
# The special tokens of each kind, that which ends a text first.
SPECIAL = {
    "gpt2": ["<|endoftext|>"],
    "llama3": ["<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>"],
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "neox": ["<|endoftext|>", "<|padding|>"],
    "olmo2": ["<|endoftext|>", "<|pad|>"],
}
# Added tokens that are not special. Before those of Qwen 3 stand special ones.
PLAIN = {
    "qwen3": ["<think>", "</think>"],
    "neox": [" " * count for count in range(12, 1, -1)],
    "olmo2": ["|||IP_ADDRESS|||"],
}
NORMALISED = ("qwen3", "neox")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def pre_tokenizer(kind: str) -> Any:
    """GPT-2's and GPT-NeoX's words, or those of cl100k with numbers of one or three digits."""
    if kind in ("gpt2", "neox"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    pattern = Regex(_WORDS + (r"\p{N}" if kind == "qwen3" else r"\p{N}{1,3}") + _REST)
    how = ("removed", True) if kind == "olmo2" else ("isolated", False)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, *how), whole])


@cache
def sample(domain: str = "jargon") -> tuple[str, ...]:
    """The documents of a domain of the sample."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.parquet"
        download(Source(path=str(SAMPLE / f"{domain}.jsonl.zst")), domain, path)
        return tuple(pq.read_table(path)["text"].to_pylist())


@cache
def definition(kind: str, size: int = 1500) -> str:
    """The tokenizer.json of a small BPE, learned from the sample, as the family `kind` writes it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer(kind), decoders.ByteLevel()
    if kind in NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    # GPT-NeoX's ids begin with its special tokens, which the vocabulary of its model holds, too.
    first = SPECIAL[kind] if kind == "neox" else []
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=first, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sample()[:300], trainer)
    tokenizer.add_special_tokens(SPECIAL[kind])
    tokenizer.add_tokens([AddedToken(token, normalized=kind == "neox") for token in PLAIN.get(kind, ())])
    if kind == "llama3":
        begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    return str(tokenizer.to_str())


def write_folder(folder: Path, kind: str, more: Sequence[tuple[str, dict[str, Any]]] = ()) -> Path:
    """tokenizer.json and tokenizer_config.json as a folder of the hub has them, and `more` files of JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(definition(kind), encoding="utf-8")
    for name, content in (("tokenizer_config.json", {"eos_token": SPECIAL[kind][0]}), *more):
        (folder / name).write_text(json.dumps(content))
    return folder / "tokenizer.json"
