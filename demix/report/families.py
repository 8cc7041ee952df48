"""The families of models side by side: dense, DEMix, BTM and c-BTM, what each costs, and how many experts it takes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from demix.config.architecture import (
    Architecture,
)
from demix.config.clustering import Clustering
from demix.report import read, title_of
from demix.report.cells import kinds_of_domains, lowest, mean_of, percent, seeds_of
from demix.report.look import COLOURS, DASHES, finish, finite, heading_of
from demix.report.read import Results, evaluations, perplexities
from demix.report.render import Table
from demix.report.verdict import mean_interval
from demix.run.models import Model
from demix.run.run import Run
from demix.run.systems import System, by_distance, label_of, merged_label, routed_weights, systems_of, table_rows

ONE = "1 cluster"
OF_RELEASED = (
    "Released scorer: weights by clusters as in the code released with c-BTM, at the same temperature: distances are "
    "squared twice, and the context lacks the last token."
)
OF_AVERAGES = "Averaged experts are one model of their mean parameters, of the run's own seed, as is their Dense."
OF_ROUTED = (
    "Merged-routed: of a row's experts each token chooses two in every layer, by the cosine of its state with the mean "
    "state of each expert's dev text. Nothing was trained for it; of the run's own seed, as is its Dense."
)


@dataclass(frozen=True)
class Family:
    """A row of `models` of the run's own seed, and the system that stands for it.

    `experts` is the number of its training experts, 1 for a dense model. `clustering` is None for experts of domains.
    `architecture` is that of the model that predicts text: of a merged-routed one another than that which was trained.
    """

    model: Model
    system: System
    experts: int
    clustering: Clustering | None
    architecture: Architecture

    @property
    def tokens(self) -> int:
        """The tokens of training of all experts together, the seed phase included."""
        return int(self.model.settings.tokens)

    def learned(self, before: dict[str, int | None]) -> float:
        """The tokens with those of a folder's model, which `before` has by row; NaN if these are not known."""
        known = before.get(self.model.row, 0)
        return math.nan if known is None else float(self.tokens + known)

    @property
    def begun(self) -> str:
        """How training began where not with a seed whose schedule it goes on with: restart, or folder."""
        if self.model.base.initial:
            return "folder"
        return "restart" if self.model.restarts else ""

    @property
    def budget(self) -> tuple[int, str]:
        """What rows that are compared share: tokens, and how training began."""
        return self.tokens, self.begun

    @property
    def name(self) -> str:
        """The name of the family in papers."""
        kind = self.model.kind
        if self.architecture.routed and not kind.routed:
            return "Merged-routed"
        if not self.clustering:
            return kind.label
        return "c-BTM" if kind.expert_scope == "model" else f"{kind.label} on clusters"

    @property
    def chosen(self) -> str:
        """The experts of a model of one column: 1, or those among which a token chooses."""
        routed = self.architecture.routed
        return f"{routed.experts}, top-{routed.top_k}" if routed else "1"

    @property
    def made(self) -> str:
        """How the clusters were made; empty for experts of domains."""
        if not self.clustering:
            return ""
        balanced = self.clustering.method != "kmeans" or self.clustering.balanced
        return {"kmeans": "k-means", "random": "random"}[self.clustering.method] if balanced else "k-means, unbalanced"


def families(run: Run) -> dict[str, Family]:
    """The rows of `models` in the order of tables, without domain tokens.

    Experts of domains are weighted by the cached prior and those of clusters by the distance of the context to the
    clusters, as in their papers.
    """
    models = {model.name: model for model in run.trained if model.seed == run.seed}
    known, routed = run.config.clusterings, routed_weights(run)
    found = {}
    for row, kind in table_rows(run).items():
        if kind.domain_tokens:
            continue
        model, system = models[row], systems_of(row, kind)[-1]
        if model.data and routed:
            system = by_distance(model, routed)
        architecture = model.architecture
        found[row] = Family(model, system, len(model.experts), known.get(model.data), architecture)
    return found


def by_label(run: Run) -> dict[str, Family]:
    """The families by their labels in tables, each followed by what was made of its experts: single models."""
    found = {}
    for row, family in families(run).items():
        label = label_of(row, family.model.kind)
        found[label] = family
        for one in run.merged:
            if one.model.name == row:
                named = merged_label(one)
                system = System(named, row, "training", "merged", one.weights)
                found[named] = replace(family, system=system, experts=1, architecture=one.architecture)
    return found


