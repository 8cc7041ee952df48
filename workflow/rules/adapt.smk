# DEMix-DAPT adds the expert of a novel domain to a model with experts. Dense-DAPT trains one model per novel domain.
RECEIVER, DENSE = THIS.receiver.name, CONFIG.adaptation.dense


rule adapt:
    input:
        model=RULES.model(RECEIVER),
        tokens=RULES.tokens(["{novel}"], "train", "dev"),
        # The parent is chosen by these scores. Adaptation does not change the losses of training domains under their
        # own experts, so metrics repeat them.
        scores=lambda wildcards: RULES.scores(RECEIVER, [wildcards.novel, *TRAINING]),
    output:
        manifest=f"{RUN}/models/{RECEIVER}/experts/{{novel}}.json",
        metrics=f"{RUN}/metrics/{RECEIVER}-dapt-{{novel}}.jsonl",
    # One job scores both adaptations of a domain.
    priority: 70
    threads: RULES.cores(THIS.adapting(THIS.receiver))
    resources:
        options=f"{RULES.run_options('adapt', THIS.adapting(THIS.receiver))} {RULES.live}",
    params:
        settings=lambda wildcards: RULES.adaptation_settings(RULES.models[RECEIVER]),
        known=f"--training {','.join(TRAINING)} --scores {RUN}/scores/{RECEIVER}",
        model=below_run(f"models/{RECEIVER}"),
        output=below_run(f"models/{RECEIVER}"),
        checkpoints=below_run(f"checkpoints/{RECEIVER}-dapt-{{novel}}"),
    shell:
        "demix adapt {params.model} {input.tokens} {params.known} --settings {params.settings:q}"
        " --output {params.output} --metrics {output.metrics} --checkpoints {params.checkpoints}"
        " {resources.options} 2> {log}"


use rule adapt as adapt_dense with:
    input:
        model=RULES.model(DENSE),
        tokens=RULES.tokens(["{novel}"], "train", "dev"),
        training=RULES.tokens(TRAINING, "dev"),
    output:
        manifest=f"{RUN}/models/{DENSE}-dapt-{{novel}}/model.json",
        metrics=f"{RUN}/metrics/{DENSE}-dapt-{{novel}}.jsonl",
    priority: 40
    params:
        settings=lambda wildcards: RULES.adaptation_settings(RULES.models[DENSE]),
        known=lambda wildcards, input: input.training,
        model=below_run(f"models/{DENSE}"),
        output=below_run(f"models/{DENSE}-dapt-{{novel}}"),
        checkpoints=below_run(f"checkpoints/{DENSE}-dapt-{{novel}}"),
