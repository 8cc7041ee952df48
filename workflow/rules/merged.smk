# Models made of experts without training. Averages of the parameters of experts that are whole models: one by equal weights,
# and one for each domain, by the cached prior of its dev split.

for merged in (one for one in THIS.merged if not one.token_routed):
    model = merged.model

    rule:
        name:
            merged.rule
        input:
            model=RULES.experts(model.name, model.experts),
            scores=(
                RULES.scores(model.name, ["{domain}"], [*model.columns, "tokens"], ["dev"]) if merged.by_domain else []
            ),
        output:
            [temp(file) if merged.by_domain else file for file in RULES.experts(merged.place, MERGED)],
        log:
            f"{RUN}/logs/average/{merged.place}.log",
        resources:
            **RULES.site("evaluate"),
        params:
            model=below_run(f"models/{model.name}"),
            experts=",".join(model.experts),
            prior=(
                f"--scores {RUN}/scores/{model.name} --decay {written(CONFIG.evaluation)['decay']}"
                f" --blocks {CONFIG.evaluation.dev_blocks}"
                if merged.by_domain
                else ""
            ),
            domain=lambda wildcards: f"--domain {wildcards.domain}" if wildcards.get("domain") else "",
            output=below_run(f"models/{merged.place}"),
        shell:
            "demix average-experts {params.model} --experts {params.experts} {params.prior} {params.domain}"
            " --output {params.output} 2> {log}"


# Experts that are feedforwards as those among which tokens choose. The dev split of each expert's text makes the router.
for merged in THIS.routed_merges:
    model = merged.model

    rule:
        name:
            merged.rule
        input:
            model=RULES.experts(model.name, model.experts),
            tokens=RULES.learned_tokens(model, "dev"),
        output:
            RULES.experts(merged.place, MERGED),
        log:
            f"{RUN}/logs/merge_routed/{merged.place}.log",
        threads: CONFIG.threads
        resources:
            **RULES.site("score"),
        params:
            model=below_run(f"models/{model.name}"),
            threads=CONFIG.threads,
            output=below_run(f"models/{merged.place}"),
        shell:
            "demix merge-routed {params.model} {input.tokens} --threads {params.threads} --output {params.output} 2> {log}"
