"""Configs so large that a stage's settings are no argument of a command."""

import hashlib
import re
import subprocess
from pathlib import Path

import pytest

from support.dry_run import ENVIRONMENT, TINY, jobs, ran, write_config
from support.server import serving_folder

NAMES = [f"part-{number:04}.jsonl" for number in range(850)]
TEXT = b'{"text": "ten words"}\n'


@pytest.mark.faults
def test_300_domains_and_850_addresses_with_digests(tmp_path: Path) -> None:
    """Their settings of over 128 KiB go by file, and the printed commands run by hand."""
    (tmp_path / "site").mkdir()
    # All that a source of one word reads.
    (tmp_path / "site" / NAMES[0]).write_bytes(TEXT)
    with serving_folder(tmp_path / "site") as site:
        digests = dict.fromkeys(NAMES, hashlib.sha256(TEXT).hexdigest())
        many = {"path": [f"{site}/{name}" for name in NAMES], "words": 1, "sha256": digests}
        sources = {f"d{number:03}": {"path": "one.jsonl"} for number in range(299)} | {"many": many}
        config = TINY | {"run": "large", "removal": {}}
        # More than one step of so many domains.
        config["training"] = config["training"] | {"tokens": 100_000}
        config["domains"] = {"training": {name: {"source": source} for name, source in sources.items()}}
        targets = ["results/large/config.json", "results/large/documents/many/0000.parquet"]
        name = write_config(tmp_path, config)
        commands = re.findall(r"Shell command: (demix .*)", ran(tmp_path, name, *targets, "--notemp"))
        made = [(tmp_path / target).read_bytes() for target in targets]
        assert sorted(re.findall(r"demix ([\w-]+)", " ".join(commands))) == ["read", "run-config"]
        for command in commands:
            subprocess.run(["bash", "-c", command], cwd=tmp_path, env=ENVIRONMENT, check=True)
        assert [(tmp_path / target).read_bytes() for target in targets] == made
        assert jobs(ran(tmp_path, name, *targets, "-n")) == set()
