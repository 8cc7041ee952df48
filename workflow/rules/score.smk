# One forward pass per (model, expert, domain, split); whatever is mixed afterwards reads the tables.
SCORING = as_json(
    taken(ScoringRecipe, config["evaluation"]), threads=config["threads"]
)
# What each model's tables have as columns: its experts, or the tokens that the domain-token model is forced to.
COLUMNS = {"demix": TRAINING, "domain_token": TRAINING, "dense": ["dense"], "dense_unbalanced": ["dense"]}
COLUMNS |= {f"{model}-seed{seed}": columns for seed in SEEDS for model, columns in COLUMNS.items()}

for model, columns in COLUMNS.items():

    rule:
        name:
            f"score_{model.replace('-', '_')}"
        input:
            model=experts(model, TRAINING if kind_of(model) == "demix" else ["dense"]),
            tokens=tokens(["{domain}"], "dev", "test"),
        output:
            scores(model, ["{domain}"], [*columns, "tokens"]),
        log:
            f"{RUN}/logs/score/{model}/{{domain}}.log",
        benchmark:
            f"{RUN}/benchmarks/score/{model}/{{domain}}.tsv"
        priority: 80 if model == "demix" else 10
        conda:
            "../../environment.yml"
        threads: config["threads"]
        resources:
            **site("score"),
        params:
            settings=SCORING,
            model=below_run(f"models/{model}"),
            folder=below_run(f"scores/{model}"),
            experts=",".join(columns),
        shell:
            "demix score {params.model} {input.tokens} --experts {params.experts}"
            " --settings {params.settings:q} --output {params.folder} 2> {log}"


for removed, kept in WITHOUT.items():

    rule:
        name:
            f"score_without_{removed}"
        input:
            model=experts(f"without-{removed}", kept),
            tokens=tokens([removed], "dev", "test"),
        output:
            scores(f"without-{removed}", [removed], [*kept, "tokens"]),
        log:
            f"{RUN}/logs/score/without-{removed}.log",
        benchmark:
            f"{RUN}/benchmarks/score/without-{removed}.tsv"
        conda:
            "../../environment.yml"
        threads: config["threads"]
        resources:
            **site("score"),
        params:
            settings=SCORING,
            model=below_run(f"models/without-{removed}"),
            folder=below_run(f"scores/without-{removed}"),
            experts=",".join(kept),
        shell:
            "demix score {params.model} {input.tokens} --experts {params.experts}"
            " --settings {params.settings:q} --output {params.folder} 2> {log}"
