"""Scores of tasks on disk: the rows of `tasks/<model>/<task>.parquet`, prompt by prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from demix.data.examples import Prompt
from demix.errors import DemixError
from demix.files import read_parquet, sha256_file


@dataclass(frozen=True)
class Scored:
    """The log p in nats of a prompt's tokens under E experts: of its context [N, E] and of each label [n, E]."""

    prompt: Prompt
    context: np.ndarray
    labels: tuple[np.ndarray, ...]


def schema_of(experts: int) -> pa.Schema:
    """The columns of a table of scores. Rows with label -1 are of the context."""
    return pa.schema(
        [
            pa.field("split", pa.dictionary(pa.int8(), pa.string()), False),
            pa.field("seed", pa.int32(), False),
            pa.field("example", pa.int32(), False),
            pa.field("label", pa.int16(), False),
            pa.field("token", pa.uint32(), False),
            pa.field("log_probability", pa.list_(pa.float32(), experts), False),
        ]
    )


def read_scored(path: Path, examples: Path, asked: Sequence[Prompt]) -> tuple[tuple[str, ...], list[Scored]]:
    """The experts of a table of scores, and what it holds of the prompts `asked`.

    Raises DemixError for a table of other examples than those of the file `examples`, or of other prompts.
    """
    table = read_parquet(path)
    about = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    if about.get("examples_sha256") != sha256_file(examples):
        raise DemixError(path, f"is of other examples than {examples}", "score the task again")
    experts = tuple(about["experts"].split(","))
    scores = table.column("log_probability").combine_chunks().flatten().to_numpy()
    scores = scores.reshape(-1, len(experts)).astype(np.float64)
    keys = [table.column(name).to_numpy() for name in ("seed", "example", "label")]
    splits = np.array(table.column("split").to_pylist(), dtype=object)
    changes = np.zeros(len(scores), bool)
    for column in (splits, *keys):
        changes[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(changes | (np.arange(len(scores)) == 0))
    parts = dict(
        zip(
            zip(splits[starts], *(key[starts].tolist() for key in keys), strict=True),
            np.split(scores, starts[1:]),
            strict=True,
        )
    )
    found = []
    for prompt in asked:
        place = (prompt.split, prompt.seed, prompt.example)
        try:
            labels = tuple(parts[*place, label] for label in range(len(prompt.choices)))
        except KeyError:
            raise DemixError(
                path, f"lacks example {prompt.example} of {prompt.split}", "score the task again"
            ) from None
        # A context without a token has no row.
        found.append(Scored(prompt, parts.get((*place, -1), scores[:0]), labels))
    return experts, found
