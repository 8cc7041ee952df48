"""All evaluations of one domain, from its score tables to rows of the results table."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from demix.config.evaluation import MixingRecipe
from demix.errors import DemixError
from demix.evaluate.choice import mixing_of, switching_on_dev
from demix.evaluate.columns import COLUMNS, DIFFERENCES, LOSSES, POSTERIORS, PRIORS, table_schema
from demix.evaluate.intervals import bounds, resampled
from demix.evaluate.losses import DocumentLosses, Mixture, dev_priors, document_losses
from demix.evaluate.planned import planned_mixtures, routed_grid
from demix.evaluate.routing import beside_of, best_on_dev
from demix.evaluate.score_tables import ScoreTable, read_scores, refuse_other_model
from demix.files import seed_for, write_parquet
from demix.mix.mixtures import FLOORS
from demix.mix.priors import (
    blocks_used,
    fitted_log_prior,
    log_prior_path,
    posterior_trace,
)
from demix.mix.rules import WeightsRule
from demix.run.models import left_out
from demix.run.systems import Evaluated, ExpertSet
from demix.settings import Items, Seed, Text, settings

log = logging.getLogger(__name__)


@settings(kw_only=True)
class Evaluation(MixingRecipe):
    """The evaluations of one domain, and the settings of the mixtures.

    `kind` is training, novel or suite. `tables` are the score tables with the sets of experts to mix
    (`demix.run.systems.evaluated`). Each system of `compared`, given as (model, experts, method, weights), is
    compared with each system of `against`, given as (name, model, experts, method, weights). `pairs` are further
    comparisons: a system's model, experts, method and weights, and then those of the one that it is compared with,
    which goes by its model's name. `seed` is the seed of the run. Only models of that seed are compared.
    """

    kind: Text
    tables: Items[Evaluated]
    compared: Items[Items[Text]]
    against: Items[Items[Text]]
    pairs: Items[Items[Text]] = ()
    seed: Seed


@dataclass(frozen=True)
class Outputs:
    """Where the tables of one domain go."""

    results: Path
    priors: Path
    differences: Path
    posteriors: Path
    losses: Path


@dataclass(frozen=True)
class Row:
    """A row of results without its intervals, and the nll by document [D] and by stretch [S] that it sums up."""

    values: dict[str, Any]
    nll: np.ndarray
    stretches: np.ndarray


def evaluate_domain(
    scores: Path, domain: str, evaluation: Evaluation, outputs: Outputs, byte_lengths: np.ndarray | None = None
) -> None:
    """Evaluate every model on the test split of `domain`, in one pass over each model's score table.

    `scores` is the run's folder scores/, with models/<model>/mixing.json beside it. `byte_lengths` are the lengths in
    bytes of the tokenizer's ids. `COLUMNS` and docs/concepts.md explain the rows. Raises DemixError if the models were
    scored on different tokens.
    """
    found = _mixed(scores, domain, evaluation, byte_lengths)
    about = {"domain": domain, "seed": evaluation.seed}
    results, differences = _with_intervals(found.rows, found.scored[0], about, evaluation)
    for values, columns, output in (
        (results, COLUMNS, outputs.results),
        (found.priors, PRIORS, outputs.priors),
        (differences, DIFFERENCES, outputs.differences),
    ):
        write_parquet(pa.Table.from_pylist(values, schema=table_schema(columns)), output)
    posteriors = found.posteriors or [table_schema(POSTERIORS).empty_table()]
    write_parquet(pa.concat_tables(posteriors), outputs.posteriors)
    write_parquet(pa.concat_tables(found.losses), outputs.losses)
    log.info("%s: %d rows", domain, len(found.rows))


def system_losses(
    scores: Path, domain: str, evaluation: Evaluation
) -> tuple[DocumentLosses, dict[tuple[str, ...], Row]]:
    """The documents of `domain`, and the rows with their losses by system: (model, experts, method, weights)."""
    found = _mixed(scores, domain, evaluation)
    return found.scored[0], {name: row for row in found.rows if (name := _system(row, evaluation.seed))}


@dataclass(frozen=True)
class _Mixed:
    """All evaluations of one domain, without intervals: of which tables, and what was found so far."""

    scores: Path
    domain: str
    evaluation: Evaluation
    byte_lengths: np.ndarray | None
    rows: list[Row] = field(default_factory=list)
    priors: list[dict[str, Any]] = field(default_factory=list)
    posteriors: list[pa.Table] = field(default_factory=list)
    scored: list[DocumentLosses] = field(default_factory=list)
    losses: list[pa.Table] = field(default_factory=list)

    def place(self, table: Evaluated, split: str) -> Path:
        """The folder of a score table."""
        return self.scores / table.folder / f"{self.domain}.{split}"

    def about(self, table: Evaluated, some: ExpertSet | None = None) -> dict[str, Any]:
        """What the rows of a table, or of one of its sets of experts, have in common."""
        of_set = {"experts": some.label, "n_experts": len(some.experts)} if some else {}
        of_domain = {"domain": self.domain, "kind": self.evaluation.kind}
        return of_domain | {"model": table.model, "seed": table.seed} | of_set

    def add_single(self, table: Evaluated) -> None:
        """Evaluate a table of one column."""
        (column,) = table.columns
        totals = document_losses(self.place(table, "test"), (column,), byte_lengths=self.byte_lengths)
        self.scored.append(totals)
        named = replace(table, model=table.folder) if table.told_apart else table
        self.losses.append(_losses(self.domain, named, totals))
        about = self.about(table) | {"n_experts": 1, "experts": column, "method": "dense", "top_k": table.top_k or None}
        if table.merged:
            about |= {"experts": "training", "method": "merged"}
        if table.without:
            about |= {"experts": left_out(table.without)}
        for some in table.sets:
            about |= {"experts": some.label, "method": "naive"}
        expert = column if table.sets else ""
        self.rows.append(_row(about, totals, column, expert=expert, weights=table.merged))

    def add_mixed(self, table: Evaluated) -> None:
        """Evaluate a table whose experts are mixed."""
        dev = read_scores(self.place(table, "dev"), table.columns) if "dev" in table.splits else None
        scored = len(dev.mask) if dev else 0
        planned = {some: self._planned(table, some, dev) for some in table.sets}
        mixtures = [mixture for entries in planned.values() for mixture, _ in entries]
        log_priors = dev_priors(dev, mixtures) if dev else {}
        for some, entries in planned.items():
            if tried := routed_grid(self.evaluation, some, scored, contexts=1):
                entries += best_on_dev(self.place(table, "dev"), table.columns, tried, log_priors)
        traced = next((_traced(self.evaluation, some) for some in table.sets if some.variants), None)
        test = self.place(table, "test")
        beside = beside_of(test, mixtures)
        totals = document_losses(test, table.columns, mixtures, log_priors, self.byte_lengths, traced, beside)
        self.scored.append(totals)
        self.losses.append(_losses(self.domain, table, totals))
        for some, entries in planned.items():
            about = self.about(table, some)
            self.rows.extend(_expert_rows(some, self.domain, about, totals, dev))
            self.rows.extend(_mixture_rows(entries, about, totals, scored))
            # Whoever asks for a prior means that of the run's own model.
            self.priors.extend(_prior_rows(entries, about, log_priors) if table.seed == self.evaluation.seed else ())
        if dev and traced is not None and totals.posteriors is not None:
            part = dev.select(traced.experts)
            path = log_prior_path(part.scores, part.mask, traced.weights, traced.decay)[:-1]
            on_dev = posterior_trace(part.scores, part.mask, traced.weights, path)
            about = self.about(table) | {"experts": "training", "seed": self.evaluation.seed}
            for split, posteriors in (("dev", on_dev), ("test", totals.posteriors)):
                self.posteriors.append(_trace(traced, posteriors, about | {"split": split}))

    def _planned(self, table: Evaluated, some: ExpertSet, dev: ScoreTable | None) -> list[tuple[Mixture, str]]:
        """The mixtures of a set of experts, with the rules that are chosen on dev."""
        weights = some.weights or self.evaluation.weights
        rules = _chosen(weights, dev, some.experts, self.scores.parent / "models" / table.folder)
        return [
            (replace(mixture, rule=mixture.rule or rules.get(mixture.weights)), variant)
            for mixture, variant in planned_mixtures(self.evaluation, some, len(dev.mask) if dev else 0)
        ]


def _mixed(scores: Path, domain: str, evaluation: Evaluation, byte_lengths: np.ndarray | None = None) -> _Mixed:
    found = _Mixed(scores, domain, evaluation, byte_lengths)
    for table in evaluation.tables:
        for split in table.splits:
            refuse_other_model(found.place(table, split), table.columns, scores.parent / "models" / table.folder)
        (found.add_mixed if table.several else found.add_single)(table)
    if len({totals.sha256 for totals in found.scored}) > 1:
        raise DemixError(f"domain {domain}", "was scored on different tokens by different models", "score it again")
    return found


def _chosen(
    weights: Sequence[str | int], dev: ScoreTable | None, experts: tuple[str, ...], model: Path
) -> dict[str | int, WeightsRule]:
    """The rules of those of `weights` whose parameters are chosen on dev, for the folder of a model and its experts."""
    rules: dict[str | int, WeightsRule] = {}
    if "tempered" in weights:
        rules["tempered"] = mixing_of(model)
    if "switching" in weights and dev:
        part = dev.select(experts)
        rules["switching"] = switching_on_dev(part, fitted_log_prior(part.scores, part.mask))
    return rules


def _traced(evaluation: Evaluation, some: ExpertSet) -> Mixture:
    return Mixture("updating", some.experts, "history", decay=evaluation.decay)


def _row(about: dict[str, Any], totals: DocumentLosses, name: str | Mixture, **more: Any) -> Row:
    """The row of the expert or the mixture `name`."""
    nll = totals[name]
    tokens, summed = int(totals.tokens.sum()), float(nll.sum())
    scorer = f"masked, {totals.folds} folds" if totals.folds else "paper"
    values = {
        "weights": "", "split": "test", "expert": "", "oracle": False, "documents": len(np.unique(totals.origins)),
        "pieces": len(totals.tokens), "tokens": tokens, "nll": summed, "perplexity": float(np.exp(summed / tokens)),
        "tokens_sha256": totals.sha256, "variant": "", "scorer": scorer, "chosen_on": "", "routing": "", "context": "",
    }  # fmt: skip
    if totals.byte_count:
        values |= {"bytes": totals.byte_count, "bits_per_byte": float(summed / np.log(2) / totals.byte_count)}
    return Row(about | values | more, nll, totals.stretches[name])


def _expert_rows(
    some: ExpertSet, domain: str, about: dict[str, Any], totals: DocumentLosses, dev: ScoreTable | None
) -> Iterator[Row]:
    """The naive expert, where all methods are asked for: a domain's own, else the best on test and that on dev."""
    if "naive" in some.methods:
        naive = about | {"method": "naive"}
        if domain in some.experts:
            yield _row(naive, totals, domain, expert=domain)
        else:
            best = min(some.experts, key=lambda expert: totals[expert].sum())
            yield _row(naive, totals, best, expert=best, oracle=True, chosen_on="test")
            if dev:
                best = some.experts[int(dev.select(some.experts).scores.sum(axis=(0, 1)).argmax())]
                yield _row(naive, totals, best, expert=best, variant="dev_choice", chosen_on="dev")
        if some.alone:
            for expert in some.experts:
                yield _row(about | {"method": "expert"}, totals, expert, expert=expert)


