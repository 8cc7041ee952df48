# The distances of each context to the centres of a clustering, computed once for all models, temperatures and top-k.
rule route:
    input:
        clusterer=rules.fit_clusters.output,
        tokens=RULES.tokens(["{domain}"], "dev", "test"),
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        RULES.routing("{clustering}", "{context}", ["{domain}"]),
    wildcard_constraints:
        context="|".join(CONFIG.evaluation.routing_context),
    params:
        settings=lambda wildcards: RULES.routing_settings(wildcards.context),
        clusterer=below_run("clusters/{clustering}"),
        folder=below_run("routing/{clustering}/{context}"),
    shell:
        "demix route {params.clusterer} {input.tokens} --tokenizer {input.tokenizer}"
        " --settings {params.settings:q} --output {params.folder} 2> {log}"
