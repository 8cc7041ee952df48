# One forward pass per (model, expert, domain, split). Every mixture is computed from the tables. The output of a job is
# a manifest with the digests of its tables (`demix.run.scoring` defines which job writes which tables).


rule score:
    input:
        unpack(lambda wildcards: RULES.scoring_inputs(wildcards.job)),
    output:
        f"{RUN}/scores/{{job}}.json",
    wildcard_constraints:
        job=r"(?!ngram[0-9]+(_all)?\.|systems/)[a-z0-9_@/-]+",
    priority: lambda wildcards: RULES.scoring[wildcards.job].priority
    threads: CONFIG.threads
    params:
        settings=lambda wildcards: RULES.scoring_settings(wildcards.job),
        models=below_run("models"),
        folder=below_run("scores"),
    shell:
        "demix score {params.models} {input.tokens} --settings {params.settings:q} --output {params.folder}"
        " --manifest {output} 2> {log}"


# N-gram baselines: one job counts and scores all models of an order.
rule score_ngrams:
    input:
        tokens=[*RULES.tokens(TRAINING, "train"), *RULES.tokens(DOMAINS, "dev", "test")],
    output:
        f"{RUN}/scores/ngram{{order}}.json",
    wildcard_constraints:
        order="[0-9]+(_all)?",
    params:
        settings=lambda wildcards: RULES.ngram_settings(wildcards.order),
        folder=below_run("scores"),
    shell:
        "demix score-ngrams {input.tokens} --settings {params.settings:q} --output {params.folder} --manifest {output}"
        " 2> {log}"


# Combined systems: mixtures of several models, computed from their tables.
rule combine:
    input:
        lambda wildcards: RULES.combined_inputs(wildcards.system),
        tokens=RULES.tokens(DOMAINS, "dev", "test"),
    output:
        f"{RUN}/scores/systems/{{system}}.json",
    params:
        settings=lambda wildcards: RULES.combination_settings(wildcards.system),
        scores=below_run("scores"),
    shell:
        "demix combine {wildcards.system} {input.tokens} --scores {params.scores} --settings {params.settings:q}"
        " --manifest {output} 2> {log}"
