"""Configs so large that a stage's settings are no argument of a command."""

import hashlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support.breaking import Note
from support.dry_run import ENVIRONMENT, REPOSITORY
from support.server import serving_folder

NAMES = [f"part-{number:04}.jsonl" for number in range(850)]
TEXT = b'{"text": "ten words"}\n'


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of a folder with the file of the first name, which is all that a source of few words reads."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / NAMES[0]).write_bytes(TEXT)
    with serving_folder(folder) as address:
        yield address


def snakemake(folder: Path, *targets: str) -> str:
    done = subprocess.run(
        ["snakemake", *targets, "--snakefile", str(REPOSITORY / "workflow/Snakefile"), "--configfile", "large.yaml",
         "--workflow-profile", str(REPOSITORY / "profiles/default"), "--notemp"],
        cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.faults
def test_300_domains_and_850_addresses_with_digests(site: str, tmp_path: Path, note: Note) -> None:
    digest = hashlib.sha256(TEXT).hexdigest()
    many = {
        "kind": "url",
        "path": [f"{site}/{name}" for name in NAMES],
        "words": 1,
        "sha256": dict.fromkeys(NAMES, digest),
    }
    one = {"kind": "files", "path": "one.jsonl"}
    sources = {f"d{number:03}": one for number in range(299)} | {"many": many}
    config = yaml.safe_load((REPOSITORY / "tests/workflow/tiny.yaml").read_text())
    config |= {"run": "large", "removal": {"retrain_without": []}}
    config["training"]["tokens"] = 100_000  # more than one step of so many domains
    config["domains"]["training"] = {name: {"source": source} for name, source in sources.items()}
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(config))
    targets = ["results/large/config.json", "results/large/documents/many/0000.parquet"]
    with note.timed("settings of over 128 KiB", "by file; the printed commands run by hand; nothing reruns"):
        commands = re.findall(r"Shell command: (demix .*)", snakemake(tmp_path, *targets))
        made = [(tmp_path / target).read_bytes() for target in targets]
        assert sorted(re.findall(r"demix ([\w-]+)", " ".join(commands))) == ["read", "run-config"]
        for command in commands:
            subprocess.run(["bash", "-c", command], cwd=tmp_path, env=ENVIRONMENT, check=True)
        assert [(tmp_path / target).read_bytes() for target in targets] == made
        assert "Nothing to be done" in snakemake(tmp_path, *targets)
