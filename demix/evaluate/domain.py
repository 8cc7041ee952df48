"""All evaluations of one domain: from its score tables, rows of the results table and of the table by position.

The table by position has the losses of tokens by their position in blocks of several lengths. It shows whether longer
context helps.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from demix.config.evaluation import Decay, MixingRecipe
from demix.data.tokenizer import byte_lengths
from demix.errors import DemixError
from demix.evaluate.choice import mixing_of, switching_on_dev
from demix.evaluate.columns import (
    COLUMNS,
    CONTEXTS,
    DIFFERENCES,
    LOSSES,
    POSTERIORS,
    PRIORS,
    SYSTEM_LOSSES,
    table_schema,
)
from demix.evaluate.intervals import block_tokens, bounds, resampled
from demix.evaluate.losses import DocumentLosses, Plan, PlannedMixture, dev_priors, document_losses
from demix.evaluate.routing import best_on_dev, side_tables_of
from demix.evaluate.score_tables import ScoreTable, footer_of, read_scores, refuse_other_model, stream_scores
from demix.files import seed_for, write_parquet
from demix.mix.mixtures import FLOORS, Mixture
from demix.mix.priors import fitted_log_prior
from demix.mix.rules import History, WeightsRule, weights_rule
from demix.run.evaluated import ContextTable
from demix.run.models import left_out
from demix.run.systems import Evaluated, ExpertSet
from demix.settings import Items, Positive, Seed, Settings, Text

log = logging.getLogger(__name__)


class Evaluation(MixingRecipe):
    """The evaluations of one domain, and the settings of the mixtures.

    `kind` is training, novel or suite. `tables` are the score tables with the sets of experts to mix
    (`demix.run.evaluated.evaluated`). Each of `pairs` has a system (model, experts, method and weights) and its
    baseline (the name in tables, then model, experts, method and weights). `seed` is the random seed of the run. Only
    models with that seed are compared.
    """

    kind: Text
    tables: Items[Evaluated]
    pairs: Items[Items[Text]] = ()
    seed: Seed


@dataclass(frozen=True)
class Row:
    """A row of results without its intervals, and the summed nll by document [D] and by section [S]."""

    values: dict[str, Any]
    nll: np.ndarray
    stretches: np.ndarray


def evaluate(domain: str, scores: Path, settings: Evaluation, output: Path, tokenizer: Path | None = None) -> None:
    """Mix the score tables of one domain by every method, in one pass over each table and without a forward pass.

    Writes the results on the test split to `output`, <name>.parquet, and next to it <name>.priors.parquet, differences,
    posteriors, losses and systems. `scores` is the run's folder scores/, with models/<model>/mixing.json next to it.
    For bits per byte, the `tokenizer` of the tables is needed. `demix.evaluate.columns` and docs/explanation/mixing.md
    explain the rows. Raises DemixError if the models were scored on different tokens.
    """
    lengths = None if tokenizer is None else byte_lengths(tokenizer)
    found = [_of_table(scores, domain, settings, table, lengths) for table in settings.tables]
    if len({one.totals.sha256 for one in found}) > 1:
        raise DemixError(f"domain {domain}", "was scored on different tokens by different models", "score it again")
    rows = [row for one in found for row in one.rows]
    results, differences = _with_intervals(rows, found[0].totals, domain, settings)
    priors = [row for one in found for row in one.priors]
    posteriors = [table for one in found for table in one.posteriors] or [table_schema(POSTERIORS).empty_table()]
    tables = {
        "": pa.Table.from_pylist(results, table_schema(COLUMNS)),
        ".priors": pa.Table.from_pylist(priors, table_schema(PRIORS)),
        ".differences": pa.Table.from_pylist(differences, table_schema(DIFFERENCES)),
        ".posteriors": pa.concat_tables(posteriors),
        ".losses": pa.concat_tables(
            one.losses for one, table in zip(found, settings.tables, strict=True) if not table.joined
        ),
        ".systems": _system_losses(rows, found[0].totals, settings.seed),
    }
    for name, table in tables.items():
        write_parquet(table, output.with_name(f"{output.stem}{name}.parquet"))
    log.info("%s: %d rows", domain, len(rows))


@dataclass(frozen=True)
class _Evaluated:
    """The results of one model's score tables for a domain: rows without intervals, priors, posteriors, losses."""

    totals: DocumentLosses
    losses: pa.Table
    rows: list[Row]
    priors: Sequence[dict[str, Any]] = ()
    posteriors: Sequence[pa.Table] = ()


