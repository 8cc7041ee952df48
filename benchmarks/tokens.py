"""Ids from text by our tokenizer against tiktoken and Hugging Face tokenizers, and the opening of shards.

    python benchmarks/tokens.py [--json rows.json]

MB per second of CPU time on one core, GPT-2's vocabulary, the sample corpus, ids equal; milliseconds to open a shard,
against the 50 allowed. Not called tokenize.py, which would stand in for Python's own module of that name.
"""

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tables import show
from tokenizers import Tokenizer as HuggingFaceTokenizer

from demix.data.shards import TokenShard, tokenize
from demix.data.sources import Source, download
from demix.data.tokenizer import Tokenizer, gpt2_tokenizer

HERE = Path(__file__).parent
DOMAINS = ("politics", "parliament", "wiki", "packages")


def main(path: Path | None) -> None:
    rows = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        texts = []
        for domain in DOMAINS:
            raw = folder / domain / "documents.parquet"
            download(Source("files", str(HERE.parent / f"resources/sample/{domain}.jsonl.zst")), domain, raw)
            texts += pq.read_table(raw)["text"].to_pylist()
        size = sum(len(text.encode()) for text in texts) / 1e6
        gpt2_tokenizer(folder / "gpt2.json")
        tokenizer = Tokenizer.load(folder / "gpt2.json")
        known = HuggingFaceTokenizer.from_file(str(folder / "gpt2.json"))
        clock = [time.process_time()]
        for _ in range(4):
            ids, _ = tokenizer.encode_batch(texts)
            clock.append(time.process_time())
        ours = 3 * size / (clock[4] - clock[1])
        exact, _ = tokenizer.encode_batch(texts, exact=True)
        clock.append(time.process_time())
        theirs = [encoded.ids for encoded in known.encode_batch(texts)]
        clock.append(time.process_time())
        assert np.array_equal(ids, exact), "ids differ from tiktoken's"
        assert np.array_equal(ids, np.concatenate(theirs)), "ids differ from tokenizers'"
        for peer, seconds in (("tiktoken", clock[5] - clock[4]), ("tokenizers", clock[6] - clock[5])):
            row = {"name": f"against {peer}", "ours": ours, "peer": size / seconds, "unit": "MB/s"}
            rows.append({**row, "ratio": ours * seconds / size})
        rows.append({"name": "cold", "ours": size / (clock[1] - clock[0]), "peer": None, "unit": "MB/s", "ratio": None})
        for repeat in (1, 16):
            documents = folder / f"{repeat}.parquet"
            pq.write_table(pa.table({"text": pa.array(texts * repeat, pa.large_string())}), documents)
            tokenize(folder / "gpt2.json", documents, folder / f"{repeat}.arrow")
            times = []
            for _ in range(20):
                start = time.process_time()
                shard = TokenShard.open(folder / f"{repeat}.arrow")
                times.append(time.process_time() - start)
            label = f"open a shard of {len(shard) / 1e6:.1f}M tokens"
            rows.append({"name": label, "ours": 1000 * max(times), "peer": 50.0, "unit": "ms", "ratio": None})
    show(rows, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    main(parser.parse_args().json)
