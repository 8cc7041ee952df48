"""Rows of `models` of each kind, in each way to begin, with each key that a row can have."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from demix.config.models import KINDS

# A value for each key but `kind` and `parent`, none of which is the usual one.
KEYS: dict[str, Any] = {
    "label": "",
    "seed_tokens": 300,
    "schedule": "restart",
    "data": "k2",
    "experts_per_job": 2,
    "averages": True,
    "merged_routed": True,
    "experts": 4,
    "top_k": 2,
    "every": 2,
    "capacity": 1.5,
    "balance": 0.1,
    "match": "updates",
    "warmup": 0.5,
    "clip": 2.0,
    "weight_decay": 0.5,
    "precision": "fp16",
    "optimizer": {"kind": "muon"},
    "learning_rate_schedule": {"kind": "cosine"},
    "z_loss": 0.1,
    "dropout": 0.1,
    "checkpoint_every": 7,
    "keep_checkpoints": 3,
    "micro_sequences": 1,
    "compile": True,
    "checkpoint_activations": True,
    "shard_optimizer": True,
    "tokens": 900,
    "sequences": 1,
    "learning_rate": 0.5,
    "dev_blocks": 1,
    "trained": "routers",
    "preset": "modern",
    "ranks": 2,
    "sweep": {"learning_rates": [0.5], "tokens": 500},
    "replicas": {"law": 2},
    "architecture": {"position": "alibi"},
}
SEED = {"parent": "dense", "seed_tokens": 500}
# How a row begins, and what it learns.
BEGINNINGS: dict[str, dict[str, Any]] = {
    "scratch": {},
    "seed": SEED,
    "restart": SEED | {"schedule": "restart"},
    "folder": {"parent": "imported/gpt2"},
    "merge": {"parent": "demix"},
    "clusters": {"data": "k2"},
    "masked": {"architecture": {"attention": "bidirectional", "objective": "mlm"}},
}
# What a row of a kind says with each key, so that the key alone decides.
BESIDE = {
    "anchored": {"weight_decay": 0.0},
    "routed": {"top_k": 2},
    "replicas": {"ranks": 3},
}
SECTIONS: dict[str, Any] = {
    "architecture": {"layers": 2, "width": 8, "heads": 1, "context": 8},
    "training": {"sequences": 2},
    "clusterings": {"k2": {"clusters": 2}},
}


# The keys that change which files a training reads and makes, and which jobs there are.
WIRING = (
    "seed_tokens",
    "schedule",
    "data",
    "experts_per_job",
    "averages",
    "merged_routed",
    "dev_blocks",
    "sweep",
    "trained",
    "replicas",
)


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with names: each kind with each beginning, and with the keys of `WIRING`; other keys in pairs with both."""
    kinds, beginnings = [*KINDS], [*BEGINNINGS]
    cases = [*product(kinds, beginnings, ("", *WIRING))]
    for turn, key in enumerate(key for key in KEYS if key not in WIRING):
        for number in range(max(len(kinds), len(beginnings))):
            cases.append((kinds[number % len(kinds)], beginnings[(number + turn) % len(beginnings)], key))
    for kind, beginning, key in cases:
        row = {"kind": kind} | BESIDE.get(kind, {}) | BEGINNINGS[beginning]
        name = "_".join(filter(None, (kind, beginning, key)))
        if key == "architecture":
            row[key] = row.get(key, {}) | KEYS[key]
        elif key:
            row |= {key: f"Mine, {name}" if key == "label" else KEYS[key]} | BESIDE.get(key, {})
        yield name, row
