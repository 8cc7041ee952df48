# One forward pass per (model, expert, domain, split). Every mixture is computed from the tables.

# The folders of n-grams of any order.
POOLED, BY_DOMAIN = systems.ngram_folders("{order}")


for job in scoring_jobs(THIS):

    rule:
        name:
            job.rule
        input:
            model=once(file for part in job.parts for file in RULES.experts(part.model, part.experts)),
            tokens=once(file for part in job.parts for file in RULES.tokens(part.domains, *part.splits)),
            # The columns of added experts use the tables of tokens, which the first scoring of a domain wrote. One job
            # scores all splits of a domain, so that one table stands for all.
            old=[
                file
                for part in job.parts
                for file in RULES.scores(part.model, part.after, ["tokens"], part.splits[:1])
            ],
        output:
            [
                file
                for part in job.parts
                for domain in part.domains
                for file in RULES.scores(
                    part.folder, [domain], [*part.columns_on(domain), *["tokens"] * part.shared], part.splits
                )
            ],
        log:
            f"{RUN}/logs/score/{job.log}.log",
        priority: job.priority
        threads: CONFIG.threads
        resources:
            **RULES.site("score"),
        params:
            settings=scoring_settings(job),
            models=below_run("models"),
            folder=below_run("scores"),
        shell:
            "demix score {params.models} {input.tokens} --settings {params.settings:q} --output {params.folder} 2> {log}"


# Baselines that count: one job reads all text of an order's models, and scores it.
rule score_ngrams:
    input:
        tokens=[*RULES.tokens(TRAINING, "train"), *RULES.tokens(DOMAINS, "dev", "test")],
    output:
        RULES.scores(POOLED, DOMAINS, [DENSE_EXPERT, "tokens"], ["test"]),
        RULES.scores(BY_DOMAIN, DOMAINS, [*TRAINING, "tokens"]),
    log:
        f"{RUN}/logs/score_ngrams/{{order}}.log",
    wildcard_constraints:
        order="|".join(map(str, CONFIG.evaluation.ngrams or ())) or "none",
    resources:
        **RULES.site("evaluate"),
    params:
        settings=lambda wildcards: RULES.ngram_settings(int(wildcards.order)),
        folder=below_run("scores"),
    shell:
        "demix score-ngrams {input.tokens} --settings {params.settings:q} --output {params.folder} 2> {log}"
