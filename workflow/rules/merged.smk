# Models made of experts without training. Averages of the parameters of experts that are whole models: one by equal weights,
# and one for each domain, by the cached prior of its dev split.


rule average:
    input:
        lambda wildcards: RULES.model(wildcards.model),
        lambda wildcards: RULES.prior_scores(wildcards.model, wildcards.average.partition("-")[2]),
    output:
        f"{RUN}/models/{{model}}-{{average}}/model.json",
    wildcard_constraints:
        model=one_of(one.model.name for one in THIS.merged if not one.token_routed),
        average="uniform|average-[a-z0-9_]+",
    params:
        model=below_run("models/{model}"),
        experts=lambda wildcards: ",".join(RULES.models[wildcards.model].experts),
        prior=lambda wildcards: RULES.prior_options(wildcards.model, wildcards.average.partition("-")[2]),
        output=below_run("models/{model}-{average}"),
    shell:
        "demix average-experts {params.model} --experts {params.experts} {params.prior} --output {params.output} 2> {log}"


# Experts that are feedforwards as those among which tokens choose. The dev split of each expert's text makes the router.
rule merge_routed:
    input:
        model=lambda wildcards: RULES.model(wildcards.model),
        tokens=lambda wildcards: RULES.learned_files(RULES.models[wildcards.model], "dev"),
    output:
        f"{RUN}/models/{{model}}-routed/model.json",
    threads: CONFIG.threads
    params:
        model=below_run("models/{model}"),
        tokens=lambda wildcards: RULES.learned_tokens(RULES.models[wildcards.model], "dev"),
        threads=CONFIG.threads,
        output=below_run("models/{model}-routed"),
    shell:
        "demix merge-routed {params.model} {params.tokens} --threads {params.threads} --output {params.output} 2> {log}"