def _of_table(
    scores: Path, domain: str, evaluation: Evaluation, table: Evaluated, byte_lengths: np.ndarray | None
) -> _Evaluated:
    """The evaluation of the score tables of one model."""
    model = scores.parent / "models" / table.folder
    folders = {split: scores / table.folder / f"{domain}.{split}" for split in table.splits}
    for folder in folders.values():
        refuse_other_model(folder, table.columns, model)
    dev, test = read_scores(folders["dev"], table.columns) if "dev" in folders else None, folders["test"]
    scored = len(dev.mask) if dev else 0
    planned = {}
    for some in table.sets if table.several else ():
        chosen = _chosen(some.weights or evaluation.weights, dev, some.experts, model)
        planned[some] = list(Plan(evaluation, some, scored, chosen).mixtures())
    mixtures = [mixture for entries in planned.values() for mixture, _ in entries]
    log_priors = dev_priors(dev, mixtures) if dev else {}
    for some, entries in planned.items():
        if tried := Plan(evaluation, some, scored).routed_grid(evaluation.routing_context[0]):
            entries += best_on_dev(folders["dev"], table.columns, tried, log_priors)
    varied = [some.experts for some in planned if some.variants]
    traced = PlannedMixture("updating", varied[0], History(), "history", decay=evaluation.decay) if varied else None
    totals = document_losses(
        test, table.columns, mixtures, log_priors, byte_lengths, traced, side_tables_of(test, mixtures)
    )
    about = {"domain": domain, "kind": evaluation.kind, "model": table.model, "seed": table.seed}
    rows = [] if table.several else [_single(table, about, totals)]
    priors: list[dict[str, Any]] = []
    for some, entries in planned.items():
        of_set = about | {"experts": some.label, "n_experts": len(some.experts)}
        rows += [*_expert_rows(some, domain, of_set, totals, dev), *_mixture_rows(entries, of_set, totals, scored)]
        # Priors are looked up only for the run's own model.
        priors += _prior_rows(entries, of_set, log_priors) if table.seed == evaluation.seed else ()
    posteriors = []
    if dev and traced is not None and totals.posteriors is not None:
        part = dev.select(traced.experts)
        path = traced.rule.log_priors(part.scores, part.mask, traced.decay)[:-1]
        on_dev = traced.rule.posteriors(part.scores, part.mask, path)
        about |= {"experts": "training", "seed": evaluation.seed}
        splits = (("dev", on_dev), ("test", totals.posteriors))
        posteriors = [_trace(traced, found, about | {"split": split}) for split, found in splits]
    return _Evaluated(totals, _losses(domain, table, totals), rows, priors, posteriors)


def _single(table: Evaluated, about: dict[str, Any], totals: DocumentLosses) -> Row:
    """The row of a table of one column."""
    (column,) = table.columns
    about |= {"n_experts": 1, "experts": column, "method": "dense", "top_k": table.top_k or None}
    if table.merged:
        about |= {"experts": "training", "method": "merged"}
    if table.without:
        about |= {"experts": left_out(table.without)}
    for some in table.sets:
        about |= {"experts": some.label, "method": "naive", "expert": column}
    return _row(about, totals, column, weights=table.merged)


def _chosen(
    weights: Sequence[str], dev: ScoreTable | None, experts: tuple[str, ...], model: Path
) -> dict[str, WeightsRule]:
    """The rules among `weights` whose parameters are chosen on dev, for a model's folder and its experts."""
    rules: dict[str, WeightsRule] = {}
    if "tempered" in weights:
        rules["tempered"] = mixing_of(model)
    if "switching" in weights and dev:
        part = dev.select(experts)
        rules["switching"] = switching_on_dev(part, fitted_log_prior(part.scores, part.mask))
    return rules


def _row(about: dict[str, Any], totals: DocumentLosses, name: str | PlannedMixture, **more: Any) -> Row:
    """The row of the expert or the mixture `name`."""
    nll = totals.nll[name]
    tokens, summed = int(totals.tokens.sum()), float(nll.sum())
    scorer = f"masked, {totals.folds} folds" if totals.folds else "paper"
    values = {
        "weights": "", "split": "test", "expert": "", "oracle": False, "documents": len(np.unique(totals.origins)),
        "pieces": len(totals.tokens), "tokens": tokens, "nll": summed, "perplexity": float(np.exp(summed / tokens)),
        "tokens_sha256": totals.sha256, "variant": "", "scorer": scorer, "chosen_on": "", "routing": "", "context": "",
    }  # fmt: skip
    if totals.byte_count:
        values |= {"bytes": totals.byte_count, "bits_per_byte": float(summed / np.log(2) / totals.byte_count)}
    return Row(values | about | more, nll, totals.stretches[name])


