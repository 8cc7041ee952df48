# Clusters of the training domains' documents (c-BTM): fitted on a sample, then each document goes to its own.
# Novel domains' documents are in no cluster.
CORPUS = [f"{RUN}/corpus/{domain}/{split}.parquet" for domain in TRAINING for split in SPLITS]


rule fit_clusters:
    input:
        expand(f"{RUN}/corpus/{{domain}}/train.parquet", domain=TRAINING),
    output:
        [
            f"{RUN}/clusters/{{clustering}}/{name}"
            for name in ("clusterer.json", "clusterer.safetensors", "terms.parquet")
        ],
    log:
        f"{RUN}/logs/fit_clusters/{{clustering}}.log",
    wildcard_constraints:
        clustering="|".join(systems.fitted(THIS)) or "none",
    priority: 90
    resources:
        **RULES.site("corpus"),
    params:
        settings=lambda wildcards: RULES.as_json(written(CONFIG.clusterings[wildcards.clustering])),
        seed=THIS.seed,
        folder=below_run("clusters/{clustering}"),
    shell:
        "demix fit-clusters {input} --settings {params.settings:q} --seed {params.seed} --output {params.folder} 2> {log}"


rule assign:
    input:
        clusterer=rules.fit_clusters.output,
        documents=CORPUS,
    output:
        [f"{RUN}/clusters/{{clustering}}/assigned/{domain}.{split}.parquet" for domain in TRAINING for split in SPLITS],
    log:
        f"{RUN}/logs/assign/{{clustering}}.log",
    wildcard_constraints:
        clustering="|".join(THIS.learned_clusterings) or "none",
    priority: 90
    resources:
        **RULES.site("corpus"),
    params:
        clusterer=below_run("clusters/{clustering}"),
        folder=below_run("clusters/{clustering}/assigned"),
    shell:
        "demix assign {params.clusterer} {input.documents} --output {params.folder} 2> {log}"


# One rule per clustering and split: the outputs list the clusters, which wildcards cannot.
for clustering, split in THIS.learned_splits:

    rule:
        name:
            f"cluster_{split}_{clustering}"
        input:
            clusterer=f"{RUN}/clusters/{clustering}/clusterer.json",
            assigned=[f"{RUN}/clusters/{clustering}/assigned/{domain}.{split}.parquet" for domain in TRAINING],
            tokens=RULES.tokens(TRAINING, split),
        output:
            [
                str(Path(shard).with_suffix(end))
                for shard in RULES.shards(clustering, THIS.clusters(clustering), split)
                for end in (".arrow", ".json")
            ],
        log:
            f"{RUN}/logs/cluster_shards/{clustering}.{split}.log",
        priority: 90
        resources:
            **RULES.site("corpus"),
        params:
            clusterer=below_run(f"clusters/{clustering}"),
            folder=below_run(f"clusters/{clustering}/shards"),
            length=THIS.context,
        shell:
            "demix cluster-shards {params.clusterer} {input.tokens} --length {params.length} --output {params.folder}"
            " 2> {log}"
