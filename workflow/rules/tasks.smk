# Few-shot classification (c-BTM): examples once, the log-probabilities of labels once per model, all routings as arithmetic.
TASKS = CONFIG.tasks
ASKED = systems.classified(THIS)
# A run without tasks has null here.
GIVEN_TASKS = {name: written(task) for name, task in TASKS.items()} or None
# How routings weight clusters, of which the report has a table.
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
    conda:
        "../../environment.yml"
    resources:
        **RULES.site(THIS.examples_stage),
    params:
        settings=lambda wildcards: RULES.as_json(written(TASKS[wildcards.task]), length=THIS.context, seed=THIS.seed),
        documents=lambda wildcards: " ".join(RULES.task_documents(wildcards.task)),
    shell:
        "demix examples {wildcards.task} {params.documents} --tokenizer {input.tokenizer}"
        " --settings {params.settings:q} --output {output} 2> {log}"


# A task that is added to a finished run is scored alone.
for model, place, tasks in [(model, *job) for model in ASKED for job in RULES.task_jobs(model.name).items()]:

    rule:
        name:
            RULES.task_rule(model, place)
        input:
            model=RULES.experts(model.name, model.experts),
            examples=[f"{RUN}/examples/{task}.parquet" for task in tasks],
            tokenizer=f"{RUN}/tokenizer.json",
        output:
            [f"{RUN}/tasks/{model.name}/{task}.parquet" for task in tasks],
        log:
            f"{RUN}/logs/fewshot/{place}.log",
        conda:
            "../../environment.yml"
        threads: CONFIG.threads
        resources:
            **RULES.site("score"),
        params:
            settings=verbatim(
                RULES.as_json(
                    tasks={name: GIVEN_TASKS[name] for name in tasks},
                    precision=CONFIG.evaluation.precision,
                    threads=CONFIG.threads,
                )
            ),
            model=below_run(f"models/{model.name}"),
            folder=below_run(f"tasks/{model.name}"),
            experts=",".join(model.experts),
        shell:
            "demix fewshot {params.model} {input.examples} --experts {params.experts} --tokenizer {input.tokenizer}"
            " --settings {params.settings:q} --output {params.folder} 2> {log}"


rule classify:
    input:
        examples=[f"{RUN}/examples/{task}.parquet" for task in TASKS],
        scores=[f"{RUN}/tasks/{model.name}/{task}.parquet" for model in ASKED for task in TASKS],
        clusterers=[f"{RUN}/clusters/{routing}/clusterer.json" for routing in systems.classified_by(THIS)],
        mixing=[
            f"{RUN}/models/{model.name}/mixing.json" for model in ASKED if model.name in systems.chosen_on_dev(THIS)
        ],
    output:
        f"{RUN}/tasks.parquet",
        TASK_WEIGHTS,
    log:
        f"{RUN}/logs/classify.log",
    conda:
        "../../environment.yml"
    resources:
        **RULES.site("evaluate"),
    params:
        settings=verbatim(
            RULES.as_json(
                tasks=GIVEN_TASKS,
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
        # A run without clusters keeps its command, and does not run again.
        "demix classify {params.run} --settings {params.settings:q} --output "
        + ("{output[0]} --weights {output[1]}" if TASK_WEIGHTS else "{output}")
        + " 2> {log}"
