"""What a run evaluates and compares, derived from its models: sets of experts, score tables, systems."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from demix.config.mixing import DEFAULTS, METHODS, parsed_weights
from demix.config.models import DENSE_EXPERT, KINDS, PAPER, Kind
from demix.run.models import Merged, Model
from demix.run.rows import Row
from demix.run.run import Run

# The maximum number of tokens whose n-grams are counted at once. For it, order 5 needs 16 GB and order 8 24 GB.
MAX_NGRAM_TOKENS = 100_000_000
# The rule that mixes a dense model with its adaptation, if both are kept, with fixed parameters for two experts.
BOTH_KEPT = "tempered({:g},{:g})".format(*DEFAULTS["tempered"])


@dataclass(frozen=True)
class ExpertSet:
    """Experts of a model that are mixed together by `methods`; results show the set under `label`.

    The method `naive` uses the expert of the domain, or the best one. `weights` are the mixing rules; by default all of
    the config's. With `singles` each expert also gets a row of its own. With `variants` the grids of settings, the
    released scorer and the posterior of every block are also evaluated. `routing` is the clustering that has a cluster
    for each of the experts, if there is one.
    """

    label: str
    experts: tuple[str, ...]
    methods: tuple[str, ...] = ("naive", *METHODS)
    weights: tuple[str, ...] = ()
    singles: bool = False
    variants: bool = False
    routing: str = ""


@dataclass(frozen=True)
class Evaluated:
    """The score tables of one model on a domain, and the sets of experts to evaluate on these tables.

    A column named model/column belongs to another model. `sets` is empty for a model with one column; for a domain's
    own token it has one set of one expert. `model` and `seed` are the values of these columns in results. `folder` is
    the folder of the tables below scores/. `merged` says how a merged model, the table's only column, was made from the
    model's experts (`demix.run.models`). `top_k` is the number of experts per token and layer; 0 means as in training.
    `without` is the expert that no token uses. With `test_only` there is no dev split.
    """

    model: str
    folder: str
    seed: int
    columns: tuple[str, ...]
    sets: tuple[ExpertSet, ...] = ()
    merged: str = ""
    top_k: int = 0
    without: str = ""
    test_only: bool = False

    @property
    def named_by_folder(self) -> bool:
        """Whether another table has the same model and column. Losses are then named by the folder."""
        return bool(self.merged or self.top_k or self.without)

    @property
    def joined(self) -> bool:
        """Whether some columns come from the tables of other models."""
        return any("/" in name for name in self.columns)

    @property
    def several(self) -> bool:
        """Whether experts are mixed or chosen."""
        return any(some.methods != ("naive",) or len(some.experts) > 1 for some in self.sets)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits whose scores the evaluation reads; dev only if experts are mixed or chosen."""
        return ("dev", "test") if self.several and not self.test_only else ("test",)


@dataclass(frozen=True)
class System:
    """A way to predict text, one line of the report's tables: a model, a set of its experts, and a mixing method.

    `variant` and `top_k` are the columns of results.parquet: empty and None for the results in the paper's tables.
    """

    label: str
    model: str
    experts: str
    method: str
    weights: str = ""
    variant: str = ""
    top_k: int | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The columns that identify the system in differences.parquet."""
        return self.model, self.experts, self.method, self.weights

    def with_weights(self, weights: str) -> "System":
        """The same system with another rule for the experts' weights."""
        return replace(self, label=f"{self.label}, {weights} weights", weights=weights)

    @property
    def by_distance(self) -> bool:
        """Whether only the distance of the text to the experts' clusters weights the experts."""
        return self.weights.split("(")[0] == "cluster"

    def released_scorer(self) -> "System":
        """The same mixture by the scorer of released code: c-BTM's if only distances weight experts, else DEMix's.

        For a uniform prior, DEMix's scorer differs only in its mixing rule.
        """
        scored = replace(self, label=f"{self.label}, released scorer", variant="released_scorer")
        if self.by_distance:
            return scored
        return replace(scored, weights="released", variant="" if self.method == "uniform" else scored.variant)

    def chosen_on_dev(self) -> "System":
        """The same system with the expert or domain token that was chosen on dev.

        A domain without an expert or token of its own needs this choice.
        """
        return replace(self, label=f"{self.label}, chosen on dev", variant="dev_choice")


@dataclass(frozen=True)
class ClassifiedModel:
    """A model whose accuracy is measured: its row and seed in tables, and the clustering of its experts, if any."""

    model: str
    folder: str
    seed: int
    mixes: bool
    routing: str = ""


