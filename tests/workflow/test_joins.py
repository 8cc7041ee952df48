"""What joins a finished run: which jobs a change of its config asks for, and what keeps its bytes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demix.files import read_json, read_parquet, sha256_file
from demix.model.experts import find_faults
from support.dry_run import SNAKEFILE, TINY, changed, jobs, ran, write_config
from support.harness_tasks import write_tasks
from support.once import tiny_run

DOCS = Path(__file__).parents[2] / "docs"
# What stands in <…> in a path, where it is no word.
PLACES = {
    "part": r"[0-9]{4}",
    "split": "(train|dev|test)",
    "rate": "[0-9.e+-]+",
    "model": "[a-z0-9_-]+",
    "format": "(html|md|tex|svg|pdf|png|json)",
    "state": "(shared|expert-dense)",
    "job": "[a-z0-9_@/-]+",
}
# Gone when all is done, or made only where a config or an option asks for it.
FLEETING = {"raw/<domain>/<part>.parquet", "checkpoints/<model>/…", "sbatch/…", "settings/<digest>.json"}
FLEETING |= {"sources/<source>/<part>.json"}
FLEETING |= {"branches/<model>/<expert>/", "clusters/<clustering>/", "metrics/<model>/<expert>.jsonl"}
FLEETING |= {"models/<model>/.lock", "models/<model>/imported/…"}


def pattern(path: str) -> re.Pattern[str]:
    """A path of the pages as a pattern of paths below a run's folder; of a folder, of all that lies in it."""
    parts = re.split(r"(<[a-z]+>|…)", path)
    texts = (
        PLACES.get(part[1:-1], "[a-z0-9_]+") if part.startswith("<") else ".+" if part == "…" else re.escape(part)
        for part in parts
    )
    return re.compile("".join(texts) + (".+" if path.endswith("/") else ""))


def lines(page: str) -> dict[str, str]:
    """What the tables of a page say of each path."""
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", (DOCS / page).read_text(), re.MULTILINE))


def assert_documented(run: Path) -> None:
    """Every file of a finished run has its line in the pages, with its columns, and every line has its file."""
    found = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    # A tiny run keeps its MLflow store by itself.
    found = {path for path in found if not path.startswith(("mlflow.db", ".mlflow.db", "mlartifacts/"))}
    told = lines("reference/files.md") | lines("reference/files-results.md")
    known = {path: pattern(path) for path in told}
    unknown = [path for path in found if not any(one.fullmatch(path) for one in known.values())]
    assert not unknown, unknown
    absent = {path for path, one in known.items() if not any(one.fullmatch(name) for name in found)}
    assert absent <= FLEETING, absent
    for path, about in told.items():
        files = [run / name for name in sorted(found) if known[path].fullmatch(name)]
        words = set(re.findall(r"\w+", about))
        if path.endswith(".parquet") and files and "see `" not in about and "columns are as in" not in about:
            columns = {name.replace("perplexity_high", "_high") for name in pq.read_schema(files[0]).names}
            assert columns <= words, (path, columns - words)
        elif path.endswith(".arrow") and files:
            assert set(pa.ipc.open_file(str(files[0])).schema.names) <= words, path


Keys = dict[str, Any]
RUN, RULES = Path("results", "tiny"), SNAKEFILE.parent / "rules"
TRAINING, NOVEL = list(TINY["domains"]["training"]), list(TINY["domains"]["novel"])


def domain(name: str) -> Keys:
    return {
        "source": {"path": f"resources/sample/{name}.jsonl.zst"},
        "words": {"train": 10000, "dev": 2000, "test": 2000},
    }


BRANCH = {"kind": "branched", "parent": "dense", "seed_tokens": 6000}
SWEEP = {"learning_rates": [50.0, 3e-3, 1e-3], "tokens": 7680}
HARNESS = {"tasks": ["choice", "rolling"], "include_path": "tasks", "models": ["demix"], "limit": 2}
# Text of a training domain, and other text.
TEXTS = [f"resources/sample/{name}.jsonl.zst" for name in ("licenses", "packages")]
SUITES = {"paloma": {"known": {"source": {"path": TEXTS}, "words": {"test": 1500}}}}
TOPICS = {"test": {"path": "topics.jsonl"}, "template": "{text} Topic: {label}"}
# A row of each kind, mixed in every way, asked tasks, scored on a suite: all that joins in one run.
JOINED: Keys = {
    "domains.novel.fortunes": None,
    "domains.novel.jargon": domain("jargon"),
    "models": {
        "btm": BRANCH | {"averages": True},
        "cbtm_2": BRANCH | {"data": "k2"},
        "upcycled": BRANCH | {"kind": "routed", "experts": 4, "top_k": 2, "every": 2},
        "btx": {"kind": "routed", "parent": "demix", "tokens": 4000},
        "far": {"kind": "demix", "architecture": {"position": "alibi", "head": "clap"}, "sweep": SWEEP},
        "masked": {"kind": "demix", "architecture": {"objective": "mlm"}},
        "mine": {"kind": "demix", "parent": "imported/mine"},
    },
    "clusterings": {"k2": {"clusters": 2, "dimensions": 20}, "by_domain": {"method": "metadata", "dimensions": 20}},
    "evaluation.weights": ["history", "cluster", "cluster+history"],
    "evaluation.contexts": [32, 64],
    "evaluation.experts_top_k": [1, "all"],
    "evaluation.suites": SUITES,
    "evaluation.systems": {"rival": {"columns": {"dense": None, "ngram3": None}}},
    "removal.merged": ["btx"],
    "tasks": {"topics": TOPICS},
    "lm_eval": HARNESS,
}

