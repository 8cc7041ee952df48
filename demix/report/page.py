"""The pages of a report, in HTML or Markdown. A page of HTML is one file that needs no other file and no network.

Snakemake's report and MLflow show a page alone, in a frame that reaches no file beside it.
"""

import base64
import gzip
import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_ENVIRONMENT = Environment(
    loader=PackageLoader("demix.report", "pages"),
    autoescape=True,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)
_MARKDOWN = _ENVIRONMENT.overlay(autoescape=False, trim_blocks=True, lstrip_blocks=True)


@cache
def _packed(name: str) -> str:
    """A file of DataTables, as the package itables bundles it: compressed, in base64."""
    from itables.utils import read_package_file

    return base64.b64encode(gzip.compress(read_package_file("html", name).encode(), mtime=0)).decode()


_ENVIRONMENT.globals |= {
    "datatables": lambda: _packed("dt_bundle.js"),
    "datatables_style": lambda: _packed("dt_bundle.css"),
}


def render(template: str, **values: Any) -> str:
    """The HTML page made from pages/`template`.html; values are escaped.

    Vega's code, charts and drawings are not escaped. The chart is JSON text in which "<" is written as \\u003c.
    """
    return _ENVIRONMENT.get_template(f"{template}.html").render(**values)


def render_markdown(template: str, **values: Any) -> str:
    """The text made from pages/`template`.md; values are not escaped, and more than one empty line becomes one."""
    return re.sub(r"\n{3,}", "\n\n", _MARKDOWN.get_template(f"{template}.md").render(**values)).strip() + "\n"
