"""The whole workflow with the tokenizer of another family, in an embedding of more than 65,536 rows."""

import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer as HuggingFaceTokenizer

from demix.data.shards import TokenShard
from demix.data.tokenizer import Tokenizer
from demix.files import read_json
from demix.model.checkpoint import describe
from support.byte_level import definition, write_folder
from support.cli import demix
from support.dry_run import REPOSITORY, ran

pytestmark = pytest.mark.workflow

TYPES = 65_600
WORDS = {"train": 6000, "dev": 900, "test": 900}
LICENSES, SCRIPTURE, FANTASY = (
    {"source": {"kind": "files", "path": f"resources/sample/{name}.jsonl.zst"}, "words": WORDS}
    for name in ("licenses", "scripture", "fantasy")
)
CONFIG = {
    "run": "qwen",
    "tracking": {"uri": "sqlite:///results/qwen/mlflow.db"},
    "domains": {"training": {"licenses": LICENSES, "scripture": SCRIPTURE}, "novel": {"fantasy": FANTASY}},
    "tokenizer": {"kind": "file", "path": "imported/qwen/tokenizer.json"},
    "architecture": {"layers": 1, "width": 8, "heads": 1, "context": 32},
    "training": {"tokens": 2048, "sequences": 4, "learning_rate": 3e-3, "clip": 1.0},
    "models": {"domain_token": None, "dense_unbalanced": None, "cbtm": {"kind": "demix", "data": "k2"}},
    "clusterings": {"k2": {"clusters": 2, "dimensions": 8}, "by_domain": {"method": "metadata", "dimensions": 8}},
    "evaluation": {"dev_blocks": 4, "test_tokens": 300, "weights": ["history", "cluster"]},
    "adaptation": {"tokens": 512, "sequences": 4, "evaluate_every": 4, "dev_blocks": 2, "forgetting_blocks": 2},
}  # fmt: skip


def test_a_run_with_the_tokenizer_of_its_parents(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "imported" / "qwen", "qwen3", [("config.json", {"vocab_size": TYPES})])
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    ran(tmp_path, "config.yaml")
    run = tmp_path / "results" / "qwen"
    section = read_json(run / "config.json")["tokenizer"]
    assert section | CONFIG["tokenizer"] == section
    assert (section["types"], section["end_of_text"]) == (TYPES, "<|endoftext|>")
    tokenizer, theirs = Tokenizer.load(run / "tokenizer.json"), HuggingFaceTokenizer.from_str(definition("qwen3"))
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (TYPES, theirs.token_to_id("<|endoftext|>"))
    theirs.encode_special_tokens = True
    rows = pd.read_parquet(run / "results.parquet")
    for domain in ("licenses", "fantasy"):
        texts = pq.read_table(run / "corpus" / domain / "test.parquet")["text"].to_pylist()
        shard = TokenShard.open(run / "tokens" / domain / "test.arrow", verify=True)
        tokens = shard.read(0, len(shard))
        assert tokens.dtype == np.uint32
        wanted = [[tokenizer.end_of_text, *theirs.encode(text).ids] for text in texts]
        assert tokens.tolist() == [token for document in wanted for token in document]
        # Bits per byte are those of the text.
        lengths = tokenizer.vocabulary.byte_lengths[tokens]
        assert lengths.sum() == sum(len(unicodedata.normalize("NFC", text).encode()) for text in texts)
        row = rows[(rows["domain"] == domain) & (rows["model"] == "dense")].iloc[0]
        assert row["bytes"] == lengths[: row["tokens"]].sum()
    shards = [*(run / "clusters" / "k2" / "shards").glob("*/train.arrow")]
    assert {TokenShard.open(path).end_of_text for path in shards} == {tokenizer.end_of_text}
    model = run / "models" / "demix"
    assert describe(model)["vocab_size"] == TYPES
    written = demix("generate", model, "--prompt", "In the beginning", "--tokens", "5")
    assert written.exit_code == 0, written.exception

    # A run whose models begin with one of these has its tokenizer, and reads no file of the family again.
    parent = "results/qwen/models/dense"
    child = CONFIG | {"run": "child", "tokenizer": {"kind": "parent"}, "clusterings": {}, "evaluation": {}}
    child["models"] = {"mine": {"kind": "demix", "parent": parent}}
    (tmp_path / "child.yaml").write_text(yaml.safe_dump(child, sort_keys=False))
    source.unlink()
    ran(tmp_path, "child.yaml", "results/child/models/mine/model.json")
    assert Tokenizer.load(tmp_path / "results" / "child" / "tokenizer.json").sha256 == tokenizer.sha256
    assert describe(tmp_path / "results" / "child" / "models" / "mine")["tokenizer_sha256"] == tokenizer.sha256
