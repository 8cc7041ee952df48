# DEMix-DAPT adds the expert of a novel domain to a model with experts. Dense-DAPT makes one model per novel domain.
# One rule for all novel domains of each parent.
for parent in {one.parent.name: one.parent for one in THIS.adaptations}.values():
    adds, name = parent.kind.has_experts, adapted(parent.row, "{novel}")

    rule:
        name:
            "adapt" if adds else "adapt_dense"
        input:
            tokens=RULES.tokens(["{novel}"], "train", "dev"),
            model=RULES.experts(parent.name, parent.experts),
            # These scores choose the parent.
            scores=RULES.scores(parent.name, ["{novel}"], [*TRAINING, "tokens"], ["dev"]) if adds else [],
            # Adaptation does not change the losses of training domains under their own experts: metrics repeat them.
            unchanged=[
                file for domain in TRAINING * adds for file in RULES.scores(parent.name, [domain], [domain], ["dev"])
            ],
            training=[] if adds else RULES.tokens(TRAINING, "dev"),
        output:
            [f"{RUN}/models/{parent.name}/experts/{{novel}}.{kind}" for kind in ("safetensors", "json")]
            if adds
            else RULES.experts(name, parent.experts),
            metrics=f"{RUN}/metrics/{name}.jsonl",
        log:
            f"{RUN}/logs/{'adapt' if adds else 'adapt-dense'}/{{novel}}.log",
        # One job scores both adaptations of a domain.
        priority: 70 if adds else 40
        localrule: SUBMITTED
        threads: RULES.cores(CONFIG.adaptation)
        resources:
            **RULES.site("adapt"),
            options=f"{RULES.run_options('adapt', CONFIG.adaptation)} {RULES.live}",
        params:
            settings=verbatim(
                RULES.as_json(
                    taken(AdaptationRecipe, CONFIG.adaptation),
                    learning_rate_factor=THIS.learning_rate_factor(parent),
                    seed=THIS.seed,
                    threads=CONFIG.threads,
                )
            ),
            model=below_run(f"models/{parent.name}"),
            output=below_run(f"models/{parent.name if adds else name}"),
            known=f"--training {','.join(TRAINING)} --scores {RUN}/scores/{parent.name}" if adds else "",
            checkpoints=below_run(f"checkpoints/{name}"),
        shell:
            "demix adapt {params.model} {input.tokens} {input.training} {params.known}"
            " --settings {params.settings:q} --output {params.output} --metrics {output.metrics} --checkpoints {params.checkpoints}"
            " {resources.options} 2> {log}"
