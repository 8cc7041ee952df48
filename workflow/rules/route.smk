# How far each context is from the centres of a clustering: once for all models, temperatures and top-k. All training domains
# in one job, and each novel domain by itself, so that a domain that is appended routes no other.
for name, domains in {"route": TRAINING, "route_novel": ["{novel}"] if NOVEL else []}.items():
    if not domains:
        continue

    rule:
        name:
            name
        input:
            clusterer=[
                f"{RUN}/clusters/{{clustering}}/{file}"
                for file in ("clusterer.json", "clusterer.safetensors", "terms.parquet")
            ],
            tokens=RULES.tokens(domains, "dev", "test"),
            tokenizer=f"{RUN}/tokenizer.json",
        output:
            RULES.routing("{clustering}", "{context}", domains, ("dev", "test")),
        log:
            f"{RUN}/logs/route/{{clustering}}.{{context}}{'.{novel}' if name == 'route_novel' else ''}.log",
        wildcard_constraints:
            clustering="|".join(systems.routed(THIS)) or "none",
            context="|".join(CONFIG.evaluation.routing_context),
        resources:
            **RULES.site("evaluate"),
        params:
            settings=lambda wildcards: RULES.as_json(
                taken(ScoredTokens, CONFIG.evaluation), length=THIS.context, context=wildcards.context
            ),
            clusterer=below_run("clusters/{clustering}"),
            folder=below_run("routing/{clustering}/{context}"),
        shell:
            "demix route {params.clusterer} {input.tokens} --tokenizer {input.tokenizer}"
            " --settings {params.settings:q} --output {params.folder} 2> {log}"