def tried_top_k(run: Run, experts: int) -> list[int]:
    """The values of `evaluation.top_k` below a number of experts, ascending."""
    return sorted(k for k in run.config.evaluation.top_k if k < experts)


def families_table(results: Results, run: Run, before: dict[str, int | None]) -> Table:
    """Perplexity of each family on both kinds of domains, at its tokens with those `before` (`read.tokens_before`)."""
    rows: dict[str, dict[str, Any]] = {}
    beneath: dict[str, dict[str, str]] = {}
    own = read.of_seed(results, run)
    for label, family in by_label(run).items():
        model, system = family.model, family.system
        mixed = model.kind.has_experts
        what = "clusters" if family.clustering else "domains"
        row: dict[str, Any] = {
            "Family": family.name,
            "Experts": f"{len(model.experts)} {what}" if mixed and not family.architecture.routed else family.chosen,
            "Mixed by": " ".join(filter(None, (system.method, system.weights))) if mixed else "",
            "Tokens": family.learned(before),
        }
        lines = beneath[label] = {}
        for kind, domains in _kinds(run):
            row[kind] = mean_of(perplexities(results, system, domains))
            lines[kind] = _spread(results, system, domains)
            # Merged models are made of the run's own seed alone.
            dense = perplexities(own if system.method == "merged" else results, read.BALANCED, domains)
            row[f"{kind}, %"] = percent(mean_of(dense), row[kind]) if system != read.BALANCED else np.nan
        for rule, ruled in _other_rules(system, run).items() if mixed and system.method != "merged" else ():
            for kind, domains in _kinds(run):
                row[f"{kind}, {rule}"] = mean_of(perplexities(results, ruled, domains))
        rows[label] = row
    frame = pd.DataFrame.from_dict(rows, orient="index")
    seeds = len(results.by_seed)
    return Table(
        "families",
        title_of("families"),
        "Mean test perplexity over the training and over the novel domains of each row of models, mixed by the rule of "
        "its paper, of which nothing is chosen: cached (a prior from dev text of the domain, with weights by the "
        "block's history) for experts of domains; cluster (the distance of the text so far to each cluster) for "
        "experts of clusters, where evaluation.weights names it. Lower is better. % is the change from Dense "
        "(Balanced).",
        frame,
        notes=(
            "Further columns are by rules whose parameters are chosen on dev: tempered on that of the training "
            "domains, switching (its prior too) and cluster (temperature and top-k) on that of the domain itself. So "
            "these two are told the domain, as cached is.",
            *([OF_RELEASED] if routed_weights(run) else []),
            "Tokens are those of all experts together, the seed phase included.",
            *read.parent_notes(run, before),
            *([OF_AVERAGES] if any(one.weights != "routed" for one in run.merged) else []),
            *([OF_ROUTED] if any(one.weights == "routed" for one in run.merged) else []),
            f"Means over {seeds} seeds, ± the standard deviation of a seed's mean. All seeds have the same clusters."
            if seeds > 1
            else "Below a mean its 95% interval from resampling test documents, where every domain has 20 of them.",
        ),
        formats={"Tokens": "{:,.0f}"} | {name: "{:+.1f}" for name in frame if name.endswith("%")},
        best=lowest(frame[[kind for kind, _ in _kinds(run)]], axis=0),
        beneath=pd.DataFrame.from_dict(beneath, orient="index"),
    )


def _other_rules(system: System, run: Run) -> dict[str, System]:
    """`system` by rules of weights whose parameters are chosen on dev, and by that of the code released with c-BTM."""
    rules = {
        "tempered": replace(system, method="uniform", weights="tempered"),
        "switching": replace(system, method="fitted", weights="switching"),
    }
    if routed := routed_weights(run):
        near = replace(system, method="uniform", weights=routed)
        rules["cluster on dev"] = replace(near, variant="dev_temperature")
        rules["released scorer"] = near.released_scorer()
    return rules


def _kinds(run: Run) -> list[tuple[str, list[str]]]:
    """The headings of the kinds of domains that the run has, and the domains."""
    return [(kind.capitalize(), domains) for kind, domains in kinds_of_domains(run) if domains]


