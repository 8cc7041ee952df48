"""Clusterings: balanced assignment, k-means, assignment of documents and distances of contexts, with their memory.

    python benchmarks/cluster.py [--documents 20000] [--fit 400000] [--json rows.json]

CPU seconds, one core, of a balanced assignment of 50,000 documents to 32 clusters (15 are allowed), and of a smaller
one against scipy's linear_sum_assignment, which takes the square of the documents in memory; of balanced k-means
against k-means-constrained (it rounds distances to a thousandth, and does not square them); of k-means without balance
against scikit-learn's. The fit (with `--fit 0` none), assignment and distances each run in a process of their own, at
1, 4 and 16 times the documents, on the sample corpus with its words shuffled, among them new ones as in text of that
size; memory is that process's peak.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.optimize import linear_sum_assignment
from tables import show

from demix.config.clustering import Clustering
from demix.data.balance import balanced_labels, kmeans, squared_distances
from demix.data.cluster import Clusterer, assign, context_distances, fit_clusters
from demix.data.shards import TokenShard, tokenize
from demix.data.sources import Source, download
from demix.data.tokenizer import Tokenizer, gpt2_tokenizer
from demix.files.batches import write_rows

HERE = Path(__file__).parents[1]
SAMPLE = HERE / "resources" / "sample"
DOMAINS = ("politics", "parliament", "wiki", "packages")
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string())])
WORDS = 300


def points(count: int, dimensions: int = 100) -> np.ndarray:
    """Points of length 1 in fifty groups of unequal sizes."""
    chance = np.random.default_rng(1)
    centres = chance.normal(size=(50, dimensions))
    found = centres[chance.choice(50, count, p=chance.dirichlet(np.ones(50)))]
    found = found + 0.7 * chance.normal(size=found.shape)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def timed(work: Callable[[], object]) -> tuple[float, object]:
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def balanced() -> list[dict]:
    rows = []
    for count, clusters in ((2000, 16), (50_000, 32), (50_007, 32)):
        some = points(count)
        costs = squared_distances(some, some[:clusters])
        seconds, labels = timed(lambda costs=costs: balanced_labels(costs))
        sizes = np.bincount(labels, minlength=clusters)
        assert sizes.max() - sizes.min() <= 1
        theirs = None
        if count <= 2000:
            repeated = np.repeat(costs, count // clusters, axis=1)
            theirs, (places, columns) = timed(lambda repeated=repeated: linear_sum_assignment(repeated))
            best = repeated[places, columns].sum()
            assert abs(costs[np.arange(count), labels].sum() - best) < 1e-9, "another objective than scipy's"
        name = f"balanced assignment {count} to {clusters}"
        row = {"name": name, "ours": seconds, "peer": theirs, "unit": "s CPU"}
        rows.append({**row, "ratio": seconds / theirs if theirs else None})
    return rows


def rounds() -> list[dict]:
    from k_means_constrained import KMeansConstrained
    from sklearn.cluster import KMeans

    some = points(20_000)
    ours, (_, labels, objectives) = timed(lambda: kmeans(some, some[:16], 20, balanced=False))
    peer = KMeans(16, init=some[:16], n_init=1, max_iter=20, tol=0, algorithm="lloyd")
    theirs, _ = timed(lambda: peer.fit(some))
    assert len(labels) == len(some)
    rows = [{"name": f"k-means 20000 to 16, {len(objectives)} rounds", "ours": ours, "peer": theirs, "unit": "s CPU"}]
    some = some[:5000]
    ours, (_, _, objectives) = timed(lambda: kmeans(some, some[:16], 20, balanced=True))
    bounds = {"size_min": 5000 // 16, "size_max": -(-5000 // 16)}
    peer = KMeansConstrained(16, init=some[:16], n_init=1, max_iter=20, tol=0, **bounds)
    theirs, _ = timed(lambda: peer.fit(some))
    name = f"balanced k-means 5000 to 16, {len(objectives)} rounds"
    rows.append({"name": name, "ours": ours, "peer": theirs, "unit": "s CPU"})
    return [row | {"ratio": row["ours"] / row["peer"]} for row in rows]


def synthetic(path: Path, count: int) -> None:
    """Documents of 300 words; one word in forty is one of ever more new ones, most of which stay rare."""
    texts = []
    for domain in DOMAINS:
        raw = path.parent / f"{domain}.raw.parquet"
        download(Source("files", str(SAMPLE / f"{domain}.jsonl.zst")), domain, raw)
        texts += [words for text in pq.read_table(raw)["text"].to_pylist() if len(words := text.split()) >= WORDS]
    chance = random.Random(1)

    def rows():
        for number in range(count):
            words = chance.choice(texts)
            start = chance.randrange(len(words) - WORDS + 1)
            text = words[start : start + WORDS]
            for place in range(chance.randrange(40), WORDS, 40):
                text[place] = f"w{int(chance.paretovariate(0.1)):x}"[:12]
            yield f"{number}", " ".join(text)

    write_rows(path, SCHEMA, rows())


def stage(name: str, folder: Path, times: int) -> None:
    """Run one stage and print its CPU seconds and its peak memory in MiB."""
    start = time.process_time()
    if name == "fit":
        fit_clusters({"a": folder / "fit.parquet"}, Clustering(clusters=8, rounds=1, balanced=False), 1, folder / "fit")
    elif name == "assign":
        assign(Clusterer.open(folder / "k8"), "a", folder / f"{times}.parquet", folder / "assigned.parquet")
    elif name != "import":
        shard, tokenizer = TokenShard.open(folder / f"{times}.arrow"), Tokenizer.load(folder / "gpt2.json")
        for distances in context_distances(Clusterer.open(folder / "k8"), tokenizer, shard, name, 1024, None):
            assert distances.shape[1] == 8
    seconds = time.process_time() - start
    # Not ru_maxrss, which a process inherits from the one that started it.
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
    print(seconds, peak)


def measured(name: str, folder: Path, times: int = 1) -> tuple[float, float]:
    command = [sys.executable, __file__, "--stage", name, "--folder", str(folder), "--times", str(times)]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    seconds, peak = map(float, done.stdout.split())
    return seconds, peak


def streams(folder: Path, documents: int) -> list[dict]:
    """Assignment and distances of contexts at 1, 4 and 16 times a sixteenth of the documents."""
    gpt2_tokenizer(folder / "gpt2.json")
    sizes = {}
    for times in (1, 4, 16):
        path = folder / f"{times}.parquet"
        synthetic(path, times * documents // 16)
        sizes[times] = sum(len(text.encode()) for text in pq.read_table(path)["text"].to_pylist()) / 1e6
        tokenize(folder / "gpt2.json", path, folder / f"{times}.arrow")
    fit_clusters({"a": folder / "16.parquet"}, Clustering(clusters=8, min_documents=10), 1, folder / "k8")
    rows, empty = [], measured("import", folder)[1]
    rows.append({"name": "import", "ours": empty, "unit": "MiB peak"})
    for times, size in sizes.items():
        tokens = len(TokenShard.open(folder / f"{times}.arrow"))
        amounts = {"assign": (size, "MB/s"), "document": (tokens, "tokens/s"), "block": (tokens, "tokens/s")}
        for name, (amount, unit) in amounts.items():
            seconds, peak = measured(name, folder, times)
            label = f"{name} {times * documents // 16} documents"
            rows.append({"name": label, "ours": amount / seconds, "unit": f"{unit} CPU"})
            rows.append({"name": label, "ours": peak, "unit": "MiB peak"})
    return [{"peer": None, "ratio": None} | row for row in rows]


def main(documents: int, fit: int, path: Path | None) -> None:
    # As in a job of the workflow.
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = [*balanced(), *rounds()]
    with TemporaryDirectory() as name:
        rows += streams(Path(name), documents)
        if fit:
            synthetic(Path(name, "fit.parquet"), fit)
            for value, unit in zip(measured("fit", Path(name)), ("s CPU", "MiB peak"), strict=True):
                rows.append({"name": f"fit {fit} documents", "ours": value, "peer": None, "unit": unit, "ratio": None})
    show(rows, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--fit", type=int, default=400_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        stage(arguments.stage, arguments.folder, arguments.times)
    else:
        main(arguments.documents, arguments.fit, arguments.json)
