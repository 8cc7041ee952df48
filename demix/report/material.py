"""All that a report reads of a run, each thing read when it is first asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from demix.files import check_sealed
from demix.report.affinity import Relation, affinities, relation_with_own, relations, with_overlap
from demix.report.clusters import Clusters, read_clusters
from demix.report.cost import cost_by_stage
from demix.report.domains import Domains, domains_of, partly_known
from demix.report.needs import CONTEXTS, HARNESS, SUITES, TASKS, WITHOUT_DOMAIN
from demix.report.paper import scale_note
from demix.report.read import Parent, read_harness, read_parents, read_results, read_rows, read_tasks, tokens_before
from demix.report.results import Bounds, Results, bounds_of
from demix.run.run import Run


@dataclass(frozen=True, eq=False)
class Material:
    """A run as tables, figures and claims read it.

    `given` holds values to take instead of those of the run's files, by the names of properties.
    """

    run: Run
    given: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vars(self).update(self.given)

    @cached_property
    def training(self) -> list[str]:
        """The training domains in the config's order."""
        return list(self.run.training)

    @cached_property
    def novel(self) -> list[str]:
        """The novel domains in the config's order."""
        return list(self.run.novel)

    @cached_property
    def kinds(self) -> list[Domains]:
        """The kinds of domains that the run has."""
        return domains_of(self.run)

    @cached_property
    def results(self) -> Results:
        """The rows of results.parquet."""
        return read_results(self.run.folder / "results.parquet")

    @cached_property
    def suites(self) -> Results:
        """The rows of suites.parquet."""
        return read_results(self.run.folder / "suites.parquet")

    @cached_property
    def own(self) -> Results:
        """The results of the run's own seed.

        Experts are added, removed and varied for this seed alone: tables of them must not mix in other seeds.
        """
        return self.results.of_seed(self.run.seed)

    @cached_property
    def priors(self) -> pd.DataFrame:
        """The rows of priors.parquet of the run's own seed."""
        return self._rows("priors").query("seed == @self.run.seed")

    @cached_property
    def differences(self) -> pd.DataFrame:
        """The rows of differences.parquet."""
        return self._rows("differences")

    @cached_property
    def bounds(self) -> Bounds:
        """The intervals of `differences`."""
        return bounds_of(self.differences)

    @cached_property
    def overlap(self) -> pd.DataFrame:
        """The rows of corpus/overlap.parquet."""
        return read_rows(self.run.folder / "corpus" / "overlap.parquet", "overlap")

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Each training expert on each domain: perplexity ratio and overlap of bigrams (`demix.report.affinity`)."""
        return with_overlap(affinities(self.own, self.run), self.overlap)

    @cached_property
    def relations(self) -> list[Relation]:
        """How the ratios of `pairs` go with their overlap, by kind of domain."""
        return relations(self.pairs)

    @cached_property
    def relation_with_own(self) -> Relation:
        """The same over the training domains, own experts included."""
        return relation_with_own(self.pairs)

    @cached_property
    def audit(self) -> pd.DataFrame:
        """The rows of audit.parquet, if the run has one."""
        return self._rows("audit") if WITHOUT_DOMAIN.met(self.run) else pd.DataFrame()

    @cached_property
    def posteriors(self) -> pd.DataFrame:
        """The rows of posteriors.parquet."""
        return self._rows("posteriors")

    @cached_property
    def parents(self) -> dict[str, Parent]:
        """What the expert of each novel domain began with."""
        return read_parents(self.run.folder / "models" / self.run.receiver.row / "experts", self.novel)

    @cached_property
    def averaged(self) -> bool:
        """Whether an expert of a novel domain began as the average of all training experts."""
        return any(parent.averaged for parent in self.parents.values())

    @cached_property
    def clusters(self) -> Clusters:
        """What the run knows of the clusters that its models learn from."""
        return read_clusters(self.run)

    @cached_property
    def contexts(self) -> pd.DataFrame:
        """The losses by position in blocks of several lengths."""
        paths = [self.run.folder / "evaluations" / f"{domain}.contexts.parquet" for domain in self.run.domains]
        return pd.concat([read_rows(path, "contexts") for path in paths], ignore_index=True)

    @cached_property
    def tasks(self) -> pd.DataFrame:
        """The rows of tasks.parquet that are not the harness's."""
        return read_tasks(self.run.folder / "tasks.parquet")

    @cached_property
    def harness(self) -> pd.DataFrame:
        """The rows of the harness in tasks.parquet."""
        return read_harness(self.run.folder / "tasks.parquet")

    @cached_property
    def contamination(self) -> pd.DataFrame:
        """How much of the harness's tasks the training text of each domain holds."""
        paths = [self.run.folder / "harness" / "contamination" / f"{domain}.parquet" for domain in self.run.training]
        return pd.concat([read_rows(path, "contamination") for path in paths], ignore_index=True)

    @cached_property
    def tokens_before(self) -> dict[str, int | None]:
        """The tokens that the models in folders, with which rows began, had learned from."""
        return tokens_before(self.run)

    @cached_property
    def metrics(self) -> Path:
        """The folder of the metrics of trainings."""
        return self.run.folder / "metrics"

    @cached_property
    def cost(self) -> list[dict[str, str]]:
        """The jobs of each stage, their time and memory."""
        return cost_by_stage(self.run)

    @cached_property
    def partly_known(self) -> str:
        """How many test documents of the training domains have other pieces in train."""
        return partly_known(self.run, self.kinds[0])

    @cached_property
    def scale_note(self) -> str:
        """The differences between this run and the paper in data, budget and scale."""
        return scale_note(self.results, self.run)

    def read(self) -> "Material":
        """This, with all files of the run read. Raises DemixError for the first that is missing or damaged."""
        # The curves are drawn long after the tables; a damaged file must be refused before anything is written.
        for path in sorted(self.metrics.glob("*.jsonl")):
            check_sealed(path)
        names = [
            "results",
            "priors",
            "differences",
            "overlap",
            "audit",
            "posteriors",
            "parents",
            "partly_known",
            "cost",
        ]
        needed = {"contexts": CONTEXTS, "tasks": TASKS, "suites": SUITES, "harness": HARNESS, "contamination": HARNESS}
        for name in (*names, "clusters", *(name for name, need in needed.items() if need.met(self.run))):
            getattr(self, name)
        return self

    def _rows(self, name: str) -> pd.DataFrame:
        return read_rows(self.run.folder / f"{name}.parquet", name)

    @cached_property
    def seed(self) -> int:
        """The seed of `own`."""
        return self.run.seed

    def of_seed(self, seed: int) -> "Material":
        """The same with the results of one seed alone. Only the run's own seed has differences."""
        if seed == self.run.seed and [*self.results.by_seed] == [seed]:
            return self
        shared = {name: getattr(self, name) for name in ("overlap", "parents", "clusters")}
        differences = self.differences if seed == self.run.seed else self.differences.iloc[:0]
        results = self.results.of_seed(seed)
        own = {"results": results, "own": results, "differences": differences, "seed": seed}
        return Material(self.run, shared | own)
