"""What a run scores and evaluates on each domain: score tables, and the sets of experts to mix there."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from demix.config.mixing import UNWEIGHTED, parsed_weights
from demix.config.models import DENSE_EXPERT
from demix.run.harness import harness_routings
from demix.run.models import MERGED, Model, adapted, folder_at, kept_next_to, left_out, one_more
from demix.run.run import Run
from demix.run.systems import (
    BOTH_KEPT,
    Evaluated,
    ExpertSet,
    classified_by,
    merged_whole,
    ngram_folders,
    other_top_k,
)


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
