"""The titles of the pages of a report."""

import html
import re
from pathlib import Path


def titles(report: Path) -> dict[str, str]:
    """What the `<title>` of each page below `report` says, by the name of its file."""
    pages = {page.stem: page.read_text() for page in report.rglob("*.html")}
    return {name: html.unescape(re.findall("<title>(.*?)</title>", text)[0]) for name, text in pages.items()}