def _mixture_rows(
    entries: Iterable[tuple[Mixture, str]], about: dict[str, Any], totals: DocumentLosses, scored: int
) -> Iterator[Row]:
    for mixture, variant in entries:
        more: dict[str, Any] = {"method": mixture.method, "top_k": mixture.top_k}
        more |= {"variant": variant, "routing": mixture.routing, "context": mixture.context}
        more |= {"scorer": mixture.scorer} if mixture.scorer != "paper" else {}
        if mixture.method in FLOORS:
            more |= {"oracle": True, "chosen_on": "test"}
        elif mixture.method != "average":
            more["weights"] = str(mixture.weights)
            rule = vars(mixture.weights_rule)
            more |= {name: rule[name] for name in ("beta", "gamma", "alpha", "temperature") if name in rule}
        if mixture.method in ("updating", "cached"):
            more["decay"] = mixture.decay
        if mixture.method == "cached":
            more["dev_blocks"] = min(blocks_used(mixture.dev_blocks, mixture.scorer), scored)
        yield _row(about, totals, mixture, **more)


def _prior_rows(
    entries: Iterable[tuple[Mixture, str]], about: dict[str, Any], log_priors: dict[Mixture, np.ndarray]
) -> Iterator[dict[str, Any]]:
    for mixture, variant in entries:
        fitted = mixture.method == "fitted" and mixture.weights == ""
        if (fitted or mixture.method == "cached") and mixture.top_k is None and not variant:
            for expert, prior in zip(mixture.experts, np.exp(log_priors[mixture]).tolist(), strict=True):
                weights = "fitted" if fitted else str(mixture.weights)
                row = about | {"weights": weights, "expert": expert, "prior": prior}
                yield {name: row[name] for name in PRIORS}


