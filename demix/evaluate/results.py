"""All evaluations of one domain, from its score tables to rows of the results table."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from demix.errors import DemixError
from demix.evaluate.mix import METHODS, cached_log_prior, mix
from demix.evaluate.tables import ScoreTable, read_scores
from demix.files import read_parquet, write_parquet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Which experts exist and how they are mixed.

    `without` maps a removed training domain to the experts of the model trained without it. `weights` are
    `history`, `released` or a window in tokens; each k of `top_k` adds every method once more.
    """

    training: tuple[str, ...]
    novel: tuple[str, ...]
    without: dict[str, tuple[str, ...]]
    decay: float
    dev_blocks: int
    weights: tuple[str | int, ...]
    top_k: tuple[int, ...]
    seed: int


# results.parquet. `variant` is empty in the rows of the tables; others say what varies in theirs: decay and dev_blocks
# (a whole grid, the config's own value too), dev_choice (an expert chosen on dev, not by the test's oracle) and
# released_scorer (the paper's published code, by `scorer` too: paper or released). `chosen_on` is the split on which
# `naive` chose an expert for a novel domain. Bounds are of the 95% interval over documents, null below 20 of them.
COLUMNS = {
    "model": pa.string(),
    "experts": pa.string(),
    "n_experts": pa.int32(),
    "method": pa.string(),
    "weights": pa.string(),
    "top_k": pa.int32(),
    "decay": pa.float64(),
    "dev_blocks": pa.int32(),
    "domain": pa.string(),
    "kind": pa.string(),
    "split": pa.string(),
    "expert": pa.string(),
    "oracle": pa.bool_(),
    "documents": pa.int32(),
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
    "seed": pa.int32(),
}
# differences.parquet: each system less the one it is held `against` (dense or demix_cached), over the same documents;
# negative is better than that one.
DIFFERENCES = {
    "model": pa.string(),
    "experts": pa.string(),
    "method": pa.string(),
    "weights": pa.string(),
    "against": pa.string(),
    "domain": pa.string(),
    "kind": pa.string(),
    "documents": pa.int32(),
    "tokens": pa.int64(),
    "nats_per_token": pa.float64(),
    "nats_per_token_low": pa.float64(),
    "nats_per_token_high": pa.float64(),
    "perplexity": pa.float64(),
    "perplexity_low": pa.float64(),
    "perplexity_high": pa.float64(),
    "tokens_sha256": pa.string(),
    "seed": pa.int32(),
}
# posteriors.parquet: over demix's training experts after each block, with the updating prior (Figures 7 and 8).
POSTERIORS = {
    "model": pa.string(),
    "experts": pa.string(),
    "weights": pa.string(),
    "decay": pa.float64(),
    "domain": pa.string(),
    "kind": pa.string(),
    "split": pa.string(),
    "block": pa.int32(),
    "expert": pa.string(),
    "posterior": pa.float64(),
    "seed": pa.int32(),
}


def table_schema(columns: dict[str, pa.DataType]) -> pa.Schema:
    """The schema of one of the tables above; the training seed is never null."""
    return pa.schema([pa.field(name, kind, nullable=name != "seed") for name, kind in columns.items()])


