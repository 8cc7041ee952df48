"""Token shards of a little real text, made by the stages themselves."""

from pathlib import Path

import pyarrow as pa

from demix.data.anonymize import anonymize_documents
from demix.data.corpus import Budget, Splitting, mark_duplicates, split
from demix.data.shards import tokenize
from demix.data.sources import Source, download
from demix.data.tokenizer import train_tokenizer

SAMPLE = Path(__file__).parents[2] / "resources" / "sample"
TRAINING = ("parliament", "scripture", "licenses")
NOVEL = ("fantasy",)


def write_tokens(run: Path) -> None:
    """tokenizer.json and tokens/<domain>/<split>.arrow of three training domains and a novel one."""
    documents = {}
    for domain in TRAINING + NOVEL:
        raw, documents[domain] = run / "raw" / domain / "documents.parquet", run / "documents" / f"{domain}.parquet"
        download(Source(path=str(SAMPLE / f"{domain}.jsonl.zst")), domain, raw)
        anonymize_documents(raw, documents[domain], documents[domain].with_suffix(".json"))
    mark_duplicates({domain: [documents[domain]] for domain in TRAINING}, run / "owners.parquet")
    for domain in TRAINING + NOVEL:
        budget = Budget(train=6000, dev=1500, test=1500)
        splitting = Splitting(words=budget, training=domain in TRAINING, seed=1)
        split(domain, [documents[domain]], run / "owners.parquet", splitting, run / "corpus" / domain)
    train_tokenizer([run / "corpus" / domain / "train.parquet" for domain in TRAINING], 400, run / "tokenizer.json")
    for path in sorted((run / "corpus").glob("*/*.parquet")):
        tokenize(run / "tokenizer.json", path, run / "tokens" / path.parent.name / f"{path.stem}.arrow")
    assert pa.ipc.open_file(str(run / "tokens" / "fantasy" / "dev.arrow")).get_batch(0).num_rows > 1000
