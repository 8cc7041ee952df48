"""How scoring and mixing grow with experts: CPU time of an expert-token and peak memory under 4, 16 and 64 experts.

    python benchmarks/growth.py [--json rows.json] [--tokens 4096] [--mixed 100000] [--experts 4,16,64] [--folder /tmp]

`demix score` scores a made-up text of so many tokens under a model of 3 layers of width 128 (blocks of 256 tokens, a
BPE of 4,096). Mixing reads a made-up table of `--mixed` tokens, by every mixture of benchmarks/mix.py. Each number of
experts is a process of its own with one thread. Time is that of the work, without imports; memory is the peak above
that of the imports. The peer is the smallest number of experts: a ratio of 1 in time is linear growth. Linux alone
says the peak. About three minutes of one core.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from mix import DEV_BLOCKS, LENGTH, ours, write_table
from tables import show

from demix.config.architecture import Architecture
from demix.data.shards import TokenShard, tokenize
from demix.data.tokenizer import train_tokenizer
from demix.evaluate.score import Scoring, score
from demix.files import write_parquet
from demix.model.checkpoint import save_expert, save_shared
from demix.model.gpt import GPT

SHAPE, VOCABULARY = Architecture(3, 128, 4, 256), 4096


def names(count: int) -> tuple[str, ...]:
    return tuple(f"expert{number:02}" for number in range(count))


def write_text_shard(folder: Path, tokens: int) -> Path:
    """A shard of random words, at least so many tokens of them."""
    generator = np.random.default_rng(0)
    letters = generator.integers(97, 123, (20_000, 7), dtype=np.uint8)
    words = [bytes(word[: 3 + number % 5]).decode() for number, word in enumerate(letters)]
    texts = [" ".join(generator.choice(words, 300)) for _ in range(max(200, tokens // 300))]
    write_parquet(pa.table({"text": pa.array(texts, pa.large_string())}), folder / "test.parquet")
    train_tokenizer([folder / "test.parquet"], VOCABULARY, folder / "tokenizer.json")
    tokenize(folder / "tokenizer.json", folder / "test.parquet", folder / "x" / "test.arrow")
    return folder / "x" / "test.arrow"


def write_model(folder: Path, shard: Path, experts: tuple[str, ...]) -> Path:
    opened = TokenShard.open(shard)
    lineage = {"tokenizer_sha256": opened.tokenizer_sha256}
    model = GPT(SHAPE, opened.vocab_size, experts).initialise(0)
    save_shared(model, folder, lineage)
    for expert in experts:
        save_expert(model, expert, folder, lineage)
    return folder


def side(what: str, folder: Path, experts: int, tokens: int) -> dict[str, float]:
    """CPU seconds and MB of one process that scores or mixes."""
    torch.set_num_threads(1)
    shard = folder / "x" / "test.arrow"
    before, cpu = peak(), time.process_time()
    if what == "score":
        scoring = Scoring(dev_blocks=1, test_tokens=tokens, precision="fp32", threads=1)
        score(folder / f"model{experts}", names(experts), [shard], scoring, folder / f"scores{experts}")
    else:
        ours(folder / f"mixed{experts}", names(experts))
    used = time.process_time() - cpu
    return {"cpu": used, "MB": peak() - before}


def peak() -> float:
    """The peak memory of this process in MB. `getrusage` begins with that of the process that started this one."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--mixed", type=int, default=100_000)
    parser.add_argument("--experts", default="4,16,64")
    parser.add_argument("--folder", type=Path, help="where the temporary folder goes")
    parser.add_argument("--side", choices=["score", "mix"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    counts = [int(count) for count in given.experts.split(",")]
    if given.side:
        print(json.dumps(side(given.side, given.folder, counts[0], given.tokens)))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        shard = write_text_shard(folder, given.tokens)
        for what, tokens in (("score", given.tokens), ("mix", given.mixed)):
            found = {}
            for count in counts:
                if what == "score":
                    write_model(folder / f"model{count}", shard, names(count))
                else:
                    write_table(folder / f"mixed{count}" / "x.test", names(count), tokens, 0)
                    write_table(folder / f"mixed{count}" / "x.dev", names(count), DEV_BLOCKS * LENGTH, 1)
                command = [sys.executable, __file__, "--side", what, "--folder", name, "--experts", str(count)]
                command += ["--tokens", str(tokens)]
                done = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found[count] = json.loads(done.splitlines()[-1])
                print(f"{what}, {count} experts: {found[count]}", file=sys.stderr)
            least = found[counts[0]]
            # Mixing also reads the dev split.
            read = tokens if what == "score" else tokens + DEV_BLOCKS * LENGTH
            for count in counts:
                each, first = (1e6 * found[n]["cpu"] / (n * read) for n in (count, counts[0]))
                text = f"{what}, {count} experts, {tokens} tokens"
                rows += [
                    {"name": f"{text}: an expert-token", "ours": each, "peer": first, "unit": "CPU us",
                     "ratio": each / first},
                    {"name": f"{text}: peak memory", "ours": found[count]["MB"], "peer": least["MB"], "unit": "MB",
                     "ratio": found[count]["MB"] / least["MB"]},
                ]  # fmt: skip
    show(rows, given.json)


if __name__ == "__main__":
    main()
