"""CPU seconds that commands take before their work begins, against `python -c pass` and `import torch`.

    python benchmarks/starts.py [--json rows.json]

Each command ends with an error about a file that is not there, after its imports. The least of five starts counts, user
and system time together. About a minute on two cores.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from tables import show

STARTS = 5
SPLIT = '{"words": {}, "training": true, "seed": 1, "metadata": false}'
WITHOUT_TORCH = {
    "demix --version": ["--version"],
    "download": ["download", "law", "--settings", '{"kind": "files", "path": "none.txt"}', "--output", "out"],
    "anonymize": ["anonymize", "none", "--output", "out", "--counts", "counts"],
    "deduplicate": ["deduplicate", "none", "--output", "out"],
    "split": ["split", "law", "none", "--owners", "none", "--output", "out", "--settings", SPLIT],
    "tokenize": ["tokenize", "none", "--tokenizer", "none", "--output", "out"],
    "choose-mixing": ["choose-mixing", "none", "--domains", "law", "--experts", "law", "--output", "out"],
    "join": ["join", "none", "--output", "out"],
}
SHARDS = ["none/law/train.arrow", "none/law/dev.arrow"]
TRAINING = (
    '{"seed": 1, "architecture": {"layers": 1, "width": 8, "heads": 1, "context": 8}, "tokens": 8, "sequences": 1, '
    '"learning_rate": 1, "warmup": 0.1, "clip": 1, "weight_decay": 0.1, "precision": "fp32", "threads": 1}'
)
WITH_TORCH = {
    "train": ["train", "dense", *SHARDS, "--settings", TRAINING, "--output", "out", "--metrics", "metrics",
              "--checkpoints", "checkpoints"],
    "adapt": ["adapt", "none", *SHARDS, "--training", "news", "--scores", "none", "--metrics", "metrics",
              "--settings", "{}", "--checkpoints", "checkpoints"],
    "score": ["score", "none", SHARDS[0], "--settings", '{"threads": 1}', "--output", "out", "--experts", "law"],
}  # fmt: skip


def seconds(command: list[str], folder: str) -> float:
    """The CPU seconds of the cheapest of some starts of a command."""
    least = float("inf")
    for _ in range(STARTS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=folder, check=False, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least = min(least, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    rows = []
    path = parser.parse_args().json
    with tempfile.TemporaryDirectory() as folder:
        for commands, peer in ((WITHOUT_TORCH, "pass"), (WITH_TORCH, "import torch")):
            least = seconds([sys.executable, "-c", peer], folder)
            for name, arguments in commands.items():
                ours = seconds([sys.executable, "-m", "demix", *arguments], folder)
                rows.append({"name": name, "ours": ours, "peer": least, "unit": "CPU s", "ratio": ours / least})
    show(rows, path)


if __name__ == "__main__":
    main()
