# Arithmetic on the score tables: mixtures, tables, figures, tracking.

MIXING = ("decay", "dev_blocks", "weights", "top_k", "decays", "prior_blocks")


rule evaluate:
    input:
        evaluated,
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        results=f"{RUN}/evaluations/{{domain}}.parquet",
        priors=f"{RUN}/evaluations/{{domain}}.priors.parquet",
        differences=f"{RUN}/evaluations/{{domain}}.differences.parquet",
        posteriors=f"{RUN}/evaluations/{{domain}}.posteriors.parquet",
    log:
        f"{RUN}/logs/evaluate/{{domain}}.log",
    benchmark:
        f"{RUN}/benchmarks/evaluate/{{domain}}.tsv"
    conda:
        "../../environment.yml"
    resources:
        **site("evaluate"),
    params:
        settings=as_json(
            {key: config["evaluation"][key] for key in MIXING},
            training=TRAINING,
            novel=NOVEL,
            without=WITHOUT,
            seed=config["seed"],
            # Named only where there are any, so that a run without them stays as it is.
            **({"seeds": SEEDS} if SEEDS else {}),
        ),
        scores=below_run("scores"),
    shell:
        "demix evaluate {wildcards.domain} --scores {params.scores} --settings {params.settings:q}"
        " --tokenizer {input.tokenizer} --output {output.results} --priors {output.priors}"
        " --differences {output.differences} --posteriors {output.posteriors} 2> {log}"


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
    benchmark:
        f"{RUN}/benchmarks/results.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    shell:
        "(demix join {input.results} --output {output.results} && demix join {input.priors} --output {output.priors}"
        " && demix join {input.differences} --output {output.differences}"
        " && demix join {input.posteriors} --output {output.posteriors}) 2> {log}"


rule run_config:
    output:
        f"{RUN}/config.json",
    log:
        f"{RUN}/logs/run_config.log",
    benchmark:
        f"{RUN}/benchmarks/run_config.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    params:
        # The site is none of what a run is.
        settings=json.dumps({key: value for key, value in config.items() if key != "cluster"}),
    shell:
        "demix run-config --settings {params.settings:q} --output {output} 2> {log}"


METRICS = expand(f"{RUN}/metrics/{{model}}.jsonl", model=[*trained_models(config), *adaptations(config)])


rule report:
    input:
        f"{RUN}/results.parquet",
        f"{RUN}/priors.parquet",
        f"{RUN}/differences.parquet",
        f"{RUN}/posteriors.parquet",
        f"{RUN}/corpus/overlap.parquet",
        f"{RUN}/audit.parquet" if WITHOUT else [],
        METRICS,
        [f"{RUN}/models/demix/experts/{novel}.json" for novel in NOVEL],
        config=f"{RUN}/config.json",
    output:
        *[captioned(name) for name in REPORT_FILES],
    log:
        f"{RUN}/logs/report.log",
    benchmark:
        f"{RUN}/benchmarks/report.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    params:
        run=below_run(""),
        folder=below_run("report"),
    shell:
        "demix report {params.run} --output {params.folder} 2> {log}"


# An adapted expert is part of the model it was added to.
CARDS = [*trained_models(config), *[name for name in adaptations(config) if not name.startswith("demix-dapt-")]]


rule card:
    input:
        f"{RUN}/results.parquet",
        [f"{RUN}/models/{model}/model.json" for model in CARDS],
        experts("demix", [*TRAINING, *NOVEL]),
        expand(f"{RUN}/corpus/{{domain}}/card.json", domain=DOMAINS),
        config=f"{RUN}/config.json",
    output:
        expand(f"{RUN}/report/cards/{{model}}.md", model=CARDS),
    log:
        f"{RUN}/logs/card.log",
    benchmark:
        f"{RUN}/benchmarks/card.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    params:
        run=below_run(""),
        folder=below_run("report/cards"),
        models=" ".join(CARDS),
    shell:
        "demix card {params.run} {params.models} --output {params.folder} 2> {log}"


rule track:
    input:
        f"{RUN}/results.parquet",
        METRICS,
        experts("demix", [*TRAINING, *NOVEL]),
        expand(f"{RUN}/corpus/{{domain}}/card.json", domain=DOMAINS),
        [f"{RUN}/report/{name}" for name in REPORT_FILES],
        rules.card.output,
        config=f"{RUN}/config.json",
    output:
        f"{RUN}/tracked.json",
    log:
        f"{RUN}/logs/track.log",
    benchmark:
        f"{RUN}/benchmarks/track.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    params:
        settings=as_json(
            config["tracking"] | {"experiment": config["tracking"]["experiment"] or f"demix-{config['run']}"}
        ),
        run=below_run(""),
    shell:
        "demix track {params.run} --settings {params.settings:q} --output {output} 2> {log}"
