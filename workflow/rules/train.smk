# Models trained from scratch. Checkpoints are no outputs: Snakemake would delete them before a killed run resumes.


rule sweep:
    input:
        tokens(TRAINING, "train"),
    output:
        f"{RUN}/metrics/sweep/{{model}}/{{rate}}.jsonl",
    log:
        f"{RUN}/logs/sweep/{{model}}.{{rate}}.log",
    benchmark:
        f"{RUN}/benchmarks/sweep/{{model}}.{{rate}}.tsv"
    wildcard_constraints:
        model="demix|dense|dense_unbalanced|domain_token",
        rate="[0-9.e+-]+",
    priority: 110
    localrule: SUBMITTED
    conda:
        "../../environment.yml"
    threads: lambda wildcards: cores(training_of(wildcards.model))
    resources:
        **site("train"),
        options=lambda wildcards: run_options("train", training_of(wildcards.model)),
    params:
        # The run's schedule in small: nothing but its length and its peak differ.
        settings=lambda wildcards: training_settings(
            wildcards.model,
            tokens=training_of(wildcards.model)["sweep"]["tokens"],
            learning_rate=float(wildcards.rate),
            dev_blocks=0,
        ),
        checkpoints=below_run("checkpoints/sweep/{model}/{rate}"),
    shell:
        "demix sweep {wildcards.model} {input} --settings {params.settings:q} --metrics {output}"
        " --checkpoints {params.checkpoints} {resources.options} 2> {log}"


rule choose_rate:
    input:
        lambda wildcards: [
            f"{RUN}/metrics/sweep/{wildcards.model}/{rate}.jsonl" for rate in swept_rates(wildcards.model)
        ],
    output:
        f"{RUN}/sweep/{{model}}.json",
    log:
        f"{RUN}/logs/choose_rate/{{model}}.log",
    benchmark:
        f"{RUN}/benchmarks/choose_rate/{{model}}.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    shell:
        "demix choose-rate {input} --output {output} 2> {log}"


# A rule for each seed, since the names of experts are no wildcards.
for model in ["demix", *(f"demix-seed{seed}" for seed in SEEDS)]:

    rule:
        name:
            f"train_{model.replace('-', '_')}"
        input:
            rate=chosen_rate(model),
            tokens=train_inputs(model, TRAINING),
        output:
            experts(model, TRAINING),
            metrics=f"{RUN}/metrics/{model}.jsonl",
        log:
            f"{RUN}/logs/train/{model}.log",
        benchmark:
            f"{RUN}/benchmarks/train/{model}.tsv"
        priority: 100
        localrule: SUBMITTED
        conda:
            "../../environment.yml"
        threads: cores(training_of(model))
        resources:
            **site("train"),
            options=run_options("train", training_of(model)),
        params:
            settings=training_settings(model),
            rate=rate_option(model),
            model=below_run(f"models/{model}"),
            checkpoints=below_run(f"checkpoints/{model}"),
        shell:
            "demix train demix {input.tokens} --settings {params.settings:q}{params.rate} --output {params.model}"
            " --metrics {output.metrics} --checkpoints {params.checkpoints} {resources.options} 2> {log}"


rule train_dense:
    input:
        rate=lambda wildcards: chosen_rate(wildcards.model),
        tokens=lambda wildcards: train_inputs(wildcards.model, TRAINING),
    output:
        experts("{model}", ["dense"]),
        metrics=f"{RUN}/metrics/{{model}}.jsonl",
    log:
        f"{RUN}/logs/train/{{model}}.log",
    benchmark:
        f"{RUN}/benchmarks/train/{{model}}.tsv"
    wildcard_constraints:
        model="(dense|dense_unbalanced|domain_token)(-seed[0-9]+)?",
    priority: 50
    localrule: SUBMITTED
    conda:
        "../../environment.yml"
    threads: lambda wildcards: cores(training_of(wildcards.model))
    resources:
        **site("train"),
        options=lambda wildcards: run_options("train", training_of(wildcards.model)),
    params:
        kind=lambda wildcards: kind_of(wildcards.model),
        settings=lambda wildcards: training_settings(wildcards.model),
        rate=lambda wildcards: rate_option(wildcards.model),
        model=below_run("models/{model}"),
        checkpoints=below_run("checkpoints/{model}"),
    shell:
        "demix train {params.kind} {input.tokens} --settings {params.settings:q}{params.rate} --output {params.model}"
        " --metrics {output.metrics} --checkpoints {params.checkpoints} {resources.options} 2> {log}"


# A rule for each removed domain, since each has experts of other names.
for removed, kept in WITHOUT.items():

    rule:
        name:
            f"train_without_{removed}"
        input:
            rate=chosen_rate("demix"),
            tokens=train_inputs("demix", kept),
        output:
            experts(f"without-{removed}", kept),
            metrics=f"{RUN}/metrics/without-{removed}.jsonl",
        log:
            f"{RUN}/logs/train/without-{removed}.log",
        benchmark:
            f"{RUN}/benchmarks/train/without-{removed}.tsv"
        localrule: SUBMITTED
        conda:
            "../../environment.yml"
        threads: cores(training_of("demix"))
        resources:
            **site("train"),
            options=run_options("train", training_of("demix"), removed),
        params:
            settings=training_settings("demix"),
            rate=rate_option("demix"),
            model=below_run(f"models/without-{removed}"),
            checkpoints=below_run(f"checkpoints/without-{removed}"),
        shell:
            "demix train demix {input.tokens} --settings {params.settings:q}{params.rate} --output {params.model}"
            " --metrics {output.metrics} --checkpoints {params.checkpoints} {resources.options} 2> {log}"
