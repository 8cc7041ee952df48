"""Score tables: made-up ones of random documents, and those of one model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np

from demix.evaluate.domain import Evaluation, evaluate
from demix.evaluate.score import Scoring, score_models
from demix.evaluate.score_tables import tokens_sha256, write_scores, write_tokens
from demix.run.scoring import ScoringPart

LENGTH = 8


def write_table(
    folder: Path, experts: Sequence[str], *, documents: int = 30, seed: int = 0, text: int = 0, whole: int | None = None
) -> None:
    """A score table of documents of 1 to 40 tokens, pieces of `whole` documents (by default whole themselves).

    `text` decides the tokens, `seed` the scores.
    """
    words = np.random.default_rng(text)
    numbers = np.repeat(np.arange(documents), words.integers(1, 40, documents))
    ids = words.integers(0, 300, len(numbers)).astype(np.uint16)
    origins = None if whole is None else np.arange(documents) * 7 % whole
    # What is hard to predict is so for every model.
    hard = np.random.default_rng([99, text]).exponential(3, len(ids))
    generator = np.random.default_rng([seed, text])
    columns = {expert: -hard * generator.uniform(0.8, 1.2) - generator.exponential(0.5, len(ids)) for expert in experts}
    write_columns(folder, ids, starts(numbers), columns, origins=origins)


def write_columns(
    folder: Path, ids: np.ndarray, offsets: np.ndarray, columns: Mapping[str, np.ndarray], *, length: int = LENGTH,
    origins: np.ndarray | None = None, **about: str,
) -> None:  # fmt: skip
    """A score table of the tokens `ids` [N], whose documents begin at `offsets`, from each expert's log p [N]."""
    write_tokens(folder, ids, offsets, length, origins)
    for expert, scores in columns.items():
        about = {"tokens_sha256": tokens_sha256(ids), "shared_sha256": "0"} | about
        write_scores(folder / f"{expert}.parquet", [scores], about)


def starts(documents: np.ndarray) -> np.ndarray:
    """Where documents begin, from the number of each token's."""
    return np.unique(documents, return_index=True)[1]


class _Here(ScoringPart):
    """A part whose score tables are in the folder of scores itself."""

    @property
    def folder(self) -> str:
        return ""


def score(
    directory: Path, experts: Sequence[str], shards: Sequence[Path], scoring: Scoring, output: Path, context: int = 0
) -> None:
    """Score all `shards` under the model in `directory`; writes output/<domain>.<split>/."""
    domains, splits = tuple({path.parent.name: 1 for path in shards}), tuple({path.stem: 1 for path in shards})
    part = _Here(directory.name, tuple(experts), domains, splits, context=context)
    manifest = output.with_name(f"{output.name}.json")
    score_models(directory.parent, [*shards], scoring.replace(models=(part,)), output, manifest)


def evaluate_domain(
    scores: Path, domain: str, evaluation: Evaluation, output: Path, lengths: np.ndarray | None = None
) -> None:
    """Evaluate a domain whose tokenizer has ids of `lengths` in bytes."""
    with patch("demix.evaluate.domain.byte_lengths", lambda _: lengths):
        evaluate(domain, scores, evaluation, output, None if lengths is None else Path("tokenizer.json"))
