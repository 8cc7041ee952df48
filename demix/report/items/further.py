"""Tables beyond the paper's: ablations, and tasks, benchmarks and suites."""

import pandas as pd

from demix.files.database import ask
from demix.report import needs
from demix.report.read import percent
from demix.report.run_data import RunData
from demix.report.systems import CACHED, UPDATING, by_label
from demix.report.table import Table
from demix.run.systems import row_systems, table_rows

ABLATIONS = r"""
with tried as (
    -- Other settings of the systems that represent models.
    select place, label || ': ' || case variant
            when 'decay' then format('{} prior, λ = {:g}', method, decay)
            when 'dev_blocks' then format('{} prior of {} dev blocks', method, dev_blocks::int)
            when 'routing' then format('{}, τ = {:g}', context, temperature) || coalesce(', top-' || top_k::int, '')
            when 'dev_temperature' then 'τ and top-k chosen on dev'
            when 'released_scorer' then 'released scorer'
            else 'top-' || top_k::int
        end as line, method as prior, weights as rule, results.*
    from known join results using (model, experts, method, weights)
    where variant = 'decay' or method != 'updating' and (
        variant in ('dev_blocks', 'routing', 'dev_temperature')
        or if(top_k is null, variant = 'released_scorer', variant = ''))
    union all by name
    -- Other rules of DEMix, and its floors.
    select -1 as place, demix || ': ' || if(method like 'best%',
            format('best expert of each {}, in hindsight', method[6:]),
            format('{} prior, {}', method, case
                when weights = '' then 'static'
                when weights = 'released' then if(variant = '', 'released weights', 'released scorer')
                else regexp_replace(weights, '^(\d+)$', 'last \1 tokens') end)
        ) as line, case when method in ('uniform', 'updating', 'cached') then method
            when method = 'fitted' then 'cached' else 'uniform' end as prior, 'history' as rule, results.*
    from results, (select any_value(label) filter (model = 'demix') as demix from known)
    where model = 'demix' and experts = 'training' and weights != 'history' and top_k is null
        and (method in ('uniform', 'updating', 'cached', 'fitted') or method like 'best%')
        and (variant = '' or (variant, weights) = ('released_scorer', 'released'))
)
select line, variant, domain, perplexity, base
from tried left join (
    select model, experts, domain, split, method as prior, weights as rule, perplexity as base
    from results where variant = '' and top_k is null
) using (model, experts, domain, split, prior, rule)
where split = 'test'
order by place, variant, method, weights, decay, dev_blocks, context, temperature, top_k, line
"""
TASKS = """
-- Of the experts of a model by themselves the one that is best on the test.
with kept as (
    from tasks qualify routing != 'one expert' or row_number() over (partition by task, model, routing
        order by accuracy desc, number) = 1
)
select place, if(routing = 'one expert', 1e9, number) as number, label || case routing when 'dense' then ''
        when 'one expert' then ' (best expert of the test (oracle))'
        else format(' ({}{})', routing, coalesce(', top-' || top_k::int, ''))
            || if(routing like 'updating%', ' (oracle)', '')
    end as system, task as benchmark, 100 * accuracy as value, '{:.1f}' as form,
    -- A cell without interval, or whose interval contains chance, says nothing.
    if(accuracy_low is null, 'too few examples', format('{:.1f} to {:.1f}', 100 * accuracy_low, 100 * accuracy_high)
        || if(reads = 'test labels', ', oracle', '') || if(judged, '', ', as chance')) as beneath,
    if(judged and accuracy > chance and reads != 'test labels' and routing != 'one expert', accuracy, null) as rank,
    format('{} examples, {} demonstrations', examples, shots)
        || if(seeds > 1, format(' by {} seeds', seeds), '') as size
from kept join models using (model)
union all by name
select distinct 1e9 as place, 0 as number, 'chance' as system, task as benchmark, 100 * chance as value from tasks
order by place, number
"""
HARNESS = """
select place, number, label || if(routing = 'dense', '', format(' ({})', routing)) as system,
    task || ', ' || metric as benchmark, value, '{:.4g}' as form,
    if(stderr is null, '', format('± {:.2g}', stderr)) as beneath,
    -- Where the harness does not say whether higher is better, no value is the best.
    if(higher_is_better, value, -value) as rank, format('{} documents, {} demonstrations', examples, shots) as size
from harness join models using (model) order by place, number
"""
SUITES = """
select place, 0 as number, label || if(method = 'naive', ' (oracle)', '') as system, source as benchmark,
    perplexity as value, '{:.2f}' as form, format('{:.3f}', bits_per_byte) as beneath,
    if(method = 'naive', null, -round(perplexity, 2)) as rank, format('{:,} tokens', tokens::int) as size
from evaluations join sources using (domain) join systems using (model, experts, method, weights, variant)
where evaluations.top_k = 0 order by place, source_place
"""


