"""The lines of the main table in order: the best at equal training FLOPs, by how much, and whether significantly."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from demix.config.models import KINDS
from demix.report.cells import Measured, measured
from demix.report.read import paired, paired_either_way, percent
from demix.report.run_data import RunData
from demix.report.systems import BALANCED, CACHED, all_training_flops, families, parameters_of, training_flops
from demix.report.table import Table
from demix.report.verdict import mean_interval
from demix.run.evaluated import columns_of
from demix.run.models import Model
from demix.run.run import Run
from demix.run.systems import (
    System,
    added,
    main_systems,
    ngram_lines,
    row_systems,
    table_rows,
)

# Training FLOPs are equal within 1%: they differ by an update, or between architectures of the same sizes.
EQUAL = 0.01
# Printed below a mean that is not lower than the mean of the run's best n-grams.
NOT_BELOW_NGRAMS = "above n-grams"


@dataclass(frozen=True)
class Entry:
    """A line of the main table. `on` has the measurements by kind of domains.

    `passes` is the number of experts that run for each token. `parameters` is the number of parameters of all models of
    the system, or of counted n-grams. `flops` are the training FLOPs of these models. `representative` is True for the
    one system that represents its model in the verdict. `apart` is the reason why the training FLOPs are not equal;
    empty if they are. `family` is the same for models of one method. Each baseline (a model without experts) is its own
    family, except n-grams (`counts`), which form one family and need no training FLOPs. `mixed` systems are not models:
    they mix columns of several models.
    """

    system: System
    on: dict[str, Measured]
    passes: int
    parameters: int
    flops: float
    representative: bool
    apart: str
    family: str
    baseline: bool
    counts: bool = False
    mixed: bool = False

    @property
    def label(self) -> str:
        """The name of the line."""
        return self.system.label

    @property
    def what(self) -> str:
        """Whether the model has experts or is a baseline, for the colour of its dots."""
        return "baseline" if self.baseline else "experts"

    def oracle_on(self, kind: str) -> bool:
        """Whether the number on a kind of domains is that of the best expert or token on the test text."""
        return kind == "novel" and self.system.method == "naive"

    @property
    def oracle(self) -> bool:
        """Whether one of the numbers is that of an oracle."""
        return any(self.oracle_on(kind) for kind in self.on)

    @property
    def fair(self) -> bool:
        """Whether it may be called the best: training FLOPs are equal, and nothing was chosen on test text."""
        return self.representative and not (self.apart or self.oracle)

    @property
    def model(self) -> bool:
        """Whether it is a model that may be called the best."""
        return self.fair and not (self.counts or self.mixed)

    @property
    def first(self) -> Measured:
        """The measurements on the training domains."""
        return next(iter(self.on.values()))


@dataclass(frozen=True)
class Ranking:
    """The lines of the main table of a run, sorted by the mean on the training domains; oracles come last."""

    entries: tuple[Entry, ...]
    data: RunData

    @property
    def models(self) -> int:
        """The number of models that may be called the best; a model with several lines counts once."""
        return len({entry.system.model for entry in self.entries if entry.model})

    @property
    def dense(self) -> Entry:
        """Dense (Balanced), the baseline of all comparisons."""
        return next(entry for entry in self.entries if entry.system == BALANCED)

    @property
    def best(self) -> Entry:
        """The best model at equal FLOPs of training."""
        return next(entry for entry in self.entries if entry.model)

    @property
    def next(self) -> Entry | None:
        """The best line of another model than `best`, n-grams and mixtures with them included."""
        others = (one for one in self.entries if one.fair and one.system.model != self.best.system.model)
        return next(others, None)

    @property
    def main(self) -> tuple[Entry, ...]:
        """The main lines: dense models and domain tokens, the best n-grams, each DEMix (the paper's also by its own
        rule), the best of each other family, and the line next to the best.

        Every DEMix is shown by the same rule, so that lines show the effect of an option, such as a dense warm start,
        and not of the rule.
        """
        shown, seen, demix = [], set(), KINDS["demix"].label
        for entry in self.entries:
            first = entry.family not in seen and (entry.fair or (entry.baseline and entry.representative))
            if first or (entry.fair and entry.family == demix) or entry.system == CACHED or entry is self.next:
                shown.append(entry)
            if first:
                seen.add(entry.family)
        return tuple(shown)

    def lowest(self, kind: str) -> Entry | None:
        """The line of `main` to print bold on a kind of domains; None if the next line may be as good.

        Bold requires that the whole interval of its difference to the next line is below zero.
        """
        known = (entry for entry in self.main if not math.isnan(entry.on[kind].mean))
        some = [entry for entry in known if not (entry.apart or entry.oracle)]
        some.sort(key=lambda entry: entry.on[kind].mean)
        return some[0] if len(some) > 1 and self.significantly(some[0], some[1], kind) else None

    def best_ngrams(self, kind: str) -> Entry | None:
        """The line of n-grams with the lowest mean on a kind of domains."""
        known = (one for one in self.entries if one.counts and not math.isnan(one.on[kind].mean))
        return min(known, key=lambda one: one.on[kind].mean, default=None)

    def significantly(self, one: Entry, other: Entry, kind: str) -> bool | None:
        """Whether the whole interval of the mean difference (`one` minus `other`) is below zero; None without interval.

        If the two were not compared on the same resamples, the interval is the widest that their differences to Dense
        (Balanced) allow: its width is the sum of both widths.
        """
        names = next(domains.names for domains in self.data.kinds if domains.kind == kind)
        mine, others = (self.data.own.perplexities(entry.system, names) for entry in (one, other))
        bounds, difference = self.data.bounds, mine - others
        known = paired_either_way(bounds, one.system, other.system, names)
        if len(known) < len(names):
            by_way = (paired(bounds, each.system, BALANCED, names) for each in (one, other) if each is not self.dense)
            halves: pd.Series = sum((found["high"] - found["low"]) / 2 for found in by_way)
            known = pd.DataFrame({"low": difference - halves, "high": difference + halves}).dropna()
        interval = mean_interval(difference, known)
        return interval[1] < 0 if interval else None

    @property
    def verdict(self) -> str:
        """The result of the run in one sentence."""
        best, dense, (training, *others) = self.best, self.dense, self.data.kinds
        if math.isnan(dense.first.mean):
            return f"This run has no numbers for {dense.label}, the baseline of all comparisons."
        begin = f"Of {self.models} models at equal training FLOPs"
        if (rival := self.next) and rival.first.mean < best.first.mean:
            lowest = f"{rival.label} has the lowest mean perplexity on the {training.said}, {rival.first.mean:.2f}."
            begin = f"{lowest} {begin} (n-grams, caches and combined models do not count)"
        if best.system.model == dense.system.model:
            nearest = self.next
            more = f"; the next, {nearest.label}, is {_against(nearest.first.change)} it" if nearest else ""
            return f"{begin}, none is below {dense.label} on the {training.said}{more}."
        parts = [f"{_against(best.first.change)} {dense.label} on the {training.said}{_significant(best.first)}"]
        measured = [(best.on[one.kind], one.said) for one in others if not math.isnan(best.on[one.kind].change)]
        parts += [f"{_against(one.change)} on the {said}{_significant(one)}" for one, said in measured]
        return f"{begin}, {best.label} is best: {'; '.join(parts)}."

    @property
    def remarks(self) -> list[str]:
        """Additions to the verdict: the next model and other seeds."""
        return [*self._nearest(), *self._seeds()]

    def _nearest(self) -> Iterator[str]:
        best, other = self.best, self.next
        if other is None or self.dense in (best, other):
            return
        kind = self.data.kinds[0].kind
        if other.first.mean < best.first.mean:
            return
        said = {True: " (significant)", False: " (not significant)", None: ""}
        sure, change = said[self.significantly(best, other, kind)], percent(best.first.mean, other.first.mean)
        yield f"The next best is {other.label}, {change:.1f}% higher on the {kind} domains{sure}."

    def _seeds(self) -> Iterator[str]:
        best, names = self.best, self.data.kinds[0].names
        means = [
            (found.mean(best.system, names), found.mean(BALANCED, names))
            for found in self.data.results.by_seed.values()
        ]
        lower = [mine < dense for mine, dense in means if not math.isnan(mine + dense)]
        if len(lower) > 1:
            yield f"{best.label} is below {self.dense.label} in {sum(lower)} of {len(lower)} seeds."


def _against(change: float) -> str:
    """The change in words, such as "7.6% below"."""
    return f"{abs(change):.1f}% {'below' if change < 0 else 'above'}"


def _significant(measured: Measured) -> str:
    return f", significant on {measured.significant} of {measured.known}" if measured.known else ""


def ranking(data: RunData) -> Ranking:
    """The lines of the main table that have numbers, ranked on the run's own seed."""
    lines = (_entry(system, data) for _, system in main_systems(data.run))
    known = [one for one in lines if one.system == BALANCED or not all(math.isnan(on.mean) for on in one.on.values())]
    known.sort(key=lambda entry: (entry.oracle, math.isnan(entry.first.mean), entry.first.mean))
    return Ranking(tuple(known), data)


