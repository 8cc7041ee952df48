# How far each context is from the centres of a clustering: once for all models, temperatures and top-k. All training domains
# in one job, and each novel domain by itself, so that a domain that is appended routes no other.
rule route:
    input:
        clusterer=rules.fit_clusters.output,
        tokens=RULES.tokens(TRAINING, "dev", "test"),
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        RULES.routing("{clustering}", "{context}", TRAINING),
    log:
        f"{RUN}/logs/route/{{clustering}}.{{context}}.log",
    wildcard_constraints:
        context="|".join(CONFIG.evaluation.routing_context),
    resources:
        **RULES.site("evaluate"),
    params:
        settings=lambda wildcards: RULES.routing_settings(wildcards.context),
        clusterer=below_run("clusters/{clustering}"),
        folder=below_run("routing/{clustering}/{context}"),
    shell:
        "demix route {params.clusterer} {input.tokens} --tokenizer {input.tokenizer}"
        " --settings {params.settings:q} --output {params.folder} 2> {log}"


use rule route as route_novel with:
    input:
        clusterer=rules.fit_clusters.output,
        tokens=RULES.tokens(["{novel}"], "dev", "test"),
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        RULES.routing("{clustering}", "{context}", ["{novel}"]),
    log:
        f"{RUN}/logs/route/{{clustering}}.{{context}}.{{novel}}.log",
