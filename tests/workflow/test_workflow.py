"""The whole DAG on a tiny config, run for real, and what a change to the config runs again."""

import copy
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

from demix.config.models import PAPER
from demix.files import check_sealed, read_json, sha256_file
from demix.run.check import load_run
from support.documented import assert_documented
from support.dry_run import ENVIRONMENT, REPOSITORY, dry_run, jobs_by_rule, ran
from support.once import once, run_with_progress

TINY = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text())
TRAINING, NOVEL = list(TINY["domains"]["training"]), list(TINY["domains"]["novel"])

pytestmark = pytest.mark.workflow


def snakemake(folder: Path, *arguments: str, config: dict | None = None) -> str:
    """Run snakemake in `folder`, with the tiny config or another; returns what it printed."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config or TINY, sort_keys=False))
    return ran(folder, "config.yaml", *arguments)


def planned(folder: Path, config: dict | None = None) -> dict[str, int]:
    """Jobs that `snakemake -n` would run, by rule."""
    return jobs_by_rule(snakemake(folder, "-n", "--quiet", "rules", config=config))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of the tiny config, which the tests of this module may change."""
    folder = tmp_path_factory.mktemp("workflow") / "copy"
    return shutil.copytree(once(tmp_path_factory, "tiny", run_with_progress), folder, symlinks=True)


@pytest.fixture(scope="module")
def results(finished: Path) -> pd.DataFrame:
    return pd.read_parquet(finished / "results" / "tiny" / "results.parquet")


def changed(**changes: object) -> dict:
    """The tiny config with dotted keys replaced."""
    config = copy.deepcopy(TINY)
    for key, value in changes.items():
        *path, last = key.split("__")
        place = config
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return config


def test_a_finished_run_has_nothing_to_do(finished: Path) -> None:
    assert planned(finished) == {}
    assert "Tables, figures, claims" not in snakemake(finished, "-n")
    assert snakemake(finished).count("Tables, figures, claims: results/tiny/report") == 1
    assert "The files are in results/tiny\n" in snakemake(finished, "results/tiny/config.json")


