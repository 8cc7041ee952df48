"""What stands between Snakemake and the commands: long commands, what jobs used, checksums of files."""

import asyncio
import csv
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake import io

from demix.launch.snakemake import SHELL_FUNCTION, VARIABLE, expanded, read_once

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("config", "variable", "noted"),
    [("config/sample.yaml", True, True), ("none.yaml", True, False), ("config/sample.yaml", False, False)],
    ids=["job", "failed job", "by hand"],
)
def test_a_job_that_ends_well_notes_what_it_used(tmp_path: Path, config: str, variable: bool, noted: bool) -> None:
    log = tmp_path / "logs" / "results" / "a" / "logs" / "sweep" / "demix.0.001.log"
    log.parent.mkdir(parents=True)
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    environment |= {VARIABLE: str(os.getpid())} if variable else {}
    # What the process that starts it has in memory is not the job's.
    held = bytes(1) * (600 << 20)
    with open(log, "wb") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "demix", "config", str(REPOSITORY / config)],
            stdout=subprocess.DEVNULL, stderr=stream, env=environment, check=False,
        )  # fmt: skip
    del held
    assert (done.returncode == 0) == (config == "config/sample.yaml")
    output = tmp_path / "logs" / "results" / "a" / "benchmarks" / "sweep" / "demix.0.001.tsv"
    assert output.exists() == noted
    if noted:
        with open(output, newline="") as stream:
            (row,) = csv.DictReader(stream, delimiter="\t")
        assert 0.1 < float(row["cpu_time"]) < 60
        assert float(row["cpu_time"]) / 2 < float(row["s"]) < 600
        assert 20 < float(row["max_rss"]) < 400


def test_a_command_of_three_megabytes_arrives_whole(tmp_path: Path) -> None:
    """Each argument as it was, in order; the last is a text of two lines."""
    names = [f"results/a/documents/law/{number:0100d}.parquet" for number in range(24_000)]
    stand_in = f"#!{sys.executable}\nimport sys\nfrom demix.launch.snakemake import expanded\n"
    (tmp_path / "demix").write_text(stand_in + "print(repr(expanded(sys.argv[1:])))")
    (tmp_path / "demix").chmod(0o755)

    def ran(count: int) -> list[str]:
        words = ["deduplicate", *names[:count], "--text 'ö'\n$(b)"]
        script = "set -euo pipefail; " + SHELL_FUNCTION + '; demix "${words[@]}"'
        (tmp_path / "script.sh").write_text("mapfile -d '' words < words; " + script)
        (tmp_path / "words").write_text("".join(f"{word}\0" for word in words))
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONUTF8": "1"}
        command = ["bash", "script.sh"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-500:]
        assert done.stdout == f"{words!r}\n"
        return words

    assert sum(len(name) + 1 for name in ran(2)) < 1000
    assert sum(len(name) + 1 for name in ran(24_000)) > 3_000_000


def test_a_failure_ends_the_shell(tmp_path: Path) -> None:
    (tmp_path / "demix").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "demix").chmod(0o755)
    for words in ("a", "$(seq 200000)"):
        script = f"set -euo pipefail; {SHELL_FUNCTION}; demix {words} 2> log; echo went on"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize("given", [[], ["eval", "@a"], ["@a", "b"]])
def test_other_arguments_stay(given: list[str]) -> None:
    assert expanded(given) == given


def test_a_checksum_is_that_of_the_file_after_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io._IOFile, "checksum", io._IOFile.checksum)
    read_once()
    path = tmp_path / "weights"
    file = io.IOFile(str(path))
    file.rule = SimpleNamespace(workflow=SimpleNamespace(iocache=SimpleNamespace(active=False)))

    def checksum(threshold: int = 100) -> str | None:
        found: str | None = asyncio.run(file.checksum(threshold))
        return found

    def sha256(text: str) -> str:
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    path.write_text("one")
    assert [checksum(), checksum()] == 2 * [sha256("one")]
    # Larger than Snakemake is to read.
    assert checksum(threshold=2) is None
    before = path.stat()
    path.write_text("two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert [checksum(), checksum()] == 2 * [sha256("two")]
    # As all files of a run come into place, with the time of the file before.
    new = tmp_path / "new"
    new.write_text("six")
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    new.rename(path)
    assert checksum() == sha256("six")
    path.unlink()
    assert checksum() is None
