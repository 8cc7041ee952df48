# Models of the Hugging Face hub that entries of `models` begin with, imported once.


rule import_parent:
    output:
        f"{RUN}/parents/{{parent}}/model.json",
        f"{RUN}/parents/{{parent}}/tokenizer.json",
    wildcard_constraints:
        parent=one_of(THIS.parents),
    params:
        address=lambda wildcards: THIS.parents[wildcards.parent],
        folder=below_run("parents/{parent}"),
        context=THIS.context,
    shell:
        # Snakemake has made the folder, and the command makes a new one.
        "rm -rf {params.folder} && demix import {params.address} --output {params.folder} --context {params.context}"
        " 2> {log}"
