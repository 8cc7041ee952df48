"""What a command imports before its work begins, which is most of the time of a short job."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import demix

# Each command ends with an error about its arguments, after its imports.
DATA = (
    "download law --settings {'kind':'files','path':'none.txt'} --output out/raw.parquet",
    "anonymize none.parquet --output out/documents.parquet --counts out/counts.json",
    "deduplicate none.parquet --output out/owners.parquet",
    "split law none.parquet --owners none.parquet --output out"
    " --settings {'words':{},'training':true,'seed':1,'metadata':false}",
    "tokenizer none.parquet --settings {'kind':'bpe','vocab_size':300} --output out/tokenizer.json",
    "tokenize none.parquet --tokenizer none.json --output out",
    "overlap none/train.arrow --output out/overlap.parquet",
)
MIXING = (
    "choose-mixing none --domains law --experts law --output out/mixing.json",
    "join none.parquet --output out/results.parquet",
)
TORCH = (
    "score none none/test.arrow --settings {'threads':1} --output out --experts law",
    "adapt none none/law/train.arrow none/law/dev.arrow --training news --scores none --settings {}"
    " --metrics out/metrics --checkpoints out/checkpoints",
)
# What takes long to import and belongs to no start: other stages' libraries, and those of a few functions.
HEAVY = {"mlflow", "pandas", "sklearn", "scipy.signal", "scipy.stats", "datasets", "transformers", "altair", "requests"}
HEAVY |= {"snakemake", "rich", "sympy", "torch._dynamo"}


def imported(command: str, folder: Path) -> set[str]:
    """The modules that `demix` has imported when it ends."""
    code = "import sys; from demix.commands.main import main\ntry: main()\nfinally: print(*sys.modules)"
    arguments = command.replace("'", '"').split()
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, check=False, capture_output=True, text=True
    )
    assert "Error" not in ended.stderr, ended.stderr
    assert ended.stderr.startswith("demix: error: "), ended.stderr
    return set(ended.stdout.split())


@pytest.mark.parametrize("command", [*DATA, *MIXING], ids=lambda command: command.split()[0])
def test_stages_of_data_and_of_mixing_load_no_torch(command: str, tmp_path: Path) -> None:
    assert imported(command, tmp_path) & (HEAVY | {"torch"}) == set()


@pytest.mark.parametrize("command", TORCH, ids=lambda command: command.split()[0])
def test_stages_with_torch_load_little_else(command: str, tmp_path: Path) -> None:
    found = imported(command, tmp_path)
    assert "torch" in found
    assert found & (HEAVY | {"duckdb", "pyarrow.compute"}) == set()


def test_help_loads_no_library_of_a_stage() -> None:
    code = "import sys; from demix.commands.main import command_line; command_line(); print(*sys.modules)"
    found = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert found & (HEAVY | {"torch", "duckdb", "tokenizers", "demix.data", "demix.evaluate"}) == set()
    assert "demix.commands.people" in found


def test_groups_of_commands_are_found() -> None:
    shown = demix("experts", "--help")
    assert shown.exit_code == 0
    assert "verify" in shown.stdout
    assert "experts" in demix("--help").stdout


def test_one_command_is_found_without_the_others() -> None:
    code = "import sys; from demix.commands.main import command_line; app = command_line('join')\n"
    code += "print(*[one.callback.__name__ for one in app.registered_commands], 'demix.commands.people' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["join", "False"]


def test_no_module_of_data_mixing_or_report_loads_torch() -> None:
    """All of the data stage and of mixing is importable without torch, and nothing but tracking loads mlflow."""
    light = "run.check data.sources data.anonymize data.corpus data.duplicates data.tokenizer data.shards data.examples"
    light += " commands.main evaluate.domain evaluate.classification report report.items.tasks report.items.pages"
    names = ", ".join(f"demix.{name}" for name in light.split())
    code = f"import sys, {names}; print([name for name in ('torch', 'mlflow', 'transformers') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
