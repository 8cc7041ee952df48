"""The workflow from text to tables on a config that takes seconds, and the files that it leaves."""

import math
import re
import subprocess
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from demix.data.shards import TokenShard, blocks
from demix.files import check_sealed, read_json, sha256_file
from demix.files.parquet import KEY
from demix.model.directory import load_model
from support.dry_run import ENVIRONMENT, TINY, jobs, ran, write_config

pytestmark = pytest.mark.quick
TRAINING, NOVEL = ("parliament", "licenses"), ("fantasy",)
LENGTH, TOKENS, TYPES = 32, 640, 300
CONFIG = TINY | {
    "domains": {
        kind: {
            name: {"source": {"path": f"resources/sample/{name}.jsonl.zst"}}
            | {"words": {"train": 6000, "dev": 800, "test": 800}}
            for name in names
        }
        for kind, names in {"training": TRAINING, "novel": NOVEL}.items()
    },
    "tokenizer": {"kind": "bpe", "vocab_size": TYPES},
    "architecture": {"layers": 1, "width": 16, "heads": 1, "context": LENGTH},
    "training": TINY["training"] | {"tokens": 4096},
    "models": {"dense_unbalanced": None, "domain_token": None},
    "evaluation": {"dev_blocks": 4, "test_tokens": TOKENS},
    "adaptation": TINY["adaptation"] | {"tokens": 512, "evaluate_every": 2},
    "removal": {},
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with the finished run, and what snakemake printed with the progress of the run."""
    folder = tmp_path_factory.mktemp("quick")
    return folder, ran(folder, write_config(folder, CONFIG), "--logger", "demix", "--cores", "2")


@pytest.fixture(scope="module")
def run(shown: tuple[Path, str]) -> Path:
    return shown[0] / "results" / "tiny"


def test_the_progress_ends_with_all_jobs_done(shown: tuple[Path, str]) -> None:
    done, planned = re.findall(r"(\d+) of (\d+) jobs", shown[1])[-1]
    assert done == planned
    assert int(done) > 30


def test_every_method_is_evaluated_on_every_domain(run: Path) -> None:
    results = pd.read_parquet(run / "results.parquet").query("split == 'test' and variant == '' and method != 'expert'")
    mixed = {"naive", "average", "uniform", "updating", "cached", "fitted", "best_block", "best_token"}
    for domain in (*TRAINING, *NOVEL):
        rows = results[results["domain"] == domain]
        assert set(rows["tokens"]) == {TOKENS}
        assert rows["tokens_sha256"].nunique() == 1
        systems = rows.groupby(["model", "experts"])["method"].agg(set).to_dict()
        assert {key: systems[key] for key in (("dense", "dense"), ("demix", "training"), ("demix", "all"))} == {
            ("dense", "dense"): {"dense"},
            ("demix", "training"): mixed,
            ("demix", "all"): mixed,
        }
    assert results["perplexity"].between(10, TYPES).all(), "between this little training and a guess"
    assert results["perplexity"].to_numpy() == pytest.approx((results["nll"] / TOKENS).map(math.exp).to_numpy())
    naive = results.query("model == 'demix' and experts == 'training' and method == 'naive'").set_index("domain")
    assert [naive["expert"][domain] for domain in TRAINING] == [*TRAINING]
    assert naive["oracle"].to_dict() == {domain: domain in NOVEL for domain in TRAINING + NOVEL}


@pytest.mark.parametrize(("domain", "expert", "experts"), [(TRAINING[1],) * 2 + ("training",), (*NOVEL * 2, "all")])
def test_a_perplexity_is_what_the_model_gives_the_tokens(run: Path, domain: str, expert: str, experts: str) -> None:
    """From the tokens and the files of the model alone, of an expert and of an adapted one."""
    inputs, targets, mask = blocks(TokenShard.open(run / "tokens" / domain / "test.arrow"), LENGTH, TOKENS)
    model = load_model(run / "models" / "demix", (expert,))
    with torch.no_grad():
        logits = model(torch.from_numpy(inputs)[None])[0] @ model.token_embedding.T
        logp = torch.log_softmax(logits.double(), -1).gather(-1, torch.from_numpy(targets)[..., None])[..., 0]
    nll = -logp[torch.from_numpy(mask)].mean().item()
    results = pd.read_parquet(run / "results.parquet")
    rows = results.query("model == 'demix' and experts == @experts and method == 'naive' and variant == ''")
    assert rows.set_index("domain")["perplexity"][domain] == pytest.approx(math.exp(nll), rel=1e-5)


def test_no_text_is_in_two_splits_or_domains(run: Path) -> None:
    seen: dict[str, str] = {}
    for path in run.glob("corpus/*/*.parquet"):
        for text in pq.read_table(path)["text"].to_pylist():
            assert seen.setdefault(text, path) == path
    for domain in (*TRAINING, *NOVEL):
        words = read_json(run / "corpus" / domain / "card.json")["words"]
        assert min(words["dev"], words["test"]) >= 800


def test_every_file_is_sealed(run: Path) -> None:
    assert not [*run.glob("raw/*/*")]
    names = {path: path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    allowed = {".parquet", ".json", ".jsonl", ".arrow", ".safetensors", ".html", ".md", ".tex", ".svg", ".pdf", ".png"}
    # Locks are empty or name who holds them; .txt are packages and logs in MLflow's folder.
    assert {path.suffix for path in names} <= allowed | {".log", ".tsv", ".db", ".txt", ".lock", ""}
    for path, name in names.items():
        # The report is for other software.
        if not name.startswith(("report/", "mlartifacts/")):
            check_sealed(path)
            assert path.suffix != ".parquet" or KEY.encode() in pq.read_metadata(path).metadata


def test_a_finished_run_has_nothing_to_do_and_its_commands_run_by_hand(shown: tuple[Path, str], run: Path) -> None:
    """Commands copied from `snakemake -n -p` give the same bytes in a shell, with another number of BLAS threads."""
    folder, config = shown[0], write_config(shown[0], CONFIG)
    assert jobs(ran(folder, config, "-n")) == set()
    for target, known, start in (
        ("evaluations/licenses.parquet", "evaluations/licenses.parquet", "demix evaluate licenses"),
        ("scores/demix/fantasy.test/fantasy.parquet", "scores/adapted-fantasy.json", "demix score results/tiny/model"),
    ):
        before = sha256_file(run / target)
        output = ran(folder, config, "-n", "-p", "--forcerun", f"results/tiny/{known}")
        (command,) = re.findall(rf"^Shell command: ({start}.*)$", output, re.MULTILINE)[:1]
        (run / target).unlink()
        subprocess.run(["bash", "-c", command], cwd=folder, check=True, env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"})
        assert sha256_file(run / target) == before
