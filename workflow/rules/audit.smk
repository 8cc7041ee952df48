# What of a removed domain's documents can still be recovered.
for removed, kept in WITHOUT.items():

    rule:
        name:
            f"audit_{removed}"
        input:
            tokens=tokens([removed], "train", "test"),
            demix=experts("demix", TRAINING),
            without=experts(f"without-{removed}", kept),
            priors=f"{RUN}/evaluations/{removed}.priors.parquet",
        output:
            f"{RUN}/evaluations/{removed}.audit.parquet",
        log:
            f"{RUN}/logs/audit/{removed}.log",
        benchmark:
            f"{RUN}/benchmarks/audit/{removed}.tsv"
        conda:
            "../../environment.yml"
        threads: config["threads"]
        resources:
            **site("score"),
        params:
            settings=as_json(config["removal"]["audit"], training=TRAINING, without=kept, threads=config["threads"]),
            domain=removed,
            models=below_run("models"),
            tokens=below_run(f"tokens/{removed}"),
        shell:
            "demix audit {params.domain} --models {params.models} --tokens {params.tokens} --priors {input.priors}"
            " --settings {params.settings:q} --output {output} 2> {log}"


rule audit:
    input:
        expand(f"{RUN}/evaluations/{{domain}}.audit.parquet", domain=WITHOUT),
    output:
        f"{RUN}/audit.parquet",
    log:
        f"{RUN}/logs/audit.log",
    benchmark:
        f"{RUN}/benchmarks/audit.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    shell:
        "demix join {input} --output {output} 2> {log}"
