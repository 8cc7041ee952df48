"""The columns of the tables that an evaluation writes, and joining those of single domains.

Each join is a process of its own, so this module loads little.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from demix.files import read_parquet, write_parquet

# What the rows of an evaluation are of: a model, a set of its experts and a rule, on the text of a domain.
SYSTEM = {
    "model": pa.string(),
    "experts": pa.string(),
    "weights": pa.string(),
    "domain": pa.string(),
    "kind": pa.string(),
    "seed": pa.int32(),
}
# results.parquet. `variant` is empty in the rows of the tables; others say what varies in theirs: decay and dev_blocks
# (a whole grid, the config's own value too), dev_choice (an expert chosen on dev, not by the test's oracle) and
# released_scorer (the published code of a paper, by `scorer` too: paper or released). The `scorer` of masked language
# models says so, and their rows compare only with one another. `chosen_on` is the split on which `naive` chose an
# expert for a novel domain. `beta`, `gamma` and `alpha` are the parameters of `tempered` and `switching`. `routing` is
# the clustering whose distances weight the experts, `context` the text that is measured (document, block or
# document_half) and `temperature` what squared distances are divided by; the variant routing is the whole grid of
# contexts, temperatures and top-k, and dev_temperature has the temperature and top-k chosen on dev. The methods
# best_block and best_token are not mixtures but floors, in hindsight. `documents` counts documents of origin, `pieces`
# what was scored of them: equal where none was cut. Bounds are of the 95% interval over documents of origin, or, below
# 20 of them, over blocks of their text; null below 400 tokens.
COLUMNS = SYSTEM | {
    "n_experts": pa.int32(),
    "method": pa.string(),
    "top_k": pa.int32(),
    "decay": pa.float64(),
    "beta": pa.float64(),
    "gamma": pa.float64(),
    "alpha": pa.float64(),
    "routing": pa.string(),
    "context": pa.string(),
    "temperature": pa.float64(),
    "dev_blocks": pa.int32(),
    "split": pa.string(),
    "expert": pa.string(),
    "oracle": pa.bool_(),
    "documents": pa.int32(),
    "pieces": pa.int32(),
    "tokens": pa.int64(),
    "nll": pa.float64(),
    "perplexity": pa.float64(),
    "tokens_sha256": pa.string(),
    "variant": pa.string(),
    "scorer": pa.string(),
    "chosen_on": pa.string(),
    "perplexity_low": pa.float64(),
    "perplexity_high": pa.float64(),
    "bytes": pa.int64(),
    "bits_per_byte": pa.float64(),
}
# differences.parquet: each system less the one it is held `against` (dense_unbalanced, dense, demix_cached, or a row of
# balanced clusters), over the same documents; negative is better than that one.
DIFFERENCES = SYSTEM | {
    "method": pa.string(),
    "against": pa.string(),
    "documents": pa.int32(),
    "pieces": pa.int32(),
    "tokens": pa.int64(),
    "nats_per_token": pa.float64(),
    "nats_per_token_low": pa.float64(),
    "nats_per_token_high": pa.float64(),
    "perplexity": pa.float64(),
    "perplexity_low": pa.float64(),
    "perplexity_high": pa.float64(),
    "tokens_sha256": pa.string(),
}
# priors.parquet: the cached priors of the tables' rows by their weights, and the fitted priors (weights: fitted).
PRIORS = SYSTEM | {
    "expert": pa.string(),
    "prior": pa.float64(),
}
# posteriors.parquet: over demix's training experts after each block, with the updating prior (Figures 7 and 8).
POSTERIORS = SYSTEM | {
    "decay": pa.float64(),
    "split": pa.string(),
    "block": pa.int32(),
    "expert": pa.string(),
    "posterior": pa.float64(),
}
# losses.parquet: the loss of each document under each column of each model's score table, in nats. `document` is its
# number in the split, `origin` is the same for pieces of one document, and `tokens` counts its scored tokens.
LOSSES = {
    "domain": pa.string(),
    "document": pa.int32(),
    "origin": pa.int64(),
    "tokens": pa.int64(),
    "model": pa.string(),
    "seed": pa.int32(),
    "expert": pa.string(),
    "nll": pa.float64(),
}
# systems.parquet: a row per system of the run's own seed, with lists over the documents of the test split: the tokens
# of each, its origin, and its loss in nats. Where blocks are drawn in place of documents (`demix.evaluate.intervals`),
# `stretched` and `stretches` are tokens and losses by stretch of the text; else they are empty.
SYSTEM_LOSSES = SYSTEM | {
    "method": pa.string(),
    "tokens": pa.list_(pa.int64()),
    "origins": pa.list_(pa.int64()),
    "nll": pa.list_(pa.float64()),
    "stretched": pa.list_(pa.int64()),
    "stretches": pa.list_(pa.float64()),
}


# contexts.parquet: the losses of tokens at positions `begin` to `end` - 1 of their blocks, which have `context` tokens.
CONTEXTS = SYSTEM | {
    "method": pa.string(),
    "split": pa.string(),
    "context": pa.int32(),
    "begin": pa.int32(),
    "end": pa.int32(),
    "tokens": pa.int64(),
    "nll": pa.float64(),
    "tokens_sha256": pa.string(),
}


# What the rows of tasks are of: a task, a model and a routing.
ROUTED_TASK = {
    "task": pa.string(),
    "model": pa.string(),
    "routing": pa.string(),
    "clustering": pa.string(),
    "expert": pa.string(),
    "seed": pa.int32(),
}
# tasks.parquet: the accuracy of one model on one task by one routing. `expert` is that of `one expert`; `reads` says
# what the routing is given in addition to texts; `judged` that the 95% interval excludes chance. Rows of the harness
# have a `metric`, its value and standard error, and no accuracy. `routing` is the rule that mixed the experts. The
# versions are those of the harness and of the task; `documents_sha256` is the digest of the documents that the model
# was asked.
TASKS = ROUTED_TASK | {
    "n_experts": pa.int32(),
    "temperature": pa.float64(),
    "top_k": pa.int32(),
    "reads": pa.string(),
    "shots": pa.int32(),
    "calibrated": pa.bool_(),
    "seeds": pa.int32(),
    "examples": pa.int32(),
    "accuracy": pa.float64(),
    "accuracy_low": pa.float64(),
    "accuracy_high": pa.float64(),
    "chance": pa.float64(),
    "judged": pa.bool_(),
    "metric": pa.string(),
    "value": pa.float64(),
    "stderr": pa.float64(),
    "higher_is_better": pa.bool_(),
    "harness_version": pa.string(),
    "task_version": pa.string(),
    "documents_sha256": pa.string(),
}

# task_weights.parquet: the mean weight of an expert over the tests of a task, with which a routing predicts the first
# token of a label.
TASK_WEIGHTS = ROUTED_TASK | {
    "weight": pa.float64(),
}


def table_schema(columns: Mapping[str, pa.DataType]) -> pa.Schema:
    """The schema of one of the tables above; the training seed is never null."""
    return pa.schema([pa.field(name, kind, nullable=name != "seed") for name, kind in columns.items()])


def join(inputs: Sequence[Path], output: Path) -> None:
    """Write the rows of all `inputs`, tables of one kind, to `output`, in their order."""
    write_parquet(pa.concat_tables(map(read_parquet, inputs)), output)