def test_every_file_says_which_file_of_the_run_it_is(finished: Path) -> None:
    run = finished / "results" / "tiny"
    names = {path: path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    sealed = {
        path: name
        for path, name in names.items()
        if path.suffix in (".json", ".jsonl", ".parquet")
        and path.name not in ("config.json", "tokenizer.json", "tracked.json")
        and not name.startswith((".", "checkpoints/", "mlartifacts/", "report/"))
        and "/.kept/" not in name
    }
    assert {name.split("/")[0] for name in sealed.values()} >= {"corpus", "tokens", "models", "metrics", "scores"}
    for path, name in sealed.items():
        if path.suffix == ".parquet":
            said = pq.read_metadata(path).metadata[b"place"].decode()
        else:
            said = json.loads(path.read_text() if path.suffix == ".json" else path.read_text().splitlines()[-1])[
                "place"
            ]
        assert said == name


def test_a_learning_rate_of_dapt_reruns_adaptation_and_what_follows(finished: Path) -> None:
    jobs = planned(finished, changed(adaptation__learning_rate_factor=0.2))
    assert jobs.keys() == {
        "adapt", "adapt_dense", "score_adapted_fantasy", "score_adapted_fortunes", "evaluate", "results",
        "audit_licenses", "audit", "report", "card", "track", "run_config",
    }  # fmt: skip


def test_lambda_reruns_mixing_only(finished: Path) -> None:
    once = ("results", "audit_licenses", "audit", "report", "card", "track", "run_config")
    for change in ({"evaluation__decay": 0.5}, {"evaluation__decays": [0.2]}, {"evaluation__prior_blocks": [3]}):
        jobs = planned(finished, changed(**change))
        assert jobs == {"evaluate": 5} | dict.fromkeys(once, 1)


def test_more_prompts_audit_again_alone(finished: Path) -> None:
    jobs = planned(finished, changed(removal__audit={"prompts": 7}))
    assert jobs.keys() == {"audit_licenses", "audit", "report", "card", "track", "run_config"}


def test_a_new_training_domain_trains_again(finished: Path) -> None:
    config = copy.deepcopy(TINY)
    config["domains"]["training"]["packages"] = {
        "source": {"kind": "files", "path": "resources/sample/packages.jsonl.zst"}, "words": {"dev": 2000, "test": 2000}
    }  # fmt: skip
    jobs = planned(finished, config)
    assert all(jobs[f"train_{kind}"] == 1 for kind in PAPER)
    assert jobs["read"] == 1, "the other domains' texts stay"


def test_a_new_novel_domain_trains_nothing_else_again(finished: Path) -> None:
    config = copy.deepcopy(TINY)
    config["domains"]["novel"]["jargon"] = {
        "source": {"kind": "files", "path": "resources/sample/jargon.jsonl.zst"}, "words": {"dev": 2000, "test": 2000}
    }  # fmt: skip
    jobs = planned(finished, config)
    once = {
        "read", "split", "tokenize", "adapt", "adapt_dense", "score_adapted_jargon", "score_demix", "score_others",
        "score_ngrams", "choose_mixing",
    }  # fmt: skip
    assert jobs == dict.fromkeys(once, 1) | {
        "novel_duplicates": 1,
        "overlap": 1,
        "evaluate": 6,
        "results": 1,
        "audit_licenses": 1,
        "audit": 1,
        "report": 1,
        "card": 1,
        "track": 1,
        "run_config": 1,
    }


def test_a_part_of_a_source_runs_again_alone(finished: Path) -> None:
    part = finished / "results" / "tiny" / "documents" / "scripture" / "0001.parquet"
    before, other = sha256_file(part), part.with_name("0000.parquet").stat().st_mtime_ns
    part.unlink()
    shown = snakemake(finished, "results/tiny/documents/scripture/0001.parquet", "--quiet", "rules")
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", shown, re.MULTILINE))
    assert jobs == {"read": "1", "total": "1"}
    assert sha256_file(part) == before
    assert part.with_name("0000.parquet").stat().st_mtime_ns == other
    snakemake(finished, "--touch")
    assert planned(finished) == {}


def test_more_parts_read_one_domain_again(finished: Path) -> None:
    config = copy.deepcopy(TINY)
    config["domains"]["training"]["scripture"]["source"]["parts"] = 3
    jobs = planned(finished, config)
    assert (jobs["read"], jobs["split"]) == (3, 5)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "config").glob("paper-*.yaml")), ids=lambda path: path.stem)
