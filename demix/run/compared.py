"""Which systems of a run are compared with which: further systems with the bases, clusterings with balanced ones."""

from demix.run.models import Model, left_out, one_more, trained_without
from demix.run.rows import Row
from demix.run.run import Run
from demix.run.systems import (
    System,
    bases,
    by_distance,
    clustered,
    combined_systems,
    ngram_systems,
    paper_systems,
    rivals,
    routed_weights,
    trained_systems,
)
from demix.settings import written


def balanced_pairs(run: Run) -> tuple[tuple[System, System], ...]:
    """Each row that learns from clusters, and the row of as many balanced clusters that it is compared with.

    Both are weighted by distance. The second is the first row of whole models that learns as many tokens from balanced
    clusters of k-means; it is in no pair of its own. There are none where no weights go only by distance. In
    differences.parquet the second is `against` by the name of its row.
    """
    weights, known = routed_weights(run), run.config.clusterings
    models = clustered(run) if weights else ()
    bases: dict[tuple[int, int], Model] = {}
    for model in models:
        made = known[model.data]
        if model.kind.expert_scope == "model" and made.method == "kmeans" and made.balanced:
            bases.setdefault(_size(model), model)
    return tuple(
        (by_distance(model, weights), by_distance(base, weights))
        for model in models
        if (base := bases.get(_size(model), model)) != model
    )


def _size(model: Model) -> tuple[int, int]:
    """The number of a model's clusters and its tokens."""
    return len(model.domains), model.settings.tokens


def compared(run: Run, domain: str) -> tuple[System, ...]:
    """The systems that are compared with each of `bases` on `domain`.

    These are the baselines and the methods of Tables 3 to 5 with one rule of weights, the systems of further rows,
    DEMix with the weights of the released code, the set of all experts and the one with the domain's own added, the
    removals of Table 7, and n-grams.
    """
    receiver, whole = run.receiver.row, run.whole.row
    return (
        *trained_systems(run),
        paper_systems("demix")[-1].with_weights("released"),
        System("", receiver, "all", "cached", "history"),
        System("", receiver, one_more(domain), "cached", "history"),
        System("", whole, left_out(domain), "cached", "history"),
        System("", trained_without(domain), "training", "cached", "history"),
        *ngram_systems(run),
        *combined_systems(run),
    )


def comparisons(run: Run, domain: str) -> list[tuple[str, ...]]:
    """The rows of differences.parquet on `domain`: the key of a system, the name of its base, and the base's key."""
    pairs = [(one, name, base) for one in compared(run, domain) for name, base in bases(run).items()]
    pairs += [(one, base.model, base) for one, base in balanced_pairs(run)]
    mixed = [*trained_systems(run), *combined_systems(run)]
    pairs += [(one, rival.model, rival) for rival in rivals(run) for one in mixed if one != rival]
    return [(*one.key, name, *base.key) for one, name, base in pairs]


def variant_rows(run: Run) -> dict[str, str]:
    """The causal entries that differ only in options from the entry with the name of their kind, and that name."""
    rows = {name: row for name, row in run.rows.items() if not row.masked}
    rest = {name: _rest(row) for name, row in rows.items()}
    return {
        name: row.kind.name
        for name, row in rows.items()
        if rest[name] == rest.get(row.kind.name) and row.options != rows[row.kind.name].options
    }


def _rest(row: Row) -> dict[str, object]:
    """The settings of a row but its options of `architecture`."""
    return {key: value for key, value in written(row.settings).items() if key != "architecture"} | {
        "initial": row.initial
    }
