# Averages of the parameters of experts that are whole models: one by equal weights, and one for each domain, by the cached
# prior of its dev split.

for average in averages(config):
    model, by_domain = average.model, average.weights == "posterior"

    rule:
        name:
            average.rule
        input:
            model=experts(model.name, model.experts),
            scores=scores(model.name, ["{domain}"], [*model.columns, "tokens"], ["dev"]) if by_domain else [],
        output:
            [temp(file) if by_domain else file for file in experts(average.place, AVERAGED)],
        log:
            f"{RUN}/logs/average/{average.place}.log",
        conda:
            "../../environment.yml"
        resources:
            **site("evaluate"),
        params:
            model=below_run(f"models/{model.name}"),
            experts=",".join(model.experts),
            prior=(
                f"--scores {RUN}/scores/{model.name} --decay {config['evaluation']['decay']}"
                f" --blocks {config['evaluation']['dev_blocks']}"
                if by_domain
                else ""
            ),
            domain=lambda wildcards: f"--domain {wildcards.domain}" if wildcards.get("domain") else "",
            output=below_run(f"models/{average.place}"),
        shell:
            "demix average-experts {params.model} --experts {params.experts} {params.prior} {params.domain}"
            " --output {params.output} 2> {log}"
