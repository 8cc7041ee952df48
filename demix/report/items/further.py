"""Tables beyond the paper's: ablations, all systems, removed documents, lengths of blocks, tasks and suites."""

from typing import Any

import pandas as pd

from demix.files.database import ask
from demix.report.cells import INTERVAL_NOTE, lowest, numbered, seed_note
from demix.report.read import percent
from demix.report.run_data import RunData
from demix.report.systems import CACHED, UPDATING, by_label, systems_on
from demix.report.table import Table
from demix.run.compared import balanced_pairs
from demix.run.systems import BASES, merged_whole, row_systems, table_rows

ABLATIONS = r"""
with tried as (
    -- Other settings of the systems that stand for models.
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
FULL = """
select domain as Domain, kind as Kind, label as System, perplexity as Perplexity, low as Low, high as High,
    spread as "± seeds", bits_per_byte as "Bits per byte",
    documents as Documents, pieces as Pieces, tokens as Tokens, model, experts, method, weights, variant
from systems join evaluations using (domain, model, experts, method, weights, variant)
where evaluations.top_k = 0 and expert = '' and perplexity is not null order by place
"""
AUDITED = {
    "own": "own expert",
    "mixture": "all experts",
    "minus": "without its expert",
    "without": "never trained on it",
    "merged": "{}",
    "merged_minus": "{} without its expert",
}


def ablations(data: RunData) -> Table:
    """Mean test perplexity by what a mixture depends on (the tokens that set the weights of experts, the decay λ and
    the dev text of the prior, the number of experts a token, the temperature of clusters), and its change in percent
    from the same mixture as the other tables have it; as in Table 9 of the c-BTM paper. Lower is better.

    Rules of DEMix are compared with weights by all earlier tokens of the block (the paper's Eq. 5 and 6) under the same
    prior, those with a fitted prior with a cached one, floors with a uniform one. Released: the previous token alone,
    and equal weights at a block's start. Released scorer: in addition the posterior of a block is taken at its last
    position and averaged over batches; its running mean decays by 0.7. That of clusters squares distances twice.

    Numbers are of the run's own seed. The lowest of several is read off the test data: no choice that a system could
    have made.
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
            f"λ is the decay of the prior, {settings.decay:g} in the other tables, where cached priors are of "
            f"{settings.dev_blocks} dev blocks (the paper: 100) and τ, the temperature of clusters, is "
            f"{settings.temperature:g}. top-k: the number of experts that are mixed at each token, the likeliest ones, "
            "or that each token of a token-routed model chooses in a layer.",
        ),
        formats={"%": "{:+.2f}"},
        long=len(frame) > 40,
    )


def full(data: RunData) -> Table:
    """Test perplexity, the bounds of its 95% interval, and bits per byte of the text, of every system of the tables on
    every domain; and its perplexity less that of another system on the same documents, with the 95% interval of the
    difference. Lower is better. Bits per byte compare across tokenizers, perplexities do not.

    Differences are of the run's own seed. Negative: better than the other system. differences.parquet has them in nats
    per token, too.
    """
    key, seeds = ["model", "experts", "method", "weights"], len(data.results.by_seed)
    systems = pd.DataFrame(
        {"domain": domain, "kind": domains.kind, **vars(system)}
        for domains in data.kinds
        for domain in domains.names
        for system in systems_on(domain, domains.kind, data.run)
    ).reset_index(names="place")
    found = numbered(ask(FULL, systems=systems, evaluations=data.results.evaluations))
    frame = found.drop(columns=[*key, "variant", *(["± seeds"] if seeds == 1 else [])])
    beneath = pd.DataFrame(index=frame.index)
    bases = {base.model: base.label for _, base in balanced_pairs(data.run)}
    bases |= {name: base.label for name, base in BASES.items()}
    # What is subtracted is the oracle's choice, not that on dev.
    differences = data.rows("differences").assign(variant="").rename(columns={"domain": "Domain"})
    for against, rows in differences[differences["seed"] == data.run.seed].groupby("against", sort=False):
        less = found[["Domain", *key, "variant"]].merge(rows, "left").set_axis(found.index)
        frame[f"Less {bases[against]}"] = less["perplexity"]
        beneath[f"Less {bases[against]}"] = [
            "" if pd.isna(low) else f"[{low:+.2f}, {high:+.2f}]".replace("-", "−")
            for low, high in zip(less["perplexity_low"], less["perplexity_high"], strict=True)
        ]
    several = f"Perplexities are means over {seeds} seeds, ± their standard deviation, where a system has them."
    return Table(
        frame,
        notes=(INTERVAL_NOTE, *([several] if seeds > 1 else [])),
        formats={"Bits per byte": "{:.3f}"} | dict.fromkeys(beneath, "{:+.2f}"),
        beneath=beneath,
        long=True,
    )


