"""Tables beyond the paper's: ablations, all systems, removed documents word for word, lengths of blocks."""

import numpy as np
import pandas as pd

from demix.files.database import ask
from demix.report.cells import INTERVAL_NOTE, lowest, numbered, seed_note
from demix.report.domains import mean_of, percent
from demix.report.families import by_label
from demix.report.material import Material
from demix.report.systems import CACHED, UPDATING, systems_on
from demix.report.table import Table
from demix.run.compared import balanced_pairs
from demix.run.contexts import asked_contexts, labels
from demix.run.systems import BASES, merged_whole

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


def ablations(material: Material) -> Table:
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
        for place, (label, family) in enumerate(by_label(material.run).items())
    ]
    (demix,) = (one for one in systems if one[2:] == CACHED.key)
    known = pd.DataFrame([*systems, (*demix[:2], *UPDATING.key)])
    known.columns = ["place", "label", "model", "experts", "method", "weights"]
    found = ask(ABLATIONS, results=material.own.rows, known=known)
    lines = pd.Index(found["line"].unique())
    tables = found.pivot(index="line", columns="domain", values=["perplexity", "base"]).reindex(index=lines)
    numbers, bases = tables["perplexity"], tables["base"]
    # A domain with fewer dev blocks counts with all of its blocks.
    few = lines.isin(found.loc[found["variant"] == "dev_blocks", "line"])
    every = material.own.perplexities(CACHED, numbers.columns)
    numbers[few], bases[few] = numbers[few].fillna(every), bases[few].fillna(every)
    frame = pd.DataFrame(index=lines)
    for domains in material.kinds:
        mean, base = (one.reindex(columns=domains.names).mean(axis=1, skipna=False) for one in (numbers, bases))
        frame[domains.heading], frame[f"{domains.heading}, %"] = mean, percent(base, mean)
    settings = material.run.config.evaluation
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


def full(material: Material) -> Table:
    """Test perplexity, the bounds of its 95% interval, and bits per byte of the text, of every system of the tables on
    every domain; and its perplexity less that of another system on the same documents, with the 95% interval of the
    difference. Lower is better. Bits per byte compare across tokenizers, perplexities do not.

    Differences are of the run's own seed. Negative: better than the other system. differences.parquet has them in nats
    per token, too.
    """
    key, seeds = ["model", "experts", "method", "weights"], len(material.results.by_seed)
    systems = pd.DataFrame(
        {"domain": domain, "kind": domains.kind, **vars(system)}
        for domains in material.kinds
        for domain in domains.names
        for system in systems_on(domain, domains.kind, material.run)
    ).reset_index(names="place")
    found = numbered(ask(FULL, systems=systems, evaluations=material.results.evaluations))
    frame = found.drop(columns=[*key, "variant", *(["± seeds"] if seeds == 1 else [])])
    beneath = pd.DataFrame(index=frame.index)
    bases = {base.model: base.label for _, base in balanced_pairs(material.run)}
    bases |= {name: base.label for name, base in BASES.items()}
    # What is subtracted is the oracle's choice, not that on dev.
    differences = material.differences.assign(variant="").rename(columns={"domain": "Domain"})
    for against, rows in differences[differences["seed"] == material.run.seed].groupby("against", sort=False):
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


def audit(material: Material) -> Table:
    """Documents of a removed domain, continued greedily from 50 of their tokens, by the model with the domain's expert,
    the model without that expert, and a model never trained on the domain; and by merged models. Tokens word for word:
    how many of the next 50 are the document's before the first that is not. Tokens right: the share of all 50 that are
    the document's. Nats: the loss of the document's own 50 tokens. Means over documents that were trained on and over
    test documents, which no model saw.

    Train above test by more than chance: training documents were memorized. If that is so without the domain's expert,
    what all experts share has memorized them.
    """
    columns = {"matched": "Tokens word for word, {}", "share": "Tokens right, {} (%)", "nll": "Nats, {}"}
    found, key = material.audit, ["domain", "system", "model"]
    by_split = found.assign(share=100 * found["share"].astype("float64")).groupby([*key, "split"])
    means, counts = by_split[[*columns]].mean().unstack(), by_split.size().astype("float64").unstack(fill_value=0.0)
    lines = found[key].drop_duplicates()
    lines = lines.sort_values("domain", key=lambda names: names.map(material.training.index), kind="stable")
    parts = {heading: means[name] for name, heading in columns.items()} | {"Documents, {}": counts}
    frame = pd.DataFrame({
        heading.format(split): part.reindex(index=pd.MultiIndex.from_frame(lines), columns=["train", "test"])[split]
        for heading, part in parts.items()
        for split in ("train", "test")
    })  # fmt: skip
    merged = {folder: whole.label for folder, whole in merged_whole(material.run).items()}
    frame.index = pd.Index(
        [f"{domain}, {AUDITED[system].format(merged.get(model))}" for domain, system, model in frame.index]
    )
    return Table(
        frame,
        notes=seed_note(material.run),
        formats=dict.fromkeys(("Documents, train", "Documents, test"), "{:.0f}"),
    )


def contexts(material: Material) -> Table:
    """Mean test perplexity of the same tokens by the length of blocks, over the training and over the novel domains.
    Lower is better.

    A dense model is taken as it is; a domain-token model under the domain's own token, so only on training domains;
    experts are mixed by the cached prior (from dev text in blocks of the length of training), with weights by the
    block's history.

    Learned positions end at the length of training. In a longer block tokens have more text before them: perplexity
    falls for a model that can use it. All numbers are of the run's own seed.
    """
    sums = material.contexts.groupby(["model", "domain", "context"])[["nll", "tokens"]].sum()
    perplexity = np.exp(sums["nll"] / sums["tokens"])
    frame = pd.DataFrame(
        {
            f"{domains.heading}, {context}": {
                label: mean_of(perplexity.get((model, domain, context), np.nan) for domain in domains.names)
                for model, label in labels(material.run).items()
            }
            for domains in material.kinds
            for context in asked_contexts(material.run)
        }
    )
    return Table(
        frame,
        notes=(f"All models were trained on blocks of {material.run.context:,} tokens.",),
        best=lowest(frame, axis=0),
    )
