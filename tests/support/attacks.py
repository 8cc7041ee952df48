"""What hostile inputs are tried on: a tokenizer, a model and score tables."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from demix.data.tokenizer import Tokenizer, train_tokenizer
from support.models import REAL_TEXT, THREE, write_model
from support.scored import write_table


def write_attacked(folder: Path) -> None:
    """A tokenizer, a model of three experts that has it, and score tables of these."""
    text, tokenizer = folder / "text.parquet", folder / "tokenizer.json"
    pq.write_table(pa.table({"text": [REAL_TEXT]}), text)
    train_tokenizer([text], 300, tokenizer)
    known = Tokenizer.load(tokenizer)
    write_model(folder / "model", THREE, known.sha256, known.vocab_size)
    (folder / "model" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    for split in ("dev", "test"):
        write_table(folder / "scores" / f"x.{split}", THREE)
