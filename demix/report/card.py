"""The model card, in the format of the Hugging Face hub: data, training, lineage of experts, results and limits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from huggingface_hub import EvalResult, ModelCardData

from demix.config.models import DENSE_EXPERT, KINDS
from demix.config.training import Execution
from demix.errors import DemixError, nearest
from demix.files import read_json, write_text
from demix.model.clusters import copy_clusters
from demix.model.directory import describe, expert_lineage, expert_names
from demix.model.experts import usual_of, write_usual
from demix.model.export import format_of
from demix.model.formats import FORMATS
from demix.model.manifest import parent_of, read_description, read_lineage
from demix.model.merge import learned_of, refuse_weights
from demix.report.read import domains_of, read_results
from demix.report.systems import BALANCED
from demix.report.table import as_markdown, markdown_rows, render, render_markdown
from demix.run.run import Run
from demix.settings import names_of

# The headings of expert sets, by their names in the results.
SETS = {
    "all": "All experts, including those added for the novel domains",
    "training": "Only the training domains' experts",
    "dense": "The model",
}
MASKED_TASK, TEXT_TASK = "fill-mask", "text-generation"
# The last of these methods that a model has represents the model.
METHODS = ("dense", "naive", "average", "uniform", "updating", "cached", "tempered")


def planned(model: str, run: Run) -> tuple[str, int]:
    """The name of a model in the results, and the model's seed."""
    row = next((one for one in run.planned if one.name == model), None)
    return (row.row, row.seed) if row else (model, run.seed)


def results_of(run: Run, model: str) -> pd.DataFrame:
    """The model's results in the paper's tables: one row per domain, expert set (`SETS`) and method."""
    rows, (row, seed) = read_results(run.folder / "results.parquet").rows, planned(model, run)
    rows = rows[(rows["model"] == row) & (rows["seed"] == seed) & rows["experts"].isin([*SETS])].query(
        "split == 'test' and variant == '' and top_k.isna() and weights in ['', 'history', 'tempered']"
    )
    rows = rows.assign(method=rows["method"].where(rows["weights"] != "tempered", "tempered"))
    # For a masked model also the dev-optimised weights, the best rule it can have: text cannot weight its experts.
    return rows[rows["method"].isin([*METHODS, *(["fitted"] if masked(rows) else [])])]


def dense_rows(results: pd.DataFrame, run: Run, model: str) -> pd.DataFrame:
    """The results of Dense (Balanced) with the model's seed, for comparison with `results`; empty for Dense itself."""
    name = run.folder_of(BALANCED.model, planned(model, run)[1])
    rows = results_of(run, name).assign(method=BALANCED.label)
    return rows if name != model and masked(rows) == masked(results) else rows.iloc[:0]


def masked(results: pd.DataFrame) -> bool:
    """Whether the results of one model are those of a masked language model."""
    return "scorer" in results and bool(results["scorer"].str.startswith("masked").any())


def evaluations(results: pd.DataFrame) -> list[EvalResult]:
    """The results for the hub's index, one per domain, of the model with all its experts."""
    rows = results[results["experts"] == next((name for name in SETS if name in {*results["experts"]}), "")]
    rows = rows[rows["method"].isin(_methods(rows)[-1:])]
    return [_evaluation(row.domain, row.method, row.perplexity, masked(results)) for row in rows.itertuples()]


def _evaluation(domain: str, method: str, perplexity: float, masked: bool = False) -> EvalResult:
    """The perplexity of a method on the test split of a domain."""
    return EvalResult(
        task_type=MASKED_TASK if masked else TEXT_TASK,
        dataset_type=domain,
        dataset_name=domain,
        dataset_split="test",
        metric_type="perplexity",
        metric_name=f"{'masked ' * masked}perplexity, {method}",
        metric_value=round(float(perplexity), 4),
    )


def _methods(rows: pd.DataFrame) -> list[str]:
    """The methods of `METHODS`, and fitted, that have results on every domain of `rows`."""
    domains = rows.groupby("method")["domain"].nunique()
    return [name for name in (*METHODS, "fitted") if domains.get(name, 0) == rows["domain"].nunique()]


def result_tables(
    results: pd.DataFrame, dense: pd.DataFrame, run: Run
) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """A table for each expert set, with the results of `dense`: heading, heads of columns, rows."""
    tables = []
    for name in (name for name in SETS if name in {*results["experts"]}):
        own = results[results["experts"] == name]
        *others, best = _methods(own)
        dense_rows_of = dense[dense["domain"].isin(own["domain"])]
        leading, rows = [*dense_rows_of["method"].unique(), best], pd.concat([own, dense_rows_of])
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
            if {*kind.names} <= {*table.index}:
                means = table.loc[kind.names].mean(skipna=False).map("{:.2f}".format).replace("nan", "–")
                cells.loc[f"mean of the {kind.said}"] = means.reindex(cells.columns).fillna("")
        tables.append((SETS[name], ("domain", *cells), [*cells.itertuples(name=None)]))
    return tables


