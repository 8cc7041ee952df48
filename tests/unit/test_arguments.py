"""Commands with more arguments than Linux passes to a process, as the workflow's shell runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

from demix.launch.arguments import SHELL_FUNCTION, expanded


def test_a_command_of_three_megabytes_arrives_whole(tmp_path: Path) -> None:
    """Each argument as it was, in order; the last is a text of two lines."""
    names = [f"results/a/documents/law/{number:0100d}.parquet" for number in range(24_000)]
    stand_in = f"#!{sys.executable}\nimport sys\nfrom demix.launch.arguments import expanded\n"
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
