"""The results on a model's card: its rows of the tables, the dense model beside them, and the hub's `model-index`."""

from typing import Any

import pandas as pd

from demix.report.domains import domains_of
from demix.report.formats import as_markdown
from demix.report.read import read_results
from demix.report.systems import BALANCED, dense_adapted
from demix.run.models import left_out, one_more
from demix.run.run import Run

# The headings of the sets of experts, by the name of a set in the results.
OWN_LEFT_OUT = "own left out"
SETS = {
    "all": "All experts, also those that learned from the novel domains",
    "training": "Only the training domains' experts",
    "dense": "The model",
    OWN_LEFT_OUT: "The domain's own expert left out",
}
MASKED_TASK, TEXT_TASK = "fill-mask", "text-generation"
# Of methods that a model has, the last stands for it.
METHODS = ("dense", "naive", "average", "uniform", "updating", "cached", "tempered")


def planned(model: str, run: Run) -> tuple[str, int]:
    """The name of a model in the results, and the model's seed."""
    row = next((one for one in run.planned if one.name == model), None)
    return (row.row, row.seed) if row else (model, run.seed)


def results_of(run: Run, model: str) -> pd.DataFrame:
    """The model's rows of the paper's tables: one row per domain, set of experts (column `set`) and method."""
    rows, (row, seed) = read_results(run.folder / "results.parquet").rows, planned(model, run)
    rows = rows[(rows["model"] == row) & (rows["seed"] == seed)].query(
        "split == 'test' and variant == '' and top_k.isna() and weights in ['', 'history', 'tempered']"
    )
    rows = rows.assign(method=rows["method"].where(rows["weights"] != "tempered", "tempered"))
    # The best that a masked model has, whose experts no text weights.
    rows = rows[rows["method"].isin([*METHODS, *(["fitted"] if masked(rows) else [])])]
    return rows.assign(set=rows["experts"].where(rows["experts"] != rows["domain"].map(left_out), OWN_LEFT_OUT))


def dense_beside(results: pd.DataFrame, run: Run, model: str) -> pd.DataFrame:
    """The rows of dense models to compare with the `results` of `model`, with their labels for methods.

    These are that of the model's seed, none for itself, and on each domain that the model was adapted to the one that
    was adapted to it.
    """
    name = run.folder_of(BALANCED.model, planned(model, run)[1])
    rows = results_of(run, name).assign(method=BALANCED.label)
    beside = [rows if name != model and masked(rows) == masked(results) else rows.iloc[:0]]
    for domain in run.novel if results["set"].map(_learned).any() else ():
        one = dense_adapted(run)(domain)
        beside.append(results_of(run, one.model).query("domain == @domain").assign(method=one.label))
    return pd.concat(beside)


def _learned(experts: str) -> bool:
    """Whether a set of experts has some that learned from a novel domain."""
    return experts == "all" or experts.startswith(one_more(""))


def masked(results: pd.DataFrame) -> bool:
    """Whether the rows of one model are those of a masked language model."""
    return "scorer" in results and bool(results["scorer"].str.startswith("masked").any())


def model_index(results: pd.DataFrame) -> list[dict[str, Any]]:
    """The hub's `model-index`: the model with all its experts, one entry per domain."""
    sets = [name for name in SETS if name in set(results["set"])]
    rows = results[results["set"] == sets[0]] if sets else results
    rows = rows[rows["method"].isin(_methods(rows)[-1:])]
    figures = [(str(row.domain), str(row.method), float(row.perplexity)) for row in rows.itertuples()]
    return index_entries(figures, MASKED_TASK if masked(results) else TEXT_TASK)


def index_entries(figures: list[tuple[str, str, float]], task: str = TEXT_TASK) -> list[dict[str, Any]]:
    """The entries of `model-index` for perplexities on test splits: (domain, method, perplexity)."""
    name = "masked perplexity" if task == MASKED_TASK else "perplexity"
    return [
        {
            "task": {"type": task},
            "dataset": {"name": domain, "type": domain, "split": "test"},
            "metrics": [{"type": "perplexity", "name": f"{name}, {method}", "value": round(perplexity, 4)}],
        }
        for domain, method, perplexity in figures
    ]


def _methods(rows: pd.DataFrame) -> list[str]:
    """Those of `METHODS`, and fitted, that have rows on every domain of `rows`."""
    domains = rows.groupby("method")["domain"].nunique()
    return [name for name in (*METHODS, "fitted") if domains.get(name, 0) == rows["domain"].nunique()]


def result_tables(
    results: pd.DataFrame, dense: pd.DataFrame, run: Run
) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """A table for each set of experts, `dense` beside: heading, heads of columns, rows."""
    tables = []
    for name, own in sorted(results.groupby("set", sort=False), key=lambda one: one[0] not in SETS):
        added = str(name).replace(one_more(""), "The training domains' experts and that of ", 1)
        *others, best = _methods(own)
        beside = dense[dense["domain"].isin(own["domain"])]
        beside = beside[_learned(str(name)) | (beside["method"] == BALANCED.label)]
        leading, rows = [*beside["method"].unique(), best], pd.concat([own, beside])
        shown = rows["perplexity"].map("{:.2f}".format) + rows["oracle"].map({True: "*", False: ""})
        cells = rows.assign(shown=shown).pivot(index="domain", columns="method", values="shown")
        cells = cells.reindex(index=rows["domain"].unique(), columns=[*leading, *others]).fillna("–")
        about = own[own["method"] == best].set_index("domain").reindex(cells.index)
        cells.insert(len(leading), "95% interval", [*map(_interval, about["perplexity_low"], about["perplexity_high"])])
        bits = about["bits_per_byte"].map("{:.3f}".format).replace("nan", "–")
        cells.insert(len(leading) + 1, "bits per byte", bits)
        cells = cells.assign(**{count: about[count].map("{:,}".format) for count in ("documents", "pieces", "tokens")})
        table = rows.pivot(index="domain", columns="method", values="perplexity")
        for kind in domains_of(run):
            if set(kind.names) <= set(table.index):
                means = table.loc[kind.names].mean(skipna=False).map("{:.2f}".format).replace("nan", "–")
                cells.loc[f"mean of the {kind.said}"] = means.reindex(cells.columns).fillna("")
        tables.append((SETS.get(str(name), as_markdown(added)), ("domain", *cells), [*cells.itertuples(name=None)]))
    return tables


def _interval(low: float, high: float) -> str:
    return "–" if pd.isna(low) else f"{low:.2f} to {high:.2f}"