def _trace(mixture: Mixture, posteriors: np.ndarray, about: dict[str, Any]) -> pa.Table:
    """Posteriors [B, E] in long form."""
    blocks, experts = posteriors.shape
    columns = about | {"weights": str(mixture.weights), "decay": mixture.decay}
    columns = {name: pa.repeat(value, blocks * experts) for name, value in columns.items()}
    columns["block"] = np.repeat(np.arange(blocks), experts)
    columns["expert"] = np.tile(np.array(mixture.experts), blocks)
    columns["posterior"] = posteriors.ravel()
    return _table(columns, POSTERIORS)


def _losses(domain: str, table: Evaluated, totals: DocumentLosses) -> pa.Table:
    """The losses by document [E, D] under the columns of one model's score table, in long form."""
    documents, experts = len(totals.numbers), len(totals.experts)
    columns = {
        name: pa.repeat(value, experts * documents)
        for name, value in (("domain", domain), ("model", table.model), ("seed", table.seed))
    }
    columns |= {
        "document": np.tile(totals.numbers, experts),
        "origin": np.tile(totals.origins, experts),
        "tokens": np.tile(totals.tokens, experts),
        "expert": np.repeat(np.array(list(totals.experts)), documents),
        "nll": np.concatenate(list(totals.experts.values())),
    }
    return _table(columns, LOSSES)