def evaluate_domain(scores: Path, domain: str, evaluation: Evaluation, output: Path, priors: Path) -> None:
    """Evaluate every model on the test split of `domain`; write rows of results and of cached priors.

    `scores` is the run's scores/ folder. See `COLUMNS` and DESIGN section 5 for the meaning of each row.
    """
    kind = "training" if domain in evaluation.training else "novel"
    rows: list[dict] = []
    prior_rows: list[dict] = []

    def add(model: str, label: str, table: ScoreTable, nll: float, method: str, **more: object) -> None:
        rows.append(
            {
                "model": model, "experts": label, "n_experts": len(table.experts), "method": method, "weights": "",
                "domain": domain, "kind": kind, "split": "test", "expert": "", "oracle": False,
                "documents": table.documents, "tokens": table.tokens, "nll": nll,
                "perplexity": float(np.exp(nll / table.tokens)), "tokens_sha256": table.sha256,
                "variant": "", "scorer": "paper", "chosen_on": "", "seed": evaluation.seed,
            } | more
        )  # fmt: skip

    def add_mixtures(model: str, label: str, test: ScoreTable, dev: ScoreTable, methods: Sequence[str]) -> None:
        for weights, method, top_k in _combinations(evaluation, methods, len(test.experts)):
            log_prior = None
            more: dict = {"weights": "" if method == "average" else str(weights), "top_k": top_k}
            if method == "cached":
                log_prior = cached_log_prior(
                    dev.scores, dev.mask, weights, decay=evaluation.decay, blocks=evaluation.dev_blocks
                )
                more |= {"decay": evaluation.decay, "dev_blocks": min(evaluation.dev_blocks, len(dev.mask))}
                if top_k is None:
                    where = {"model": model, "experts": label, "weights": str(weights), "domain": domain, "kind": kind}
                    prior_rows.extend(
                        where | {"expert": expert, "prior": prior}
                        for expert, prior in zip(test.experts, np.exp(log_prior).tolist(), strict=True)
                    )
            elif method == "updating":
                more["decay"] = evaluation.decay
            mixed = mix(
                test.scores, test.mask, method, weights, decay=evaluation.decay, log_prior=log_prior, top_k=top_k
            )
            add(model, label, test, -float(mixed.sum()), method, **more)

    def add_experts(model: str, label: str, test: ScoreTable, *, each: bool) -> None:
        nlls = dict(zip(test.experts, (-test.scores.sum(axis=(0, 1))).tolist(), strict=True))
        own = domain in test.experts
        naive = domain if own else min(nlls, key=nlls.__getitem__)
        add(model, label, test, nlls[naive], "naive", expert=naive, oracle=not own, chosen_on="" if own else "test")
        if each:
            for expert, nll in nlls.items():
                add(model, label, test, nll, "expert", expert=expert)

    def table(model: str, split: str, experts: Sequence[str]) -> ScoreTable:
        return read_scores(scores / model / f"{domain}.{split}", experts)

    dense = ["dense", "dense_unbalanced"]
    dense += [f"dense-dapt-{novel}" for novel in evaluation.novel if kind == "training" or novel == domain]
    for model in dense:
        test = table(model, "test", ("dense",))
        add(model, "dense", test, -float(test.scores.sum()), "dense")

    test, dev = (table("domain_token", split, evaluation.training) for split in ("test", "dev"))
    add_experts("domain_token", "training", test, each=True)
    add_mixtures("domain_token", "training", test, dev, METHODS)

    everyone = evaluation.training + evaluation.novel
    test, dev = (table("demix", split, everyone) for split in ("test", "dev"))
    if evaluation.novel:
        add_experts("demix", "all", test, each=True)
        add_mixtures("demix", "all", test, dev, METHODS)
    test, dev = test.select(evaluation.training), dev.select(evaluation.training)
    add_experts("demix", "training", test, each=not evaluation.novel)
    add_mixtures("demix", "training", test, dev, METHODS)

    if kind == "training" and len(evaluation.training) > 1:
        rest = tuple(expert for expert in evaluation.training if expert != domain)
        add_mixtures("demix", f"minus-{domain}", test.select(rest), dev.select(rest), ("cached",))
    if domain in evaluation.without:
        model, experts = f"without-{domain}", evaluation.without[domain]
        add_mixtures(model, "training", table(model, "test", experts), table(model, "dev", experts), ("cached",))

    compared = {row["tokens_sha256"] for row in rows}
    if len(compared) > 1:
        raise DemixError(f"domain {domain}", "was scored on different tokens by different models", "score it again")
    write_parquet(pa.Table.from_pylist(rows, schema=table_schema(COLUMNS)), output)
    write_parquet(pa.Table.from_pylist(prior_rows), priors)
    log.info("%s: %d rows", domain, len(rows))


def join(inputs: Sequence[Path], output: Path) -> None:
    """Write the rows of all `inputs` to `output`, in their order."""
    tables = [read_parquet(path) for path in inputs]
    for path, table in zip(inputs, tables, strict=True):
        if table.schema != tables[0].schema:
            raise DemixError(path, f"has other columns than {inputs[0]}", "join tables of one kind")
    write_parquet(pa.concat_tables(tables), output)


def _combinations(
    evaluation: Evaluation, methods: Sequence[str], experts: int
) -> Iterator[tuple[str | int, str, int | None]]:
    """(weights, method, top_k) of all mixtures; `average` has no posterior, hence one weights rule."""
    for top_k in (None, *(k for k in evaluation.top_k if k < experts)):
        for method in methods:
            if method == "average" and top_k is not None:
                continue
            rules = evaluation.weights[:1] if method == "average" else evaluation.weights
            yield from ((rule, method, top_k) for rule in rules)