# What follows wherever a number of the tables may have changed.
TOLD = {"report", "track", "run_config"}
AUDITED = {"audit_domain licenses", "table audit"}
MIXED = {f"evaluate {name}" for name in TRAINING + NOVEL} | AUDITED | TOLD
MIXED |= {f"table {name}" for name in ("results", "priors", "differences", "posteriors")}
# Further models are scored in jobs of several models, which keep the tables that are there.
SCORED = {f"score others-{texts}" for texts in ("training", "fantasy", "fortunes")} | MIXED
NGRAMS = {"score_ngrams 3", "choose_mixing ngram3_domains"}
ADAPTED = {f"{rule} {name}" for rule in ("adapt", "adapt_dense") for name in NOVEL}
ADAPTED |= {"score adapted-fantasy", "score adapted-fortunes"}
PAPER = ("demix", "dense", "dense_unbalanced", "domain_token")
SUITE = {f"{rule} paloma_known" for rule in ("hold_out", "tokenize_suite", "evaluate")}
SUITE |= {"score suites-paloma_known", "read paloma_known 0000", "table suites"}
ASKED = {"harness_documents", "harness demix", "classify"} | {f"contamination {name}" for name in TRAINING}
JARGON = {f"{rule} jargon" for rule in ("split", "tokenize", "adapt", "adapt_dense")}
JARGON |= {f"score {job}" for job in ("demix/jargon", "others-jargon", "adapted-jargon")}
JARGON |= {"read jargon 0000", "evaluate jargon", "overlap"} | NGRAMS
SEED2 = {f"train {name}-seed2" for name in PAPER} | {"choose_mixing demix-seed2"}
# All that depends on the text of the training domains.
RETRAINED = {f"train {name}" for name in (*PAPER, "without-licenses")} | {"choose_mixing demix"}
RETRAINED |= (
    {f"score demix/{texts}" for texts in ("training", "fantasy", "fortunes")}
    | {"deduplicate", "tokenizer", "overlap"}
    | NGRAMS
    | ADAPTED
)
RETRAINED |= {f"{rule} {name}" for rule in ("split", "tokenize") for name in TRAINING + NOVEL} | SCORED

CHANGES: dict[str, tuple[Keys, set[str]]] = {
    "nothing": ({}, set()),
    "the seeds that it has": ({"seeds": [1]}, TOLD),
    "another decay": ({"evaluation.decay": 0.5}, MIXED),
    "another decay of the grid": ({"evaluation.decays": [0.2]}, MIXED),
    "another prior of the grid": ({"evaluation.prior_blocks": [3]}, MIXED),
    "a rate of adaptation": ({"adaptation.learning_rate_factor": 0.2}, ADAPTED | MIXED),
    "a rate of one model": ({"models": {"domain_token": {"learning_rate": 1e-3}}}, {"train domain_token"} | SCORED),
    "one model less": ({"models": {"domain_token": None}}, SCORED),
    "a warm start": (
        {"models": {"seeded": {"kind": "demix", "parent": "dense", "seed_tokens": 6000}}},
        {"seed dense 00000015", "train seeded", "choose_mixing seeded"} | SCORED,
    ),
    "a seed": ({"seeds": [1, 2]}, SEED2 | SCORED),
    "a novel domain": ({"domains.novel.jargon": domain("jargon")}, JARGON | MIXED),
    "a novel domain less": (
        {"domains.novel.fortunes": None},
        {"overlap"} | NGRAMS | MIXED - {"evaluate fortunes"},
    ),
    "a training domain": (
        {"domains.training.packages": domain("packages")},
        {"read packages 0000", "split packages", "tokenize packages", "evaluate packages"} | RETRAINED,
    ),
    "a training domain less": (
        {"domains.training.parliament": None},
        RETRAINED - {f"{rule} parliament" for rule in ("split", "tokenize", "evaluate")},
    ),
    "more parts of one source": (
        {"domains.training.scripture.source.parts": 3},
        {f"read scripture 000{part}" for part in range(3)} | RETRAINED,
    ),
    "a task": (
        {"tasks": {"topics": TOPICS}},
        {"examples topics", "classify"} | TOLD | {f"fewshot {one} topics" for one in PAPER[:3]},
    ),
    "a suite": ({"evaluation.suites": SUITES}, SUITE | TOLD),
    "tasks of the harness": ({"lm_eval": HARNESS}, ASKED | TOLD),
}


