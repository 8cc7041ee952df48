# One forward pass per (model, expert, domain, split). Every mixture is computed from the tables.
SCORING = as_json(taken(ScoringRecipe, config["evaluation"]), threads=config["threads"])

for job in scoring_jobs(config):

    rule:
        name:
            job.rule
        input:
            model=experts(job.model, job.experts),
            tokens=tokens(job.domains, *job.splits),
            # The columns of added experts use the table of tokens that the first scoring wrote.
            old=scores(job.model, job.after, ["tokens"], job.splits),
        output:
            [
                file
                for domain in job.domains
                for file in scores(
                    job.folder, [domain], [*job.columns_on(domain), *["tokens"] * job.shared], job.splits
                )
            ],
        log:
            f"{RUN}/logs/score/{job.log}.log",
        priority: job.priority
        conda:
            "../../environment.yml"
        threads: config["threads"]
        resources:
            **site("score"),
        params:
            settings=SCORING,
            model=below_run(f"models/{job.model}"),
            folder=below_run(f"scores/{job.folder}"),
            # With the option of other blocks here, the commands of the other rules stay as they are.
            experts=("own" if job.own else ",".join(job.columns)) + f" --context {job.context}" * bool(job.context),
        shell:
            "demix score {params.model} {input.tokens} --experts {params.experts}"
            " --settings {params.settings:q} --output {params.folder} 2> {log}"


# Which experts tokens choose on each domain.
rule loads:
    input:
        model=lambda wildcards: experts(wildcards.model, MERGED),
        tokens=tokens(DOMAINS, "test"),
    output:
        f"{RUN}/loads/{{model}}.parquet",
    log:
        f"{RUN}/logs/loads/{{model}}.log",
    wildcard_constraints:
        model="|".join(model.name for model in token_routed(config)) or "none",
    conda:
        "../../environment.yml"
    threads: config["threads"]
    resources:
        **site("score"),
    params:
        settings=SCORING,
        model=below_run("models/{model}"),
    shell:
        "demix router-loads {params.model} {input.tokens} --settings {params.settings:q} --output {output} 2> {log}"