def audit(data: RunData) -> Table:
    """Documents of a removed domain, continued greedily from 50 of their tokens, by the model with the domain's expert,
    the model without that expert, and a model never trained on the domain; and by merged models. Tokens word for word:
    how many of the next 50 are the document's before the first that is not. Tokens right: the share of all 50 that are
    the document's. Nats: the loss of the document's own 50 tokens. Means over documents that were trained on and over
    test documents, which no model saw.

    Train above test by more than chance: training documents were memorized. If that is so without the domain's expert,
    what all experts share has memorized them.
    """
    columns = {"matched": "Tokens word for word, {}", "share": "Tokens right, {} (%)", "nll": "Nats, {}"}
    found, key = data.rows("audit"), ["domain", "system", "model"]
    by_split = found.assign(share=100 * found["share"].astype("float64")).groupby([*key, "split"])
    means, counts = by_split[[*columns]].mean().unstack(), by_split.size().astype("float64").unstack(fill_value=0.0)
    lines = found[key].drop_duplicates()
    lines = lines.sort_values("domain", key=lambda names: names.map(data.training.index), kind="stable")
    parts = {heading: means[name] for name, heading in columns.items()} | {"Documents, {}": counts}
    frame = pd.DataFrame({
        heading.format(split): part.reindex(index=pd.MultiIndex.from_frame(lines), columns=["train", "test"])[split]
        for heading, part in parts.items()
        for split in ("train", "test")
    })  # fmt: skip
    merged = {folder: whole.label for folder, whole in merged_whole(data.run).items()}
    frame.index = pd.Index(
        [f"{domain}, {AUDITED[system].format(merged.get(model))}" for domain, system, model in frame.index]
    )
    return Table(
        frame,
        notes=seed_note(data.run),
        formats=dict.fromkeys(("Documents, train", "Documents, test"), "{:.0f}"),
    )


CHANCE, BEST = "chance", "best expert of the test (oracle)"
ORACLE, ALONE = "test labels", "one expert"
COUNTS = {"Documents": "examples", "Demonstrations": "shots"}


def _wide(rows: pd.DataFrame, values: pd.Series, line: str, column: str) -> pd.DataFrame:
    """`values` of `rows`, a row for each `line` and a column for each `column`, both in their order."""
    found = values.set_axis(pd.MultiIndex.from_frame(rows[[line, column]])).unstack(column)
    found = found.reindex(index=rows[line].unique(), columns=rows[column].unique())
    return found.rename_axis(index=None, columns=None)


def tasks(data: RunData) -> Table:
    """Percent of the examples of a classification task whose likeliest label is the right one, by model and routing
    (c-BTM, section 5 and appendix A.7), and below it the 95% interval: exact for one seed, else by a bootstrap over
    seeds and examples. “As chance” stands where the interval contains what chance gives. Differences among such numbers
    mean nothing.

    Bold: the highest of the numbers above chance that read no test label. Oracles read test labels: “updating” those of
    earlier examples, “own expert” where the domain is asked for, and the best expert.

    “fixed, 8 + 8” weights experts by their accuracy on 8 other examples after the demonstrations, “fixed, 8” by that on
    the demonstrations. The names are the paper's, which has 8 demonstrations. “released” mixes as the paper's code
    does, by the same weights: whole labels, after a softmax over labels of each expert.
    """
    models, names = {name: row.label for name, row in data.run.rows.items()}, list(data.run.config.tasks)
    rows = data.rows("tasks")
    alone = rows[rows["routing"] == ALONE].sort_values("accuracy", ascending=False, kind="stable")
    rows = pd.concat([rows[rows["routing"] != ALONE], alone.drop_duplicates(["task", "model"])])
    rows = rows.sort_values("model", key=lambda found: found.map([*models].index), kind="stable")
    rows["label"] = [_label(models[row.model], row) for row in rows.itertuples()]
    # Cells without interval, or whose interval holds chance, say nothing.
    beneath = pd.Series([_interval(row) for row in rows.itertuples()], rows.index)
    frame = _wide(rows, 100 * rows["accuracy"], "label", "task").reindex(columns=names)
    told = rows["judged"] & (rows["accuracy"] > rows["chance"]) & (rows["reads"] != ORACLE) & (rows["routing"] != ALONE)
    fair = _wide(rows, rows["accuracy"].where(told), "label", "task")
    by_task = data.rows("tasks").groupby("task")[["chance", "examples", "shots", "seeds"]].first()
    asked = "; ".join(
        f"{name}: {row.examples} examples, {row.shots} demonstrations"
        + (f" by {row.seeds} seeds" if row.seeds > 1 else "")
        for name, row in ((name, by_task.loc[name]) for name in names if name in by_task.index)
    )
    frame.loc[CHANCE] = 100 * by_task["chance"].reindex(names)
    return Table(
        frame,
        notes=(f"{asked}.",),
        formats=dict.fromkeys(names, "{:.1f}"),
        summaries=frozenset({CHANCE}),
        best=fair.eq(fair.max()) & fair.notna(),
        beneath=_wide(rows, beneath, "label", "task"),
        long=len(frame) > 40,
    )


