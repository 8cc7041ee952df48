"""What a run evaluates on each domain: score tables, the sets of experts that are mixed, and the compared systems.

Some score tables use other context lengths than training.
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
    """The score columns of a model (of any seed) or of n-grams; none for another name."""
    for order in run.config.evaluation.ngrams or ():
        if folder in ngram_folders(order):
            return (DENSE_EXPERT,) if folder == ngram_folders(order)[0] else run.training
    whole = (one for one in run.trained if one.name == folder and not (one.removed or one.masked))
    return next((one.columns for one in whole), ())


def _combined_tables(run: Run) -> Iterator[Evaluated]:
    """The score tables of the systems of `combined_systems`."""
    for name, one in run.config.evaluation.mixed.items():
        if not one.pairs:
            yield Evaluated(name, name, run.seed, (DENSE_EXPERT,))
            continue
        columns = columns_of(run, one.pairs[0])
        some = ExpertSet("training", columns, methods=("uniform",), weights=(one.weights,))
        yield Evaluated(name, name, run.seed, columns, (some,))


def _ngram_tables(run: Run) -> Iterator[Evaluated]:
    """The score tables of the systems of `ngram_systems`."""
    for order in run.config.evaluation.ngrams or ():
        pooled, by_domain = ngram_folders(order)
        yield Evaluated(pooled, pooled, run.seed, (DENSE_EXPERT,))
        some = ExpertSet("training", run.training, routing=run.receiver.routing)
        yield Evaluated(by_domain, by_domain, run.seed, run.training, (some,))


@cache
def evaluated(run: Run, domain: str) -> tuple[Evaluated, ...]:
    """The score tables and sets of experts to evaluate on `domain`, the run's own seed first.

    N-grams, merged models, models with another number of experts per token, and models without the domain's expert
    come last.
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
            # No rule that reads the text can be used with these methods.
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
            # In the tables, a training domain is scored only with its own token.
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
    # If the dense model is kept next to its adaptation, forgetting can be avoided.
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
    """The models of the run's own seed that are scored on the suites; none in a run without suites."""
    return tuple(model for model in run.own if not model.masked) if run.suites else ()


def _of_suites(run: Run) -> tuple[Evaluated, ...]:
    """What is evaluated on a domain of a suite: only systems that need no dev split and no distance to clusters."""
    found = []
    for model in suite_models(run):
        methods = ("naive",) if model.kind.domain_tokens else ("naive", "average", "uniform", "updating")
        experts = model.kind.has_experts or model.kind.domain_tokens
        sets = (ExpertSet("training", model.columns, methods=methods),) if experts else ()
        found.append(Evaluated(model.row, model.name, model.seed, model.columns, sets, test_only=True))
    return tuple(found)


@cache
def routed(run: Run) -> tuple[str, ...]:
    """The clusterings whose distances are used as weights of experts in the evaluation."""
    if not any(parsed_weights(weights).rules.routed for weights in run.config.evaluation.weights):
        return ()
    sets = (some for domain in run.domains for table in evaluated(run, domain) for some in table.sets)
    return tuple(dict.fromkeys(some.routing for some in sets if some.routing))


def chosen_on_dev(run: Run) -> dict[str, tuple[str, ...]]:
    """The experts of each model with a mixing.json, by its folder.

    These are the models that are mixed by `tempered` without parameters in the config, and then n-grams of domains.
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
    """The clusterings on which a model trains, or whose distances weight experts."""
    used = [*run.learned_clusterings, *routed(run), *classified_by(run), *harness_routings(run).values()]
    return tuple(dict.fromkeys(used))


# The number of position bins in a block of the training length. Bins of longer blocks have the same width.
POSITION_BINS = 8


@dataclass(frozen=True)
class ContextTable:
    """The score table of one model entry on a domain with context length `context`, and how it is mixed.

    `folder` is its folder below scores/. With the method `cached`, the prior comes from the dev split scored at the
    training length, whose table is in `prior`. With other methods the table has one column.
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
    """The context lengths in `evaluation.contexts`, ascending."""
    return tuple(sorted(run.config.evaluation.contexts or ()))


def contexts_of(run: Run, model: Model) -> tuple[int, ...]:
    """The context lengths of `evaluation.contexts` at which a model is evaluated.

    With learned positions, none is beyond the training length. Models of further seeds, models without a domain and
    masked models are not evaluated.
    """
    if model.name != model.row or model.removed or model.adapted_to or model.masked:
        return ()
    ends = model.architecture.position == "learned"
    return tuple(context for context in asked_contexts(run) if not ends or context <= model.architecture.context)


def other_contexts(run: Run, model: Model) -> tuple[int, ...]:
    """The lengths of `contexts_of` other than the training length: those that need additional score tables."""
    return tuple(context for context in contexts_of(run, model) if context != model.architecture.context)


def context_tables(run: Run, domain: str) -> tuple[ContextTable, ...]:
    """The score tables of `domain` at the lengths of `evaluation.contexts`, by model entry.

    Models are mixed as in the paper's tables: experts with the cached prior and the rule `history`. Domain-token models
    use the token of a training domain; a novel domain has no token.
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
    """Raise DemixError for a context length at which no model can be evaluated."""
    for context in asked_contexts(run):
        if not any(context in contexts_of(run, model) for model in run.trained):
            cause = f"{context} is beyond the {run.context} positions that the models learn"
            raise DemixError("config key evaluation.contexts", cause, "remove it, or add an entry with position alibi")


def balanced_pairs(run: Run) -> tuple[tuple[System, System], ...]:
    """Pairs of systems: an entry that trains on clusters, and the entry of as many balanced clusters as its baseline.

    Both are weighted by distance. The baseline is the first entry of whole models that trains on as many tokens from
    balanced k-means clusters; no pair compares the baseline with itself. If no rule uses only distances, there are no
    pairs. In differences.parquet the column `against` has the name of the baseline's entry.
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

    These are: the baselines and the methods of Tables 3 to 5 with one mixing rule, the systems of further entries,
    DEMix with the rule of the released code, the set of all experts and the set to which only the domain's own expert
    is added, the removals of Table 7, and n-grams.
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
    """The causal entries that differ only in architecture options from the entry named like their kind; that name."""
    rows = {name: row for name, row in run.rows.items() if not row.masked}
    rest = {name: _rest(row) for name, row in rows.items()}
    return {
        name: row.kind.name
        for name, row in rows.items()
        if rest[name] == rest.get(row.kind.name) and row.options != rows[row.kind.name].options
    }


def _rest(row: Row) -> dict[str, object]:
    """The settings of an entry without its options of `architecture`."""
    return {key: value for key, value in written(row.settings).items() if key != "architecture"} | {
        "initial": row.initial
    }
