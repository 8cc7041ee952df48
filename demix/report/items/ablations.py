"""What the mean test perplexity of a mixture depends on: the tokens that set the weights of experts, the decay λ and
the dev text of the prior, the number of experts a token, and the temperature of clusters; as in Table 9 of the c-BTM
paper.
"""

from demix.report.domains import percent
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.systems import CACHED, UPDATING
from demix.report.table import Table

ITEM = TableItem("Ablations: rules of weights, priors, number of experts, temperature", Group.FURTHER, 1)
QUERY = r"""
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


def make(material: Material) -> Table:
    import pandas as pd

    from demix.files.database import ask
    from demix.report.families import by_label

    systems = [
        (place, family.model.label if family.system.method != "merged" else label, *family.system.key)
        for place, (label, family) in enumerate(by_label(material.run).items())
    ]
    (demix,) = (one for one in systems if one[2:] == CACHED.key)
    known = pd.DataFrame([*systems, (*demix[:2], *UPDATING.key)])
    known.columns = ["place", "label", "model", "experts", "method", "weights"]
    found = ask(QUERY, results=material.own.rows, known=known)
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
        "Mean test perplexity by what a mixture depends on, and its change in percent from the same mixture as the "
        "other tables have it. Lower is better.",
        frame,
        notes=(
            f"λ is the decay of the prior, {settings.decay:g} in the other tables, where cached priors are of "
            f"{settings.dev_blocks} dev blocks (the paper: 100) and τ, the temperature of clusters, is "
            f"{settings.temperature:g}. top-k: the number of experts that are mixed at each token, the likeliest ones, "
            "or that each token of a token-routed model chooses in a layer.",
            "Rules of DEMix are compared with weights by all earlier tokens of the block (the paper's Eq. 5 and 6) "
            "under the same prior, those with a fitted prior with a cached one, floors with a uniform one. Released: "
            "the previous token alone, and equal weights at a block's start. Released scorer: in addition the "
            "posterior of a block is taken at its last position and averaged over batches; its running mean decays by "
            "0.7. That of clusters squares distances twice.",
            "Numbers are of the run's own seed. The lowest of several is read off the test data: no choice that a "
            "system could have made.",
        ),
        formats={name: "{:+.2f}" for name in frame if name.endswith("%")},
        long=len(frame) > 40,
    )