def _interval(low: float, high: float) -> str:
    return "–" if pd.isna(low) else f"{low:.2f} to {high:.2f}"


def write_cards(run: Path, output: Path, models: Sequence[str] = ()) -> None:
    """Write the cards of a run's models: data, licences, training, lineage, results, limits.

    The cards are those of the named `models`, or of all models. Three things are also written into a model's folder, so
    that they are copied with it: the card (README.md), each expert's results on its own domain (usual.json), and the
    clusters that can weight its experts (clusterer/).
    """
    whole = Run.read(run)
    for model in models or sorted(path.parent.name for path in (run / "models").glob("*/model.json")):
        text, directory = model_card(whole, model), run / "models" / model
        for path in (output / f"{model}.md", directory / "README.md"):
            write_text(path, text)
        write_text(output / f"{model}.html", card_page(whole, model, text))
        write_usual(directory, usual_of(directory))
        copy_clusters(directory, directory)


def model_card(run: Run, model: str) -> str:
    """The card of `models/<model>` of a finished run, as Markdown with YAML front matter.

    All content comes from the run's files; names and licences are escaped. Raises DemixError if the run has no such
    model or if a file of the model is missing.
    """
    directory = run.folder / "models" / model
    if not (directory / "model.json").is_file():
        models = sorted(path.parent.name for path in (run.folder / "models").glob("*/model.json"))
        raise DemixError(directory, "is not a model of the run", nearest(model, models, "train the model first"))
    needed = ("kind", "tokens", "steps", "shared_parameters", "expert_parameters")
    about = read_description(directory / "model.json", *needed).content
    experts = [read_lineage(path).content | {"name": path.stem} for path in (directory / "experts").glob("*.json")]
    # The config's order; experts that the config does not name come last.
    order = [*run.training, *run.novel]
    experts.sort(key=lambda one: (order.index(one["name"]) if one["name"] in order else len(order), one["name"]))
    results, parent, sources = results_of(run, model), _parent(about), [about, *experts]
    if parent.get("adapted"):
        sources.append(read_description(run.folder / "models" / parent["model"] / "model.json").content)
    later = [one | {"adaptation": _settings(one["adaptation"])} for one in experts if "adaptation" in one]
    return _card(
        "model",
        model,
        ["mixture-of-experts"] * (len(experts) > 1) + [MASKED_TASK] * masked(results),
        evaluations(results),
        about=about | {key: _settings(about.get(key) or {}) for key in ("training", "adaptation")},
        label=next((one.label for one in run.planned if one.name == model), ""),
        run=run.name,
        seed=planned(model, run)[1],
        experts=len(experts),
        results=result_tables(results, dense_rows(results, run, model), run),
        masked=masked(results),
        tempered="tempered" in set(results["method"]),
        parent=parent,
        data=_data(run, sources),
        later=later,
        lines=_lineage(experts),
    )


def card_page(run: Run, model: str, card: str) -> str:
    """The page of the card of `models/<model>`: its Markdown without front matter, below the model's label."""
    from markdown_it import MarkdownIt

    label = next((one.label for one in run.planned if one.name == model), model)
    body = MarkdownIt("js-default").render(card.partition("\n---\n")[2].lstrip().partition("\n")[2])
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    return render("card", title=label, paragraphs=[], notes=[], card=body)


def exported_card(directory: Path, expert: str | None) -> str:
    """The card of one expert of the model in `directory`, exported as a separate model; None means their mixture.

    A model with one expert and a mixture keep the card of the model's folder, or "" without such a card. The card of an
    expert has only the results on its own domain, if it was scored there, and counts its own tokens. Raises DemixError
    if a file of the model is missing.
    """
    place, run = directory.resolve(), Run.of_model(directory)
    if expert in (None, DENSE_EXPERT):
        card = (place / "README.md").read_text(encoding="utf-8") if (place / "README.md").is_file() else ""
        if card or expert is None:
            return card.replace("library_name: demix\n", "library_name: transformers\n", 1)
    about = read_description(place / "model.json", "kind").content
    lineage = expert_lineage(directory, expert).content
    usual = usual_of(directory).get(expert)
    return _card(
        "expert",
        f"{place.name}-{expert}",
        [format_of(directory).name],
        [_evaluation(expert, "only this expert", usual.perplexity)] if usual else [],
        about=about,
        expert=expert,
        model=place.name,
        run=run.name if run else "",
        data=_data(run, [lineage]) if run else None,
        lines=_lineage([lineage | {"name": expert}]),
        usual=usual,
    )


