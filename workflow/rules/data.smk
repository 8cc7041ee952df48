# Raw text -> anonymized documents -> corpus splits -> tokens.


# One pass over a part of a shared source writes the raw text of each of its domains, for the rule that reads it.
rule divide:
    input:
        lambda wildcards: CONFIG.sources[wildcards.source].source.share(int(wildcards.part)),
    output:
        f"{RUN}/sources/{{source}}/{{part}}.json",
    wildcard_constraints:
        source=one_of(THIS.shared),
    resources:
        # These are a resource, not params: if a domain is added, it reads the source by itself, and other text is kept.
        settings=lambda wildcards: RULES.division_settings(wildcards.source),
    params:
        division=lambda wildcards: RULES.as_json(RULES.division(wildcards.source)),
        part=lambda wildcards: int(wildcards.part),
        raw=below_run("raw"),
    shell:
        "demix divide {wildcards.source} --settings {resources.settings} --part {params.part}"
        " --raw {params.raw} --output {output} 2> {log}"


# The config sets the number of parts of a source. Each part is one job, or, on a cluster, one job of download and one
# of anonymize.
if THIS.submitted:

    rule download:
        input:
            lambda wildcards: RULES.read_files(wildcards.domain, int(wildcards.part)),
        output:
            temp(f"{RUN}/raw/{{domain}}/{{part}}.parquet"),
        params:
            settings=lambda wildcards: RULES.source_settings(wildcards.domain, whole=True),
            part=lambda wildcards: int(wildcards.part),
        shell:
            "demix download {wildcards.domain} --settings {params.settings:q} --part {params.part}"
            " --output {output} 2> {log}"

    rule anonymize:
        input:
            f"{RUN}/raw/{{domain}}/{{part}}.parquet",
        output:
            documents=f"{RUN}/documents/{{domain}}/{{part}}.parquet",
            counts=f"{RUN}/documents/{{domain}}/{{part}}.json",
        params:
            rules=lambda wildcards: RULES.anonymizing(wildcards.domain),
            pieces=lambda wildcards: RULES.pieces(wildcards.domain),
        shell:
            "demix anonymize {input} {params.rules} {params.pieces}"
            " --output {output.documents} --counts {output.counts} 2> {log}"

else:

    rule read:
        input:
            lambda wildcards: RULES.read_files(wildcards.domain, int(wildcards.part)),
        output:
            documents=f"{RUN}/documents/{{domain}}/{{part}}.parquet",
            counts=f"{RUN}/documents/{{domain}}/{{part}}.json",
        params:
            settings=lambda wildcards: RULES.source_settings(wildcards.domain),
            part=lambda wildcards: int(wildcards.part),
            rules=lambda wildcards: RULES.anonymizing(wildcards.domain),
            raw=below_run("raw/{domain}/{part}.parquet"),
        shell:
            "demix read {wildcards.domain} --settings {params.settings:q} --part {params.part} {params.rules}"
            " --raw {params.raw} --output {output.documents} --counts {output.counts} 2> {log}"


# Novel domains are not an input, because a new novel domain must not change the training domains.
rule deduplicate:
    input:
        RULES.parts(TRAINING, "parquet"),
    output:
        f"{RUN}/corpus/owners.parquet",
    shell:
        "demix deduplicate {input} --output {output} 2> {log}"


rule split:
    input:
        documents=lambda wildcards: RULES.parts([wildcards.domain], "parquet"),
        counts=lambda wildcards: RULES.parts([wildcards.domain], "json"),
        owners=f"{RUN}/corpus/owners.parquet",
    output:
        expand(f"{RUN}/corpus/{{{{domain}}}}/{{split}}.parquet", split=SPLITS),
        f"{RUN}/corpus/{{domain}}/card.json",
    wildcard_constraints:
        domain=one_of(DOMAINS),
    params:
        settings=lambda wildcards: RULES.split_settings(wildcards.domain),
        folder=below_run("corpus/{domain}"),
    shell:
        "demix split {wildcards.domain} {input.documents} --owners {input.owners}"
        " --settings {params.settings:q} --output {params.folder} 2> {log}"


rule tokenizer:
    input:
        CONFIG.tokenizer.path or expand(f"{RUN}/corpus/{{domain}}/train.parquet", domain=TRAINING),
    output:
        f"{RUN}/tokenizer.json",
    params:
        settings=lambda wildcards: RULES.as_json(written(CONFIG.tokenizer)),
    shell:
        "demix tokenizer {input} --settings {params.settings:q} --output {output} 2> {log}"


rule tokenize:
    input:
        documents=expand(f"{RUN}/corpus/{{{{domain}}}}/{{split}}.parquet", split=SPLITS),
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        expand(
            f"{RUN}/tokens/{{{{domain}}}}/{{split}}.{{kind}}",
            split=SPLITS,
            kind=["arrow", "documents.arrow", "json"],
        ),
    wildcard_constraints:
        domain=one_of(DOMAINS),
    params:
        folder=below_run("tokens/{domain}"),
    shell:
        "demix tokenize {input.documents} --tokenizer {input.tokenizer} --output {params.folder} 2> {log}"


# A domain of a suite has only a test split.
use rule split as hold_out with:
    output:
        f"{RUN}/corpus/{{domain}}/test.parquet",
        f"{RUN}/corpus/{{domain}}/card.json",
    wildcard_constraints:
        domain=one_of(THIS.suites),


use rule tokenize as tokenize_suite with:
    input:
        documents=f"{RUN}/corpus/{{domain}}/test.parquet",
        tokenizer=f"{RUN}/tokenizer.json",
    output:
        expand(f"{RUN}/tokens/{{{{domain}}}}/test.{{kind}}", kind=["arrow", "documents.arrow", "json"]),
    wildcard_constraints:
        domain=one_of(THIS.suites),


# The report compares a domain's overlap with each training domain with how well that domain's expert predicts it.
rule overlap:
    input:
        RULES.tokens(TRAINING, "train"),
        RULES.tokens(DOMAINS, "test"),
    output:
        f"{RUN}/corpus/overlap.parquet",
    shell:
        "demix overlap {input} --output {output} 2> {log}"
