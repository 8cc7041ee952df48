# Few-shot classification (c-BTM): examples once, the log-probabilities of labels once per model, all routings as arithmetic.
TASKS = CONFIG.tasks
ASKED = systems.classified(THIS)
# A run without tasks has null here.
GIVEN_TASKS = {name: written(task) for name, task in TASKS.items()} or None
# Those of the lm-evaluation-harness.
HARNESSED = [model.name for model in harnessed(THIS)]
HARNESS = [f"{RUN}/harness/models/{model}.parquet" for model in HARNESSED]
# How routings weight clusters.
TASK_WEIGHTS = [f"{RUN}/task_weights.parquet"] if TASKS and systems.clustered(THIS) else []


wildcard_constraints:
    task="|".join(TASKS) or "none",


rule examples:
    input:
        lambda wildcards: RULES.task_inputs(wildcards.task),
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        f"{RUN}/examples/{{task}}.parquet",
    log:
        f"{RUN}/logs/examples/{{task}}.log",
    localrule: RULES.on_login(THIS.examples_stage)
    resources:
        **RULES.site(THIS.examples_stage),
    params:
        settings=lambda wildcards: RULES.as_json(written(TASKS[wildcards.task]), length=THIS.context, seed=THIS.seed),
        documents=lambda wildcards: " ".join(RULES.task_documents(wildcards.task)),
    shell:
        "demix examples {wildcards.task} {params.documents} --tokenizer {input.tokenizer}"
        " --settings {params.settings:q} --output {output} 2> {log}"


# A job for each task, so that one that is added to a finished run is scored alone.
rule fewshot:
    input:
        model=lambda wildcards: RULES.experts(wildcards.model, MODELS[wildcards.model].experts),
        examples=f"{RUN}/examples/{{task}}.parquet",
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        f"{RUN}/tasks/{{model}}/{{task}}.parquet",
    log:
        f"{RUN}/logs/fewshot/{{model}}/{{task}}.log",
    wildcard_constraints:
        model="|".join(model.name for model in ASKED) or "none",
    threads: CONFIG.threads
    resources:
        **RULES.site("score"),
    params:
        settings=lambda wildcards: RULES.as_json(
            tasks={wildcards.task: GIVEN_TASKS[wildcards.task]},
            precision=CONFIG.evaluation.precision,
            threads=CONFIG.threads,
        ),
        model=below_run("models/{model}"),
        folder=below_run("tasks/{model}"),
        experts=lambda wildcards: ",".join(MODELS[wildcards.model].experts),
    shell:
        "demix fewshot {params.model} {input.examples} --experts {params.experts} --tokenizer {input.tokenizer}"
        " --settings {params.settings:q} --output {params.folder} 2> {log}"


# Early: a task without data is told at the beginning of a run, and not after its trainings.
rule harness_documents:
    input:
        harness_files(THIS),
    output:
        f"{RUN}/harness/documents.parquet",
    log:
        f"{RUN}/logs/harness_documents.log",
    priority: 150
    localrule: RULES.on_login("download")
    resources:
        **RULES.site("download"),
        options="--offline" if not CONFIG.lm_eval or CONFIG.lm_eval.offline else "--no-offline",
    params:
        settings=verbatim(RULES.as_json(harness_tasks(THIS))),
    shell:
        "demix harness-documents --settings {params.settings:q} --output {output} {resources.options} 2> {log}"


# Reported only.
rule contamination:
    input:
        documents=f"{RUN}/harness/documents.parquet",
        train=f"{RUN}/corpus/{{training}}/train.parquet",
    output:
        f"{RUN}/harness/contamination/{{training}}.parquet",
    log:
        f"{RUN}/logs/contamination/{{training}}.log",
    resources:
        **RULES.site("corpus"),
    shell:
        "demix contamination {input.documents} {input.train} --output {output} 2> {log}"


rule harness:
    input:
        lambda wildcards: RULES.experts(wildcards.model, MODELS[wildcards.model].experts),
        lambda wildcards: RULES.harness_mixing(wildcards.model),
        harness_files(THIS),
        # What the clusters of a model are is read there; most changes of it are of something else.
        ancient([f"{RUN}/config.json"] if harness_routings(THIS) else []),
        documents=f"{RUN}/harness/documents.parquet",
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        f"{RUN}/harness/models/{{model}}.parquet",
    log:
        f"{RUN}/logs/harness/{{model}}.log",
    wildcard_constraints:
        model="|".join(HARNESSED) or "none",
    threads: CONFIG.threads
    resources:
        **RULES.site("score"),
    params:
        settings=lambda wildcards: RULES.as_json(harness_settings(THIS, MODELS[wildcards.model])),
        context=CONFIG.evaluation.routing_context[0] if harness_routings(THIS) else "",
        model=below_run("models/{model}"),
    shell:
        "demix harness {params.model} --documents {input.documents} --settings {params.settings:q}"
        " --output {output} 2> {log}"


rule classify:
    input:
        examples=[f"{RUN}/examples/{task}.parquet" for task in TASKS],
        scores=[f"{RUN}/tasks/{model.name}/{task}.parquet" for model in ASKED for task in TASKS],
        clusterers=[f"{RUN}/clusters/{routing}/clusterer.json" for routing in systems.classified_by(THIS)],
        mixing=[
            f"{RUN}/models/{model.name}/mixing.json" for model in ASKED if model.name in systems.chosen_on_dev(THIS)
        ],
        harness=HARNESS,
    output:
        f"{RUN}/tasks.parquet",
        TASK_WEIGHTS,
    log:
        f"{RUN}/logs/classify.log",
    resources:
        **RULES.site("evaluate"),
    params:
        settings=verbatim(
            RULES.as_json(
                # A run of the harness's tasks alone has none.
                tasks=GIVEN_TASKS or ({} if HARNESSED else None),
                models=[
                    {
                        "model": model.row,
                        "folder": model.name,
                        "seed": model.seed,
                        "mixes": model.kind.has_experts,
                        "routing": model.routing,
                    }
                    for model in ASKED
                ],
                weights=CONFIG.evaluation.weights,
                temperature=written(CONFIG.evaluation)["temperature"],
                top_k=CONFIG.evaluation.top_k,
                seed=THIS.seed,
            )
        ),
        run=below_run(""),
    shell:
        # A run without clusters or without the harness keeps its command, and does not run again.
        "demix classify {params.run} --settings {params.settings:q} --output "
        + ("{output[0]} --weights {output[1]}" if TASK_WEIGHTS else "{output}")
        + "".join(f" --harness {file}" for file in HARNESS)
        + " 2> {log}"
