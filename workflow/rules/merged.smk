# Models made of experts without training. Averages of the parameters of experts that are whole models: one by equal weights,
# and one for each domain, by the cached prior of its dev split.


rule average:
    input:
        lambda wildcards: RULES.model(wildcards.model),
    output:
        f"{RUN}/models/{{model}}-uniform/model.json",
    log:
        f"{RUN}/logs/average/{{model}}-uniform.log",
    params:
        model=below_run("models/{model}"),
        experts=lambda wildcards: ",".join(RULES.models[wildcards.model].experts),
        output=below_run("models/{model}-uniform"),
    shell:
        "demix average-experts {params.model} --experts {params.experts} --output {params.output} 2> {log}"


rule average_by_domain:
    input:
        lambda wildcards: RULES.model(wildcards.model),
        lambda wildcards: RULES.scores(wildcards.model, [wildcards.domain]),
    output:
        temp(directory(f"{RUN}/models/{{model}}-average-{{domain}}")),
    log:
        f"{RUN}/logs/average/{{model}}-average-{{domain}}.log",
    params:
        model=below_run("models/{model}"),
        experts=lambda wildcards: ",".join(RULES.models[wildcards.model].experts),
        scores=below_run("scores/{model}"),
        prior=f"--decay {CONFIG.evaluation.decay} --blocks {CONFIG.evaluation.dev_blocks}",
    shell:
        "demix average-experts {params.model} --experts {params.experts} --scores {params.scores} {params.prior}"
        " --domain {wildcards.domain} --output {output} 2> {log}"


# Experts that are feedforwards as those among which tokens choose. The dev split of each expert's text makes the router.
rule merge_routed:
    input:
        model=lambda wildcards: RULES.model(wildcards.model),
        tokens=lambda wildcards: RULES.learned_files(RULES.models[wildcards.model], "dev"),
    output:
        f"{RUN}/models/{{model}}-routed/model.json",
    log:
        f"{RUN}/logs/merge_routed/{{model}}-routed.log",
    threads: CONFIG.threads
    params:
        model=below_run("models/{model}"),
        tokens=lambda wildcards: RULES.learned_tokens(RULES.models[wildcards.model], "dev"),
        threads=CONFIG.threads,
        output=below_run("models/{model}-routed"),
    shell:
        "demix merge-routed {params.model} {params.tokens} --threads {params.threads} --output {params.output} 2> {log}"
