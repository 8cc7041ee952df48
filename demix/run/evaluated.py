"""What a run evaluates on each domain: score tables, sets of experts to mix there, and which systems are compared.

Some score tables are of blocks of other lengths than those of training.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from demix.config.mixing import UNWEIGHTED, parsed_weights
from demix.config.models import DENSE_EXPERT
from demix.errors import DemixError
from demix.run.harness import harness_routings
from demix.run.models import MERGED, Model, adapted, folder_at, kept_next_to, left_out, one_more, trained_without
from demix.run.rows import Row
from demix.run.run import Run
from demix.run.systems import (
    BOTH_KEPT,
    Evaluated,
    ExpertSet,
    System,
    bases,
    by_distance,
    classified_by,
    clustered,
    combined_systems,
    merged_whole,
    ngram_folders,
    ngram_systems,
    other_top_k,
    paper_systems,
    rivals,
    routed_weights,
    systems_of,
    trained_systems,
)
from demix.settings import written


def columns_of(run: Run, folder: str) -> tuple[str, ...]:
    """The score columns of a model, also of a further seed, or of n-grams; none for another name."""
    for order in run.config.evaluation.ngrams or ():
        if folder in ngram_folders(order):
            return (DENSE_EXPERT,) if folder == ngram_folders(order)[0] else run.training
    whole = (one for one in run.trained if one.name == folder and not (one.removed or one.masked))
    return next((one.columns for one in whole), ())


def _combined_tables(run: Run) -> Iterator[Evaluated]:
    """The score tables of `combined_systems`."""
    for name, one in run.config.evaluation.mixed.items():
        if not one.pairs:
            yield Evaluated(name, name, run.seed, (DENSE_EXPERT,))
            continue
        columns = columns_of(run, one.pairs[0])
        some = ExpertSet("training", columns, methods=("uniform",), weights=(one.weights,))
        yield Evaluated(name, name, run.seed, columns, (some,))


def _ngram_tables(run: Run) -> Iterator[Evaluated]:
    """The score tables of `ngram_systems`."""
    for order in run.config.evaluation.ngrams or ():
        pooled, by_domain = ngram_folders(order)
        yield Evaluated(pooled, pooled, run.seed, (DENSE_EXPERT,))
        some = ExpertSet("training", run.training, routing=run.receiver.routing)
        yield Evaluated(by_domain, by_domain, run.seed, run.training, (some,))


@cache
def evaluated(run: Run, domain: str) -> tuple[Evaluated, ...]:
    """The score tables and sets of experts to evaluate on `domain`, the run's own seed first.

    N-grams, merged models, those with another number of chosen experts, and those without the domain's expert come
    last.
    """
    if domain in run.suites:
        return _of_suites(run)
    training, novel, receiver, whole = run.training, run.novel, run.receiver, run.whole

    def sets(model: Model) -> Iterator[ExpertSet]:
        if model.removed:
            yield ExpertSet("training", model.columns, methods=("cached",))
            return
        if model.kind.domain_tokens:
            # A novel domain has no token of its own.
            yield ExpertSet("training", training, methods=("naive",))
            return
        own = model.seed == run.seed
        if model.masked:
            # None of these methods goes with weights by history, so that no rule reads the text.
            yield ExpertSet("training", model.columns, methods=UNWEIGHTED, weights=("history",), singles=own)
            return
        adds = model == receiver and bool(novel)
        if adds:
            yield ExpertSet("all", training + novel, singles=True)
            for name in novel if domain in training else (domain,):
                yield ExpertSet(one_more(name), (*training, name), methods=("cached",), weights=("history",))
        variants = own and model.name == "demix"
        yield ExpertSet("training", model.columns, singles=own and not adds, variants=variants, routing=model.routing)
        if model == whole and domain in training and len(training) > 1:
            rest = tuple(expert for expert in training if expert != domain)
            yield ExpertSet(left_out(domain), rest, methods=("cached",), routing=model.routing)

    def table_of(model: Model) -> Evaluated:
        if model.kind.domain_tokens and domain in training:
            # The tables show a training domain only under its own token.
            own = ExpertSet("training", (domain,), methods=("naive",))
            return Evaluated(model.row, model.name, model.seed, own.experts, (own,))
        columns = training + novel if model == receiver else model.columns
        own_sets = tuple(sets(model)) if model.kind.has_experts or model.kind.domain_tokens else ()
        return Evaluated(model.row, model.name, model.seed, columns, own_sets)

    seeds = (run.seed, *run.config.further_seeds)
    models = [model for seed in seeds for model in run.planned if domain in model.scored and model.seed == seed]
    found = [*map(table_of, models), *_ngram_tables(run), *_combined_tables(run)]
    found += [
        Evaluated(one.model.row, one.of(domain), one.model.seed, MERGED, merged=one.weights)
        for one in run.merged
        if domain in one.model.scored
    ]
    # A dense model need not forget where it is kept next to its adaptation.
    dense = run.config.adaptation.dense
    for name in novel if domain in training else (domain,):
        columns = (DENSE_EXPERT, f"{adapted(dense, name)}/{DENSE_EXPERT}")
        some = ExpertSet("training", columns, methods=("uniform",), weights=(BOTH_KEPT,))
        found.append(Evaluated(kept_next_to(dense, name), dense, run.seed, columns, (some,), test_only=True))
    chosen = other_top_k(run)
    found += [
        replace(table, folder=folder_at(table.folder, top_k=k), top_k=k)
        for table in found
        for k in chosen.get(table.folder, ())
    ]
    found += [
        Evaluated(
            whole.model, folder_at(folder, without=domain), run.seed, MERGED, merged=whole.weights, without=domain
        )
        for folder, whole in merged_whole(run).items()
        if domain in training
    ]
    return tuple(found)


def suite_models(run: Run) -> tuple[Model, ...]:
    """The models that are scored on the suites, of the run's own seed; none in a run without suites."""
    return tuple(model for model in run.own if not model.masked) if run.suites else ()


