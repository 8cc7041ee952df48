"""The report's files: which a run has, what is refused and left out, what other programs read, and names of others."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from demix.files import read_json, write_json, write_parquet
from demix.report import report_files, report_items, write_report
from demix.report.item import FigureItem
from demix.report.run_data import RunData
from demix.report.table import Table, write_table
from demix.run.run import Run
from support.cli import demix, succeeds
from support.configs import domains, small_run
from support.errors import refused
from support.frozen import rows_of, run_data
from support.report import all_items, drawn, drawn_as, pairs_of, read_page, read_table, shown, square_pairs

REPOSITORY = Path(__file__).parents[2]
FIGURES = [name for name, item in all_items().items() if isinstance(item, FigureItem)]


def test_the_files_are_those_that_the_workflow_is_told_of(frozen: Run, report: Path) -> None:
    assert {path.relative_to(report).as_posix() for path in report.rglob("*.*")} == set(report_files(frozen))


def test_files_of_the_same_run_are_the_same_bytes(frozen: Run, report: Path, tmp_path: Path) -> None:
    for name in ("table13", "figure4", "claims"):
        all_items()[name].write(run_data(frozen), tmp_path)
    # What writes PDF orders the resources of a page at random.
    for path in (path for path in tmp_path.rglob("*.*") if path.suffix != ".pdf"):
        assert path.read_bytes() == (report / path.relative_to(tmp_path)).read_bytes(), path


@pytest.mark.parametrize("name", FIGURES)
def test_other_programs_open_a_figure(name: str, report: Path) -> None:
    folder = report / "figures"
    assert "vega-lite/v6" in json.loads((folder / f"{name}.json").read_text())["$schema"]
    assert ElementTree.parse(folder / f"{name}.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF-")


def test_a_table_is_the_same_in_each_format(frozen: Run, report: Path) -> None:
    """LaTeX has the cells of the others, one line each; braces and environments are closed."""
    for path in (report / "tables").glob("*.tex"):
        text = path.read_text()
        assert text.isascii(), path
        plain = re.sub(r"\\[\\{}]", "", text)
        assert plain.count("{") == plain.count("}"), path
        assert re.findall(r"\\begin{(\w+)}", text) == re.findall(r"\\end{(\w+)}", text)[::-1], path
        (columns,) = re.findall(r"\\begin{(?:tabular|longtable)}{([lr]+)}", text)
        body = text.split(r"\endlastfoot" if "longtable" in text else r"\midrule", 1)[1]
        lines = [line for line in body.splitlines() if line.endswith(r" \\")]
        assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in lines} == {len(columns)}, path
        made = shown(path.stem, run_data(frozen))
        for found in (read_table(path.with_suffix(".md")), *read_page(path.with_suffix(".html"))):
            for frames in ((found.cells, made.cells), (found.beneath, made.beneath), (found.bold, made.bold)):
                pd.testing.assert_frame_equal(*frames, check_dtype=False)


EVIL = "<b onclick='x'>a&b_|c* [x](y) $5% #~^ {\\d}"


def test_words_of_a_text_are_no_markup(tmp_path: Path) -> None:
    frame = pd.DataFrame({"Terms": [EVIL], "Documents": [1.0]}, index=["a"])
    write_table(Table(frame, "Terms", name="evil", title="Evil"), tmp_path)
    for found in (read_table(tmp_path / "evil.md"), *read_page(tmp_path / "evil.html")):
        assert [*found.cells["Terms"]] == [EVIL]
    latex = (tmp_path / "evil.tex").read_text()
    assert r"a\&b\_|c* [x](y) \$5\% \#" in latex
    assert r"\{\textbackslash d\}" in latex


OF_CLUSTERS = {"by_clusters", "cluster_experts", "cluster_sizes"}
OF_NOVEL = {"table5", "table6", "table13", "figure6", "figure8"}
CLUSTERED: dict[str, Any] = {
    "models": {"x": {"kind": "branched", "data": "k2"}},
    "clusterings": {"k2": {"clusters": 2}},
    "training": {"sequences": 2},
}
TWO = domains(("law", "news"))


@pytest.mark.parametrize(
    ("sections", "more"),
    [
        ({"domains": TWO}, {"table7"}),
        ({"domains": domains(("law",), ("songs",))}, OF_NOVEL),
        (CLUSTERED, OF_CLUSTERS),
        (CLUSTERED | {"evaluation": {"temperatures": [1.0]}}, OF_CLUSTERS),
        ({"tasks": {"x": {"test": {"path": "x.jsonl"}}}}, {"tasks"}),
        (CLUSTERED | {"tasks": {"x": {"test": {"path": "x.jsonl"}}}}, OF_CLUSTERS | {"tasks"}),
        ({"lm_eval": {"tasks": ["lambada"]}}, {"tasks"}),
    ],
)
def test_a_run_has_the_elements_of_what_it_has(sections: dict[str, Any], more: set[str]) -> None:
    plain = {"domains": domains(("law",)), "models": {"dense_unbalanced": None, "domain_token": None}}
    models = {"models": plain["models"] | sections.get("models", {})}
    few, many = (set(report_files(small_run(**one))) for one in (plain, plain | sections | models))
    assert {Path(name).stem for name in many - few} == more
    assert few <= many


def doubled(found: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([found, found[:1]])


def without_a_column(found: pd.DataFrame) -> pd.DataFrame:
    return found.iloc[:, 1:]


def on_other_tokens(found: pd.DataFrame) -> pd.DataFrame:
    return found.assign(tokens_sha256=found["tokens_sha256"].where(found["model"] != "dense", "other"))


@pytest.mark.parametrize(
    ("name", "file", "damage"),
    [
        ("table3", "results", on_other_tokens),
        ("tasks", "tasks", without_a_column),
        *(
            (name, file, damage)
            for damage in (doubled, without_a_column)
            for name, file in (
                ("table3", "results"),
                ("figure4", "priors"),
                ("figure2", "corpus/overlap"),
                ("figure7", "posteriors"),
                ("index", "differences"),
            )
        ),
    ],
)
def test_what_is_doubled_lacks_a_column_or_does_not_compare_is_refused(
    name: str, file: str, damage: Callable[[pd.DataFrame], pd.DataFrame], frozen_copy: Run, tmp_path: Path
) -> None:
    table = pa.Table.from_pandas(damage(rows_of(frozen_copy, file)), preserve_index=False)
    write_parquet(table, frozen_copy.folder / f"{file}.parquet")
    with refused(f"{file}.parquet"):
        all_items()[name].write(RunData(frozen_copy), tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("benchmarks/tokenizer.tsv", "s\tcpu_time\tmax_rss\n1.5\t"),
        ("metrics/demix.jsonl", '{"step": 2}\n'),
        ("clusters/k2/assigned/licenses.train.parquet", ""),
    ],
)
def test_a_damaged_file_is_refused_before_anything_is_written(
    name: str, text: str, frozen_copy: Run, tmp_path: Path
) -> None:
    (frozen_copy.folder / name).write_text(text)
    with refused(name):
        write_report(frozen_copy, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_what_a_run_has_no_numbers_of_is_left_out(frozen: Run, tmp_path: Path) -> None:
    few = rows_of(frozen).query("kind == 'training' and model in ('dense', 'demix') and seed == 1")
    files = {"priors": "priors", "posteriors": "posteriors", "overlap": "corpus/overlap", "differences": "differences"}
    nothing = {name: rows_of(frozen, file).iloc[:0] for name, file in files.items()}
    made = run_data(frozen, results=few, metrics=tmp_path / "none", **nothing)
    for item in report_items(frozen):
        item.write(made, tmp_path)
    assert set(report_files(frozen)) == {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    tables = tmp_path / "tables"
    assert {label.partition(" (")[0] for label in read_table(tables / "table3.md").cells.index} == {"Dense", "DEMix"}
    assert {*read_table(tables / "table6.md").cells.index} >= {*frozen.training}
    assert not {*read_table(tables / "table6.md").cells.index} & {*frozen.novel}
    assert drawn_as(tmp_path / "figures" / "figure4.json", "domain", "expert", "value")["value"].isna().all()


def numbered(frozen: Run, perplexities: dict[str, float], other: float = 99.0) -> pd.DataFrame:
    """The results of the run's own seed with the perplexities of some systems (queries), and all others alike."""
    found = rows_of(frozen).query("seed == 1").assign(perplexity=other)
    for query, value in perplexities.items():
        found.loc[found.eval(query), "perplexity"] = value
    return found