def _entry(system: System, data: RunData) -> Entry:
    run, adapted, counts = data.run, added(data.run)[1], ngram_lines(data.run)
    mixed = run.config.evaluation.mixed.get(system.model)
    named = mixed.models if mixed else (system.model,)
    trained = [one for one in run.trained if one.name in named]
    baseline = not any(one.kind.has_experts or one.kind.routed for one in trained)
    apart = _unequal(trained[0], run) if len(trained) == 1 else f"with {len(trained)} trained models" * bool(mixed)
    if mixed:
        passes, family = sum(len(columns_of(run, name)) for name in mixed.models), system.label
    else:
        experts = run.domains if system.experts == "all" else trained[0].experts if trained else run.training
        passes = 1 if system.method in ("dense", "naive") else len(experts)
        family = "n-grams" if not trained else system.model if baseline else families(run)[system.model].name
    every = system.experts == adapted.experts
    sizes = [(len(run.domains if every else one.experts), *parameters_of(one, run)) for one in trained]
    if every:
        apart = "added experts trained on the novel domains"
    return Entry(
        system,
        {one.kind: measured(data.own, data.bounds, system, BALANCED, one.names) for one in data.kinds},
        passes=passes,
        parameters=sum(shared + experts * own for experts, shared, own in sizes)
        + sum(count for name, count in data.ngrams.items() if name in named),
        # The length of an adaptation depends on dev loss, so its FLOPs are not known in advance.
        flops=math.nan if every else sum(all_training_flops(one, run) for one in trained),
        representative=bool(mixed) or system in (adapted, *counts, representatives(run).get(system.model)),
        apart=apart,
        family=family,
        baseline=baseline,
        counts=system in counts,
        mixed=bool(mixed),
    )


