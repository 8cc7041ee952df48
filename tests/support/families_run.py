"""A made-up run with several families of models: BTM, c-BTM by several clusterings, DEMix on clusters and seeded."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from demix.config.clustering import Clustering
from demix.data.cluster import Clusterer, assign, fit_clusters
from demix.files import write_json_lines, write_parquet
from demix.report.results import Results
from support.synthetic_run import NOVEL, TRAINING, MadeUp, base, build_run, with_keys

SEED = {"parent": "dense", "seed_tokens": 819200}
MODELS = {
    "demix_seeded": {"kind": "demix", "merged_routed": True, **SEED},
    "btm": {"kind": "branched", "averages": True, **SEED},
    "cbtm_2": {"kind": "branched", "data": "k2", **SEED},
    "cbtm_3": {"kind": "branched", "data": "k3", **SEED},
    "cbtm_3_random": {"kind": "branched", "data": "r3", **SEED},
    "cbtm_3_loose": {"kind": "branched", "data": "u3", **SEED},
    "demix_k3": {"kind": "demix", "data": "k3", **SEED},
    "cbtm_2_short": {"kind": "branched", "data": "k2", "tokens": 1228800},
}
MODELS = {name: row | {"label": name} for name, row in MODELS.items()}
CLUSTERINGS = {
    "k2": {"clusters": 2, "dimensions": 3},
    "k3": {"clusters": 3, "dimensions": 3},
    "u3": {"clusters": 3, "dimensions": 3, "balanced": False},
    "r3": {"clusters": 3, "dimensions": 3, "method": "random"},
    "by_domain": {"method": "metadata", "dimensions": 3},
}
# Over the perplexity of a domain's own DEMix expert, by the rule that the report shows.
FACTORS = {
    "demix_seeded": 0.95, "btm": 0.94, "cbtm_2": 0.96, "cbtm_3": 0.92, "cbtm_3_random": 1.45, "cbtm_3_loose": 0.97,
    "demix_k3": 0.98, "cbtm_2_short": 1.2,
}  # fmt: skip
# The rows that rows of as many balanced clusters are compared with.
BALANCED = {"cbtm_3_random": "cbtm_3", "cbtm_3_loose": "cbtm_3", "demix_k3": "cbtm_3"}
WIDTH = 0.5
TOP_K = {None: 1.0, 1: 1.02, 2: 1.001}
TEMPERATURES = {0.01: 1.03, 0.1: 1.0, 1.0: 1.1}
WORDS = {
    "code": "function loop array index",
    "law": "court appeal judge statute",
    "news": "minister said election vote",
}


def experts_of(model: str) -> tuple[str, ...]:
    """The training experts of a row of `MODELS`."""
    data = MODELS[model].get("data")
    return TRAINING if not data else tuple(f"c{number:02}" for number in range(CLUSTERINGS[data]["clusters"]))


def nll_of(model: str, expert: str, cluster: str) -> float:
    """The loss a token (nats) of an expert on documents of a cluster: the own expert is the best one."""
    return 4.0 + 0.1 * (expert != cluster) + 0.01 * int(expert[1:])


def build_families(path: Path, change: Callable[[str, float], float | None] = lambda model, value: value) -> MadeUp:
    """Write such a run below `path`. `change` may replace the perplexity of a row of `MODELS` by None or another."""
    made = build_run(path)
    evaluation = {"weights": [*made.keys["evaluation"]["weights"], "cluster"], "top_k": [1, 2]}
    evaluation |= {"temperature": 0.1, "temperatures": [0.01, 1.0], "routing_context": ["document"]}
    keys = made.keys | {
        "models": MODELS,
        "clusterings": CLUSTERINGS,
        "evaluation": made.keys["evaluation"] | evaluation,
    }
    run = with_keys(path, keys)
    results = pd.concat([made.results.rows, _rows(change)], ignore_index=True)
    write_parquet(pa.Table.from_pandas(results, preserve_index=False), path / "results.parquet")
    differences = pd.concat([made.differences, _differences(results)], ignore_index=True)
    write_parquet(pa.Table.from_pandas(differences, preserve_index=False), path / "differences.parquet")
    _write_metrics(path)
    _write_clusters(path)
    return replace(made, run=run, keys=keys, results=Results(results), differences=differences)


def _rows(change: Callable[[str, float], float | None]) -> pd.DataFrame:
    rows = []
    for model in MODELS:
        factor = change(model, FACTORS[model])
        for number, domain in enumerate((*TRAINING, *NOVEL) if factor else ()):
            own = base(domain) * factor * (1 + 0.01 * (number % 2))
            routed = {"method": "uniform", "weights": "cluster", "context": "document", "temperature": 0.1}
            cached = {"method": "cached", "weights": "history"}
            lines = [cached | {"perplexity": own * (1.01 if "data" in MODELS[model] else 1.0)}]
            lines.append({"method": "uniform", "weights": "tempered", "perplexity": own * 0.99})
            lines.append({"method": "fitted", "weights": "switching", "perplexity": own * 0.98})
            for top_k, more in TOP_K.items():
                lines.append(routed | {"top_k": top_k, "perplexity": own * more})
                lines += [
                    routed | {"top_k": top_k, "perplexity": own * more * hot, "variant": "routing", "temperature": tau}
                    for tau, hot in TEMPERATURES.items()
                ]
            lines.append(routed | {"top_k": 2, "perplexity": own * 0.97, "variant": "dev_temperature"})
            lines += [
                routed | {"top_k": top_k, "perplexity": own * more * 1.07, "variant": "released_scorer"}
                for top_k, more in TOP_K.items()
            ]
            made = {"averages": {"uniform": 1.2, "posterior": 1.15}, "merged_routed": {"routed": 1.1}}
            lines += [
                {"method": "merged", "weights": by, "perplexity": own * more}
                for key in made.keys() & MODELS[model].keys()
                for by, more in made[key].items()
            ]
            for line in lines:
                value, tokens = line["perplexity"], 1000 + len(domain)
                rows.append({
                    "model": model, "experts": "training", "n_experts": len(experts_of(model)), "top_k": None,
                    "domain": domain, "kind": "training" if domain in TRAINING else "novel", "split": "test",
                    "expert": "", "oracle": False, "documents": 50, "pieces": 60, "tokens": tokens, "variant": "",
                    "nll": tokens * math.log(value), "scorer": "paper", "seed": 1, "perplexity_low": value * 0.9,
                    "perplexity_high": value * 1.2, "bytes": 3 * tokens, "bits_per_byte": math.log2(value) / 3,
                    "tokens_sha256": hashlib.sha256(domain.encode()).hexdigest(), **line,
                })  # fmt: skip
    return pd.DataFrame(rows).astype({"top_k": "Int64"})


def _differences(results: pd.DataFrame) -> pd.DataFrame:
    """Rows of clusters less the dense model and less the balanced rows, with bounds `WIDTH` to either side."""
    rows = results[(results["variant"] == "") & results["top_k"].isna()]
    dense, routed = rows[rows["model"] == "dense"], rows[rows["weights"] == "cluster"]
    perplexity = pd.concat([dense, routed]).set_index(["model", "domain"])["perplexity"]
    found = []
    for model in (model for model, row in MODELS.items() if "data" in row):
        for against in filter(None, ("dense", BALANCED.get(model))):
            own = routed[routed["model"] == model]
            others = np.array([perplexity.get((against, domain), np.nan) for domain in own["domain"]])
            less = {
                "perplexity": own["perplexity"] - others,
                "nats_per_token": np.log(own["perplexity"] / others),
            }
            low, high = (
                {f"{name}_{end}": value + sign * WIDTH for name, value in less.items()}
                for end, sign in (("low", -1), ("high", 1))
            )
            found.append(own.assign(against=against, **less | low | high))
    return pd.concat(found)


def _write_metrics(path: Path) -> None:
    for model in MODELS:
        lines = [
            {"step": step, "tokens": 8192 * step, "loss": 6.0 - 0.1 * step, "tokens_per_second": 4096.0}
            for step in range(1, 6)
        ]
        write_json_lines(path / "metrics" / f"{model}.jsonl", lines)
        if MODELS[model]["kind"] == "branched":
            for number, expert in enumerate(experts_of(model)):
                # The more experts came before, the longer one takes.
                some = [line | {"tokens_per_second": 8192.0 / (number + 1)} for line in lines]
                write_json_lines(path / "metrics" / model / f"{expert}.jsonl", some)


def _write_clusters(path: Path) -> None:
    """Documents of few words, their clusters, and the loss of each document under each expert of its row."""
    for place, domain in enumerate(TRAINING):
        for split, count in (("train", 12 + place), ("test", 5 + place)):
            # Some documents are as those of the next domain: the first of test, and every fifth of train.
            other = TRAINING[(place + 1) % len(TRAINING)]
            foreign = {0} if split == "test" else {4, 9}
            words = [WORDS[other if number in foreign else domain] for number in range(count)]
            texts = [f"{some} {some.split()[number % 4]} {number}" for number, some in enumerate(words)]
            table = pa.table({"id": [f"{domain}.{split}.{number}" for number in range(count)], "text": texts})
            write_parquet(table, path / "corpus" / domain / f"{split}.parquet")
    train = {domain: path / "corpus" / domain / "train.parquet" for domain in TRAINING}
    labels: dict[tuple[str, str], np.ndarray] = {}
    for name, options in CLUSTERINGS.items():
        folder = path / "clusters" / name
        fit_clusters(train, Clustering(**options), 1, folder)
        for domain in TRAINING:
            for split in ("train", "test"):
                output = folder / "assigned" / f"{domain}.{split}.parquet"
                assign(Clusterer.open(folder), domain, path / "corpus" / domain / f"{split}.parquet", output)
                labels[name, domain] = pd.read_parquet(output)["cluster"].to_numpy()
    for domain in TRAINING:
        rows = [
            {"domain": domain, "document": document, "origin": document, "tokens": 10 + document, "model": model,
             "seed": 1, "expert": expert,
             "nll": (10 + document) * nll_of(model, expert, f"c{labels[row['data'], domain][document]:02}")}
            for model, row in MODELS.items() if "data" in row
            for expert in experts_of(model)
            # The last document is beyond the tokens that are scored.
            for document in range(4 + TRAINING.index(domain))
        ]  # fmt: skip
        write_parquet(pa.Table.from_pylist(rows), path / "evaluations" / f"{domain}.losses.parquet")
