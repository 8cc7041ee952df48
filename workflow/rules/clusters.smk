# Clusters of the training domains' documents (c-BTM): fitted on a sample, to which all documents are then assigned.
# Documents of novel domains are in no cluster.


rule fit_clusters:
    input:
        expand(f"{RUN}/corpus/{{domain}}/train.parquet", domain=TRAINING),
    output:
        [
            f"{RUN}/clusters/{{clustering}}/{name}"
            for name in ("clusterer.json", "clusterer.safetensors", "terms.parquet")
        ],
    priority: 90
    params:
        settings=lambda wildcards: RULES.as_json(written(CONFIG.clusterings[wildcards.clustering])),
        seed=THIS.seed,
        folder=below_run("clusters/{clustering}"),
    shell:
        "demix fit-clusters {input} --settings {params.settings:q} --seed {params.seed} --output {params.folder} 2> {log}"


rule assign:
    input:
        clusterer=rules.fit_clusters.output,
        documents=expand(f"{RUN}/corpus/{{domain}}/{{split}}.parquet", domain=TRAINING, split=SPLITS),
    output:
        expand(
            f"{RUN}/clusters/{{{{clustering}}}}/assigned/{{domain}}.{{split}}.parquet", domain=TRAINING, split=SPLITS
        ),
    priority: 90
    params:
        clusterer=below_run("clusters/{clustering}"),
        folder=below_run("clusters/{clustering}/assigned"),
    shell:
        "demix assign {params.clusterer} {input.documents} --output {params.folder} 2> {log}"


rule cluster_shards:
    input:
        clusterer=f"{RUN}/clusters/{{clustering}}/clusterer.json",
        assigned=expand(f"{RUN}/clusters/{{{{clustering}}}}/assigned/{{domain}}.{{{{split}}}}.parquet", domain=TRAINING),
        tokens=RULES.tokens(TRAINING, "{split}"),
    output:
        f"{RUN}/clusters/{{clustering}}/shards/{{split}}.json",
    priority: 90
    params:
        clusterer=below_run("clusters/{clustering}"),
        length=THIS.context,
        folder=below_run("clusters/{clustering}/shards"),
    shell:
        "demix cluster-shards {params.clusterer} {input.tokens} --length {params.length} --output {params.folder}"
        " 2> {log}"