def _table(values: Mapping[str, Any], columns: Mapping[str, pa.DataType]) -> pa.Table:
    """A table of arrays, cast to the types of `columns`."""
    arrays = [pa.array(values[name]).cast(kind) for name, kind in columns.items()]
    return pa.table(arrays, schema=table_schema(columns))


def _system(row: Row, seed: int | None) -> tuple[str, ...] | None:
    """(model, experts, method, weights) of a row of the tables' own systems and of `seed`; None for another row."""
    values = row.values
    if values["variant"] or values.get("top_k") or values["method"] == "expert" or values.get("seed") != seed:
        return None
    return tuple(values[name] for name in ("model", "experts", "method", "weights"))


def _with_intervals(
    rows: list[Row], totals: DocumentLosses, common: dict[str, Any], evaluation: Evaluation | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows with bounds of their perplexity, and the systems compared with others, all on the same resamples."""
    # By what was scored: the same documents are drawn for all models, seeds and runs.
    seed = seed_for(0, common["domain"], totals.sha256)
    by_document = np.stack([totals.tokens, *(row.nll for row in rows)])
    by_stretch = np.stack([totals.stretched, *(row.stretches for row in rows)])
    drawn = resampled(by_document, totals.origins, by_stretch, seed)
    tokens, *nlls = np.empty((len(by_document), 0)) if drawn is None else drawn
    results, systems = [], {}
    for row, nll in zip(rows, nlls, strict=True):
        low, high = (None, None) if drawn is None else bounds(np.exp(nll / tokens))
        results.append(row.values | {"perplexity_low": low, "perplexity_high": high})
        # Differences are between models of one training each.
        if names := _system(row, common.get("seed")):
            systems[names] = (row, nll)
    differences = []
    for names, name, other in _comparisons(evaluation) if evaluation else ():
        if names != other and names in systems and other in systems:
            (row, nll), (base, base_nll) = systems[names], systems[other]
            difference = row.values | {
                "against": name,
                "nats_per_token": (row.values["nll"] - base.values["nll"]) / row.values["tokens"],
                "perplexity": row.values["perplexity"] - base.values["perplexity"],
            }
            if drawn is not None:
                low, high = bounds((nll - base_nll) / tokens)
                difference |= {"nats_per_token_low": low, "nats_per_token_high": high}
                low, high = bounds(np.exp(nll / tokens) - np.exp(base_nll / tokens))
                difference |= {"perplexity_low": low, "perplexity_high": high}
            differences.append({name: difference.get(name) for name in DIFFERENCES})
    return results, differences


def _comparisons(evaluation: Evaluation) -> Iterator[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    """A system, the name of the one that it is compared with, and that one."""
    for system in evaluation.compared:
        for name, *key in evaluation.against:
            yield tuple(system), name, tuple(key)
    for pair in evaluation.pairs:
        yield tuple(pair[:4]), pair[4], tuple(pair[4:])