def _expert_rows(
    some: ExpertSet, domain: str, about: dict[str, Any], totals: DocumentLosses, dev: ScoreTable | None
) -> Iterator[Row]:
    """The naive expert, if all methods are evaluated: a domain's own; else the best on test and the best on dev."""
    if "naive" in some.methods:
        naive = about | {"method": "naive"}
        if domain in some.experts:
            yield _row(naive, totals, domain, expert=domain)
        else:
            best = min(some.experts, key=lambda expert: totals.nll[expert].sum())
            yield _row(naive, totals, best, expert=best, oracle=True, chosen_on="test")
            if dev:
                best = some.experts[int(dev.select(some.experts).scores.sum(axis=(0, 1)).argmax())]
                yield _row(naive, totals, best, expert=best, variant="dev_choice", chosen_on="dev")
        if some.singles:
            for expert in some.experts:
                yield _row(about | {"method": "expert"}, totals, expert, expert=expert)


def _mixture_rows(
    entries: Iterable[tuple[PlannedMixture, str]], about: dict[str, Any], totals: DocumentLosses, scored: int
) -> Iterator[Row]:
    for mixture, variant in entries:
        more: dict[str, Any] = {"method": mixture.method, "top_k": mixture.top_k}
        more |= {"variant": variant, "routing": mixture.routing, "context": mixture.context}
        more |= {"scorer": mixture.rule.scorer} if mixture.rule.scorer != "paper" else {}
        if mixture.method in FLOORS:
            more |= {"oracle": True, "chosen_on": "test"}
        elif mixture.method != "average":
            more["weights"] = str(mixture.weights)
            rule = vars(mixture.rule)
            more |= {name: rule[name] for name in ("beta", "gamma", "alpha", "temperature") if name in rule}
        if mixture.method in ("updating", "cached"):
            more["decay"] = mixture.decay
        if mixture.method == "cached":
            more["dev_blocks"] = min(mixture.rule.blocks_read(mixture.dev_blocks), scored)
        yield _row(about, totals, mixture, **more)


def _prior_rows(
    entries: Iterable[tuple[PlannedMixture, str]], about: dict[str, Any], log_priors: dict[PlannedMixture, np.ndarray]
) -> Iterator[dict[str, Any]]:
    for mixture, variant in entries:
        fitted = mixture.method == "fitted" and mixture.weights == ""
        if (fitted or mixture.method == "cached") and mixture.top_k is None and not variant:
            for expert, prior in zip(mixture.experts, np.exp(log_priors[mixture]).tolist(), strict=True):
                weights = "fitted" if fitted else str(mixture.weights)
                yield about | {"weights": weights, "expert": expert, "prior": prior}


def _trace(mixture: PlannedMixture, posteriors: np.ndarray, about: dict[str, Any]) -> pa.Table:
    """Posteriors [B, E] in long form."""
    blocks, experts = posteriors.shape
    columns = about | {"weights": str(mixture.weights), "decay": mixture.decay}
    columns |= {"block": np.repeat(np.arange(blocks), experts), "expert": np.tile(np.array(mixture.experts), blocks)}
    return _table(columns | {"posterior": posteriors.ravel()}, POSTERIORS)


def _losses(domain: str, table: Evaluated, totals: DocumentLosses) -> pa.Table:
    """The losses by document [D] under each column of one model's score table, in long form."""
    model = table.folder if table.named_by_folder else table.model
    about = {"domain": domain, "model": model, "seed": table.seed}
    about |= {"document": totals.numbers, "origin": totals.origins, "tokens": totals.tokens}
    return pa.concat_tables(
        _table(about | {"expert": expert, "nll": totals.nll[expert]}, LOSSES) for expert in table.columns
    )


def _table(values: Mapping[str, Any], columns: Mapping[str, pa.DataType]) -> pa.Table:
    """A table of arrays. A value that is not an array is the same in each row."""
    frame = pd.DataFrame({name: values[name] for name in columns})
    return pa.Table.from_pandas(frame, table_schema(columns), preserve_index=False)


def _system(row: Row, seed: int | None) -> tuple[str, ...] | None:
    """(model, experts, method, weights) of a row, if it is a system of the tables with this `seed`; else None."""
    values = row.values
    if values["variant"] or values.get("top_k") or values["method"] == "expert" or values.get("seed") != seed:
        return None
    return tuple(values[name] for name in ("model", "experts", "method", "weights"))


