"""Text by the workflow: a source that domains share, two runs that make their text once, and a config's sources."""

import json
import shutil
from pathlib import Path
from typing import Any

from demix.files import check_sealed, read_json, sha256_file
from support.dry_run import TINY, changed, jobs, jobs_by_rule, ran, write_config

NAMES = ("parliament", "scripture", "licenses", "fantasy", "fortunes")


def config_of(names: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    """The tiny config, whose domains are `names` of one source of local files."""
    source = {"path": "texts", "parts": 2} | changes
    domains = {
        kind: {
            name: {"from": "corpus", "value": name.upper(), "words": {"dev": 20, "test": 20}}
            for name in some
            if name in names
        }
        for kind, some in TINY["domains"].items()
    }
    return TINY | {"sources": {"corpus": {"source": source, "by": "meta.set"}}, "domains": domains}


def documents(names: tuple[str, ...]) -> list[str]:
    """What is made of a shared source for its domains."""
    return [f"results/tiny/documents/{name}/{part:04d}.json" for name in names for part in range(2)]


def reads(*names: str) -> set[str]:
    return {f"read {name} {part:04d}" for name in names for part in range(2)}


def test_a_domain_more_reads_the_source_and_makes_no_other_text_again(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        rows = [{"text": f"{name} {number} {row}", "meta": {"set": name.upper()}} for row in range(9) for name in NAMES]
        rows.append({"text": "of none", "meta": {"set": "rest"}})
        (tmp_path / "texts" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    four, run = NAMES[:4], tmp_path / "results" / "tiny"
    ran(tmp_path, write_config(tmp_path, config_of(four)), *documents(four))
    parts = {path: (path.stat().st_mtime_ns, sha256_file(path)) for path in run.glob("documents/*/*.parquet")}
    assert len(parts) == 8
    counts = [read_json(path) for path in run.glob("sources/corpus/*.json")]
    assert [sum(one[key] for one in counts) for key in ("documents", "others")] == [138, 30]

    def planned(config: dict[str, Any], names: tuple[str, ...] = four) -> set[str]:
        return jobs(ran(tmp_path, write_config(tmp_path, config), *documents(names), "-n"))

    assert planned(config_of(four)) == set()
    other = {"domains.training.scripture.value": "rest"}
    assert planned(changed(config_of(four), other)) == reads("scripture")
    divided = {"divide corpus 0000", "divide corpus 0001"}
    assert planned(config_of(four, where={"text": "x"})) == reads(*four) | divided
    assert planned(config_of(four[1:]), four[1:]) == set()
    assert planned(config_of(NAMES), NAMES) == reads("fortunes")
    ran(tmp_path, write_config(tmp_path, config_of(NAMES)), *documents(NAMES))
    assert {path: (path.stat().st_mtime_ns, sha256_file(path)) for path in parts} == parts
    assert not [*run.glob("raw/*/*")], "raw text is removed"
    assert planned(config_of(NAMES), NAMES) == set()
    shutil.copyfile(tmp_path / "texts" / "1.jsonl", tmp_path / "texts" / "0.jsonl")
    first = {job for job in reads(*NAMES) if job.endswith("0000")}
    assert planned(config_of(NAMES), NAMES) == first | {"divide corpus 0000"}


def test_two_runs_make_their_text_once(tmp_path: Path) -> None:
    domains = {name: TINY["domains"]["training"][name] for name in ("scripture", "licenses")}
    kept = {key: TINY[key] for key in ("tokenizer", "architecture", "training", "evaluation")}
    write_config(tmp_path, {"run": "one", "domains": {"training": domains}} | kept)
    # Learning rates differ, text does not.
    (tmp_path / "two.yaml").write_text("{base: config.yaml, run: two, training: {learning_rate: 1.0e-3}}")

    def run(config: str, *arguments: str) -> str:
        return ran(tmp_path, config, "--until", "tokenize", *arguments)

    for config in ("config.yaml", "two.yaml"):
        run(config)
    one, two = tmp_path / "results" / "one", tmp_path / "results" / "two"
    files = [
        path.relative_to(one) for place in ("documents", "corpus", "tokens") for path in (one / place).rglob("*.*")
    ]
    files.append(Path("tokenizer.json"))
    assert len(files) == 6 + 1 + 8 + 18 + 1
    assert [file for file in files if not (one / file).samefile(two / file)] == []
    times = {file: (one / file).stat().st_mtime_ns for file in files}
    run("two.yaml", "--touch")
    assert {file: (one / file).stat().st_mtime_ns for file in files} == times
    for config in ("config.yaml", "two.yaml"):
        assert jobs_by_rule(run(config, "-n", "--quiet", "rules")) == {}
    shutil.rmtree(one)
    assert jobs_by_rule(run("two.yaml", "-n", "--quiet", "rules")) == {}
    for file in files:
        check_sealed(two / file)
