"""The HTML pages of a report. Each is one file that needs no other file and no network.

Snakemake's report and MLflow show a page alone, in a frame that reaches no file beside it.
"""

import base64
import gzip
from functools import cache
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1a1a1a;
  background: #fff; margin: 2rem auto; padding: 0 1.25rem; max-width: 84rem; }
h1 { font-size: 1.25rem; font-weight: 600; margin: 0 0 .25rem; }
h2 { font-size: 1.05rem; font-weight: 600; margin: 1.5rem 0 .25rem; }
p { max-width: 52rem; margin: .35rem 0; }
.note { color: #555; font-size: .87rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
.figure { overflow-x: auto; margin: 1.5rem 0; padding: 0 3rem; }
.figure svg { overflow: visible; }
table { border-collapse: collapse; border-top: 2px solid #1a1a1a; border-bottom: 2px solid #1a1a1a; }
th, td { padding: .28rem .55rem; text-align: right; vertical-align: top; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th:first-child, td.text, th.text { text-align: left; }
thead th { border-bottom: 1px solid #1a1a1a; font-weight: 600; vertical-align: bottom; white-space: normal; }
tbody th { font-weight: 400; }
tbody tr:hover { background: #f4f4f2; }
tr.summary th, tr.summary td { border-top: 1px solid #999; }
tbody tr.summary + tr:not(.summary) > * { border-top: 1px solid #1a1a1a; }
td.best { font-weight: 700; }
.beneath { display: block; font-size: .78rem; font-weight: 400; color: #555; }
.scroll .dt-container { width: fit-content; max-width: 100%; }
.dt-layout-table { overflow-x: auto; }
td.wrap { white-space: normal; max-width: 34rem; text-align: left; }
td.wide { max-width: 62rem; }
.verdict { white-space: nowrap; font-weight: 600; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for paragraph in paragraphs %}<p>{{ paragraph }}</p>
{% endfor %}{% block content %}{% endblock %}
{% for note in notes %}<p class="note">{{ note }}</p>
{% endfor %}</body>
</html>
"""

_GRID = """<div class="scroll"><table class="interactive compact">
<thead><tr>
{% for heading in headings %}<th scope="col"{% if heading in text_headings %} class="text"{% endif %}>{{ heading }}</th>
{% endfor %}<th hidden></th></tr></thead>
<tbody>
{% for group in groups %}{% set number = loop.index0 %}{% for row in group %}\
<tr{% if row.summary %} class="summary"{% endif %}>\
<th scope="row" data-order="{{ row.position }}">{{ row.label }}</th>
{%- for cell in row.cells %}<td data-order="{{ cell.key }}" class="\
{{ "text" if cell.is_text }}{{ "best" if cell.best }}">{{ cell.text }}\
{% if cell.beneath %}<span class="beneath">{{ cell.beneath }}</span>{% endif %}</td>{% endfor %}\
<td hidden data-order="{{ 2 * number + row.summary }}"></td></tr>
{% endfor %}{% endfor %}</tbody>
</table></div>
"""

# The last column keeps a group's averages below the group, whatever column sorts the rows.
_DATATABLES = """<script type="application/octet-stream" id="datatables">{{ datatables() }}</script>
<script type="application/octet-stream" id="datatables-style">{{ datatables_style() }}</script>
<script type="module">
const unpacked = id => new Response(new Blob([Uint8Array.from(atob(document.getElementById(id).textContent), \
letter => letter.charCodeAt(0))]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
const style = document.createElement("style");
style.textContent = await unpacked("datatables-style");
document.head.prepend(style);
const code = new Blob([await unpacked("datatables")], {type: "text/javascript"});
const {default: DataTable} = await import(URL.createObjectURL(code));
const empty = (a, b) => (a === "") - (b === "");
DataTable.type("number", {order: {asc: (a, b) => empty(a, b) || a - b, desc: (a, b) => empty(a, b) || b - a}});
for (const table of document.querySelectorAll("table.interactive")) {
  const headings = [...table.tHead.rows[0].cells], rows = table.tBodies[0].rows.length, long = rows > 60;
  const columns = headings.map((heading, place) => heading.hidden ? {type: "number", visible: false}
    : heading.classList.contains("text") ? {type: "string", columnControl: long ? [["searchList"]] : []}
    : {type: "number", className: place ? "dt-right" : "dt-left"});
  const shown = {columns: ":visible"};
  new DataTable(table, {
    columns, order: [], orderFixed: {pre: [[columns.length - 1, "asc"]]}, autoWidth: false,
    paging: long, pageLength: 50, lengthMenu: [50, 200, {label: "all", value: -1}],
    layout: {
      topStart: "search", topEnd: {buttons: [{extend: "copyHtml5", exportOptions: shown, title: null},
        {extend: "csvHtml5", exportOptions: shown}]},
      bottomStart: long ? "info" : null, bottomEnd: long ? ["pageLength", "paging"] : null,
    },
  });
}
</script>
"""

_TABLE = """{% extends "shell" %}{% block content %}{% include "grid" %}{% include "datatables" %}{% endblock %}"""

_COMPARISON = """{% extends "shell" %}{% block content %}{% for table in parts %}\
{% if table is string %}<div class="figure">{{ table | safe }}</div>
{% else %}<h2>{{ table.title }}</h2>
<p>{{ table.caption }}</p>
{% with headings = table.headings, text_headings = table.text_headings, groups = table.groups %}\
{% include "grid" %}{% endwith %}{% for note in table.notes %}<p class="note">{{ note }}</p>
{% endfor %}{% endif %}{% endfor %}{% include "datatables" %}{% endblock %}"""

_CLAIMS = """{% extends "shell" %}{% block content %}<div class="scroll"><table>
<thead><tr><th scope="col" class="text">Claim of the paper</th><th scope="col" class="text">In this run</th>
<th scope="col" class="text">Numbers</th></tr></thead>
<tbody>
{% for claim in claims %}<tr><td class="wrap">{{ claim.statement }}</td>
<td class="text verdict" style="color: {{ claim.colour }}">{{ claim.sign }} {{ claim.verdict }}</td>
<td class="wrap">{{ claim.numbers }}</td></tr>
{% endfor %}</tbody></table></div>
{% endblock %}"""

_INDEX = """{% extends "shell" %}{% block content %}<div class="figure">{{ stages | safe }}</div>
<h2>{{ main.title }}</h2>
<div class="scroll"><table>
<thead><tr>{% for column in main.columns %}<th scope="col" class="{{ column.class }}">{{ column.heading }}</th>\
{% endfor %}</tr></thead>
<tbody>
{% for row in main.rows %}<tr>{% for cell in row %}<td class="{{ main.columns[loop.index0].class }}">{{ cell }}</td>\
{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% if main.caption %}<p class="note">{{ main.caption }}</p>{% endif %}
<h2>Claims</h2>
<p><a href="claims.html">The numbers that decide</a></p>
<div class="scroll"><table><tbody>
{% for claim in claims %}<tr><td class="text verdict">{{ claim.verdict }}</td>\
<td class="wrap wide">{{ claim.statement }}</td></tr>
{% endfor %}</tbody></table></div>
{% for group, entries in groups.items() %}<h2>{{ group }}</h2>
<ul>
{% for entry in entries %}<li><a href="{{ entry.files.html }}">{{ entry.shows }}</a><span class="note">\
{% for suffix, file in entry.files.items() if suffix != "html" %} · <a href="{{ file }}">{{ suffix }}</a>{% endfor %}\
</span></li>
{% endfor %}</ul>
{% endfor %}<h2>Cards of the models</h2>
<p>{% for card in cards %}<a href="cards/{{ card }}.html">{{ card }}</a>{{ ", " if not loop.last }}{% endfor %}</p>
<h2>Time and cost</h2>
{% if cost %}<div class="scroll"><table>
<thead><tr><th scope="col">Stage</th><th scope="col">Jobs</th><th scope="col">Time</th><th scope="col">CPU time</th>\
<th scope="col">Steps × ranks</th><th scope="col">Memory of the largest job</th></tr></thead>
<tbody>
{% for row in cost %}<tr><th scope="row">{{ row.stage }}</th><td>{{ row.jobs }}</td><td>{{ row.time }}</td>\
<td>{{ row.cpu }}</td><td>{{ row.steps }}</td><td>{{ row.memory }}</td></tr>
{% endfor %}</tbody></table></div>
<p class="note">Hours:minutes:seconds, summed over jobs that may have run at once. CPU time is that of processors. \
Steps × ranks is what the steps of training took, times the ranks that shared them: GPU-hours, if each rank had a GPU. \
The other columns count the last run of a job that was killed and run again, and of a training by jobs of SLURM \
the process that waited for it.</p>
{% else %}<p>Snakemake did not make this run: it has no record of its jobs.</p>
{% endif %}<h2>Settings</h2>
<p>The digest of all settings but the name is {{ digest }}: <code>demix.config</code> in MLflow.</p>
<details><summary>All settings</summary><pre>{{ settings }}</pre></details>
<h2>Versions that made this report</h2>
<p>{% for name, version in versions.items() %}{{ name }} {{ version }}{{ ", " if not loop.last }}{% endfor %}</p>
<script>
// Snakemake's report and MLflow show this page alone, in a frame: there its links lead nowhere.
if (window !== window.parent) document.querySelectorAll("a[href]").forEach(link => link.removeAttribute("href"));
</script>
{% endblock %}"""

_CARD = """{% extends "shell" %}{% block content %}{{ card | safe }}{% endblock %}"""

_FIGURE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>body { margin: 1rem; background: #fff; }</style>
</head>
<body>
<div id="figure"></div>
<script>{{ vega | safe }}</script>
<script type="application/json" id="chart">{{ chart | safe }}</script>
<script>
const chart = JSON.parse(document.getElementById("chart").textContent);
vegaEmbed("#figure", chart, {renderer: "svg", actions: {export: true, source: true, compiled: false, editor: false}});
</script>
</body>
</html>
"""

_ENVIRONMENT = Environment(
    loader=DictLoader(
        {
            "shell": _SHELL,
            "grid": _GRID,
            "datatables": _DATATABLES,
            "table": _TABLE,
            "comparison": _COMPARISON,
            "claims": _CLAIMS,
            "index": _INDEX,
            "card": _CARD,
            "figure": _FIGURE,
        }
    ),
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
    """The HTML page made from `template` ("table", "comparison", "claims", "index" or "figure"); values are escaped.

    Vega's code, charts and drawings are not escaped. The chart is JSON text in which "<" is written as \\u003c.
    """
    return _ENVIRONMENT.get_template(template).render(**values)