def planned(folder: Path, config: Keys, *arguments: str) -> set[str]:
    """The jobs that snakemake would run."""
    return jobs(ran(folder, write_config(folder, config), "-n", *arguments))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run, and the files of the tasks that join it."""
    folder = tmp_path_factory.mktemp("joins") / "copy"
    shutil.copytree(tiny_run(tmp_path_factory), folder, symlinks=True)
    write_tasks(folder)
    shutil.copytree(folder / RUN / "models" / "dense", folder / "imported" / "mine")
    labels = ("law", "music")
    rows = [{"text": f"The {labels[n % 2]} of day {n}.", "label": labels[n % 2]} for n in range(40)]
    (folder / "topics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_runs_what_it_reaches_and_nothing_else(change: str, finished: Path) -> None:
    keys, expected = CHANGES[change]
    assert planned(finished, changed(TINY, keys)) == expected


def test_a_file_that_is_gone_is_made_again_alone(finished: Path) -> None:
    part = finished / RUN / "documents" / "scripture" / "0001.parquet"
    before = sha256_file(part)
    part.unlink()
    shown = ran(finished, write_config(finished, TINY), str(part.relative_to(finished)))
    assert jobs(shown) == {"read scripture 0001"}
    assert sha256_file(part) == before
    assert planned(finished, TINY) == set()


def test_snakemake_makes_one_page_with_all_items(finished: Path) -> None:
    ran(finished, write_config(finished, TINY), "--report", "report.html")
    page = (finished / "report.html").read_text()
    assert {"figure2", "table5"} <= {*re.findall(r"\w+", page)}


def made(run: Path) -> dict[Path, str]:
    """The digests of what takes long to make: text, models, metrics, scores.

    Model cards change with the results, a job's list of scores with its models, and all n-grams are scored in one job.
    """
    kinds = ("documents", "corpus/*", "tokens", "models", "metrics", "scores", "clusters", "tasks", "seeds")
    files = {path for kind in kinds for place in run.glob(kind) for path in place.rglob("*.*") if path.is_file()}
    others = (".md", "usual.json", ".lock", "ngram", "scores/others-", "scores/adapted-")
    return {path: sha256_file(path) for path in files if not any(name in str(path.relative_to(run)) for name in others)}


@pytest.fixture(scope="module")
def grown(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that a domain and a seed have joined."""
    folder = shutil.copytree(finished, tmp_path_factory.mktemp("grown") / "copy", symlinks=True)
    config = changed(TINY, {"domains.novel.jargon": domain("jargon"), "seeds": [1, 2]})
    before, expected = made(folder / RUN), JARGON | SEED2 | SCORED
    assert planned(folder, config) == expected
    assert jobs(ran(folder, "config.yaml")) == expected
    assert planned(folder, config) == set()
    assert {path: sha256_file(path) for path in before} == before
    return folder


def test_a_domain_and_a_seed_join_and_nothing_that_was_made_changes(grown: Path) -> None:
    results = pd.read_parquet(grown / RUN / "results.parquet").query("split == 'test'")
    assert {*results["domain"]} == {*TRAINING, *NOVEL, "jargon"}
    assert {*results.loc[results["model"] == "demix", "seed"]} == {1, 2}
    assert {"dense-dapt-jargon", "ngram3", "without-licenses"} <= {*results["model"]}


@pytest.fixture(scope="module")
def joined(grown: Path) -> Path:
    """The copy that rows of every kind, tasks, a suite and tasks of the harness have joined."""
    config, before = changed(TINY, JOINED), made(grown / RUN)
    shown = ran(grown, write_config(grown, config))
    assert planned(grown, config) == set()
    assert {path: sha256_file(path) for path in before} == before
    (grown / "shown.txt").write_text(shown)
    return grown


