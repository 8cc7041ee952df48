# Arithmetic on the score tables: mixtures, tables, figures, tracking.


rule choose_mixing:
    input:
        lambda wildcards: RULES.scores(
            wildcards.model, TRAINING, [*systems.chosen_on_dev(THIS)[wildcards.model], "tokens"], ["dev"]
        ),
    output:
        f"{RUN}/models/{{model}}/mixing.json",
    log:
        f"{RUN}/logs/choose_mixing/{{model}}.log",
    wildcard_constraints:
        model="|".join(systems.chosen_on_dev(THIS)) or "none",
    resources:
        **RULES.site("evaluate"),
    params:
        folder=below_run("scores/{model}"),
        domains=",".join(TRAINING),
        experts=lambda wildcards: ",".join(systems.chosen_on_dev(THIS)[wildcards.model]),
    shell:
        "demix choose-mixing {params.folder} --domains {params.domains} --experts {params.experts}"
        " --output {output} 2> {log}"


rule evaluate:
    input:
        lambda wildcards: RULES.evaluated_scores(wildcards.domain),
        routing=lambda wildcards: RULES.evaluated_routing(wildcards.domain),
        mixing=[f"{RUN}/models/{model}/mixing.json" for model in systems.chosen_on_dev(THIS)],
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        results=f"{RUN}/evaluations/{{domain}}.parquet",
        priors=f"{RUN}/evaluations/{{domain}}.priors.parquet",
        differences=f"{RUN}/evaluations/{{domain}}.differences.parquet",
        posteriors=f"{RUN}/evaluations/{{domain}}.posteriors.parquet",
        losses=f"{RUN}/evaluations/{{domain}}.losses.parquet",
    log:
        f"{RUN}/logs/evaluate/{{domain}}.log",
    resources:
        **RULES.site("evaluate"),
    params:
        settings=lambda wildcards: RULES.as_json(
            taken(MixingRecipe, CONFIG.evaluation),
            kind=THIS.kind_of(wildcards.domain),
            tables=[asdict(table) for table in systems.evaluated(THIS, wildcards.domain)],
            compared=(
                [system.key for system in compared(THIS, wildcards.domain)] if wildcards.domain in DOMAINS else []
            ),
            against=[(name, *system.key) for name, system in systems.bases(THIS).items()],
            # A run without such pairs keeps its settings, and its evaluations.
            **({"pairs": [(*one.key, *base.key) for one, base in pairs]} if (pairs := balanced_pairs(THIS)) else {}),
            seed=THIS.seed,
        ),
        scores=below_run("scores"),
    shell:
        "demix evaluate {wildcards.domain} --scores {params.scores} --settings {params.settings:q}"
        " --tokenizer {input.tokenizer} --output {output.results} 2> {log}"


# The same text in blocks of other lengths than those of training.
rule contexts:
    input:
        lambda wildcards: RULES.context_scores(wildcards.domain),
    output:
        f"{RUN}/evaluations/{{domain}}.contexts.parquet",
    log:
        f"{RUN}/logs/contexts/{{domain}}.log",
    resources:
        **RULES.site("evaluate"),
    params:
        settings=lambda wildcards: RULES.context_settings(wildcards.domain),
        scores=below_run("scores"),
    shell:
        "demix contexts {wildcards.domain} --scores {params.scores} --settings {params.settings:q}"
        " --output {output} 2> {log}"


rule results:
    input:
        results=expand(f"{RUN}/evaluations/{{domain}}.parquet", domain=DOMAINS),
        priors=expand(f"{RUN}/evaluations/{{domain}}.priors.parquet", domain=DOMAINS),
        differences=expand(f"{RUN}/evaluations/{{domain}}.differences.parquet", domain=DOMAINS),
        posteriors=expand(f"{RUN}/evaluations/{{domain}}.posteriors.parquet", domain=DOMAINS),
    output:
        results=f"{RUN}/results.parquet",
        priors=f"{RUN}/priors.parquet",
        differences=f"{RUN}/differences.parquet",
        posteriors=f"{RUN}/posteriors.parquet",
    log:
        f"{RUN}/logs/results.log",
    localrule: True
    shell:
        "(demix join {input.results} --output {output.results} && demix join {input.priors} --output {output.priors}"
        " && demix join {input.differences} --output {output.differences}"
        " && demix join {input.posteriors} --output {output.posteriors}) 2> {log}"


