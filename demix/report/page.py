"""The HTML pages of a report. Each is one file that needs no other file and no network.

Snakemake's report and MLflow show a page alone, in a frame that reaches no file beside it.
"""

import base64
import gzip
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_ENVIRONMENT = Environment(
    loader=PackageLoader("demix.report", "pages"),
    autoescape=True,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)


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
