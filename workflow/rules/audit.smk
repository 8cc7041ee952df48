# How much of a removed domain's documents can still be recovered.
rule audit_domain:
    input:
        tokens=RULES.tokens(["{training}"], "train", "test"),
        models=lambda wildcards: RULES.audited(wildcards.training),
        priors=f"{RUN}/evaluations/{{training}}.priors.parquet",
    output:
        f"{RUN}/evaluations/{{training}}.audit.parquet",
    threads: CONFIG.threads
    params:
        settings=lambda wildcards: RULES.audit_settings(wildcards.training),
        models=below_run("models"),
        tokens=below_run("tokens/{training}"),
    shell:
        "demix audit {wildcards.training} --models {params.models} --tokens {params.tokens} --priors {input.priors}"
        " --settings {params.settings:q} --output {output} 2> {log}"
