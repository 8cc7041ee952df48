# Computations from the score tables: mixtures, tables, figures, tracking.
from demix.report import report_items
from demix.run.evaluated import chosen_on_dev


rule choose_mixing:
    input:
        lambda wildcards: RULES.scores(wildcards.model, TRAINING),
    output:
        f"{RUN}/models/{{model}}/mixing.json",
    params:
        folder=below_run("scores/{model}"),
        domains=",".join(TRAINING),
        experts=lambda wildcards: ",".join(chosen_on_dev(THIS)[wildcards.model]),
    shell:
        "demix choose-mixing {params.folder} --domains {params.domains} --experts {params.experts}"
        " --output {output} 2> {log}"


rule evaluate:
    input:
        lambda wildcards: RULES.evaluated_scores(wildcards.domain),
        routing=lambda wildcards: RULES.evaluated_routing(wildcards.domain),
        mixing=[f"{RUN}/models/{model}/mixing.json" for model in chosen_on_dev(THIS)],
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        results=f"{RUN}/evaluations/{{domain}}.parquet",
        priors=f"{RUN}/evaluations/{{domain}}.priors.parquet",
        differences=f"{RUN}/evaluations/{{domain}}.differences.parquet",
        posteriors=f"{RUN}/evaluations/{{domain}}.posteriors.parquet",
        losses=f"{RUN}/evaluations/{{domain}}.losses.parquet",
        systems=f"{RUN}/evaluations/{{domain}}.systems.parquet",
    params:
        settings=lambda wildcards: RULES.evaluation_settings(wildcards.domain),
        scores=below_run("scores"),
    shell:
        "demix evaluate {wildcards.domain} --scores {params.scores} --settings {params.settings:q}"
        " --tokenizer {input.tokenizer} --output {output.results} 2> {log}"


# The same text with other context lengths than in training.
rule contexts:
    input:
        lambda wildcards: RULES.context_scores(wildcards.domain),
    output:
        f"{RUN}/evaluations/{{domain}}.contexts.parquet",
    params:
        settings=lambda wildcards: RULES.context_settings(wildcards.domain),
        scores=below_run("scores"),
    shell:
        "demix contexts {wildcards.domain} --scores {params.scores} --settings {params.settings:q}"
        " --output {output} 2> {log}"


# Joins the tables of single domains into one.
rule table:
    input:
        lambda wildcards: RULES.joined(wildcards.table),
    output:
        f"{RUN}/{{table}}.parquet",
    wildcard_constraints:
        table="results|priors|differences|posteriors|suites|audit",
    shell:
        "demix join {input} --output {output} 2> {log}"


rule run_config:
    output:
        f"{RUN}/config.json",
    # Commands recognise a run by this file.
    priority: 200
    params:
        settings=lambda wildcards: RULES.kept,
    shell:
        "demix run-config --settings {params.settings:q} --output {output} 2> {log}"


rule report:
    input:
        RULES.reported,
        config=f"{RUN}/config.json",
    output:
        [file for item in report_items(THIS) for file in captioned(item)],
        expand(f"{RUN}/report/cards/{{model}}.{{kind}}", model=RULES.models, kind=["md", "html"]),
    params:
        run=below_run(""),
        folder=below_run("report"),
        models=list(RULES.models),
    shell:
        "(demix report {params.run} --output {params.folder}"
        " && demix card {params.run} {params.models} --output {params.folder}/cards) 2> {log}"


rule track:
    input:
        RULES.tracked,
        expand(f"{RUN}/corpus/{{domain}}/card.json", domain=DOMAINS),
        rules.report.output,
        config=f"{RUN}/config.json",
    output:
        f"{RUN}/tracked.json",
    params:
        run=below_run(""),
    shell:
        "demix track {params.run} --output {output} 2> {log}"
