"""The HTML pages of tables, claims and figures: self-contained; tables sort without a library."""

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
tbody + tbody tr:first-child:not(.summary) > * { border-top: 1px solid #1a1a1a; }
td.best { font-weight: 700; }
.beneath { display: block; font-size: .78rem; font-weight: 400; color: #555; }
button { font: inherit; color: inherit; background: none; border: 0; padding: 0; text-align: inherit; cursor: pointer; }
button:hover, button:focus-visible { text-decoration: underline; }
[aria-sort=ascending] button::after { content: " ▲"; font-size: .7em; }
[aria-sort=descending] button::after { content: " ▼"; font-size: .7em; }
td.wrap { white-space: normal; max-width: 34rem; text-align: left; }
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

_GRID = """<div class="scroll"><table>
<thead><tr>
{% for heading in headings %}<th scope="col"{% if heading in text_headings %} class="text"{% endif %}>\
<button type="button" title="sort by this column">{{ heading }}</button></th>
{% endfor %}</tr></thead>
{% for group in groups %}<tbody>
{% for row in group %}<tr{% if row.summary %} class="summary"{% endif %}>\
<th scope="row" data-key="{{ row.position }}">{{ row.label }}</th>
{%- for cell in row.cells %}<td data-key="{{ cell.key }}" class="\
{{ "text" if cell.is_text }}{{ "best" if cell.best }}">{{ cell.text }}\
{% if cell.beneath %}<span class="beneath">{{ cell.beneath }}</span>{% endif %}</td>{% endfor %}</tr>
{% endfor %}</tbody>
{% endfor %}</table></div>
"""

_SORTING = """<script>
const compare = (a, b) => {
  const [x, y] = [Number(a), Number(b)];
  if (a === "" || b === "") return (a === "") - (b === "");
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
};
document.querySelectorAll("table").forEach(table => [...table.tHead.rows[0].cells].forEach((heading, column) => \
heading.addEventListener("click", () => {
  const descending = heading.getAttribute("aria-sort") === "ascending";
  [...heading.parentNode.cells].forEach(other => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  for (const body of table.tBodies) {
    const key = row => row.cells[column].dataset.key;
    const rows = [...body.rows].filter(row => !row.classList.contains("summary"));
    rows.sort((a, b) => key(a) === "" || key(b) === "" || !descending
      ? compare(key(a), key(b)) : compare(key(b), key(a)));
    body.prepend(...rows);
  }
})));
</script>
"""

_TABLE = """{% extends "shell" %}{% block content %}{% include "grid" %}{% include "sorting" %}{% endblock %}"""

_COMPARISON = """{% extends "shell" %}{% block content %}{% for table in parts %}\
{% if table is string %}<div class="figure">{{ table | safe }}</div>
{% else %}<h2>{{ table.title }}</h2>
<p>{{ table.caption }}</p>
{% with headings = table.headings, text_headings = table.text_headings, groups = table.groups %}\
{% include "grid" %}{% endwith %}{% for note in table.notes %}<p class="note">{{ note }}</p>
{% endfor %}{% endif %}{% endfor %}{% include "sorting" %}{% endblock %}"""

_CLAIMS = """{% extends "shell" %}{% block content %}<div class="scroll"><table>
<thead><tr><th scope="col" class="text">Claim of the paper</th><th scope="col" class="text">In this run</th>
<th scope="col" class="text">Numbers</th></tr></thead>
<tbody>
{% for claim in claims %}<tr><td class="wrap">{{ claim.statement }}</td>
<td class="text verdict" style="color: {{ claim.colour }}">{{ claim.sign }} {{ claim.verdict }}</td>
<td class="wrap">{{ claim.numbers }}</td></tr>
{% endfor %}</tbody></table></div>
{% endblock %}"""

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
            "sorting": _SORTING,
            "table": _TABLE,
            "comparison": _COMPARISON,
            "claims": _CLAIMS,
            "figure": _FIGURE,
        }
    ),
    autoescape=True,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)


def render(template: str, **values: Any) -> str:
    """The HTML page made from `template` ("table", "comparison", "claims" or "figure"); values are escaped.

    Vega's code, charts and drawings are not escaped. The chart is JSON text in which "<" is written as \\u003c.
    """
    return _ENVIRONMENT.get_template(template).render(**values)
