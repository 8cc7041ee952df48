"""config/one-gpu.yaml, but for sizes and places: from files laid out as its data sets are to the report, on a CPU."""

import csv
import gzip
import json
import zipfile
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from demix.data.readers import Reading, read_rows
from support.disturbed import REPOSITORY
from support.dry_run import ran
from support.server import serving_folder

FILE = REPOSITORY / "config" / "one-gpu.yaml"
DOMAINS = yaml.safe_load(FILE.read_text())["domains"]
TEXTS = ("parliament", "scripture", "novels", "licenses", "politics", "packages", "glosses", "code", "fantasy", "wiki")
SEED = 4096

pytestmark = pytest.mark.workflow


def texts(name: str) -> list[str]:
    """Documents of a domain of the sample, of 300 words at most and 6,000 or more in all."""
    found: list[str] = []
    words = 0
    for row in read_rows(REPOSITORY / "resources" / "sample" / f"{name}.jsonl.zst", Reading(())):
        document = str(row.fields["text"]).split()[:300]
        found.append(" ".join(document))
        if (words := words + len(document)) > 6000:
            break
    return found


def write_data_set(folder: Path, source: dict, documents: list[str]) -> None:
    """Documents where the globs and the field of a source of the hub look for them."""
    (pattern,), field = source["data_files"], source.get("text", "text")
    path = folder / pattern.replace("*", "a")
    path.parent.mkdir(parents=True)
    rows = [{field: text, "other": number} for number, text in enumerate(documents)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def write_site(folder: Path, contracts: list[str], abstracts: list[str]) -> None:
    """An archive and a table under the names of the addresses of the novel domains."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "CUAD_v1.zip", "w") as archive:
        for number, text in enumerate(contracts):
            archive.writestr(f"CUAD_v1/full_contract_txt/{number}.txt", text)
        archive.writestr("CUAD_v1/master_clauses.csv", "not,a,contract")
    with open(folder / "metadata.csv", "w", newline="") as file:
        csv.writer(file).writerows([("cord_uid", "abstract"), *enumerate(abstracts)])


def test_it_runs_to_its_end_where_everything_is_small(tmp_path: Path) -> None:
    documents = dict(zip([*DOMAINS["training"], *DOMAINS["novel"]], map(texts, TEXTS), strict=True))
    for name, domain in DOMAINS["training"].items():
        write_data_set(tmp_path / "hub" / name, domain["source"], documents[name])
    write_site(tmp_path / "site", documents["contracts"], documents["cord19"])
    few = {"words": {"train": 4000, "dev": 800, "test": 800}}
    sizes = {"layers": 2, "width": 32, "heads": 2, "inner": 48, "context": 32}
    with serving_folder(tmp_path / "site") as site:
        sources = {
            "training": {name: {"path": f"hub/{name}", "parts": 1} for name in DOMAINS["training"]},
            "novel": {
                name: {"path": f"{site}/{Path(domain['source']['path']).name}"}
                for name, domain in DOMAINS["novel"].items()
            },
        }
        own = {
            "base": str(FILE),
            "threads": 1,
            "domains": {
                kind: {name: few | {"source": source} for name, source in some.items()}
                for kind, some in sources.items()
            },
            "tokenizer": {"vocab_size": 512},
            "architecture": sizes,
            "training": {"tokens": 2 * SEED, "sequences": 2},
            "models": {name: {"seed_tokens": SEED} for name in ("demix_seeded", "btm", "upcycled")},
            "evaluation": {"dev_blocks": 5, "test_tokens": 640},
            "adaptation": {
                "tokens": 1024,
                "sequences": 4,
                "evaluate_every": 4,
                "dev_blocks": 4,
                "forgetting_blocks": 2,
            },
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(own, sort_keys=False))
        ran(tmp_path, "config.yaml")
    run = tmp_path / "results" / "one-gpu"
    results = pd.read_parquet(run / "results.parquet")
    scored = results[results["split"] == "test"]
    assert set(scored["domain"]) == {*DOMAINS["training"], *DOMAINS["novel"]}
    assert {"dense", "demix", "demix_seeded", "btm", "upcycled"} <= set(scored["model"])
    # Of 512 types, each as likely as the others, no model knows anything.
    learned = scored[scored["domain"].isin(DOMAINS["training"])].groupby("model")["perplexity"].median()
    assert (learned < 450).all(), learned
    assert (run / "report" / "index.html").exists()