def _of_suites(run: Run) -> tuple[Evaluated, ...]:
    """What is evaluated on a domain of a suite: what neither its dev split nor the distance of its text decides."""
    found = []
    for model in suite_models(run):
        methods = ("naive",) if model.kind.domain_tokens else ("naive", "average", "uniform", "updating")
        experts = model.kind.has_experts or model.kind.domain_tokens
        sets = (ExpertSet("training", model.columns, methods=methods),) if experts else ()
        found.append(Evaluated(model.row, model.name, model.seed, model.columns, sets, test_only=True))
    return tuple(found)


@cache
def routed(run: Run) -> tuple[str, ...]:
    """The clusterings whose distances weight experts in the evaluation."""
    if not any(parsed_weights(weights).rules.routed for weights in run.config.evaluation.weights):
        return ()
    sets = (some for domain in run.domains for table in evaluated(run, domain) for some in table.sets)
    return tuple(dict.fromkeys(some.routing for some in sets if some.routing))


def chosen_on_dev(run: Run) -> dict[str, tuple[str, ...]]:
    """The experts of each model with a mixing.json, by its folder.

    These are the models mixed by `tempered` with parameters that the config leaves open, n-grams of domains last.
    """
    if "tempered" not in run.config.evaluation.weights:
        return {}
    models = [model for model in run.trained if model.kind.has_experts and not (model.removed or model.masked)]
    ngrams = [ngram_folders(order)[1] for order in run.config.evaluation.ngrams or ()]
    pairs = {
        name: columns_of(run, one.pairs[0])
        for name, one in run.config.evaluation.mixed.items()
        if one.pairs and one.weights == "tempered"
    }
    return {model.name: model.columns for model in models} | dict.fromkeys(ngrams, run.training) | pairs


def fitted(run: Run) -> tuple[str, ...]:
    """The clusterings that some model learns from, or whose distances weight experts."""
    used = [*run.learned_clusterings, *routed(run), *classified_by(run), *harness_routings(run).values()]
    return tuple(dict.fromkeys(used))


# In how many bins of positions a block of the length of training is cut; bins of longer blocks are as wide.
POSITION_BINS = 8


@dataclass(frozen=True)
class ContextTable:
    """The score table of one row of `models` on a domain in blocks of `context` tokens, and how it is mixed.

    `folder` is its folder below scores/. With the method `cached` the prior comes from the dev split in blocks of the
    length of training, whose table is in `prior`. Other methods have one column.
    """

    model: str
    folder: str
    context: int
    columns: tuple[str, ...]
    experts: str
    method: str
    weights: str = ""
    prior: str = ""


def asked_contexts(run: Run) -> tuple[int, ...]:
    """The lengths of blocks in `evaluation.contexts`, ascending."""
    return tuple(sorted(run.config.evaluation.contexts or ()))


def contexts_of(run: Run, model: Model) -> tuple[int, ...]:
    """The asked lengths of blocks on which a model is evaluated; its learned positions end at the length of training.

    Models of further seeds, or without a domain, are not evaluated, and neither are those that learned masked tokens.
    """
    if model.name != model.row or model.removed or model.adapted_to or model.masked:
        return ()
    ends = model.architecture.position == "learned"
    return tuple(context for context in asked_contexts(run) if not ends or context <= model.architecture.context)


def other_contexts(run: Run, model: Model) -> tuple[int, ...]:
    """The lengths of `contexts_of` that are not that of training: those that need score tables of their own."""
    return tuple(context for context in contexts_of(run, model) if context != model.architecture.context)


def context_tables(run: Run, domain: str) -> tuple[ContextTable, ...]:
    """The score tables of `domain` in blocks of the asked lengths, by row of `models`.

    A row is mixed as in the paper's tables: a training domain has its own token, and experts the cached prior with
    weights by `history`. A novel domain has no token.
    """
    found = []
    for model in run.trained:
        if model.kind.domain_tokens and domain not in model.domains:
            continue
        system = systems_of(model.row, model.kind, model.label)[-1]
        columns = (domain,) if model.kind.domain_tokens else model.columns
        how = system.experts, system.method, system.weights, model.name if model.kind.has_experts else ""
        for context in contexts_of(run, model):
            folder = folder_at(model.name, context if context in other_contexts(run, model) else 0)
            found.append(ContextTable(model.row, folder, context, columns, *how))
    return tuple(found)


def check_contexts(run: Run) -> None:
    """Raise DemixError for a length of blocks on which no model can be evaluated."""
    for context in asked_contexts(run):
        if not any(context in contexts_of(run, model) for model in run.trained):
            cause = f"{context} is beyond the {run.context} positions that the models learn"
            raise DemixError("config key evaluation.contexts", cause, "remove it, or add an entry with position alibi")


def balanced_pairs(run: Run) -> tuple[tuple[System, System], ...]:
    """Each row that learns from clusters, and the row of as many balanced clusters that it is compared with.

    Both are weighted by distance. The second is the first row of whole models that learns as many tokens from balanced
    clusters of k-means; it is in no pair of its own. Without weights that go only by distance there are no pairs.
    In differences.parquet the second is `against` by the name of its row.
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