def ablations(data: RunData) -> Table:
    """Mean test perplexity (lower is better) of mixtures with one setting changed (rows), and its change in percent
    from the same mixture with the setting of all other tables.

    Table 3 defines the other rules. “updating prior”: the weights at the start of a block (context window) are a
    decayed average of the posteriors after earlier blocks. “fitted prior”: the fixed weights with the lowest dev loss.
    “static”: the prior gives the weights at every token. “last n”: only these tokens of the block change the weights.
    “in hindsight”: the best expert of each block (a lower bound for the paper's rule) or token (a lower bound for every
    mixture), chosen on test text. “released weights”: the weights follow from our prior and the previous token only; at
    a block's first token all experts have equal weights. “released scorer”: the same rule with the prior of the
    authors' code, a running mean over batches of blocks that keeps 0.7 of its old value at each step. For
    experts of clusters, “released scorer” is the rule of c-BTM's code, which squares distances twice and reads them one
    token late. “top-k”: at
    each token only the k experts with the largest weights are mixed; in a token-routed model each token chooses k
    experts in each layer. “τ”: the temperature of clusters, varied as in Table 9 of the c-BTM paper.

    Each rule for DEMix is compared with the paper's rule (Eq. 5 and 6) under the same prior. But a fitted prior is
    compared with the cached prior, and hindsight with the uniform prior. All numbers are of the run's own random seed.
    Choosing the lowest row would be a choice on test data.
    """
    systems = [
        (place, family.model.label if family.system.method != "merged" else label, *family.system.key)
        for place, (label, family) in enumerate(by_label(data.run).items())
    ]
    (demix,) = (one for one in systems if one[2:] == CACHED.key)
    known = pd.DataFrame([*systems, (*demix[:2], *UPDATING.key)])
    known.columns = ["place", "label", "model", "experts", "method", "weights"]
    found = ask(ABLATIONS, results=data.own.rows, known=known)
    lines = pd.Index(found["line"].unique())
    tables = found.pivot(index="line", columns="domain", values=["perplexity", "base"]).reindex(index=lines)
    numbers, bases = tables["perplexity"], tables["base"]
    # A domain with fewer dev blocks counts with all of its blocks.
    few = lines.isin(found.loc[found["variant"] == "dev_blocks", "line"])
    every = data.own.perplexities(CACHED, numbers.columns)
    numbers[few], bases[few] = numbers[few].fillna(every), bases[few].fillna(every)
    frame = pd.DataFrame(index=lines)
    for domains in data.kinds:
        mean, base = (one.reindex(columns=domains.names).mean(axis=1, skipna=False) for one in (numbers, bases))
        frame[domains.heading], frame[f"{domains.heading}, %"] = mean, percent(base, mean)
    settings = data.run.config.evaluation
    return Table(
        frame,
        notes=(
            f"The other tables use the decay λ = {settings.decay:g} of the prior, {settings.dev_blocks} dev blocks for "
            f"a cached prior (100 in the paper), and the temperature τ = {settings.temperature:g} of clusters.",
        ),
        formats={"%": "{:+.2f}"},
        long=len(frame) > 40,
    )


