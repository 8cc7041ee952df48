"""Ids from text by our tokenizer against Hugging Face tokenizers; the opening and reading of shards.

    python benchmarks/tokenize.py [--json rows.json]

MB per second of CPU time on one core, GPT-2's vocabulary, the sample corpus, ids equal; milliseconds of CPU time to
open a shard, the slowest of 20, against the 50 allowed; random blocks of 1,024 tokens per second of CPU time, warm,
against `np.memmap`.
"""

from __future__ import annotations

if __name__ == "tokenize":
    # Some library wants Python's own module of this name, and this folder comes first in sys.path.
    import os
    import sys

    here, paths = os.path.dirname(os.path.abspath(__file__)), sys.path
    sys.path = [path for path in paths if os.path.abspath(path) != here]
    del sys.modules["tokenize"]
    import tokenize

    sys.path = paths
else:
    import time
    from collections.abc import Callable
    from pathlib import Path
    from tempfile import TemporaryDirectory

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from common import SAMPLE, arguments, row, show
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    from demix.data.shards import TokenShard, tokenize
    from demix.data.sources import Source, download
    from demix.data.tokenizer import Tokenizer, gpt2_tokenizer

DOMAINS = ("politics", "parliament", "wiki", "packages")
LENGTH = 1024


def encoding(texts: list[str], definition: Path) -> list[dict]:
    size = sum(len(text.encode()) for text in texts) / 1e6
    tokenizer = Tokenizer.load(definition)
    known = HuggingFaceTokenizer.from_str(tokenizer.definition)
    clock = [time.process_time()]
    for _ in range(4):
        ids, _ = tokenizer.encode_batch(texts)
        clock.append(time.process_time())
    ours = 3 * size / (clock[4] - clock[1])
    theirs = [encoded.ids for encoded in known.encode_batch(texts)]
    clock.append(time.process_time())
    assert np.array_equal(ids, np.concatenate(theirs)), "ids differ from tokenizers'"
    seconds = clock[5] - clock[4]
    cold = size / (clock[1] - clock[0])
    return [row("against tokenizers", ours, size / seconds, "MB/s"), row("cold", cold, None, "MB/s")]


def opening(path: Path) -> dict:
    times = []
    for _ in range(20):
        start = time.process_time()
        shard = TokenShard.open(path)
        times.append(time.process_time() - start)
    return row(f"open {len(shard) / 1e6:.1f}M tokens", 1000 * max(times), 50.0, "ms")


def reading(path: Path, flat: Path) -> list[dict]:
    shard = TokenShard.open(path)
    shard.read(0, len(shard)).tofile(flat)
    mapped = np.memmap(flat, shard.tokens.dtype, mode="r")
    places = np.random.default_rng(1).integers(0, len(shard) // LENGTH, 300_000) * LENGTH

    def speed(read: Callable[[int, int], np.ndarray]) -> float:
        start = time.process_time()
        for place in places.tolist():
            read(place, place + LENGTH)
        return len(places) / (time.process_time() - start)

    rows = []
    for name, finish in (("views", lambda block: block), ("int64 copies", lambda block: block.astype(np.int64))):
        ours, peer = (
            max(speed(lambda a, b, read=read, finish=finish: finish(read(a, b))) for _ in range(3))
            for read in (shard.read, lambda a, b: mapped[a:b])
        )
        rows.append(row(f"random {name}", ours, peer, "blocks/s"))
    return rows


def main(path: Path | None) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        texts = []
        for domain in DOMAINS:
            raw = folder / domain / "documents.parquet"
            download(Source(path=str(SAMPLE / f"{domain}.jsonl.zst")), domain, raw)
            texts += pq.read_table(raw)["text"].to_pylist()
        gpt2_tokenizer(folder / "gpt2.json")
        rows = encoding(texts, folder / "gpt2.json")
        pq.write_table(pa.table({"text": pa.array(texts * 16, pa.large_string())}), folder / "train.parquet")
        shard = folder / "train.arrow"
        tokenize(folder / "gpt2.json", folder / "train.parquet", shard)
        rows += [opening(shard), *reading(shard, folder / "flat")]
    show(rows, path)


if __name__ == "__main__":
    main(arguments(__doc__).json)