def test_bold_is_what_prints_lowest_and_no_oracle(frozen: Run) -> None:
    results = numbered(
        frozen,
        {
            "method == 'naive'": 1,
            "variant == 'dev_choice'": 80,
            "method == 'average'": 50.004,
            "model == 'dense'": 50.001,
        },
    )
    bold = shown("table5", run_data(frozen, results=results)).bold["Mean"]
    averages = {label for label in bold.index if label.endswith("(average)")}
    assert {*bold[bold].index} == averages | {"Dense (Balanced)"}


def test_bold_of_tasks_is_surely_above_chance_and_reads_no_label(frozen: Run) -> None:
    tasks = rows_of(frozen, "tasks").query("metric.isna()").assign(accuracy=0.9, chance=0.5, judged=True)
    best, read = tasks["routing"] == "average", tasks["reads"] == "test labels"
    tasks.loc[best, "accuracy"] = 0.95
    tasks.loc[read | (tasks["routing"] == "one expert"), "accuracy"] = 0.99
    tasks.loc[tasks["task"] == "halves", "judged"] = False
    bold = shown("tasks", run_data(frozen, tasks=tasks)).bold
    assert {label.rpartition(" (")[2] for label in bold.index[bold["domain"]]} == {"average)"}
    assert not bold["halves"].any()
    of_harness = shown("tasks", run_data(frozen)).bold["rolling, bits_per_byte"]
    assert [*of_harness.index[of_harness]] == ["DEMix (tempered)"], "the lowest"