def merged_card(directory: Path, weights: Mapping[str, float], name: str) -> str:
    """The card of the merged model `name`: the experts of the model in `directory`, averaged with `weights`.

    Without weights it is a token-routed model of these experts and their anchor.
    """
    # This raises an error for a folder that is not a model, before an expert is looked up in it.
    describe(directory)
    if weights:
        refuse_weights(weights)
    weights = {expert: weight for expert, weight in weights.items() if weight}
    about, experts = describe(directory).content, [*weights] or expert_names(directory)
    parents = {expert: expert_lineage(directory, expert) for expert in experts}
    learned = learned_of(parents.values())
    return _card(
        "merged",
        name,
        ["merge"] if weights else ["merge", "mixture-of-experts"],
        [],
        about=about,
        model=directory.resolve().name,
        # The experts and their anchor.
        routed=0 if weights else len(parents) + 1,
        parents=[
            (expert, *([f"{weights[expert]:.4f}"] if weights else []), f"{one.tokens or 0:,}", one.sha256[:12])
            for expert, one in parents.items()
        ],
        together=learned["tokens"] if any(learned["seeds"].values()) else 0,
    )


def _card(what: str, name: str, tags: list[str], index: list[EvalResult], **values: Any) -> str:
    """A card from pages/card.md with the hub's front matter; `index` becomes `model-index`, if it is not empty."""
    front = ModelCardData(
        library_name="transformers" if any(name in tags for name in FORMATS) else "demix",
        license="other",
        tags=["demix", *tags, *([] if MASKED_TASK in tags else [TEXT_TASK])],
        model_name=name if index else None,
        eval_results=index or None,
    )
    about = values["about"]
    return render_markdown(
        "card",
        md=as_markdown,
        table=markdown_rows,
        number="{:,}".format,
        what=what,
        name=name,
        front=front.to_yaml(),
        kind=KINDS.get(about["kind"]),
        shared=", ".join(map(as_markdown, about.get("data_sha256") or {})),
        **values,
    )


def _parent(about: Mapping[str, Any]) -> dict[str, Any]:
    """The parent of a model, with a key for its role: training `began` with it, or it was `imported` or `adapted`."""
    parent = about.get("parent")
    if not isinstance(parent, dict):
        return {"model": parent, "adapted": True} if parent else {}
    return {"model": parent["model"], "tokens": parent.get("tokens"), "began" if parent["step"] else "imported": True}


def _data(run: Run, sources: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The tables of the domains on which a model and its experts were trained; None if no domain is the run's.

    An expert from another run, or from no run, may have been added.
    """
    read = {domain: sha256 for one in sources for domain, sha256 in (one.get("data_sha256") or {}).items()}
    cards = {name: read_json(run.folder / "corpus" / name / "card.json") for name in run.domains if name in read}
    if not cards:
        return None
    categories = sorted({name for card in cards.values() for name in card["replacements"]})
    rows, replaced = [], []
    for name, card in cards.items():
        domain, known = run.domains[name], card["leakage"]["ngrams"]
        kind, licence = "training" if name in run.training else "novel", domain.licence or "not stated"
        words = (f"{card['words'][split]:,}" for split in ("train", "dev", "test"))
        documents = f"{card['origins']['test']:,}"
        rows.append((name, kind, licence, *words, f"{known['test']:.1%}", documents, read[name][:12]))
        counts = (f"{card['replacements'].get(key, 0):,}" if domain.anonymize else "–" for key in categories)
        replaced.append((name, *counts))
    lengths = sorted({card["leakage"]["ngrams"]["length"] for card in cards.values()})
    return {"lengths": "/".join(map(str, lengths)), "categories": categories, "rows": rows, "replaced": replaced}


def _lineage(experts: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            expert["name"],
            parent_of(expert) or "–",
            f"{expert['parent_prior']:.3f}" if "parent_prior" in expert else "–",
            ", ".join(expert.get("data_sha256") or {}) or "–",
            *(f"{expert[key]:,}" if key in expert else "–" for key in ("tokens", "steps")),
            str(expert.get("sha256", "–"))[:12],
        )
        for expert in experts
    ]


def _settings(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """The settings that define the model, without execution settings."""
    left_out = (*names_of(Execution), "threads", "architecture")
    return [(key, str(value)) for key, value in sorted(settings.items()) if key not in left_out]