def test_the_papers_configs_are_planned_to_the_last_rule_without_a_network(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setitem(ENVIRONMENT, name, "http://127.0.0.1:9")
    parts = sum(domain.source.parts for domain in load_run(path).domains.values())
    jobs = jobs_by_rule(dry_run(tmp_path, path, "--quiet", "rules"))
    assert jobs["read"] == parts
    assert jobs["split"] == jobs["tokenize"] == jobs["evaluate"] == 16
    assert jobs["report"] == jobs["track"] == 1
    assert (jobs["sweep"], jobs["choose_rate"]) == (12, 4)
    assert not (tmp_path / "results").exists()


def test_one_models_learning_rate_trains_that_model_alone(finished: Path) -> None:
    jobs = planned(finished, changed(models__domain_token__learning_rate=1e-3))
    assert jobs == {
        "train_domain_token": 1, "score_known_others": 1, "score_others": 2, "evaluate": 5, "results": 1,
        "audit_licenses": 1, "audit": 1, "report": 1, "card": 1, "track": 1, "run_config": 1,
    }  # fmt: skip


def test_a_sweep_chooses_the_fastest_rate_that_does_not_diverge(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "swept"
    shutil.copytree(finished, folder, symlinks=True)
    sweep = {"learning_rates": [1e-3, 50.0, 4e-3], "tokens": 7680}
    config = changed(models__demix={"sweep": sweep})
    run = folder / "results" / "tiny"
    models = [f"results/tiny/models/{model}/model.json" for model in ("demix", "dense", "without-licenses")]
    shown = snakemake(folder, *models, "--quiet", "rules", config=config)
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", shown, re.MULTILINE))
    once = dict.fromkeys(("choose_rate", "train_demix", "train_without_licenses"), "1")
    assert jobs == once | {"sweep": "3", "total": "6"}, "dense has no sweep"
    record = read_json(run / "sweep" / "demix.json")
    assert [trial["learning_rate"] for trial in record["trials"]] == [1e-3, 4e-3, 50.0]
    assert [trial["diverged"] is None for trial in record["trials"]] == [True, True, False]
    assert record["learning_rate"] == 4e-3
    rates = [read_json(folder / model)["training"]["learning_rate"] for model in models]
    assert rates == [4e-3, 3e-3, 4e-3]
    assert not list((run / "checkpoints").rglob("*.safetensors"))
    assert "Nothing to be done" in snakemake(folder, "-n", *models, config=config)


def test_a_printed_command_runs_by_hand(finished: Path) -> None:
    """Commands copied from `snakemake -n -p`, run in a shell, give the same bytes."""
    run = finished / "results" / "tiny"
    # Else the column would be taken from there.
    shutil.rmtree(run / "scores" / "demix" / "fantasy.test" / ".kept" / "fantasy")
    commands = {
        "evaluations/scripture.parquet": "demix evaluate scripture",
        "scores/demix/fantasy.test/fantasy.parquet": "demix score results/tiny/models ",
    }
    for target, start in commands.items():
        before = sha256_file(run / target)
        kept = shutil.move(run / target, finished / "kept")
        output = snakemake(finished, "-n", "-p", "--forcerun", f"results/tiny/{target}")
        command = next(line for line in output.splitlines() if line.startswith(f"Shell command: {start}"))
        subprocess.run(
            ["bash", "-c", command.removeprefix("Shell command: ")], cwd=finished, check=True, env=ENVIRONMENT
        )
        assert sha256_file(run / target) == before
        Path(kept).replace(run / target)
    # What the commands wrote is newer than what was made of it.
    snakemake(finished, "--touch")


def test_results_hold_every_method_on_every_domain(results: pd.DataFrame) -> None:
    test = results[(results.split == "test") & results.top_k.isna() & (results.variant == "")]
    mixtures = {("average", "")} | {
        (method, weights) for method in ("uniform", "updating", "cached") for weights in ("history", "released")
    }
    mixtures |= {("uniform", "tempered"), ("fitted", "switching"), ("fitted", "")}
    mixtures |= {("best_block", ""), ("best_token", "")}
    systems = {("dense", "dense"): {("dense", "")}, ("dense_unbalanced", "dense"): {("dense", "")}}
    systems |= dict.fromkeys((("demix", "training"), ("demix", "all")), mixtures | {("naive", "")})
    systems |= {("domain_token", "training"): {("naive", "")}}
    systems |= {("ngram3", "dense"): {("dense", "")}, ("ngram3_domains", "training"): mixtures | {("naive", "")}}
    for (model, experts), methods in systems.items():
        for domain in TRAINING + NOVEL:
            rows = test[(test.model == model) & (test.experts == experts) & (test.domain == domain)]
            found = [*zip(rows.method, rows.weights, strict=True)]
            assert {pair for pair in found if pair[0] != "expert"} == methods, (model, experts, domain)
            assert len([pair for pair in found if pair[0] != "expert"]) == len(methods)
    assert set(results[results.top_k == 2].method) == {"uniform", "updating", "cached", "fitted"}
    for removed in TRAINING:
        rows = test[test.experts == f"minus-{removed}"]
        assert set(rows.domain) == {removed}
        assert set(rows.n_experts) == {2}
    assert set(test[test.model == "without-licenses"].domain) == {"licenses"}
    for novel in NOVEL:
        assert set(test[test.model == f"dense-dapt-{novel}"].domain) == {*TRAINING, novel}
    naive = test[(test.model == "demix") & (test.experts == "training") & (test.method == "naive")].set_index("domain")
    assert [naive.expert[domain] for domain in TRAINING] == TRAINING
    assert naive.oracle.to_dict() == {domain: domain in NOVEL for domain in TRAINING + NOVEL}
    for _, rows in test.groupby("domain"):
        assert rows.tokens_sha256.nunique() == 1
        assert set(rows.tokens) == {1000}
    assert np.allclose(test.perplexity, np.exp(test.nll / test.tokens))
    # What was counted in one domain may be worse than a guess on another.
    trained = test[~test.model.str.startswith("ngram")]
    assert trained.perplexity.between(20, 512).all(), "between this little training and a guess"
    grids = results[results.variant.isin(["decay", "dev_blocks"])]
    # Of 1, 5, 10, 50 and 100 dev blocks 10 are scored.
    expected = {("updating", "decay"): 10, ("cached", "decay"): 10, ("cached", "dev_blocks"): 6}
    for _, rows in grids.groupby("domain"):
        assert rows.groupby(["method", "variant"]).size().to_dict() == expected
    assert set(results[results.variant == "released_scorer"].scorer) == {"released"}
    assert set(results[results.variant == "dev_choice"].domain) == set(NOVEL)
    assert (results.seed == 1).all()
    assert np.allclose(results.bits_per_byte * results.bytes * math.log(2), results.nll)
    assert results.perplexity_low.le(results.perplexity).all(), "also of fewer than 20 documents"


def test_differences_and_posteriors_are_those_of_the_results(finished: Path, results: pd.DataFrame) -> None:
    run = finished / "results" / "tiny"
    differences, posteriors = (pd.read_parquet(run / f"{name}.parquet") for name in ("differences", "posteriors"))
    test = results[results.top_k.isna() & (results.variant == "") & (results.method != "expert")]
    names = ["model", "experts", "method", "weights", "domain"]
    nats = (test.set_index(names).nll / 1000).to_dict()
    others = {
        "dense_unbalanced": ("dense_unbalanced", "dense", "dense", ""),
        "dense": ("dense", "dense", "dense", ""),
        "demix_cached": ("demix", "training", "cached", "history"),
    }
    for row in differences.itertuples():
        system = (row.model, row.experts, row.method, row.weights, row.domain)
        assert row.nats_per_token == pytest.approx(nats[system] - nats[*others[row.against], row.domain], abs=1e-12)
    assert (differences.groupby(["domain", "against"]).size() >= 8).all()
    sums = posteriors.groupby(["domain", "split", "block"]).posterior.sum()
    assert np.allclose(sums, 1)
    ngrams = differences[differences.model.str.startswith("ngram")]
    assert ngrams.nats_per_token_low.notna().all()
    assert set(ngrams.against) == set(others)
    assert sums.groupby(level=[0, 1]).size().to_dict() == {
        (domain, split): {"dev": 10, "test": 32}[split] for domain in TRAINING + NOVEL for split in ("dev", "test")
    }


def test_what_removed_domains_leave_is_audited(finished: Path) -> None:
    rows = pd.read_parquet(finished / "results" / "tiny" / "audit.parquet")
    assert set(rows.domain) == {"licenses"}
    systems = rows.groupby("system").agg(model=("model", "first"), experts=("experts", "first"))
    assert systems.T.to_dict("list") == {
        "own": ["demix", "own"],
        "mixture": ["demix", "training"],
        "minus": ["demix", "minus-licenses"],
        "without": ["without-licenses", "training"],
    }
    documents = rows.groupby(["split", "system"]).document.apply(tuple)
    # So short a training may have drawn no whole excerpt of a document.
    assert {"test"} <= set(rows["split"]) <= {"train", "test"}
    assert (documents.groupby("split").nunique() == 1).all(), "all systems continue the same ones"
    assert not rows.groupby("document")["split"].nunique().gt(1).any()
    assert rows.matched.between(0, 50).all()
    assert (rows.matched / 50 <= rows.share).all()


def test_scores_are_what_the_model_says(finished: Path, results: pd.DataFrame) -> None:
    """The naive perplexity of a domain, from its tokens and the model's files alone."""
    import torch

    from demix.data.shards import TokenShard, blocks
    from demix.model.checkpoint import load_model

    run = finished / "results" / "tiny"
    shard = TokenShard.open(run / "tokens" / "scripture" / "test.arrow")
    inputs, targets, mask = blocks(shard, 32, 1000)
    model = load_model(run / "models" / "demix", ("scripture",))
    with torch.no_grad():
        logits = model(torch.from_numpy(inputs)[None])[0] @ model.token_embedding.T
        logp = torch.log_softmax(logits.double(), -1).gather(-1, torch.from_numpy(targets)[..., None])[..., 0]
    nll = -logp[torch.from_numpy(mask)].sum().item()
    rows = results[(results.model == "demix") & (results.experts == "training") & (results.method == "naive")]
    rows = rows[rows.variant == ""]
    assert rows.set_index("domain").perplexity["scripture"] == pytest.approx(math.exp(nll / 1000), rel=1e-5)


def test_no_text_is_in_two_splits_or_domains(finished: Path) -> None:
    run = finished / "results" / "tiny" / "corpus"
    seen: dict[str, str] = {}
    for domain in TRAINING + NOVEL:
        for split in ("train", "dev", "test"):
            for text in pq.read_table(run / domain / f"{split}.parquet")["text"].to_pylist():
                assert seen.setdefault(text, f"{domain}.{split}") == f"{domain}.{split}"
        card = read_json(run / domain / "card.json")
        assert card["words"]["dev"] >= 2000
        assert card["words"]["test"] >= 2000


def test_raw_text_is_gone_and_no_artefact_is_a_pickle(finished: Path) -> None:
    assert not list((finished / "results").rglob("raw/*/*"))
    suffixes = {path.suffix for path in (finished / "results" / "tiny").rglob("*") if path.is_file()}
    allowed = {".parquet", ".json", ".jsonl", ".arrow", ".safetensors", ".html", ".md", ".tex", ".svg", ".png"}
    # Locks are empty or name who holds them; .txt are packages and logs in MLflow's folder.
    assert suffixes <= allowed | {".log", ".tsv", ".db", ".txt", ".lock", ""}


def test_every_json_file_has_its_seal(finished: Path) -> None:
    run = finished / "results" / "tiny"
    # The report is for other software.
    files = [path for path in run.rglob("*.json*") if path.relative_to(run).parts[0] not in ("report", "mlartifacts")]
    assert {path.suffix for path in files} == {".json", ".jsonl"}
    for path in files:
        check_sealed(path)


def test_every_file_is_documented(finished: Path) -> None:
    assert_documented(finished / "results" / "tiny")


def test_snakemake_report_is_one_page(finished: Path) -> None:
    snakemake(finished, "--report", "report.html")
    page = (finished / "report.html").read_text()
    assert "figure2" in page
    assert "table5" in page
    assert "At a glance" in page
    # The captions are the docstrings of the modules that make the items.
    assert "The run on one page: which model is best" in page
    assert "not better than 3-grams" in (finished / "results" / "tiny" / "report" / "index.html").read_text()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("evalution: {}", r"config.yaml, line \d+, config key evalution: is not known; did you mean evaluation?"),
        ("seed: 7\nseed: 8", r"config.yaml, line \d+: names the key seed again, which is on line \d+ too; give"),
    ],
)
def test_a_bad_config_is_refused_in_one_line(tmp_path: Path, more: str, told: str) -> None:
    (tmp_path / "config.yaml").write_text(f"{yaml.safe_dump(TINY)}\n{more}\n")
    done = subprocess.run(
        ["snakemake", "-n", "--snakefile", str(REPOSITORY / "workflow" / "Snakefile"), "--configfile", "config.yaml"],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert re.search(told.replace("?", "[?]"), done.stdout + done.stderr)


def test_the_first_error_is_last_on_the_screen(tmp_path: Path) -> None:
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
    config = changed(domains__training__scripture__source__text="body")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    targets = [f"results/tiny/documents/{domain}/0000.parquet" for domain in ("scripture", "parliament")]
    command = ["snakemake", *targets, "--snakefile", REPOSITORY / "workflow" / "Snakefile"]
    command += ["--configfile", "config.yaml", "--workflow-profile", REPOSITORY / "profiles" / "default"]
    command += ["--logger", "demix", "--cores", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("The first to fail was read scripture 0000: demix: error: "), done.stderr
    assert last.endswith("(log: results/tiny/logs/read/scripture.0000.log)")
    assert (tmp_path / targets[1]).is_file(), "what does not need it goes on"


def test_a_further_seed_trains_and_scores_only_its_models(finished: Path) -> None:
    jobs = planned(finished, changed(seeds=[1, 2]))
    again = {f"train_{kind}_seed2": 1 for kind in PAPER}
    scored = {"score_others": 2, "score_known_others": 1}
    once = ("results", "audit_licenses", "audit", "report", "card", "track", "run_config")
    assert jobs == again | scored | {"choose_mixing": 1, "evaluate": 5} | dict.fromkeys(once, 1)
    assert planned(finished, changed(seeds=[1])).keys() <= {"run_config", "report", "card", "track"}
