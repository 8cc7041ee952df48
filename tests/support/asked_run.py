"""A made-up run with files of every kind that `demix sql` reads; its texts, tokens and documents are real."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa

from demix.data.shards import TokenShard
from demix.evaluate.columns import CONTEXTS, table_schema
from demix.evaluate.score_tables import tokens_sha256, write_scores, write_tokens
from demix.files import read_json, read_parquet, write_json, write_json_lines, write_parquet
from support.synthetic_run import build_run, with_keys
from support.tokens import NOVEL, TRAINING

LENGTH, TOKENS = 32, 1000
COLUMNS = {"demix": TRAINING + NOVEL, "dense": ("dense",)}


def build_asked_run(run: Path, tokens: Path) -> None:
    """Write the run below `run`; `tokens` is the folder of `support.tokens.write_tokens`."""
    made = build_run(run, training=TRAINING, novel=NOVEL, retrained=("licenses",))
    with_keys(run, made.keys | {"seeds": [1, 2]})
    write_json_lines(
        run / "metrics" / "demix-seed2.jsonl", [{"step": 1, "tokens": 64, "loss": 2.5, "loss/licenses": 3}]
    )
    found = made.differences["perplexity"]
    bounded = made.differences.assign(perplexity_low=found - 1, perplexity_high=found + 1)
    write_parquet(pa.Table.from_pandas(bounded, preserve_index=False), run / "differences.parquet")
    shutil.copy(tokens / "tokenizer.json", run)
    audit = {"domain": "licenses", "system": "own", "model": "demix", "experts": "own", "split": "train"}
    write_parquet(pa.table({name: [value] for name, value in audit.items()}), run / "audit.parquet")
    loads = {"domain": "licenses", "layer": 2, "expert": 0, "choices": 17}
    write_parquet(pa.table({name: [value] for name, value in loads.items()}), run / "loads" / "dense.parquet")
    for domain in TRAINING + NOVEL:
        _contexts(run, domain)
    accuracy = {"task": "topics", "model": "demix", "routing": "history", "accuracy": 0.5, "chance": 0.25, "seed": 1}
    write_parquet(pa.table({name: [value] for name, value in accuracy.items()}), run / "tasks.parquet")
    suite = {"model": "demix", "domain": "paloma_c4", "kind": "suite", "perplexity": 9.5, "bits_per_byte": 1.5}
    write_parquet(pa.table({name: [value] for name, value in suite.items()}), run / "suites.parquet")
    shared = {"task": "topics", "domain": "licenses", "documents": 9, "found_documents": 1}
    placed = run / "harness" / "contamination" / "licenses.parquet"
    write_parquet(pa.table({name: [value] for name, value in shared.items()}), placed)
    for path in (tokens / "corpus").glob("*/*"):
        placed = run / "corpus" / path.parent.name / path.name
        if path.suffix == ".json":
            write_json(placed, read_json(path))
        else:
            write_parquet(read_parquet(path), placed)
    added = run / "models" / "demix" / "experts" / "fantasy.json"
    chosen = {"parent_prior": 0.8, "lowest_dev_loss_expert": "scripture", "tokens": 10240}
    write_json(added, read_json(added) | chosen)
    for domain in TRAINING + NOVEL:
        _score(run, tokens, domain)
    for number, job in enumerate(("report", "train/demix", "score/demix/fantasy", "score/demix/training")):
        path = run / "benchmarks" / f"{job}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"s\tcpu_time\tmax_rss\n{10.5 * number}\t{10.0 * number}\t300.25\n")


def _contexts(run: Path, domain: str) -> None:
    """The losses of a domain in blocks of two lengths, 5 nats a token before position 16 and 4 nats behind it."""
    about = {
        "model": "dense", "experts": "dense", "method": "dense", "weights": "", "domain": domain, "split": "test",
        "kind": "training" if domain in TRAINING else "novel", "tokens_sha256": "0" * 64, "seed": 1,
    }  # fmt: skip
    rows = [
        about | {"context": context, "begin": begin, "end": begin + 16, "tokens": 10, "nll": 40.0 if begin else 50.0}
        for context in (16, 32)
        for begin in range(0, context, 16)
    ]
    path = run / "evaluations" / f"{domain}.contexts.parquet"
    write_parquet(pa.Table.from_pylist(rows, table_schema(CONTEXTS)), path)


def _score(run: Path, tokens: Path, domain: str) -> None:
    """Scores of both splits of a domain, drawn at random but better under its own expert, and their sums."""
    random = np.random.default_rng(len(domain))
    rows = []
    for split in ("dev", "test"):
        shard = TokenShard.open(tokens / "tokens" / domain / f"{split}.arrow")
        ids = shard.read(0, TOKENS)
        numbers = np.searchsorted(shard.offsets, np.arange(TOKENS), side="right") - 1
        for model, experts in COLUMNS.items():
            folder = run / "scores" / model / f"{domain}.{split}"
            write_tokens(folder, ids, shard.offsets, LENGTH, shard.origins)
            for expert in experts:
                scores = -random.exponential(4 if expert == domain else 5, TOKENS).astype(np.float32)
                footer = {"tokens_sha256": tokens_sha256(ids), "shared_sha256": "2" * 64}
                write_scores(folder / f"{expert}.parquet", [scores], footer)
                for document in np.unique(numbers) if split == "test" else ():
                    own = numbers == document
                    nll = -float(scores[own].sum(dtype=np.float64))
                    rows.append({
                        "domain": domain, "document": document, "origin": shard.origins[document],
                        "tokens": own.sum(), "model": model, "seed": 1, "expert": expert, "nll": nll,
                    })  # fmt: skip
    write_parquet(pa.Table.from_pylist(rows), run / "evaluations" / f"{domain}.losses.parquet")