def _label(model: str, row: Any) -> str:
    if row.routing == "dense":
        return model
    if row.routing == ALONE:
        return f"{model} ({BEST})"
    kept = "" if pd.isna(row.top_k) else f", top-{row.top_k:.0f}"
    oracle = " (oracle)" if row.routing.startswith("updating") else ""
    return f"{model} ({row.routing}{kept}){oracle}"


def _interval(row: Any) -> str:
    if pd.isna(row.accuracy_low):
        return "too few examples"
    oracle, chance = ", oracle" if row.reads == ORACLE else "", "" if row.judged else ", as chance"
    return f"{100 * row.accuracy_low:.1f} to {100 * row.accuracy_high:.1f}{oracle}{chance}"


def harness(data: RunData) -> Table:
    """Values as EleutherAI's lm-evaluation-harness gives them, by model and rule that mixes its experts, with ± its
    standard error below. A row is a task, or a group of tasks, and a metric.

    Bold: the best value of a row, where the harness says whether higher is better. All values are of the run's own
    seed; the rule in parentheses mixed the experts of the training domains. Documents are those that were asked.
    tasks.parquet has the digest of each task's documents.
    """
    models, rows = {name: row.label for name, row in data.run.rows.items()}, data.rows("harness")
    rows = rows.assign(
        line=rows["task"] + ", " + rows["metric"],
        system=[
            models[model] + f" ({routing})" * (routing != "dense")
            for model, routing in zip(rows["model"], rows["routing"], strict=True)
        ],
    )
    values, first = _wide(rows, rows["value"], "line", "system"), rows.groupby("line", sort=False).first()
    higher = first["higher_is_better"]
    best = values.eq(values.max(axis=1).where(higher.eq(True), values.min(axis=1)), axis=0)
    counts = pd.DataFrame({name: first[column].astype(float) for name, column in COUNTS.items()})
    versions = rows[rows["task_version"] != ""].groupby("task", sort=False)["task_version"].first()
    errors = rows["stderr"].map(lambda error: "" if pd.isna(error) else f"± {error:.2g}")
    return Table(
        pd.concat([counts, values], axis=1),
        notes=(
            f"Version of the harness: {', '.join(sorted(set(rows['harness_version'])))}; of the tasks: "
            f"{', '.join(f'{name} {version}' for name, version in versions.items())}.",
            _contaminated(data.rows("contamination")),
        ),
        formats=dict.fromkeys(values, "{:.4g}") | {"Demonstrations": "{:,.0f}"},
        best=best.where(higher.notna(), False, axis=0),
        beneath=_wide(rows, errors, "line", "system"),
        long=len(values) > 40,
    )


def _contaminated(found: pd.DataFrame) -> str:
    """By task, how many of its documents the training text of each domain holds, in words."""
    told = []
    for task, rows in found.groupby("task", sort=False):
        held = rows[rows["found_documents"] > 0].sort_values("found_documents", ascending=False, kind="stable")
        named = [f"{row.domain} {row.found_documents:,}" for row in held.itertuples()]
        told.append(f"{task} {', '.join(named) or 'none'} (of {rows['long_documents'].iloc[0]:,})")
    return (
        "Contamination: documents of a task that share a 13-gram of words with the training text of a domain, whose "
        f"expert may know them, of those documents that have 13 words: {'; '.join(told)}."
    )


def suites(data: RunData) -> Table:
    """Test perplexity on each source of a suite, and below it bits per byte, which compare across tokenizers. Lower is
    better. No model learned from these texts or was adapted to them, and nothing was chosen on them.

    Texts that a training domain holds are left out. Experts are those of the training domains, by rules that need no
    dev text and no clusters; an oracle is the best expert or domain token of the test text itself. Bold: the lowest of
    a row that is no oracle.
    """
    run, found = data.run, data.suites.of_seed(data.run.seed)
    names = [f"{suite}: {name}" for suite, sources in (run.config.evaluation.suites or {}).items() for name in sources]
    shown = {}
    for system in (one for row in table_rows(run).values() for one in row_systems(row, run)):
        of = found.of(system, run.suites).set_axis(names)
        if of["perplexity"].notna().any():
            shown[system.label + " (oracle)" * (system.method == "naive")] = of
    values = pd.DataFrame({label: of["perplexity"] for label, of in shown.items()})
    frame = pd.concat([next(iter(shown.values()))["tokens"].rename("Tokens"), values], axis=1)
    return Table(
        frame,
        best=lowest(values[[label for label in values if not label.endswith("(oracle)")]], axis=1),
        beneath=pd.DataFrame({label: of["bits_per_byte"].map("{:.3f}".format) for label, of in shown.items()}),
        long=len(values) > 40,
    )
