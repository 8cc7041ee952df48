"""Scoring of tasks: the log-probability of every token of a prompt and of each of its labels, under each expert.

`tasks/<model>/<task>.parquet` stores them. All mixtures of experts are then computed from this file
(`demix.evaluate.classification`).
"""

import logging
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import torch

from demix.config.tasks import Task
from demix.config.training import Threads
from demix.data.examples import Prompt, prompts, read_examples
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.evaluate.classification import schema_of
from demix.files import sha256_file
from demix.files.batches import regrouped, write_batches
from demix.model.continuations import Continuation, continuation_scores
from demix.model.device import compute_type, own_device, set_threads
from demix.model.directory import describe, expert_lineage, load_experts, refuse_other_tokenizer
from demix.model.gpt import GPT
from demix.model.scoring import columns_of, refuse_not_finite
from demix.progress import progress

log = logging.getLogger(__name__)

# The number of tokens of a row group.
ROWS = 1 << 16


class TaskScoring(Task):
    """A task, and how it is scored."""

    precision: Literal["fp32", "bf16"] = "fp32"
    threads: Threads


def score_task(
    directory: Path, experts: tuple[str, ...], examples: Path, tokenizer: Path, given: TaskScoring, output: Path
) -> None:
    """Write the scores of a task, whose examples are examples/<task>.parquet, under `experts` of a model.

    Raises DemixError if the tokenizer is not the model's, a prompt does not fit into the model's context, or an expert
    has log-probabilities that are not finite.
    """
    set_threads(given.threads)
    encoder = Tokenizer.load(tokenizer)
    refuse_other_tokenizer(directory, tokenizer, encoder.sha256, encoder.vocab_size)
    trunks = load_experts(directory, experts, own_device())
    names, dtype = columns_of(trunks), compute_type(given.precision)
    hashes = {name: expert_lineage(directory, name).sha256 for name in names}
    asked = list(prompts(given, read_examples(examples)))
    about = {
        "experts": ",".join(names),
        "examples_sha256": sha256_file(examples),
        "shared_sha256": describe(directory).shared_sha256,
        **{f"expert_sha256.{name}": sha256 for name, sha256 in hashes.items()},
    }
    schema = schema_of(len(names)).with_metadata(about)
    batches = _batches(examples.stem, asked, trunks, encoder, dtype)
    write_batches(output, schema, regrouped(batches, repeat(ROWS)))
    log.info("%s: %d prompts, %d experts", examples.stem, len(asked), len(names))


def tokens_of(task: str, prompt: Prompt, tokenizer: Tokenizer, length: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """The tokens of a prompt's context and of each of its labels.

    Raises DemixError for a label without tokens, and if all tokens together exceed a block of `length`.
    """
    context, labels = tokenizer.encode(prompt.context), [tokenizer.encode(choice) for choice in prompt.choices]
    if not all(map(len, labels)):
        raise DemixError(f"tasks.{task}", "has an empty label", "give each label a word")
    if len(context) + max(map(len, labels)) > length:
        longest = max(map(len, labels))
        cause = f"has a prompt of {len(context)} tokens and a label of {longest}, too long for blocks of {length}"
        raise DemixError(f"tasks.{task}", cause, "lower the key shots or tokens")
    return context, labels


def _batches(
    task: str, asked: Sequence[Prompt], trunks: Sequence[GPT], encoder: Tokenizer, dtype: torch.dtype | None
) -> Iterator[pa.RecordBatch]:
    """The rows of each prompt: its context (label -1), then its labels."""
    names = columns_of(trunks)
    schema = schema_of(len(names))
    with progress(f"{task}: prompts", len(asked)) as advance:
        for prompt in asked:
            context, labels = tokens_of(task, prompt, encoder, trunks[0].architecture.context)
            before = (encoder.end_of_text, *context.tolist())
            wanted = [Continuation(before, tuple(label.tolist())) for label in labels]
            found = [np.concatenate(continuation_scores(trunk, wanted, dtype), axis=1) for trunk in trunks]
            scores = np.concatenate(found)  # [E, tokens]
            refuse_not_finite(names, scores)
            sizes, count = [len(context), *map(len, labels)], scores.shape[1]
            columns = {
                "split": [prompt.split] * count,
                "seed": [prompt.seed] * count,
                "example": [prompt.example] * count,
                "label": np.repeat(np.arange(-1, len(labels)), sizes),
                "token": np.concatenate([context, *labels]),
                "log_probability": list(scores.T.astype(np.float32)),
            }
            yield pa.RecordBatch.from_pydict(columns, schema)
            advance(1)