def test_an_expert_that_began_as_an_average_has_no_single_parent(frozen_copy: Run) -> None:
    """It is compared with the likeliest of those that were averaged."""
    copied = shown("table13", RunData(frozen_copy)).cells
    for name in frozen_copy.novel:
        path = frozen_copy.folder / "models" / "demix" / "experts" / f"{name}.json"
        about = read_json(path)
        shares = {one: {"weight": 0.6 if one == about["parent"] else 0.2} for one in frozen_copy.training}
        write_json(path, about | {"parent": None, "parents": shares})
    averaged = shown("table13", RunData(frozen_copy)).cells
    assert {*averaged["Parent expert"][[*frozen_copy.novel]]} == {"average"}
    pd.testing.assert_frame_equal(averaged.drop(columns="Parent expert"), copied.drop(columns="Parent expert"))
    told = demix(
        "sql", frozen_copy.folder, "select distinct parent from experts where expert in ('fortunes', 'fantasy')"
    )
    assert "average" in told.output


def test_what_rounds_to_zero_has_no_sign(frozen: Run) -> None:
    found = shown("table6", run_data(frozen, results=numbered(frozen, {"experts == 'all'": 99 - 1e-6})))
    assert {*found.cells["Change, %"][["licenses", "fantasy"]]} == {"0.00"}


def test_a_figure_without_a_point_is_drawn_all_the_same(frozen: Run, tmp_path: Path) -> None:
    results = rows_of(frozen).query("not method in ['dense', 'cached'] and weights != 'cluster'")
    item = all_items()["by_clusters"]
    item.write(run_data(frozen, results=results), tmp_path)
    svg = ElementTree.parse(tmp_path / item.files["svg"]).getroot()
    assert all(0 < float(svg.attrib[side]) < 2000 for side in ("width", "height"))


def test_a_text_without_an_interval_has_a_dash_beneath(frozen: Run) -> None:
    results, bounds = rows_of(frozen).query("seed == 1"), ["perplexity_low", "perplexity_high"]
    results.loc[results["domain"] == "scripture", bounds] = np.nan
    found = shown("table4", run_data(frozen, results=results)).beneath
    assert {*found["scripture"]} == {"–"}
    assert found["licenses"].str.fullmatch(r"\[[\d.]+, [\d.]+\]").all()
    results[bounds] = np.nan
    assert {*shown("table4", run_data(frozen, results=results)).beneath.to_numpy().ravel()} == {""}


