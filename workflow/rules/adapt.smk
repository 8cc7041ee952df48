# DEMix-DAPT adds the expert of a novel domain to models/demix; Dense-DAPT makes a model of its own for each.
ADAPTATION = as_json(
    taken(AdaptationRecipe, config["adaptation"]),
    seed=config["seed"],
    threads=config["threads"],
)


rule adapt:
    input:
        tokens=tokens(["{novel}"], "train", "dev"),
        model=experts("demix", TRAINING),
        scores=scores("demix", ["{novel}"], [*TRAINING, "tokens"], ["dev"]),
        # The training domains' losses under their own experts, which adaptation leaves as they are.
        unchanged=[file for domain in TRAINING for file in scores("demix", [domain], [domain, "tokens"], ["dev"])],
    output:
        [f"{RUN}/models/demix/experts/{{novel}}.{kind}" for kind in ("safetensors", "json")],
        metrics=f"{RUN}/metrics/demix-dapt-{{novel}}.jsonl",
    log:
        f"{RUN}/logs/adapt/{{novel}}.log",
    benchmark:
        f"{RUN}/benchmarks/adapt/{{novel}}.tsv"
    wildcard_constraints:
        novel="|".join(NOVEL) or "none",
    priority: 70
    localrule: SUBMITTED
    conda:
        "../../environment.yml"
    threads: cores(config["adaptation"])
    resources:
        **site("adapt"),
        options=run_options("adapt", config["adaptation"]),
    params:
        settings=ADAPTATION,
        model=below_run("models/demix"),
        training=",".join(TRAINING),
        scores=below_run("scores/demix"),
        checkpoints=below_run("checkpoints/demix-dapt-{novel}"),
    shell:
        "demix adapt {params.model} {input.tokens} --training {params.training} --scores {params.scores}"
        " --settings {params.settings:q} --metrics {output.metrics} --checkpoints {params.checkpoints}"
        " {resources.options} 2> {log}"


# For each novel domain a rule for its expert on the domains before it, one job instead of one for each pair, and one
# for this expert and those before it on the domain. A domain appended at the end changes none of the others.
for number, novel in enumerate(NOVEL):

    rule:
        name:
            f"score_adapted_{novel}"
        input:
            new=experts("demix", [novel]),
            tokens=tokens([*TRAINING, *NOVEL[:number]], "dev", "test"),
            old=scores("demix", [*TRAINING, *NOVEL[:number]], ["tokens"]),
        output:
            scores("demix", [*TRAINING, *NOVEL[:number]], [novel]),
        log:
            f"{RUN}/logs/score/adapted/{novel}.log",
        benchmark:
            f"{RUN}/benchmarks/score/adapted/{novel}.tsv"
        priority: 60
        conda:
            "../../environment.yml"
        threads: config["threads"]
        resources:
            **site("score"),
        params:
            settings=SCORING,
            model=below_run("models/demix"),
            folder=below_run("scores/demix"),
            expert=novel,
        shell:
            "demix score {params.model} {input.tokens} --experts {params.expert}"
            " --settings {params.settings:q} --output {params.folder} 2> {log}"

    rule:
        name:
            f"score_adapted_on_{novel}"
        input:
            model=experts("demix", NOVEL[: number + 1]),
            tokens=tokens([novel], "dev", "test"),
            old=scores("demix", [novel], ["tokens"]),
        output:
            scores("demix", [novel], NOVEL[: number + 1]),
        log:
            f"{RUN}/logs/score/adapted/on-{novel}.log",
        benchmark:
            f"{RUN}/benchmarks/score/adapted/on-{novel}.tsv"
        priority: 60
        conda:
            "../../environment.yml"
        threads: config["threads"]
        params:
            settings=SCORING,
            model=below_run("models/demix"),
            folder=below_run("scores/demix"),
            experts=",".join(NOVEL[: number + 1]),
        shell:
            "demix score {params.model} {input.tokens} --experts {params.experts}"
            " --settings {params.settings:q} --output {params.folder} 2> {log}"


rule adapt_dense:
    input:
        tokens=tokens(["{novel}"], "train", "dev"),
        training=tokens(TRAINING, "dev"),
        model=experts("dense", ["dense"]),
    output:
        experts("dense-dapt-{novel}", ["dense"]),
        metrics=f"{RUN}/metrics/dense-dapt-{{novel}}.jsonl",
    log:
        f"{RUN}/logs/adapt-dense/{{novel}}.log",
    benchmark:
        f"{RUN}/benchmarks/adapt-dense/{{novel}}.tsv"
    wildcard_constraints:
        novel="|".join(NOVEL) or "none",
    localrule: SUBMITTED
    conda:
        "../../environment.yml"
    threads: cores(config["adaptation"])
    resources:
        **site("adapt"),
        options=run_options("adapt", config["adaptation"]),
    params:
        settings=ADAPTATION,
        model=below_run("models/dense"),
        output=below_run("models/dense-dapt-{novel}"),
        checkpoints=below_run("checkpoints/dense-dapt-{novel}"),
    shell:
        "demix adapt-dense {params.model} {input.tokens} {input.training} --settings {params.settings:q}"
        " --output {params.output} --metrics {output.metrics} --checkpoints {params.checkpoints}"
        " {resources.options} 2> {log}"


rule score_adapted_dense:
    input:
        model=experts("dense-dapt-{novel}", ["dense"]),
        tokens=tokens([*TRAINING, "{novel}"], "test"),
    output:
        scores("dense-dapt-{novel}", [*TRAINING, "{novel}"], ["dense", "tokens"], ["test"]),
    log:
        f"{RUN}/logs/score/dense-dapt-{{novel}}.log",
    benchmark:
        f"{RUN}/benchmarks/score/dense-dapt-{{novel}}.tsv"
    wildcard_constraints:
        novel="|".join(NOVEL) or "none",
    conda:
        "../../environment.yml"
    threads: config["threads"]
    resources:
        **site("score"),
    params:
        settings=SCORING,
        model=below_run("models/dense-dapt-{novel}"),
        folder=below_run("scores/dense-dapt-{novel}"),
    shell:
        "demix score {params.model} {input.tokens} --experts dense"
        " --settings {params.settings:q} --output {params.folder} 2> {log}"
