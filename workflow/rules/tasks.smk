# Few-shot classification (c-BTM): examples are prepared once, and labels scored once per model; all mixing methods are
# computed from these scores.
from demix.run.harness import harness_files, harness_routings, harness_settings, harness_tasks


rule examples:
    input:
        lambda wildcards: RULES.task_inputs(wildcards.task),
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        f"{RUN}/examples/{{task}}.parquet",
    params:
        settings=lambda wildcards: RULES.example_settings(wildcards.task),
    shell:
        "demix examples {wildcards.task} --tokenizer {input.tokenizer}"
        " --settings {params.settings:q} --output {output} 2> {log}"


# There is one job per task, so that a task that is added to a finished run is scored by itself.
rule fewshot:
    input:
        model=lambda wildcards: RULES.model(wildcards.model),
        examples=f"{RUN}/examples/{{task}}.parquet",
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        f"{RUN}/tasks/{{model}}/{{task}}.parquet",
    threads: CONFIG.threads
    params:
        settings=lambda wildcards: RULES.fewshot_settings(wildcards.task),
        model=below_run("models/{model}"),
        experts=lambda wildcards: ",".join(RULES.models[wildcards.model].experts),
    shell:
        "demix fewshot {params.model} {input.examples} --experts {params.experts} --tokenizer {input.tokenizer}"
        " --settings {params.settings:q} --output {output} 2> {log}"


# This runs early, so that a task without data ends a run at its beginning, not after its trainings.
rule harness_documents:
    input:
        harness_files(THIS),
    output:
        f"{RUN}/harness/documents.parquet",
    priority: 150
    resources:
        options="--offline" if not CONFIG.lm_eval or CONFIG.lm_eval.offline else "--no-offline",
    params:
        settings=lambda wildcards: RULES.as_json(harness_tasks(THIS)),
    shell:
        "demix harness-documents --settings {params.settings:q} --output {output} {resources.options} 2> {log}"


# The numbers are only reported.
rule contamination:
    input:
        documents=f"{RUN}/harness/documents.parquet",
        train=f"{RUN}/corpus/{{training}}/train.parquet",
    output:
        f"{RUN}/harness/contamination/{{training}}.parquet",
    shell:
        "demix contamination {input.documents} {input.train} --output {output} 2> {log}"


rule harness:
    input:
        lambda wildcards: RULES.model(wildcards.model),
        lambda wildcards: RULES.harness_mixing(wildcards.model),
        harness_files(THIS),
        # The clusters of a model are read from this file; most changes of the file do not concern them.
        ancient([f"{RUN}/config.json"] if harness_routings(THIS) else []),
        documents=f"{RUN}/harness/documents.parquet",
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        f"{RUN}/harness/models/{{model}}.parquet",
    threads: CONFIG.threads
    params:
        settings=lambda wildcards: RULES.as_json(harness_settings(THIS, RULES.models[wildcards.model])),
        # No option contains the context. It is here so that a change of it reruns the job, as config.json is ancient.
        context=CONFIG.evaluation.routing_context[0] if harness_routings(THIS) else "",
        model=below_run("models/{model}"),
    shell:
        "demix harness {params.model} --documents {input.documents} --settings {params.settings:q}"
        " --output {output} 2> {log}"


rule classify:
    input:
        **RULES.classified,
    output:
        tasks=f"{RUN}/tasks.parquet",
        weights=RULES.task_weights,
    params:
        settings=lambda wildcards: RULES.classify_settings,
        run=below_run(""),
        weights=lambda wildcards, output: [f"--weights {file}" for file in output.weights],
        harness=lambda wildcards, input: [f"--harness {file}" for file in input.harness],
    shell:
        "demix classify {params.run} --settings {params.settings:q} --output {output.tasks} {params.weights}"
        " {params.harness} 2> {log}"
