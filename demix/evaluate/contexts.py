"""The losses of tokens by their position in blocks of several lengths, from score tables: does longer context help?"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from demix.config.evaluation import Decay
from demix.errors import DemixError
from demix.evaluate.columns import CONTEXTS, table_schema
from demix.evaluate.score_tables import footer_of, read_scores, stream_scores
from demix.files import write_parquet
from demix.mix.mixtures import Mixture
from demix.mix.rules import History, weights_rule
from demix.run.evaluated import ContextTable
from demix.settings import Items, Positive, Seed, Settings, Text

log = logging.getLogger(__name__)


class ContextEvaluation(Settings):
    """The tables of one domain (`demix.run.evaluated.context_tables`), and how they are mixed and summed.

    `kind` is training or novel, `decay` that of cached priors, which the first `dev_blocks` blocks of dev make. Bins of
    positions are `width` tokens wide.
    """

    kind: Text
    tables: Items[ContextTable]
    width: Positive
    decay: Decay
    dev_blocks: Positive
    seed: Seed


def evaluate_contexts(scores: Path, domain: str, contexts: ContextEvaluation, output: Path) -> None:
    """Write the losses of `domain`'s test split by row of models, length of blocks and bin of positions (`CONTEXTS`).

    `scores` is the run's folder scores/. Raises DemixError if two tables were scored on different tokens.
    """
    rows = [row for table in contexts.tables for row in _rows(scores, domain, table, contexts)]
    if len({row["tokens_sha256"] for row in rows}) > 1:
        raise DemixError(f"domain {domain}", "was scored on different tokens by different models", "score it again")
    write_parquet(pa.Table.from_pylist(rows, schema=table_schema(CONTEXTS)), output)
    log.info("%s: %d rows", domain, len(rows))


def losses_by_position(
    directory: Path, columns: Sequence[str], log_prior: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The sums of losses (nats) and the numbers of tokens by position in the block, both [T], of a score table.

    With `log_prior` [E] the columns are mixed by this prior with weights by `history`; without it there is one column.
    """
    sums = []
    for chunk in stream_scores(directory, columns):
        # A block of `history` depends on no other, so that a chunk of blocks is mixed by itself.
        mixed = chunk.scores[..., 0]
        if log_prior is not None:
            mixed = Mixture(History(), log_prior).table(chunk.scores, chunk.mask)
        sums.append((-mixed.sum(0), chunk.mask.sum(0)))
    nll, tokens = (np.sum(parts, axis=0) for parts in zip(*sums, strict=True))
    return nll, tokens


def _rows(scores: Path, domain: str, table: ContextTable, contexts: ContextEvaluation) -> Iterator[dict[str, Any]]:
    directory, log_prior = scores / table.folder / f"{domain}.test", None
    if table.prior:
        dev = read_scores(scores / table.prior / f"{domain}.dev", table.columns)
        rule, decay, blocks = weights_rule(table.weights), contexts.decay, contexts.dev_blocks
        log_prior = rule.cached_log_prior(dev.scores, dev.mask, decay=decay, blocks=blocks)
    nll, tokens = losses_by_position(directory, table.columns, log_prior)
    if len(nll) != table.context:
        raise DemixError(directory, f"has blocks of {len(nll)} tokens, not {table.context}", "score the domain again")
    begins = np.arange(0, table.context, contexts.width)
    sums = (np.add.reduceat(values, begins).tolist() for values in (nll, tokens))
    for begin, loss, count in zip(begins.tolist(), *sums, strict=True):
        if count:
            yield {
                "model": table.model, "experts": table.experts, "method": table.method, "weights": table.weights,
                "domain": domain, "kind": contexts.kind, "split": "test", "context": table.context, "begin": begin,
                "end": min(begin + contexts.width, table.context), "tokens": count, "nll": loss,
                "tokens_sha256": footer_of(directory, table.columns).tokens_sha256, "seed": contexts.seed,
            }  # fmt: skip