@dataclass(frozen=True)
class Member:
    """A member of a combined system: the folder and `columns` of its score tables, and the rule `weights` to mix them.

    If `weights` is empty, there is one column. A member without columns is the cache of the text.
    """

    folder: str = ""
    columns: tuple[str, ...] = ()
    weights: str = ""


def merged_label(merged: Merged) -> str:
    """The name of a merged model in tables."""
    label = merged.model.base.label
    return f"{label}, merged-routed" if merged.token_routed else f"{label}, averaged ({merged.weights})"


def systems_of(row: str, kind: Kind, label: str) -> tuple[System, ...]:
    """The systems of a trained model with the experts (or domain tokens) of its training domains.

    There is one system per mixing method and rule. `label` is the model's name in tables.
    """
    if kind.domain_tokens:
        return (System(label, row, "training", "naive"),)
    if not kind.has_experts:
        return (System(label, row, "dense", "dense"),)
    return (
        System(f"{label} (naive)", row, "training", "naive"),
        System(f"{label} (average)", row, "training", "average"),
        *(
            System(f"{label} ({prior} prior)", row, "training", prior, "history")
            for prior in ("uniform", "updating", "cached")
        ),
    )


def paper_systems(row: str) -> tuple[System, ...]:
    """The systems of one of the paper's entries, which has the name of its kind."""
    return systems_of(row, KINDS[row], KINDS[row].label)


def stream_systems(row: str, kind: Kind, label: str, run: Run) -> tuple[System, ...]:
    """The systems of a model by rules that the paper lacks: those that use earlier blocks or clusters."""
    rules = [(str(weights), parsed_weights(weights).rules) for weights in run.config.evaluation.weights]
    return tuple(
        System(
            f"{label} ({weights}{f', {method} prior' * (len(family.evaluated) > 1)})",
            row,
            "training",
            method,
            weights,
        )
        for weights, family in rules
        if kind.has_experts and (family.refused or family.routed)
        for method in family.evaluated
    )


def row_systems(row: Row, run: Run) -> tuple[System, ...]:
    """The systems of an entry with its training experts.

    If the entry trains on clusters, no system is a single expert, because no domain has its own expert.
    """
    own = row.name, row.kind, row.label
    systems = systems_of(*own) + stream_systems(*own, run)
    return tuple(system for system in systems if not (row.settings.data and system.method == "naive"))


def ngram_folders(order: object) -> tuple[str, str]:
    """The names of the n-gram baselines of an order: of all training text together, and of each training domain."""
    return f"ngram{order}", f"ngram{order}_domains"


def ngram_systems(run: Run) -> tuple[System, ...]:
    """The systems of `evaluation.ngrams`: for each order one of all training text, then mixtures of domains."""
    found: list[System] = []
    for order in run.config.evaluation.ngrams or ():
        pooled, by_domain = ngram_folders(order)
        number, _, counts_all = str(order).partition("_")
        text = " of all text" if counts_all else ""
        found.append(System(f"{number}-grams{text} (modified Kneser-Ney)", pooled, DENSE_EXPERT, "dense"))
        own = by_domain, KINDS["demix"], f"{number}-grams{text} by domain"
        found += systems_of(*own) + stream_systems(*own, run)
    return tuple(found)


def combined_systems(run: Run) -> tuple[System, ...]:
    """The systems of `evaluation.systems`."""
    return tuple(
        System(one.label or name, name, "training", "uniform", str(one.weights))
        if one.pairs
        else System(one.label or name, name, DENSE_EXPERT, "dense")
        for name, one in run.config.evaluation.mixed.items()
    )


def _mixed(run: Run) -> Iterator[tuple[System, bool, tuple[str, ...]]]:
    """The systems that mix columns of models, each with whether a model has experts, and its n-grams and caches."""
    trained = {one.name: one.kind.has_experts or one.kind.routed for one in run.trained}
    for system, one in zip(combined_systems(run), run.config.evaluation.mixed.values(), strict=True):
        names = {*one.columns, *one.pairs}
        counts = tuple(sorted(names - trained.keys()))
        yield system, any(trained.get(name) for name in names), counts and (*counts, *["reset"] * one.reset)


def rivals(run: Run) -> list[System]:
    """The combined systems without experts: dense models, also with n-grams or a cache of the text."""
    return [system for system, experts, _ in _mixed(run) if not experts]


def with_same_counts(run: Run) -> list[tuple[System, System]]:
    """The combined systems of experts with n-grams or caches, each paired with a dense model with the same."""
    dense = {counts: system for system, experts, counts in _mixed(run) if counts and not experts}
    return [(system, dense[counts]) for system, experts, counts in _mixed(run) if experts and counts in dense]