rule suites:
    input:
        expand(f"{RUN}/evaluations/{{suite}}.parquet", suite=SUITES),
    output:
        f"{RUN}/suites.parquet",
    log:
        f"{RUN}/logs/suites.log",
    localrule: True
    shell:
        "demix join {input} --output {output} 2> {log}"


rule run_config:
    output:
        f"{RUN}/config.json",
    log:
        f"{RUN}/logs/run_config.log",
    # Commands know a run by this file.
    priority: 200
    localrule: True
    params:
        settings=verbatim(RULES.argument(json.dumps(kept(CONFIG)))),
    shell:
        "demix run-config --settings {params.settings:q} --output {output} 2> {log}"


METRICS = [f"{RUN}/metrics/{one.name}.jsonl" for one in (*THIS.trained, *THIS.adaptations)]
# The experts of all domains, including the added ones.
EXPERTS = RULES.experts(THIS.receiver.name, [*TRAINING, *NOVEL])


rule report:
    input:
        f"{RUN}/results.parquet",
        f"{RUN}/priors.parquet",
        f"{RUN}/differences.parquet",
        f"{RUN}/posteriors.parquet",
        f"{RUN}/corpus/overlap.parquet",
        expand(f"{RUN}/corpus/{{domain}}/card.json", domain=DOMAINS),
        f"{RUN}/audit.parquet" if WITHOUT else [],
        f"{RUN}/tasks.parquet" if TASKS or HARNESSED else [],
        f"{RUN}/suites.parquet" if SUITES else [],
        [f"{RUN}/harness/contamination/{domain}.parquet" for domain in TRAINING if HARNESSED],
        METRICS,
        # What a report of clusters reads besides.
        [f"{RUN}/clusters/{clustering}/clusterer.json" for clustering in THIS.learned_clusterings],
        [
            f"{RUN}/clusters/{clustering}/assigned/{domain}.{split}.parquet"
            for clustering in THIS.learned_clusterings
            for domain in TRAINING
            for split in ("train", "test")
        ],
        [f"{RUN}/evaluations/{domain}.losses.parquet" for domain in TRAINING if THIS.learned_clusterings],
        [f"{RUN}/evaluations/{domain}.contexts.parquet" for domain in DOMAINS if asked_contexts(THIS)],
        # The learning rates that were tried, and the sizes of models.
        [f"{RUN}/models/{THIS.receiver.name}/experts/{novel}.json" for novel in NOVEL],
        [f"{RUN}/models/{model}/model.json" for model in MODELS],
        config=f"{RUN}/config.json",
    output:
        *[file for item in report_items(THIS) for file in captioned(item)],
    log:
        f"{RUN}/logs/report.log",
    localrule: True
    params:
        run=below_run(""),
        folder=below_run("report"),
    shell:
        "demix report {params.run} --output {params.folder} 2> {log}"


rule card:
    input:
        f"{RUN}/results.parquet",
        [f"{RUN}/models/{model}/model.json" for model in MODELS],
        EXPERTS,
        expand(f"{RUN}/corpus/{{domain}}/card.json", domain=DOMAINS),
        config=f"{RUN}/config.json",
    output:
        expand(f"{RUN}/report/cards/{{model}}.{{kind}}", model=MODELS, kind=["md", "html"]),
    log:
        f"{RUN}/logs/card.log",
    localrule: True
    params:
        run=below_run(""),
        folder=below_run("report/cards"),
        models=" ".join(MODELS),
    shell:
        "demix card {params.run} {params.models} --output {params.folder} 2> {log}"


rule track:
    input:
        f"{RUN}/results.parquet",
        f"{RUN}/tasks.parquet" if TASKS or HARNESSED else [],
        f"{RUN}/suites.parquet" if SUITES else [],
        TASK_WEIGHTS,
        METRICS,
        EXPERTS,
        expand(f"{RUN}/corpus/{{domain}}/card.json", domain=DOMAINS),
        [f"{RUN}/report/{name}" for name in report_files(THIS)],
        rules.card.output,
        config=f"{RUN}/config.json",
    output:
        f"{RUN}/tracked.json",
    log:
        f"{RUN}/logs/track.log",
    localrule: True
    params:
        run=below_run(""),
    shell:
        "demix track {params.run} --output {output} 2> {log}"
