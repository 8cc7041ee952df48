# Models trained from scratch. Checkpoints are no outputs: Snakemake would delete them before a killed run resumes.


def training_settings(model):
    return as_json(
        config["training"],
        config["models"][model],
        seed=config["seed"],
        threads=config["threads"],
        architecture=config["architecture"],
    )


rule train_demix:
    input:
        tokens(TRAINING, "train"),
    output:
        experts("demix", TRAINING),
        metrics=f"{RUN}/metrics/demix.jsonl",
    params:
        settings=training_settings("demix"),
        model=f"{RUN}/models/demix",
        checkpoints=f"{RUN}/checkpoints/demix",
    log:
        f"{RUN}/logs/train/demix.log",
    benchmark:
        f"{RUN}/benchmarks/train/demix.tsv"
    conda:
        "../../environment.yml"
    threads: config["threads"]
    priority: 100
    shell:
        "demix train demix {input} --settings {params.settings:q} --output {params.model}"
        " --metrics {output.metrics} --checkpoints {params.checkpoints} 2> {log}"


rule train_dense:
    input:
        tokens(TRAINING, "train"),
    output:
        experts("{model}", ["dense"]),
        metrics=f"{RUN}/metrics/{{model}}.jsonl",
    wildcard_constraints:
        model="dense|dense_unbalanced|domain_token",
    params:
        settings=lambda wildcards: training_settings(wildcards.model),
        model=f"{RUN}/models/{{model}}",
        checkpoints=f"{RUN}/checkpoints/{{model}}",
    log:
        f"{RUN}/logs/train/{{model}}.log",
    benchmark:
        f"{RUN}/benchmarks/train/{{model}}.tsv"
    conda:
        "../../environment.yml"
    threads: config["threads"]
    priority: 50
    shell:
        "demix train {wildcards.model} {input} --settings {params.settings:q} --output {params.model}"
        " --metrics {output.metrics} --checkpoints {params.checkpoints} 2> {log}"


# A rule for each removed domain, since each has experts of other names.
for removed, kept in WITHOUT.items():

    rule:
        name:
            f"train_without_{removed}"
        input:
            tokens(kept, "train"),
        output:
            experts(f"without-{removed}", kept),
            metrics=f"{RUN}/metrics/without-{removed}.jsonl",
        params:
            settings=training_settings("demix"),
            model=f"{RUN}/models/without-{removed}",
            checkpoints=f"{RUN}/checkpoints/without-{removed}",
        log:
            f"{RUN}/logs/train/without-{removed}.log",
        benchmark:
            f"{RUN}/benchmarks/train/without-{removed}.tsv"
        conda:
            "../../environment.yml"
        threads: config["threads"]
        shell:
            "demix train demix {input} --settings {params.settings:q} --output {params.model}"
            " --metrics {output.metrics} --checkpoints {params.checkpoints} 2> {log}"
