"""A made-up `results/<run>/` whose every perplexity is known, for the tests of the report and of tracking."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from demix.config.config import Config
from demix.files import write_json, write_json_lines, write_parquet
from demix.report.read import Parent, Results
from demix.run.kept import write_run_config
from demix.run.run import Run
from demix.run.systems import BASES

TRAINING, NOVEL = ("code", "law", "news"), ("wiki", "songs")
# Domains with documents enough for an interval.
MANY = ("law", "wiki")

# In every rule below a higher factor is a worse prediction; 1.0 is the domain's own expert.
FACTORS = {"dense_unbalanced": 1.4, "dense": 1.3, "domain_token": 1.2}
METHODS = {"naive": 1.0, "average": 1.5, "uniform": 1.05, "updating": 1.02, "cached": 1.01, "fitted": 1.03}
METHODS |= {"best_block": 0.9, "best_token": 0.5}
WEIGHTS = {"released": 1.03, "tempered": 0.97, "switching": 0.96}


@dataclass(frozen=True)
class Key:
    """What identifies one evaluation."""

    model: str
    experts: str
    method: str
    weights: str
    domain: str
    kind: str
    expert: str = ""


def base(domain: str, training: tuple[str, ...] = TRAINING, novel: tuple[str, ...] = NOVEL) -> float:
    """The perplexity of a domain's own expert: 100, 110, … in the config's order."""
    return 100.0 + 10 * [*training, *novel].index(domain)


def parent_of(domain: str, training: tuple[str, ...], novel: tuple[str, ...]) -> str:
    return training[novel.index(domain) % len(training)]


def perplexity(key: Key, training: tuple[str, ...] = TRAINING, novel: tuple[str, ...] = NOVEL) -> float:
    """The rule that gives every claim of the paper."""
    new = key.kind == "novel"
    if key.model.startswith("dense-dapt-"):
        factor = 1.1 if key.domain == key.model.removeprefix("dense-dapt-") else 1.3 * 1.2
    elif key.model.startswith("without-"):
        factor = 1.9
    elif key.experts.startswith("minus-"):
        factor = 1.8
    elif key.method == "expert" and key.model == "demix":
        parent = new and key.expert == parent_of(key.domain, training, novel)
        factor = 1.0 if key.expert == key.domain else 1.25 if parent else 1.6 if new else 1.5
    elif key.method == "dense":
        factor = FACTORS[key.model]
    else:
        factor = FACTORS.get(key.model, 1.0) * METHODS.get(key.method, 1.7)
        factor *= WEIGHTS.get(key.weights, 1.0)
        if key.model == "demix" and new and key.experts == "training":
            factor *= 1.25 if key.method == "naive" else 1.15
    return base(key.domain, training, novel) * factor


@dataclass(frozen=True)
class MadeUp:
    """The made-up run, the keys of its config as in a file, and its frames."""

    run: Run
    keys: dict
    results: Results
    priors: pd.DataFrame
    overlap: pd.DataFrame
    differences: pd.DataFrame
    parents: dict[str, Parent]

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self.run.folder


def with_keys(folder: Path, keys: dict) -> Run:
    """The run in `folder` of a config with these `keys`, completed as by the workflow. Its config.json is written."""
    config = Config.complete(keys)
    write_run_config(folder / "config.json", config)
    return Run(config, folder)


def build_run(
    path: Path,
    *,
    training: tuple[str, ...] = TRAINING,
    novel: tuple[str, ...] = NOVEL,
    retrained: tuple[str, ...] = ("law",),
    change: Callable[[Key, float], float | None] = lambda key, value: value,
    steps: int = 30,
) -> MadeUp:
    """Write a whole run below `path`. `change` may replace a perplexity, or drop its row by returning None."""
    keys = {
        "run": "made-up",
        "seed": 1,
        "domains": {
            kind: {name: {"source": {"kind": "files", "path": f"{name}.jsonl"}} for name in names}
            for kind, names in (("training", training), ("novel", novel))
        },
        "architecture": {"layers": 3, "width": 128, "heads": 4, "context": 256},
        "tokenizer": {"kind": "bpe", "vocab_size": 4096},
        "training": {"tokens": 2457600, "sequences": 4, "learning_rate": 0.001},
        "evaluation": {
            "dev_blocks": 100,
            "decay": 0.3,
            "weights": ["history", "released", "tempered", "switching"],
        },
        "removal": {"retrain_without": list(retrained), "replacement": "songs" if retrained else None},
    }
    kinds = {**dict.fromkeys(training, "training"), **dict.fromkeys(novel, "novel")}
    rows = []
    for key in _keys(training, novel, retrained):
        value = change(key, perplexity(key, training, novel))
        if value is not None:
            tokens = 1000 + len(key.domain)
            rows.append({
                **vars(key), "n_experts": {"all": len(kinds)}.get(key.experts, len(training)), "top_k": None,
                "split": "test", "oracle": key.method == "naive" and key.kind == "novel" and key.experts == "training",
                "documents": 50 if key.domain in MANY else 7, "pieces": 60, "tokens": tokens,
                "nll": tokens * math.log(value), "perplexity": value,
                "tokens_sha256": hashlib.sha256(key.domain.encode()).hexdigest(),
                "variant": "", "scorer": "paper", "seed": 1, "decay": None, "dev_blocks": None,
                "perplexity_low": value * 0.9 if key.domain in MANY else None,
                "perplexity_high": value * 1.2 if key.domain in MANY else None,
                "bytes": 3 * tokens, "bits_per_byte": math.log2(value) / 3,
            })  # fmt: skip
    results = pd.DataFrame(rows).astype({"top_k": "Int64", "dev_blocks": "Int64", "decay": "float64"})
    results = results.astype({"perplexity_low": "float64", "perplexity_high": "float64"})
    # The further off in the config, the less is shared.
    overlap = pd.DataFrame([
        {"domain": domain, "expert": expert, "overlap": 0.9 - 0.1 * abs(place - other),
         "train_tokens": 5000, "test_bigrams": 900}
        for place, domain in enumerate(kinds) for other, expert in enumerate(training)
    ])  # fmt: skip
    priors = pd.DataFrame([
        {"model": "demix", "experts": "training", "weights": weights, "domain": domain, "kind": kind, "expert": expert,
         "seed": 1, "prior": 1 - 0.1 * (len(training) - 1)
         if expert == (domain if kind == "training" else parent_of(domain, training, novel)) else 0.1}
        for weights in ("history", "released") for domain, kind in kinds.items() for expert in training
    ])  # fmt: skip
    results = pd.concat([results, _variants(results)], ignore_index=True)
    differences = _differences(results)
    chosen = {domain: domain if kind == "training" else training[0] for domain, kind in kinds.items()}
    posteriors = pd.DataFrame([
        {"model": "demix", "experts": "training", "weights": "history", "decay": 0.3, "domain": domain, "kind": kind,
         "split": "dev", "block": block, "expert": expert, "seed": 1,
         "posterior": 1 / len(training) if not block else float(expert == chosen[domain])}
        for domain, kind in kinds.items() for block in range(4) for expert in training
    ])  # fmt: skip
    run = with_keys(path, keys)
    write_parquet(pa.Table.from_pandas(differences, preserve_index=False), path / "differences.parquet")
    write_parquet(pa.Table.from_pandas(posteriors, preserve_index=False), path / "posteriors.parquet")
    write_parquet(pa.Table.from_pandas(results, preserve_index=False), path / "results.parquet")
    write_parquet(pa.Table.from_pandas(overlap, preserve_index=False), path / "corpus" / "overlap.parquet")
    write_parquet(pa.Table.from_pandas(priors, preserve_index=False), path / "priors.parquet")
    _write_metrics(path, training, novel, retrained, steps)
    _write_cards(path, training, novel, retrained)
    parents = {name: Parent(parent_of(name, training, novel)) for name in novel}
    return MadeUp(run, keys, Results(results), priors, overlap, differences, parents)


# Factors on the perplexity of the tables' own row.
DECAYS = {0.1: 1.02, 0.3: 1.0, 0.9: 1.1}
DEV_BLOCKS = {1: 1.3, 10: 1.05, 100: 1.0}
CHOSEN_ON_DEV, RELEASED_SCORER = 1.1, 1.5


def _variants(results: pd.DataFrame) -> pd.DataFrame:
    """The rows of the grids, of the choice on dev and of the released scorer, made from those of the tables."""
    demix = results[(results["model"] == "demix") & (results["experts"] == "training")]
    history = demix[demix["weights"] == "history"]

    def times(rows: pd.DataFrame, factor: float, **columns: object) -> pd.DataFrame:
        return rows.assign(perplexity=rows["perplexity"] * factor, **columns)

    prior, cached = history[history["method"] != "uniform"], history[history["method"] == "cached"]
    naive = results[(results["method"] == "naive") & (results["kind"] == "novel") & (results["experts"] == "training")]
    released = demix[(demix["weights"] == "released") & (demix["method"] != "uniform")]
    return pd.concat([
        *(times(prior, factor, variant="decay", decay=decay) for decay, factor in DECAYS.items()),
        *(times(cached, factor, variant="dev_blocks", dev_blocks=number) for number, factor in DEV_BLOCKS.items()),
        times(naive, CHOSEN_ON_DEV, variant="dev_choice", oracle=False),
        times(released, RELEASED_SCORER, variant="released_scorer", scorer="released"),
    ])  # fmt: skip


def _differences(results: pd.DataFrame) -> pd.DataFrame:
    """The systems of the tables less those of `BASES`; the interval is 5% of the difference to either side."""
    rows = results[(results["variant"] == "") & results["method"].isin(["dense", "naive", "cached"])]
    rows = rows[~rows["model"].str.contains("-") & rows["weights"].isin(["", "history"])]
    rows = rows[~rows["experts"].str.startswith("plus-")]
    rows = rows[(rows["model"] != "domain_token") | (rows["method"] == "naive")]
    found = []
    for against, base in BASES.items():
        of_base = (rows["model"] == base.model) & (rows["experts"] == base.experts) & (rows["method"] == base.method)
        others = rows[of_base].set_index("domain")["perplexity"].reindex(rows["domain"]).to_numpy()
        less = rows.assign(
            against=against, nats_per_token=np.log(rows["perplexity"] / others), perplexity=rows["perplexity"] - others
        )[~of_base]
        for name in ("nats_per_token", "perplexity"):
            for bound, sign in (("low", -1), ("high", 1)):
                less[f"{name}_{bound}"] = (less[name] + sign * 0.05 * less[name].abs()).where(less["documents"] >= 20)
        found.append(less)
    return pd.concat(found)


def _keys(training: tuple[str, ...], novel: tuple[str, ...], retrained: tuple[str, ...]) -> list[Key]:
    kinds = {**dict.fromkeys(training, "training"), **dict.fromkeys(novel, "novel")}
    keys = [
        Key(model, "dense", "dense", "", *item) for model in ("dense_unbalanced", "dense") for item in kinds.items()
    ]
    for model, experts in (("domain_token", "training"), ("demix", "training"), ("demix", "all")):
        for domain, kind in kinds.items():
            chosen = domain if experts == "all" or kind == "training" else parent_of(domain, training, novel)
            keys += [Key(model, experts, "naive", "", domain, kind, chosen)]
            keys += [Key(model, experts, "average", "", domain, kind)]
            keys += [
                Key(model, experts, method, weights, domain, kind)
                for method in ("uniform", "updating", "cached")
                for weights in ("history", "released")
            ]
            if model == "demix":
                beyond = {"uniform": "tempered", "fitted": "switching", "best_block": "", "best_token": ""}
                keys += [Key(model, experts, method, weights, domain, kind) for method, weights in beyond.items()]
                keys += [Key(model, experts, "fitted", "", domain, kind)]
            if experts == "all" or model == "domain_token":
                names = kinds if experts == "all" else training
                keys += [Key(model, experts, "expert", "", domain, kind, name) for name in names]
    for domain in training:
        keys += [
            Key("demix", f"minus-{domain}", "cached", weights, domain, "training")
            for weights in ("history", "released")
        ]
    for name in novel:
        keys += [Key("demix", f"plus-{name}", "cached", "history", one, kinds[one]) for one in (*training, name)]
    for domain in retrained:
        keys += [Key(f"without-{domain}", "training", "cached", w, domain, "training") for w in ("history", "released")]
    for adapted in novel:
        keys += [Key(f"dense-dapt-{adapted}", "dense", "dense", "", name, "training") for name in training]
        keys += [Key(f"dense-dapt-{adapted}", "dense", "dense", "", adapted, "novel")]
    return keys


def _write_metrics(
    path: Path, training: tuple[str, ...], novel: tuple[str, ...], retrained: tuple[str, ...], steps: int
) -> None:
    folder = path / "metrics"
    folder.mkdir(parents=True, exist_ok=True)
    models = ["demix", "dense", "dense_unbalanced", "domain_token", *(f"without-{name}" for name in retrained)]
    for index, model in enumerate(models):
        lines = []
        for step in range(1, steps + 1):
            loss = 5 + 0.05 * index + 3.3 * math.exp(-4 * step / steps) + 0.06 * math.sin(37 * step + index)
            lines.append({
                "step": step, "tokens": 8192 * step, "loss": loss, **{f"loss/{name}": loss for name in training},
                "learning_rate": 0.001, "gradient_norm": 1.0, "tokens_per_second": 11000.0,
            })  # fmt: skip
        write_json_lines(folder / f"{model}.jsonl", lines)
    for name in novel:
        for kind, start, forgets in (("demix", 5.3, 0.0), ("dense", 5.4, 0.25)):
            lines = []
            for point in range(6):
                gained = 1 - math.exp(-point / 2)
                own = start + 0.1 * novel.index(name) - (0.15 if kind == "demix" else 0.3) * gained
                old = {
                    f"dev_loss/{domain}": start - 0.3 + 0.05 * i + forgets * gained for i, domain in enumerate(training)
                }
                lines.append({"step": 10 * point, "tokens": 10240 * point, **old, f"dev_loss/{name}": own})
                if point:
                    lines.append({"step": 10 * point, "tokens": 10240 * point, "loss": own, "learning_rate": 0.0001})
            write_json_lines(folder / f"{kind}-dapt-{name}.jsonl", lines)


def _write_cards(path: Path, training: tuple[str, ...], novel: tuple[str, ...], retrained: tuple[str, ...]) -> None:
    for name in (*training, *novel):
        counts = {"documents": {"train": 10, "dev": 2, "test": 2}, "words": {"train": 900, "dev": 90, "test": 90}}
        counts["origins"] = {"dev": 2, "dev_in_train": 0, "test": 2, "test_in_train": 1}
        more = {"replacements": {"EMAIL": 3}, "leakage": {"ngrams": {"length": 13, "test": 0.0}}}
        write_json(path / "corpus" / name / "card.json", counts | more)
    models = ["demix", "dense", "dense_unbalanced", "domain_token", *(f"without-{name}" for name in retrained)]
    for model in [*models, *(f"dense-dapt-{name}" for name in novel)]:
        # Those of other models are left out, as is some of what a model.json holds.
        read = {"data_sha256": dict.fromkeys(training, "1" * 64)} if model == "demix" else {}
        architecture = {"layers": 3, "width": 128, "heads": 4, "context": 256}
        kind = "demix" if model.startswith("without-") else model.split("-")[0]
        counts = {"shared_parameters": 100, "expert_parameters": 23, "vocab_size": 4096, "tokens": 2457600, "steps": 30}
        made = {"architecture": architecture, "kind": kind, "parameters": 123, "shared_sha256": "2" * 64}
        made |= {"training": {"learning_rate": 1e-3, "seed": 1}, "domain_tokens": [], **counts, **read}
        write_json(path / "models" / model / "model.json", made)
    for name in (*training, *novel):
        card = {"sha256": "0" * 64, "parent": parent_of(name, training, novel) if name in novel else None, "steps": 50}
        card |= {"adaptation": {"tokens": 10240}} if name in novel else {}
        card |= {"name": name, "shared_sha256": "2" * 64}
        write_json(path / "models" / "demix" / "experts" / f"{name}.json", card)
