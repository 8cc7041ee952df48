# Models trained from scratch. Checkpoints are no outputs: Snakemake would delete them before a killed run resumes.


rule train_demix:
    input:
        train_inputs("demix", TRAINING),
    output:
        experts("demix", TRAINING),
        metrics=f"{RUN}/metrics/demix.jsonl",
    log:
        f"{RUN}/logs/train/demix.log",
    benchmark:
        f"{RUN}/benchmarks/train/demix.tsv"
    priority: 100
    conda:
        "../../environment.yml"
    threads: config["threads"] * ranks("demix")
    resources:
        ranks=ranks("demix"),
        replicas=replicas("demix"),
    params:
        settings=training_settings("demix"),
        model=below_run("models/demix"),
        checkpoints=below_run("checkpoints/demix"),
    shell:
        "demix train demix {input} --settings {params.settings:q} --output {params.model}"
        " --metrics {output.metrics} --checkpoints {params.checkpoints} --ranks {resources.ranks}"
        " --replicas {resources.replicas:q} 2> {log}"


rule train_dense:
    input:
        lambda wildcards: train_inputs(wildcards.model, TRAINING),
    output:
        experts("{model}", ["dense"]),
        metrics=f"{RUN}/metrics/{{model}}.jsonl",
    log:
        f"{RUN}/logs/train/{{model}}.log",
    benchmark:
        f"{RUN}/benchmarks/train/{{model}}.tsv"
    wildcard_constraints:
        model="dense|dense_unbalanced|domain_token",
    priority: 50
    conda:
        "../../environment.yml"
    threads: lambda wildcards: config["threads"] * ranks(wildcards.model)
    resources:
        ranks=lambda wildcards: ranks(wildcards.model),
    params:
        settings=lambda wildcards: training_settings(wildcards.model),
        model=below_run("models/{model}"),
        checkpoints=below_run("checkpoints/{model}"),
    shell:
        "demix train {wildcards.model} {input} --settings {params.settings:q} --output {params.model}"
        " --metrics {output.metrics} --checkpoints {params.checkpoints} --ranks {resources.ranks} 2> {log}"


# A rule for each removed domain, since each has experts of other names.
for removed, kept in WITHOUT.items():

    rule:
        name:
            f"train_without_{removed}"
        input:
            train_inputs("demix", kept),
        output:
            experts(f"without-{removed}", kept),
            metrics=f"{RUN}/metrics/without-{removed}.jsonl",
        log:
            f"{RUN}/logs/train/without-{removed}.log",
        benchmark:
            f"{RUN}/benchmarks/train/without-{removed}.tsv"
        conda:
            "../../environment.yml"
        threads: config["threads"] * ranks("demix")
        resources:
            ranks=ranks("demix"),
            replicas=replicas("demix"),
        params:
            settings=training_settings("demix"),
            model=below_run(f"models/without-{removed}"),
            checkpoints=below_run(f"checkpoints/without-{removed}"),
        shell:
            "demix train demix {input} --settings {params.settings:q} --output {params.model}"
            " --metrics {output.metrics} --checkpoints {params.checkpoints} --ranks {resources.ranks}"
            " --replicas {resources.replicas:q} 2> {log}"