def test_a_figure_shows_the_first_64_domains_and_experts(frozen: Run) -> None:
    names = [f"d{number:02}" for number in range(66)]
    numbers = np.random.default_rng(0).uniform(1, 2, (3, 66 * 66))
    about = {"model": "demix", "experts": "training", "weights": "history", "seed": 1, "split": "dev", "block": 0}
    rows = pairs_of(names, prior=numbers[2], posterior=0.5, **about)
    frames = {"pairs": {"training": square_pairs(names, *numbers[:2])}, "priors": rows, "posteriors": rows}
    made = RunData(small_run(domains=domains(names)), frames)
    for name, columns in (
        ("figure2", ("domain", "expert")),
        ("figure4", ("domain", "expert")),
        ("figure7", ("expert",)),
    ):
        figure = drawn(name, made)
        records = [row for rows in figure["datasets"].values() for row in rows]
        assert all({row[column] for row in records} == {*names[:64]} for column in columns)
    assert {row["domain"] for row in records} == {*names[:64]}


def test_the_first_page_leads_to_all_pages(report: Path) -> None:
    page = (report / "index.html").read_text()
    links = {link.partition("#")[0] for link in re.findall(r'href="([^"]+)"', page)}
    there = {path.relative_to(report).as_posix() for path in report.rglob("*.*")}
    assert {link for link in links if not link.startswith("cards/")} == there - {"index.html", "claims.md"}
    assert (REPOSITORY / "docs" / "pipeline.svg").read_text() in page
    assert {link for link in links if link.startswith("cards/")} >= {"cards/demix.html", "cards/dense.html"}
    claims = re.findall(r'<tbody id="(\w+)"', (report / "claims.html").read_text())
    assert {*re.findall(r'href="claims.html#(\w+)"', page)} == {*claims}
    # An entry has the name of the page to which it leads.
    entries = dict(re.findall(r'<li><a href="([a-z]+/[a-z0-9_]+[.]html)">(?:<img[^>]+>)?([^<]+)</a>', page))
    titles = {name: re.findall("<title>(.*?)</title>", (report / name).read_text()) for name in entries}
    assert titles == {name: [entry] for name, entry in entries.items()}


def test_the_first_page_has_the_time_of_each_rule(frozen: Run, report: Path) -> None:
    (found,) = (table for table in read_page(report / "index.html") if "CPU minutes" in table.cells)
    jobs = frozen.folder / "benchmarks"
    for rule in ("train", "tokenizer"):
        paths = [*jobs.glob(f"{rule}.tsv"), *jobs.glob(f"{rule}/**/*.tsv")]
        seconds = sum(pd.read_csv(path, sep="\t")["s"].sum() for path in paths)
        assert not found.wrong(pd.DataFrame({"Jobs": len(paths), "Minutes": seconds / 60}, [rule]))


def test_the_terminal_has_means_and_marks_oracles(frozen: Run) -> None:
    done = succeeds("summary", frozen.folder)
    results = rows_of(frozen).query(
        "seed == 1 and split == 'test' and variant == '' and experts in ('training', 'dense')"
    )
    means = results.groupby(["model", "method", "kind"])["perplexity"].mean()
    token, dense = means["domain_token", "naive"], means["dense", "dense"]
    (line,) = re.findall(r"^.*\+ Domain Token.*$", done.stdout, re.MULTILINE)
    cells = [cell.strip() for cell in line.split("│")]
    change = f"{100 * (token['training'] / dense['training'] - 1):+.1f}".replace("-", "−")
    means_of = [cells[number].removesuffix(" above n-grams") for number in (2, 4)]
    assert (means_of, cells[3]) == ([f"{token['training']:.2f}", f"{token['novel']:.2f}"], change)
    assert cells[5].endswith(" oracle")
