# How much of a removed domain's documents can still be recovered.
for model in WITHOUT:

    rule:
        name:
            f"audit_{model.removed}"
        input:
            tokens=RULES.tokens([model.removed], "train", "test"),
            whole=RULES.experts(THIS.whole.name, TRAINING),
            without=RULES.experts(model.name, model.experts),
            merged=[file for folder in systems.merged_whole(THIS) for file in RULES.experts(folder, MERGED)],
            priors=f"{RUN}/evaluations/{model.removed}.priors.parquet",
        output:
            f"{RUN}/evaluations/{model.removed}.audit.parquet",
        log:
            f"{RUN}/logs/audit/{model.removed}.log",
        threads: CONFIG.threads
        resources:
            **RULES.site("score"),
        params:
            settings=verbatim(
                RULES.as_json(
                    written(CONFIG.removal.audit),
                    {key: list(folders) for key, folders in [("merged", systems.merged_whole(THIS))] if folders},
                    model=THIS.whole.name,
                    training=TRAINING,
                    left_out=left_out(model.removed),
                    without_model=trained_without(model.removed),
                    without=model.experts,
                    threads=CONFIG.threads,
                )
            ),
            domain=model.removed,
            models=below_run("models"),
            tokens=below_run(f"tokens/{model.removed}"),
        shell:
            "demix audit {params.domain} --models {params.models} --tokens {params.tokens} --priors {input.priors}"
            " --settings {params.settings:q} --output {output} 2> {log}"


rule audit:
    input:
        expand(f"{RUN}/evaluations/{{domain}}.audit.parquet", domain=[model.removed for model in WITHOUT]),
    output:
        f"{RUN}/audit.parquet",
    log:
        f"{RUN}/logs/audit.log",
    localrule: True
    shell:
        "demix join {input} --output {output} 2> {log}"