def test_rows_tasks_and_suites_join_and_nothing_that_was_made_changes(joined: Path) -> None:
    found = jobs((joined / "shown.txt").read_text())
    rules = {job.partition(" ")[0] for job in found}
    assert {job for job in found if job.startswith(("train", "join", "seed", "adapt"))} == {
        *("seed dense 00000015", "join btm", "join cbtm_2", "train_expert cbtm_2 c00", "train_expert cbtm_2 c01"),
        *(f"train_expert btm {domain}" for domain in TRAINING),
        *(f"train {model}" for model in ("upcycled", "btx", "far", "masked", "mine")),
    }
    assert not [job for job in found if job.startswith(("read", "split", "tokenize ")) and "paloma" not in job]
    assert not [job for job in found if job.startswith("score demix/")]
    # Every rule of the workflow has run here, but for those of shared sources, of parents from a hub and of clusters.
    text = "".join(path.read_text() for path in RULES.glob("*.smk"))
    others = {"divide", "download", "anonymize", "all"}
    before = {job.partition(" ")[0] for job in RETRAINED}
    assert {*re.findall(r"^ *(?:use )?rule (?:\w+ as )?(\w+)", text, re.MULTILINE)} - others <= rules | before | {
        "read",
        "tokenize",
    }


def test_every_model_is_whole_and_scored_on_every_domain(joined: Path) -> None:
    run = joined / RUN
    results = pd.read_parquet(run / "results.parquet").query("split == 'test'")
    rows = {*JOINED["models"], "demix", "dense"}
    domains = {*TRAINING, "fantasy", "jargon"}
    for model, scored in results.groupby("model"):
        if model in rows:
            assert {*scored["domain"]} == domains, model
            # Of 512 types, each as likely as the others, no model knows anything.
            assert scored.loc[scored["domain"].isin(TRAINING), "perplexity"].median() < 450, model
    assert rows <= {*results["model"]}
    for path in run.glob("models/*/model.json"):
        assert find_faults(path.parent) == [], path
    chosen = read_json(run / "sweep" / "far.json")
    assert chosen["learning_rate"] == 3e-3
    assert [trial["diverged"] is None for trial in chosen["trials"]] == [True, True, False]
    assert read_json(run / "models" / "far" / "model.json")["training"]["learning_rate"] == 3e-3
    assert read_json(run / "models" / "upcycled" / "model.json")["parent"]["step"] == 6000 // (3 * 4 * 32)
    tasks = pd.read_parquet(run / "tasks.parquet")
    assert {*tasks["task"]} >= {"topics", "choice"}
    suites = pd.read_parquet(run / "suites.parquet")
    assert {*suites["domain"]} == {"paloma_known"}
    assert "paloma_known" not in {*results["domain"]}
    # What a training domain holds is left out of a suite.
    trained = {*read_parquet(run / "corpus" / "owners.parquet")["id"].to_pylist()}
    assert not trained & {*read_parquet(run / "corpus" / "paloma_known" / "test.parquet")["id"].to_pylist()}
    assert read_json(run / "corpus" / "paloma_known" / "card.json")["duplicates"]["across"] > 0


def test_every_file_is_documented(joined: Path) -> None:
    assert_documented(joined / RUN)


AFTERWARDS: dict[str, tuple[Keys, set[str]]] = {
    "another task": ({"tasks.more": TOPICS | {"examples": 5}}, {"examples more", "classify"} | TOLD),
    "the harness online": ({"lm_eval.offline": False}, TOLD),
    "another rule of the harness": ({"lm_eval.weights": ["history"]}, {"harness demix", "classify"} | TOLD),
    "no suite": ({"evaluation.suites": None}, TOLD),
}


@pytest.mark.parametrize("change", AFTERWARDS)
def test_a_later_change_runs_what_it_reaches_and_nothing_else(change: str, joined: Path) -> None:
    keys, expected = AFTERWARDS[change]
    found = planned(joined, changed(changed(TINY, JOINED), keys))
    asked = {job for job in found if job.startswith("fewshot ")}
    assert found - asked == expected
    # A task that is added is asked alone, of every model that has tasks.
    models = {path.name for path in (joined / RUN / "tasks").iterdir()}
    assert asked == ({f"fewshot {model} more" for model in models} if "more" in str(keys) else set())


def test_a_parent_that_is_trained_again_keeps_the_state_of_the_same_bytes(joined: Path) -> None:
    """Beside rows that begin with it, a dense model keeps its state as it is trained: no step is trained twice."""
    config, state = changed(TINY, JOINED), RUN / "seeds" / "dense" / "step-00000015" / "manifest.json"
    manifest = RUN / "models" / "dense" / "model.json"
    before = sha256_file(joined / state)
    shutil.rmtree((joined / state).parent)
    shown = ran(joined, write_config(joined, config), str(state), "--forcerun", str(manifest))
    assert jobs(shown) == {"train dense", "seed dense 00000015"}
    assert sha256_file(joined / state) == before
    assert not list((joined / RUN / "checkpoints").rglob("*.safetensors"))
    # Metrics hold the speed.
    assert planned(joined, config) <= {"report", "track"}
