"""The columns of the tables that an evaluation writes, and the joining of tables of single domains.

Each join is a separate process, so this module imports little.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from demix.files import read_parquet, write_parquet

# The columns that identify a row of an evaluation: a model, a set of its experts and a rule, on the text of a domain.
SYSTEM = {
    "model": pa.string(),
    "experts": pa.string(),
    "weights": pa.string(),
    "domain": pa.string(),
    "kind": pa.string(),
    "seed": pa.int32(),
}
# results.parquet. `variant` is empty in rows that tables show. In other rows it names what varies: decay and dev_blocks
# (a whole grid, including the config's value), dev_choice (an expert chosen on dev, not an oracle on test) and
# released_scorer (the published code of a paper; `scorer` is then released instead of paper). For masked language
# models `scorer` says so, and their rows can be compared only with one another. `chosen_on` is the split on which
# `naive` chose an expert for a novel domain. `beta`, `gamma` and `alpha` are the parameters of `tempered` and
# `switching`. `routing` is the clustering whose distances weight the experts, `context` the text whose distance is used
# (document, block or document_half) and `temperature` the divisor of squared distances. The variant routing is the
# whole grid of contexts, temperatures and top-k; dev_temperature has the temperature and top-k chosen on dev. The
# methods best_block and best_token are not mixtures, but lower bounds in hindsight. `documents` counts source
# documents, `pieces` their scored chunks; they are equal if no document was cut. Bounds are those of the 95% interval
# over source documents, or, with fewer than 20 of them, over blocks of their text; null below 400 tokens.
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
# differences.parquet: each system minus the one in `against` (dense_unbalanced, dense, demix_cached, or an entry of
# balanced clusters), on the same documents. A negative difference means that the system is better.
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
# priors.parquet: the cached priors of rows in tables, by rule (`weights`), and the fitted priors (`weights` is fitted).
PRIORS = SYSTEM | {
    "expert": pa.string(),
    "prior": pa.float64(),
}
# posteriors.parquet: the posterior over demix's training experts after each block, with the updating prior (Figures 7
# and 8).
POSTERIORS = SYSTEM | {
    "decay": pa.float64(),
    "split": pa.string(),
    "block": pa.int32(),
    "expert": pa.string(),
    "posterior": pa.float64(),
}
# losses.parquet: the loss of each document under each column of each model's score table, in nats. `document` is its
# number in the split, `origin` is the same for chunks of one source document, and `tokens` counts its scored tokens.
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
# systems.parquet: one row per system of the run's own seed, with lists over the documents of the test split: tokens,
# origin, and loss in nats. If blocks are drawn instead of documents (`demix.evaluate.intervals`), `stretched` and
# `stretches` are tokens and losses by section of the text; otherwise they are empty.
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


# The columns that identify a row of tasks: a task, a model and a routing.
ROUTED_TASK = {
    "task": pa.string(),
    "model": pa.string(),
    "routing": pa.string(),
    "clustering": pa.string(),
    "expert": pa.string(),
    "seed": pa.int32(),
}
# tasks.parquet: the accuracy of one model on one task by one routing. `expert` is that of `one expert`; `reads` names
# the data that the routing uses in addition to texts; `judged` is true if the 95% interval excludes chance. Rows of the
# harness have a `metric`, its value and standard error, and no accuracy; their `routing` is the rule that mixed the
# experts. The versions are those of the harness and of the task; `documents_sha256` is the digest of the task's
# documents.
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

# task_weights.parquet: the mean, over the tests of a task, of an expert's weight when a routing predicts the first
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