def _spread(results: Results, system: System, domains: list[str]) -> str:
    """The spread over seeds, or the interval over documents, of a mean over domains; empty where there is neither."""
    found = evaluations(results, system, domains)
    if found["perplexity"].isna().any():
        return ""
    if len(results.by_seed) > 1:
        return seeds_of(results, system, domains)
    interval = mean_interval(found["perplexity"], found[["low", "high"]].dropna())
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""


def top_k_table(results: Results, run: Run) -> Table:
    """Perplexity by the number of experts a token: Figure 9 and Table 9 of c-BTM's paper."""
    rows: dict[str, dict[str, float]] = {}
    for family in families(run).values():
        single = not family.model.kind.has_experts
        lines = rows[family.system.label] = {}
        for kind, domains in _kinds(run):
            for k in [] if single else tried_top_k(run, family.experts):
                lines[f"{kind}, top-{k}"] = mean_of(perplexities(results, replace(family.system, top_k=k), domains))
            lines[f"{kind}, all"] = mean_of(perplexities(results, family.system, domains))
    most = max((family.experts for family in families(run).values()), default=1)
    columns = [
        f"{kind}, {k}" for kind, _ in _kinds(run) for k in (*(f"top-{k}" for k in tried_top_k(run, most)), "all")
    ]
    frame = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=columns)
    return Table(
        "top_k",
        title_of("top_k"),
        "Mean test perplexity by the number of experts that are mixed at each token, the likeliest ones (as in Figure "
        "9 and Table 9 of the c-BTM paper). Lower is better.",
        frame,
        notes=("A model without domain experts is under “all”.",),
        best=lowest(frame, axis=0),
    )


def temperatures_table(results: Results, run: Run) -> Table:
    """Perplexity by context, temperature and number of experts a token: Table 9 of c-BTM's paper, by row of models."""
    evaluation, rows = run.config.evaluation, dict[str, dict[str, float]]()
    tried = results.rows.query("split == 'test' and variant == 'routing' and method == 'uniform'")
    tried = tried.assign(k=[f"top-{k:.0f}" if pd.notna(k) else "all" for k in tried["top_k"]])
    for family in families(run).values():
        found = tried[(tried["model"] == family.model.row) & (tried["weights"] == routed_weights(run))]
        for kind, domains in _kinds(run):
            by_domain = found.pivot_table("perplexity", ["context", "temperature", "k"], "domain")
            means = by_domain.reindex(columns=domains).dropna().mean(axis=1)
            for (context, temperature, k), mean in means.items():
                rows.setdefault(f"{family.model.row}, {context}, τ = {temperature:g}", {})[f"{kind}, {k}"] = mean
    ks = (*(f"top-{k}" for k in sorted(evaluation.top_k)), "all")
    columns = [f"{kind}, {k}" for kind, _ in _kinds(run) for k in ks]
    return Table(
        "temperatures",
        title_of("temperatures"),
        "Mean test perplexity of experts that are weighted by the distance of a context to their clusters, by the "
        "context (the document so far, what of it is in the block, or no more of it than its first half), the "
        "temperature τ and the number of experts a token (as in Table 9 of the c-BTM paper). Lower is better.",
        pd.DataFrame.from_dict(rows, orient="index").reindex(columns=columns).astype("float64"),
        notes=(
            f"The other tables use the {next(iter(evaluation.routing_context), 'document')} and τ = "
            f"{evaluation.temperature:g}. The lowest of a column is no choice that a system could have "
            "made.",
        ),
    )


def one_clusters(run: Run) -> dict[tuple[int, str], System]:
    """The models of one cluster by their budgets: Dense (Balanced), and dense rows that begin as branches do.

    A seed is a state of Dense (Balanced), which goes on with the same schedule.
    """
    single = [one for one in families(run).values() if one.chosen == "1" and not one.model.kind.has_experts]
    return {one.budget: one.system for one in single if one.begun or one.system == read.BALANCED}