def merged_whole(run: Run) -> dict[str, System]:
    """The merged models of `removal.merged` with all their experts, by their folders."""
    found: dict[str, System] = {}
    for one in (one for one in run.own if one.name in run.config.removal.merged):
        if one.mixes:
            found[one.name] = System(one.label, one.row, DENSE_EXPERT, "dense")
        else:
            made = Merged(one, "routed")
            found[made.place] = System(merged_label(made), one.row, "training", "merged", made.weights)
    return found


def other_top_k(run: Run) -> dict[str, tuple[int, ...]]:
    """The further numbers of experts per token, ascending, with which token-routed models are scored.

    By folder: first the entries of kind routed with the run's own seed, then models merged from domain experts.
    """
    asked = run.config.evaluation.experts_top_k or ()
    chosen = {one.name: one.architecture.routed for one in run.own if one.kind.routed and not one.masked}
    chosen |= {one.place: one.architecture.routed for one in run.merged}
    found = {}
    for name, layer in chosen.items() if asked else ():
        if layer:
            numbers = {layer.experts if k == "all" else k for k in asked} - {layer.top_k}
            found[name] = tuple(sorted(k for k in numbers if k <= layer.experts))
    return found


def classified(run: Run) -> tuple[Model, ...]:
    """The models whose accuracy on tasks is measured: those trained with the run's own seed on all domains.

    None for a run without tasks.
    """
    models = run.own if run.config.tasks else ()
    return tuple(model for model in models if model.continues)


def classified_by(run: Run) -> tuple[str, ...]:
    """The clusterings whose distances weight experts in the classification of tasks."""
    return tuple(dict.fromkeys(model.routing for model in classified(run) if model.routing))


# The systems that differences.parquet subtracts, by their names in its column `against`.
BASES = {
    "dense_unbalanced": paper_systems("dense_unbalanced")[0],
    "dense": paper_systems("dense")[0],
    "demix_cached": paper_systems("demix")[-1],
}


def bases(run: Run) -> dict[str, System]:
    """The systems of `BASES` that exist in the run."""
    return {name: base for name, base in BASES.items() if base.model in run.rows}


def routed_weights(run: Run) -> str:
    """The first of `evaluation.weights` that uses only distances to clusters; empty if there is none."""
    named = map(str, run.config.evaluation.weights)
    return next((weights for weights in named if weights.split("(")[0] == "cluster"), "")


def by_distance(model: Model, weights: str) -> System:
    """The system of all experts of `model`, weighted by the distance of the context to their clusters."""
    return System(f"{model.label} ({weights})", model.row, "training", "uniform", weights)


def clustered(run: Run) -> tuple[Model, ...]:
    """The causal models of the run's own seed that train on clusters."""
    return tuple(model for model in run.own if model.data and not model.masked)


def table_rows(run: Run) -> dict[str, Row]:
    """The causal entries of `models` in the order of the tables: the paper's entries, then further ones."""
    rows = {name: row for name, row in run.rows.items() if not row.masked}
    paper = ("dense_unbalanced", "dense", "domain_token", "demix")
    return {name: rows[name] for name in (*paper, *rows) if name in rows and (name in paper or name not in PAPER)}


def added(run: Run) -> tuple[System, System]:
    """Two systems of all experts of the model with added experts: each domain's own expert, and the mixture."""
    row, label = run.receiver.row, run.receiver.label
    return (
        System(f"{label}, all experts (naive)", row, "all", "naive"),
        System(f"{label}, all experts (cached)", row, "all", "cached", "history"),
    )


def trained_systems(run: Run) -> list[System]:
    """The systems of every model entry with its training experts: first the paper's entries, then further ones."""
    return [system for row in table_rows(run).values() for system in row_systems(row, run)]


def ngram_lines(run: Run) -> list[System]:
    """The n-grams of the main table, by order: of all training text, and of domains by `tempered`, else `cached`."""
    systems = ngram_systems(run)
    weights = next((one.weights for one in systems if one.weights.startswith("tempered")), "")
    return [
        one
        for one in systems
        if one.method == "dense" or (one.weights == weights if weights else one.method == "cached")
    ]


def main_systems(run: Run) -> list[tuple[System, System]]:
    """The lines of the main table, n-grams last. Each pair is the system that gives the name, and the system shown."""
    systems = trained_systems(run)
    lines = [(system, system) for system in systems if not system.weights]
    lines += [
        (system, variant)
        for system in (*(system for system in systems if system.weights == "history"), added(run)[1])
        for variant in (system, system.with_weights("released"))
    ]
    lines += [(system, system) for system in systems if system.weights not in ("", "history")]
    return lines + [(system, system) for system in (*ngram_lines(run), *combined_systems(run))]
