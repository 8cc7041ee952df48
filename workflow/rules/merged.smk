# Models that are merged from experts without training. Averages of the parameters of experts that are whole models: one
# with equal weights, and one for each domain with the cached prior of its dev split.


rule average:
    input:
        lambda wildcards: RULES.model(wildcards.model),
        # The scores from which the cached prior is computed; none for an average with equal weights.
        lambda wildcards: RULES.scores(wildcards.model, wildcards.average.split("-")[1:]),
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


# Experts merged into a token-routed model, without those that adaptations add.
rule merge_routed:
    input:
        lambda wildcards: RULES.model(wildcards.model),
    output:
        f"{RUN}/models/{{model}}-routed/model.json",
    params:
        model=below_run("models/{model}"),
        experts=lambda wildcards: ",".join(RULES.models[wildcards.model].experts),
        output=below_run("models/{model}-routed"),
    shell:
        "demix merge-routed {params.model} --experts {params.experts} --output {params.output} 2> {log}"