def representatives(run: Run) -> dict[str, System]:
    """The system that represents each model entry; it is fixed before any test text is scored.

    It is the system mixed by `tempered`, which does not know the domain, or without it the rule of the model's paper.
    """
    found = {}
    for name, row in table_rows(run).items():
        systems = row_systems(row, run)
        own = systems[0] if row.kind.domain_tokens else families(run)[name].system
        found[name] = next((one for one in systems if one.weights.startswith("tempered")), own)
    return found


def _unequal(model: Model, run: Run) -> str:
    """The reason why a model's training FLOPs differ from those of Dense (Balanced); empty if they are equal."""
    pair = (model, next(one for one in run.own if one.name == BALANCED.model))
    if pair[0].base.initial == pair[1].base.initial != "":
        # The FLOPs of their common parent are equal, so they need not be known.
        mine, others = (training_flops(one, run)[0] for one in pair)
    else:
        mine, others = (all_training_flops(one, run) for one in pair)
    more = mine / others - 1
    if math.isnan(more):
        return "training FLOPs of a parent are unknown"
    return "" if abs(more) <= EQUAL else f"with {abs(more):.0%} {'more' if more > 0 else 'fewer'} training FLOPs"


def main_table(found: Ranking, entries: Sequence[Entry]) -> Table:
    """Lines of the main table, best first: means, changes relative to Dense (Balanced) with intervals, and costs."""
    rows: dict[str, dict[str, Any]] = {entry.label: {} for entry in entries}
    beneath: dict[str, dict[str, str]] = {entry.label: {} for entry in entries}
    best: dict[str, dict[str, bool]] = {entry.label: {} for entry in entries}
    lowest = {domains.kind: found.lowest(domains.kind) for domains in found.data.kinds}
    counted = {domains.kind: found.best_ngrams(domains.kind) for domains in found.data.kinds}
    for entry in entries:
        row, label = rows[entry.label], entry.label
        for domains in found.data.kinds:
            name, measured = domains.said, entry.on[domains.kind]
            change, significant = (f"{domains.heading}, {what}" for what in ("change in %", "significant"))
            row[name], row[change] = measured.mean, measured.change if entry is not found.dense else float("nan")
            row[significant] = f"{measured.significant} of {measured.known}" if measured.known else " "
            interval = "{:+.1f} to {:+.1f}".format(*measured.interval).replace("-", "−") if measured.interval else ""
            beneath[label][change] = "oracle" if entry.oracle_on(domains.kind) else interval
            best[label][name] = entry is lowest[domains.kind]
            if (ngrams := counted[domains.kind]) and not entry.counts and measured.mean >= ngrams.on[domains.kind].mean:
                beneath[label][name] = NOT_BELOW_NGRAMS
        row["Experts run per token"], row["Parameters"] = float(entry.passes), entry.parameters or math.nan
        row["Training FLOPs"], row["Remark"] = entry.flops, entry.apart or " "
    frame, bold, below = (pd.DataFrame.from_dict(one, orient="index") for one in (rows, best, beneath))
    # An empty column is left out.
    frame = frame if any(entry.apart for entry in entries) else frame.drop(columns="Remark", errors="ignore")
    caption = (
        f"Change: relative to {found.dense.label}. Oracle: the best expert or domain token, chosen on test data. "
        "Parameters, training FLOPs: the sum over a line's models; n-grams count as parameters and need no FLOPs."
    )
    known = [(one, domains) for domains in found.data.kinds if (one := counted[domains.kind])]
    if rivals := [f"{one.label} ({one.on[on.kind].mean:.2f}) on the {on.said}" for one, on in known]:
        caption += f" {NOT_BELOW_NGRAMS.capitalize()}: not below the run's best n-grams, {', '.join(rivals)}."
    return Table(
        frame,
        caption=caption,
        formats={"Experts run per token": "{:.0f}", "Parameters": "{:,.0f}", "Training FLOPs": "{:.3g}"},
        best=bold,
        beneath=below,
        title="Mean test perplexity (lower is better)",
    )