def _system_losses(rows: list[Row], totals: DocumentLosses, seed: int) -> pa.Table:
    """The losses of each system of `seed`, from which `resampled` draws; by section only if it draws blocks."""
    blocks = block_tokens(len(np.unique(totals.origins)), int(totals.tokens.sum()))
    stretched = totals.stretched if blocks else totals.stretched[:0]
    shared = {"tokens": totals.tokens, "origins": totals.origins, "stretched": stretched}
    found = [
        row.values | shared | {"nll": row.nll, "stretches": row.stretches[: len(stretched)]}
        for row in rows
        if _system(row, seed)
    ]
    return pa.Table.from_pylist(found, table_schema(SYSTEM_LOSSES))


def _with_intervals(
    rows: list[Row], totals: DocumentLosses, domain: str, evaluation: Evaluation
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows with bounds of their perplexity, and the differences of systems, all on the same resamples."""
    # The seed depends on the scored tokens, so the same documents are drawn for all models, seeds and runs.
    seed = seed_for(0, domain, totals.sha256)
    by_document = np.stack([totals.tokens, *(row.nll for row in rows)])
    by_stretch = np.stack([totals.stretched, *(row.stretches for row in rows)])
    drawn = resampled(by_document, totals.origins, by_stretch, seed)
    tokens, *nlls = np.empty((len(by_document), 0)) if drawn is None else drawn
    results, systems = [], {}
    for row, nll in zip(rows, nlls, strict=True):
        results.append(row.values | _interval("perplexity", np.exp(nll / tokens)))
        # Only models with a single training each are compared.
        if names := _system(row, evaluation.seed):
            systems[names] = (row, nll)
    differences = []
    for pair in evaluation.pairs:
        one, name, other = pair[:4], pair[4], pair[5:]
        if one != other and one in systems and other in systems:
            (row, nll), (base, base_nll) = systems[one], systems[other]
            difference = row.values | {
                "against": name,
                "nats_per_token": (row.values["nll"] - base.values["nll"]) / row.values["tokens"],
                "perplexity": row.values["perplexity"] - base.values["perplexity"],
            }
            difference |= _interval("nats_per_token", (nll - base_nll) / tokens)
            difference |= _interval("perplexity", np.exp(nll / tokens) - np.exp(base_nll / tokens))
            differences.append(difference)
    return results, differences


def _interval(name: str, drawn: np.ndarray) -> dict[str, float | None]:
    """The bounds of a value from its resamples; none without resamples."""
    low, high = bounds(drawn) if len(drawn) else (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


class ContextEvaluation(Settings):
    """The tables of one domain (`demix.run.evaluated.context_tables`), and how they are mixed and summed.

    `kind` is training or novel. `decay` is the decay of cached priors, which are computed from the first `dev_blocks`
    blocks of dev. Bins of positions are `width` tokens wide.
    """

    kind: Text
    tables: Items[ContextTable]
    width: Positive
    decay: Decay
    dev_blocks: Positive
    seed: Seed


def evaluate_contexts(scores: Path, domain: str, contexts: ContextEvaluation, output: Path) -> None:
    """Write the losses on `domain`'s test split by model entry, context length and bin of positions (`CONTEXTS`).

    `scores` is the run's folder scores/. Raises DemixError if two tables were scored on different tokens.
    """
    rows = [row for table in contexts.tables for row in _by_position(scores, domain, table, contexts)]
    if len({row["tokens_sha256"] for row in rows}) > 1:
        raise DemixError(f"domain {domain}", "was scored on different tokens by different models", "score it again")
    write_parquet(pa.Table.from_pylist(rows, schema=table_schema(CONTEXTS)), output)
    log.info("%s: %d rows", domain, len(rows))


def losses_by_position(
    directory: Path, columns: Sequence[str], log_prior: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The sums of losses (nats) and the numbers of tokens by position in the block, both [T], of a score table.

    With `log_prior` [E] the columns are mixed with this prior by the rule `history`; without it there is one column.
    """
    sums = []
    for chunk in stream_scores(directory, columns):
        # With `history` a block does not depend on others, so each chunk of blocks can be mixed by itself.
        mixed = chunk.scores[..., 0]
        if log_prior is not None:
            mixed = Mixture(History(), log_prior).table(chunk.scores, chunk.mask)
        sums.append((-mixed.sum(0), chunk.mask.sum(0)))
    nll, tokens = (np.sum(parts, axis=0) for parts in zip(*sums, strict=True))
    return nll, tokens


def _by_position(
    scores: Path, domain: str, table: ContextTable, contexts: ContextEvaluation
) -> Iterator[dict[str, Any]]:
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
