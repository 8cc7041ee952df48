# Models trained from scratch. The output of a training is the model's manifest, which is written last and has the
# digests of all other files. Checkpoints are not outputs, because Snakemake would delete outputs before a killed job
# resumes.


rule sweep:
    input:
        lambda wildcards: RULES.train_files(RULES.models[wildcards.model], dev=False),
    output:
        f"{RUN}/metrics/sweep/{{model}}/{{rate}}.jsonl",
    wildcard_constraints:
        model=one_of(model.name for model in THIS.swept),
        rate="[0-9.e+-]+",
    priority: 110
    threads: lambda wildcards: RULES.cores(RULES.models[wildcards.model].settings)
    resources:
        options=lambda wildcards: RULES.run_options("train", RULES.models[wildcards.model].settings),
    params:
        kind=lambda wildcards: RULES.models[wildcards.model].kind.name,
        tokens=lambda wildcards: RULES.train_inputs(RULES.models[wildcards.model], dev=False),
        settings=lambda wildcards: RULES.trial_settings(RULES.models[wildcards.model], float(wildcards.rate)),
        checkpoints=below_run("checkpoints/sweep/{model}/{rate}"),
    shell:
        "demix train {params.kind} {params.tokens} --settings {params.settings:q} --metrics {output}"
        " --checkpoints {params.checkpoints} {resources.options} 2> {log}"


rule choose_rate:
    input:
        lambda wildcards: RULES.trials(RULES.models[wildcards.model]),
    output:
        f"{RUN}/sweep/{{model}}.json",
    wildcard_constraints:
        model=one_of(model.name for model in THIS.swept),
    shell:
        "demix choose-rate {input} --output {output} 2> {log}"


# A training keeps, among its checkpoints, the states from which other trainings start; this rule moves them. If a
# training ended before a state was requested, the state is missing. Its model is then trained again to that step, in
# this rule and not in its own, so that everything that was made from the model is kept.
rule seed:
    input:
        model=f"{RUN}/models/{{model}}/model.json",
        rate=lambda wildcards: RULES.chosen_rate(RULES.models[wildcards.model]),
        tokens=lambda wildcards: RULES.train_files(RULES.models[wildcards.model]),
    output:
        f"{RUN}/seeds/{{model}}/step-{{step}}/manifest.json",
    wildcard_constraints:
        step="[0-9]+",
    priority: 90
    threads: lambda wildcards: RULES.cores(RULES.models[wildcards.model].settings)
    resources:
        options=lambda wildcards: RULES.run_options("train", RULES.models[wildcards.model].settings),
    params:
        kind=lambda wildcards: RULES.models[wildcards.model].kind.name,
        tokens=lambda wildcards: RULES.train_inputs(RULES.models[wildcards.model]),
        settings=lambda wildcards: RULES.training_settings(RULES.models[wildcards.model]),
        beginning=lambda wildcards: RULES.beginning(RULES.models[wildcards.model]),
        step=lambda wildcards: int(wildcards.step),
        kept=below_run("checkpoints/{model}"),
        checkpoints=below_run("checkpoints/{model}-step-{step}"),
        folder=below_run("seeds/{model}/step-{step}"),
    shell:
        "demix seed {params.kind} {params.tokens} --settings {params.settings:q}{params.beginning} --step {params.step}"
        " --output {params.folder} --kept {params.kept} --checkpoints {params.checkpoints} {resources.options} 2> {log}"


rule train:
    input:
        rate=lambda wildcards: RULES.chosen_rate(RULES.models[wildcards.model]),
        tokens=lambda wildcards: RULES.train_files(RULES.models[wildcards.model]),
        seed=lambda wildcards: RULES.seed_of(RULES.models[wildcards.model]),
    output:
        manifest=f"{RUN}/models/{{model}}/model.json",
        metrics=f"{RUN}/metrics/{{model}}.jsonl",
    wildcard_constraints:
        model=one_of(model.name for model in THIS.trained if not model.in_parts),
    priority: lambda wildcards: RULES.priority(RULES.models[wildcards.model])
    threads: lambda wildcards: RULES.cores(RULES.models[wildcards.model].settings)
    resources:
        options=lambda wildcards: RULES.train_options(RULES.models[wildcards.model]),
    params:
        kind=lambda wildcards: RULES.models[wildcards.model].kind.name,
        tokens=lambda wildcards: RULES.train_inputs(RULES.models[wildcards.model]),
        settings=lambda wildcards: RULES.training_settings(RULES.models[wildcards.model]),
        beginning=lambda wildcards: RULES.beginning(RULES.models[wildcards.model]),
        model=below_run("models/{model}"),
        checkpoints=below_run("checkpoints/{model}"),
    shell:
        "demix train {params.kind} {params.tokens} --settings {params.settings:q}{params.beginning}"
        " --output {params.model} --metrics {output.metrics} --checkpoints {params.checkpoints}"
        " {resources.options} 2> {log}"


# Experts that are whole models: one training job per expert.
use rule train as train_expert with:
    output:
        manifest=f"{RUN}/branches/{{model}}/{{expert}}/model.json",
        metrics=f"{RUN}/metrics/{{model}}/{{expert}}.jsonl",
    wildcard_constraints:
        model=one_of(model.name for model in THIS.joined),
    params:
        beginning=lambda wildcards: f"{RULES.beginning(RULES.models[wildcards.model])} --expert {wildcards.expert}",
        model=below_run("branches/{model}/{expert}"),
        checkpoints=below_run("checkpoints/{model}/{expert}"),


# Joins experts that are whole models, and were trained one by one, into one model.
rule join:
    input:
        experts=lambda wildcards: RULES.part_files(RULES.models[wildcards.model], "branches", "model.json"),
        metrics=lambda wildcards: RULES.part_files(RULES.models[wildcards.model], "metrics"),
    output:
        manifest=f"{RUN}/models/{{model}}/model.json",
        metrics=f"{RUN}/metrics/{{model}}.jsonl",
    wildcard_constraints:
        model=one_of(model.name for model in THIS.joined),
    params:
        branches=lambda wildcards, input: [str(Path(file).parent) for file in input.experts],
        metrics=lambda wildcards, input: ",".join(input.metrics),
        model=below_run("models/{model}"),
    shell:
        "demix join-branches {params.branches} --metrics-of {params.metrics} --output {params.model}"
        " --metrics {output.metrics} 2> {log}"