def tasks(data: RunData) -> Table:
    """Accuracy in percent on classification tasks (higher is better), metrics of EleutherAI's lm-evaluation-harness,
    and test perplexity on the sources of suites (lower is better). Rows are models, with the rule that mixes their
    experts in parentheses.

    Classification tasks (c-BTM, section 5 and appendix A.7): the percentage of examples whose likeliest label is right.
    Below it is the 95% interval: exact for one random seed, otherwise by a bootstrap over seeds and examples. “As
    chance” marks an interval that contains the accuracy of chance; differences among such numbers mean nothing. Two
    methods are oracles, since they read test labels: “updating” weights the experts by their accuracy on the earlier
    test examples, and the best expert is chosen by its accuracy on the test. “fixed, 8” weights the experts by
    their accuracy on the demonstrations (8 in the paper), “fixed, 8 + 8” by their accuracy on 8 further examples. A
    row with “released” has the same weights as the row without this word, and mixes the experts' probabilities of
    whole labels, as the paper's released code does. The other rows mix their probabilities of tokens.

    Harness: a column is a task or group of tasks with a metric, for the run's own random seed. Below a value is ± its
    standard error. tasks.parquet has the digest of each task's documents.

    Suites are texts that serve only to measure perplexity. Below a perplexity are bits per byte, which can be compared
    across tokenizers. No model was trained on these texts or adapted to them. Texts that a training domain contains are
    left out. The mixing rules here use no dev text of a suite and no clusters. An oracle is the expert or domain token
    that is best on the test text itself; nothing else was chosen on these texts.

    Bold: the best of a column among the rows that read no test label and choose nothing on test text. A task has a bold
    number only if it is above chance; a harness metric, only if the harness says whether higher is better.
    """
    run, found, notes = data.run, [], []
    models = pd.DataFrame(
        [(place, name, row.label) for place, (name, row) in enumerate(run.rows.items())],
        columns=["place", "model", "label"],
    )
    if needs.TASKS.met(run):
        found.append(ask(TASKS, tasks=data.rows("tasks").reset_index(names="number"), models=models))
    if needs.HARNESS.met(run):
        rows = data.rows("harness")
        found.append(ask(HARNESS, harness=rows.reset_index(names="number"), models=models))
        versions = rows[rows["task_version"] != ""].groupby("task", sort=False)["task_version"].first()
        notes += [
            f"Version of the harness: {', '.join(sorted(set(rows['harness_version'])))}. Versions of the tasks: "
            f"{', '.join(f'{name} {version}' for name, version in versions.items())}.",
            _contaminated(data.rows("contamination")),
        ]
    if needs.SUITES.met(run):
        sources = [f"{suite}: {one}" for suite, of in (run.config.evaluation.suites or {}).items() for one in of]
        systems = pd.DataFrame(
            {"place": models.loc[models["model"] == name, "place"].iloc[0], **vars(system)}
            for name, row in table_rows(run).items()
            for system in row_systems(row, run)
        )
        named = pd.DataFrame({"domain": [*run.suites], "source": sources, "source_place": range(len(sources))})
        evaluations = data.suites.of_seed(run.seed).evaluations
        found.append(ask(SUITES, evaluations=evaluations, sources=named, systems=systems))
    rows = pd.concat(found).sort_values("place", kind="stable")
    lines, benchmarks = rows["system"].unique(), pd.concat(found)["benchmark"].unique()
    values, beneath, rank = (
        rows.pivot(index="system", columns="benchmark", values=name)
        .reindex(index=lines, columns=benchmarks)
        .rename_axis(index=None, columns=None)
        for name in ("value", "beneath", "rank")
    )
    about = rows.dropna(subset="size").drop_duplicates("benchmark").set_index("benchmark").loc[benchmarks]
    sizes = "; ".join(f"{name}: {size}" for name, size in about["size"].items())
    return Table(
        values,
        notes=(f"{sizes}.", *notes),
        formats=about["form"].to_dict(),
        summaries=frozenset({"chance"}),
        best=rank.eq(rank.max()) & rank.notna(),
        beneath=beneath,
        long=len(values) > 40,
    )


def _contaminated(found: pd.DataFrame) -> str:
    """By task, how many of its documents the training text of each domain holds, in words."""
    listed = []
    for task, rows in found.groupby("task", sort=False):
        held = rows[rows["found_documents"] > 0].sort_values("found_documents", ascending=False, kind="stable")
        named = [f"{row.domain} {row.found_documents:,}" for row in held.itertuples()]
        listed.append(f"{task} {', '.join(named) or 'none'} (of {rows['long_documents'].iloc[0]:,})")
    return (
        "Contamination: how many of a task's documents (of those with 13 or more words) share a 13-gram of words with "
        f"a domain's training text. The domain's expert may know these documents. {'; '.join(listed)}."
    )
