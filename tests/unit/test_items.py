"""The registry of tables, figures and pages: a module is an item, and all else follows from it."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import demix
from demix.report import report_files
from demix.report.item import Group, PageItem
from demix.report.items import all_items
from support.synthetic_run import MadeUp

NEW = '''"""What a new table shows."""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.table import Table

ITEM = TableItem("A new table", Group.FURTHER)


def make(material: Material) -> Table:
    import pandas as pd

    return Table("New.", pd.DataFrame({"Mean": {"all": 1.0}}))
'''


def test_every_item_has_a_heading_a_caption_and_a_group() -> None:
    items = all_items()
    folder = Path(demix.__file__).parent / "report" / "items"
    assert items.keys() == {path.stem for path in folder.glob("[a-z]*.py")}
    for name, item in items.items():
        assert item.heading, name
        assert item.caption, name
        assert item.category, name
        assert bool(item.group) != isinstance(item, PageItem), name
    assert len({item.heading for item in items.values()}) == len(items)


def test_a_module_is_an_item_and_nothing_else_names_it(made_up: MadeUp, tmp_path: Path) -> None:
    """A copy of the package with one more file: the report has one more table, with its caption, and links to it."""
    package = Path(demix.__file__).parent
    shutil.copytree(package, tmp_path / "demix", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "demix" / "report" / "items" / "new.py").write_text(NEW)
    code = """
from pathlib import Path
import sys
from demix.report import report_files, report_items, write_report
from demix.run.run import Run
run = Run.read(Path(sys.argv[1]))
(item,) = [item for item in report_items(run) if item.name == "new"]
assert item.caption == "What a new table shows."
write_report(run, Path(sys.argv[2]))
print(*report_files(run))
"""
    command = [sys.executable, "-c", code, made_up.path, tmp_path / "report"]
    made = subprocess.check_output(command, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}).split()
    assert set(made) - {*report_files(made_up.run)} == {f"tables/new.{suffix}" for suffix in ("html", "md", "tex")}
    assert "1.00" in (tmp_path / "report" / "tables" / "new.md").read_text()
    page = (tmp_path / "report" / "index.html").read_text()
    further = page.partition(f"<h2>{Group.FURTHER}</h2>")[2].partition("<h2>")[0]
    assert '<a href="tables/new.html">A new table</a>' in further


def test_an_installed_package_has_the_templates() -> None:
    folder = Path(demix.__file__).parent / "report"
    data = tomllib.loads((folder.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in data["demix.report"] for path in folder.glob(pattern)}
    assert packed == {folder / "paper.json", *(folder / "pages").iterdir()}
