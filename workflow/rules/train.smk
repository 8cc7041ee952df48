# Models trained from scratch. Checkpoints are no outputs: Snakemake would delete outputs before a killed job resumes.


rule sweep:
    input:
        lambda wildcards: RULES.train_inputs(MODELS[wildcards.model], dev=False),
    output:
        f"{RUN}/metrics/sweep/{{model}}/{{rate}}.jsonl",
    log:
        f"{RUN}/logs/sweep/{{model}}.{{rate}}.log",
    wildcard_constraints:
        model="|".join(model.name for model in THIS.swept) or "none",
        rate="[0-9.e+-]+",
    priority: 110
    localrule: SUBMITTED
    threads: lambda wildcards: RULES.cores(MODELS[wildcards.model].settings)
    resources:
        **RULES.site("train"),
        options=lambda wildcards: RULES.run_options("train", MODELS[wildcards.model].settings),
    params:
        kind=lambda wildcards: MODELS[wildcards.model].kind.name,
        # A trial differs from the model's training only in tokens and learning rate, and is not evaluated on dev.
        settings=lambda wildcards: RULES.training_settings(
            MODELS[wildcards.model],
            tokens=written(MODELS[wildcards.model].settings)["sweep"]["tokens"],
            learning_rate=float(wildcards.rate),
            dev_blocks=0,
        ),
        checkpoints=below_run("checkpoints/sweep/{model}/{rate}"),
    shell:
        "demix sweep {params.kind} {input} --settings {params.settings:q} --metrics {output}"
        " --checkpoints {params.checkpoints} {resources.options} 2> {log}"


rule choose_rate:
    input:
        lambda wildcards: [
            f"{RUN}/metrics/sweep/{wildcards.model}/{rate}.jsonl" for rate in MODELS[wildcards.model].swept_rates
        ],
    output:
        f"{RUN}/sweep/{{model}}.json",
    log:
        f"{RUN}/logs/choose_rate/{{model}}.log",
    wildcard_constraints:
        model="|".join(model.name for model in THIS.swept) or "none",
    localrule: True
    shell:
        "demix choose-rate {input} --output {output} 2> {log}"


# A training keeps the states that others begin with among its checkpoints, and this rule moves them. A training that ended
# before a state was asked for kept none: its model is then trained again to that step, here and not in its own rule,
# so that what was made of the model stays.
rule seed:
    input:
        model=f"{RUN}/models/{{model}}/model.json",
        rate=lambda wildcards: RULES.chosen_rate(SEEDS[wildcards.model]),
        tokens=lambda wildcards: RULES.train_inputs(SEEDS[wildcards.model]),
    output:
        RULES.seed_files("{model}", "{step}"),
    log:
        f"{RUN}/logs/seed/{{model}}.{{step}}.log",
    wildcard_constraints:
        model="|".join(SEEDS) or "none",
        step="[0-9]+",
    priority: 90
    localrule: SUBMITTED
    threads: lambda wildcards: RULES.cores(SEEDS[wildcards.model].settings)
    resources:
        **RULES.site("train"),
        options=lambda wildcards: RULES.run_options("train", SEEDS[wildcards.model].settings),
    params:
        kind=lambda wildcards: SEEDS[wildcards.model].kind.name,
        settings=lambda wildcards: RULES.training_settings(SEEDS[wildcards.model]),
        beginning=lambda wildcards: RULES.beginning(SEEDS[wildcards.model]),
        step=lambda wildcards: int(wildcards.step),
        kept=below_run("checkpoints/{model}"),
        checkpoints=below_run("checkpoints/{model}-step-{step}"),
        folder=below_run("seeds/{model}/step-{step}"),
    shell:
        "demix seed {params.kind} {input.tokens} --settings {params.settings:q}{params.beginning} --step {params.step}"
        " --output {params.folder} --kept {params.kept} --checkpoints {params.checkpoints} {resources.options} 2> {log}"


# One rule per training: the outputs list the experts, which wildcards cannot.
for model in (model for model in THIS.trained if not model.in_parts):

    rule:
        name:
            f"train_{model.rule}"
        input:
            rate=RULES.chosen_rate(model),
            tokens=RULES.train_inputs(model),
            seed=RULES.seed_of(model),
        output:
            RULES.trained_files(model),
            metrics=f"{RUN}/metrics/{model.place}.jsonl",
        log:
            f"{RUN}/logs/train/{model.place}.log",
        # Models that other rules wait for start first.
        priority: 20 if model.removed else 100 if model.kind.has_experts else 50
        localrule: SUBMITTED
        threads: RULES.cores(model.settings)
        resources:
            **RULES.site("train"),
            options=RULES.train_options(model),
        params:
            kind=model.kind.name,
            settings=verbatim(RULES.training_settings(model)),
            beginning=verbatim(RULES.beginning(model)),
            model=below_run(model.folder),
            checkpoints=below_run(f"checkpoints/{model.place}"),
        shell:
            "demix train {params.kind} {input.tokens} --settings {params.settings:q}{params.beginning}"
            " --output {params.model} --metrics {output.metrics} --checkpoints {params.checkpoints}"
            " {resources.options} 2> {log}"


# Experts that are whole models: one job for each.
for model, part in ((model, part) for model in THIS.joined for part in model.trainings):

    rule:
        name:
            f"train_{part.rule}"
        input:
            rate=RULES.chosen_rate(model),
            tokens=RULES.train_inputs(model),
            seed=RULES.seed_of(model),
        output:
            RULES.trained_files(part),
            metrics=f"{RUN}/metrics/{part.place}.jsonl",
        log:
            f"{RUN}/logs/train/{part.place}.log",
        priority: 20 if model.removed else 100
        localrule: SUBMITTED
        threads: RULES.cores(model.settings)
        resources:
            **RULES.site("train"),
            options=RULES.train_options(model),
        params:
            kind=model.kind.name,
            settings=verbatim(RULES.training_settings(model)),
            beginning=verbatim(RULES.beginning(model)),
            expert=part.part,
            model=below_run(part.folder),
            checkpoints=below_run(f"checkpoints/{part.place}"),
        shell:
            "demix train {params.kind} {input.tokens} --settings {params.settings:q}{params.beginning}"
            " --expert {params.expert} --output {params.model} --metrics {output.metrics}"
            " --checkpoints {params.checkpoints} {resources.options} 2> {log}"


# The experts that are whole models, and were trained one by one, as one model.
for model in THIS.joined:

    rule:
        name:
            f"join_{model.rule}"
        input:
            [file for part in model.parts for file in RULES.trained_files(part)],
            metrics=[f"{RUN}/metrics/{part.place}.jsonl" for part in model.parts],
        output:
            RULES.experts(model.name, model.experts),
            metrics=f"{RUN}/metrics/{model.name}.jsonl",
        log:
            f"{RUN}/logs/join/{model.name}.log",
        resources:
            **RULES.site("corpus"),
        params:
            branches=[f"{RUN}/{part.folder}" for part in model.parts],
            metrics=",".join(f"{RUN}/metrics/{part.place}.jsonl" for part in model.parts),
            model=below_run(f"models/{model.name}"),
        shell:
            "demix join-branches {params.branches} --metrics-of {params.metrics} --output {params.model}"
            " --metrics {output.metrics} 2> {log}"