def by_clusters_points(results: Results, run: Run) -> pd.DataFrame:
    """Perplexity by number of clusters: columns made (how experts came by their text), clusters, tokens, kind,
    perplexity, row."""
    singles = one_clusters(run).values()

    def points() -> Iterator[tuple[str, int, int, str, float, str]]:
        for row, family in families(run).items():
            whole = family.model.kind.expert_scope == "model"
            if family.clustering:
                made = family.made if whole else f"{family.model.kind.label}, {family.made}"
            elif whole:
                made = "domains (BTM)"
            elif family.system in singles:
                made = ONE
            else:
                continue
            made += f", {family.begun}" if family.begun else ""
            for kind, domains in _kinds(run):
                perplexity = mean_of(perplexities(results, family.system, domains))
                yield made, family.experts, family.tokens, kind, perplexity, row

    return pd.DataFrame(points(), columns=["made", "clusters", "tokens", "kind", "perplexity", "row"]).dropna()


def by_clusters(results: Results, run: Run) -> alt.TopLevelMixin:
    """Figures 5, 6, 13 and 18 of c-BTM's paper: perplexity by clusters and, with several budgets, by tokens."""
    points = by_clusters_points(results, run)
    several = points["tokens"].nunique() > 1
    points["series"] = points["made"] + (points["tokens"].map(", {:,} tokens".format) if several else "")
    single = points["made"] == ONE
    # The model of one cluster is the first point of every line of its budget.
    lines = points[~single & ~points["made"].str.startswith("domains")]
    starts = lines[["series", "tokens"]].drop_duplicates().merge(points[single].drop(columns="series"), on="tokens")
    parts = [_panels(points, pd.concat([starts, lines]), "clusters", run)]
    budgets = points.groupby(["made", "clusters", "kind"])["tokens"].transform("nunique") > 1
    if budgets.any():
        grown = points[budgets]
        made = grown["made"] + ", K = " + grown["clusters"].astype(str)
        grown = grown.assign(series=made.where(grown["made"] != ONE, ONE))
        parts.append(_panels(grown, grown, "tokens", run))
    labels = " or ".join(one.label for one in one_clusters(run).values())
    return finish(
        alt.vconcat(*parts, spacing=28).resolve_scale(color="independent", strokeDash="independent"),
        title_of("by_clusters"),
        "As Figures 5, 6 and 13 of the c-BTM paper: mean test perplexity by the number of clusters"
        + (", and by the tokens of training" if budgets.any() else "")
        + f". Experts of domains (BTM) stand at the number of domains. One cluster is {labels}, which learns from all "
        "text.",
    )


def _panels(points: pd.DataFrame, lines: pd.DataFrame, over: str, run: Run) -> alt.HConcatChart:
    """Points and lines of perplexity over `over` (clusters or tokens), one panel per kind of domain."""
    series = list(dict.fromkeys(points["series"]))
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(series))]
    dashes = [DASHES[index % len(DASHES)] for index in range(len(series))]
    legend = alt.Legend(title=None, symbolSize=200, symbolType="stroke")

    def base(rows: pd.DataFrame) -> alt.Chart:
        values = [
            {"series": row.series, "row": row.row, over: getattr(row, over), "perplexity": finite(row.perplexity)}
            for row in rows.itertuples()
        ]
        chart: alt.Chart = alt.Chart(alt.InlineData(values=values)).encode(
            x=alt.X(
                f"{over}:Q",
                title=over,
                scale=alt.Scale(type="log", base=2, nice=False, padding=16),
                axis=alt.Axis(values=sorted(set(points[over])), format=".3~s", grid=False),
            ),
            y=alt.Y("perplexity:Q", title="test perplexity", scale=alt.Scale(zero=False)),
            color=alt.Color("series:N", sort=series, scale=alt.Scale(domain=series, range=colours), legend=legend),
            tooltip=["row:N", "series:N", f"{over}:Q", "perplexity:Q"],
        )
        return chart

    dashed = alt.StrokeDash("series:N", sort=series, scale=alt.Scale(domain=series, range=dashes), legend=legend)
    panels = [
        (
            base(lines[lines["kind"] == kind]).mark_line(strokeWidth=2).encode(strokeDash=dashed)
            + base(points[points["kind"] == kind]).mark_point(size=60, filled=True, opacity=1)
        ).properties(width=340, height=260, title=heading_of(f"{kind} domains"))
        for kind, _ in _kinds(run)
    ]
    return alt.hconcat(*panels, spacing=30)
