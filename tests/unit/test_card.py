"""Model cards: every number from the run's files, nothing of what others wrote taken for markup."""

import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from demix.files import read_json
from demix.model.experts import usual_of
from demix.report.card import model_card
from demix.run.run import Run
from support.cli import succeeds
from support.configs import changed
from support.errors import refused
from support.frozen import rows_of, with_models
from support.report import Shown, tables_of

EVIL = "<script>alert(1)</script> | [x](javascript:1)\n---\nCC0 https://example.org *all*"


def parts(card: str) -> tuple[dict[str, Any], list[Shown]]:
    """The front matter of a card, and its tables."""
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    return yaml.safe_load(front), tables_of(body)


def table_with(card: str, column: str) -> Shown:
    """The first table of a card with a column of this name."""
    return next(table for table in parts(card)[1] if column in table.cells)


METHODS = ["naive", "average", "uniform", "updating", "cached", "tempered"]


@pytest.mark.parametrize(("name", "seed", "most"), [("demix", 1, "all"), ("demix-seed2", 2, "training")])
def test_results_are_those_of_the_models_seed(name: str, seed: int, most: str, frozen: Run) -> None:
    """A table for each set of experts, with the dense models of the seed, and means where a kind has all domains."""
    front, tables = parts(model_card(frozen, name))
    rows = rows_of(frozen).query(f"seed == {seed} and split == 'test' and variant == '' and top_k.isna()")
    dense = rows[rows["model"] == "dense"].set_index("domain")["perplexity"]
    demix = rows.query("model == 'demix' and weights in ('', 'history', 'tempered')")
    demix = demix.assign(method=demix["method"].where(demix["weights"] != "tempered", "tempered"))
    demix = demix[demix["method"].isin(METHODS)]
    bounds = zip(demix["perplexity_low"], demix["perplexity_high"], strict=True)
    demix["interval"] = [f"{low:.2f} to {high:.2f}" for low, high in bounds]
    shown = [table for table in tables if "95% interval" in table.cells]
    demix = demix[demix["experts"].isin(["all", "training"])]
    assert len(shown) == demix["experts"].nunique()
    for _, found in demix.groupby("experts"):
        expected = found.pivot(index="domain", columns="method", values="perplexity")
        expected["Dense (Balanced)"] = dense
        for kind, domains in (("training", frozen.training), ("novel", frozen.novel)):
            if {*domains} <= {*expected.index}:
                expected.loc[f"mean of the {len(domains)} {kind} domains"] = expected.loc[[*domains]].mean(skipna=False)
        of_these = [one for one in shown if {*one.cells.index} == {*expected.index} and {*expected} <= {*one.cells}]
        (table,) = (one for one in of_these if not one.wrong(expected))
        leading = found[found["method"] == ("tempered" if "tempered" in expected else "cached")].set_index("domain")
        named = {"interval": "95% interval", "bits_per_byte": "bits per byte", "tokens": "tokens"}
        assert not table.wrong(leading[[*named]].rename(columns=named))
        starred = table.cells["naive"].str.endswith("*") if "naive" in table.cells else pd.Series(dtype=bool)
        assert {*starred.index[starred]} == {*found.loc[found["oracle"], "domain"]}
    index = {one["dataset"]["name"]: one["metrics"][0]["value"] for one in front["model-index"][0]["results"]}
    tempered = demix[(demix["method"] == "tempered") & (demix["experts"] == most)].set_index("domain")["perplexity"]
    assert index == tempered.round(4).to_dict()


def test_data_and_lineage_are_those_of_the_files(frozen: Run) -> None:
    card, models = model_card(frozen, "demix"), frozen.folder / "models" / "demix"
    data, replaced, lineage = {}, {}, {}
    for name in frozen.domains:
        one, expert = (
            read_json(frozen.folder / "corpus" / name / "card.json"),
            read_json(models / "experts" / f"{name}.json"),
        )
        sha256 = {"tokens' sha256": expert["data_sha256"][name][:12]}
        known = {"test 13-grams seen in train": 100 * one["leakage"]["ngrams"]["test"]}
        data[name] = {"words: train": one["words"]["train"], "test": one["words"]["test"]} | sha256 | known
        replaced[name] = one["replacements"]
        begun = {"parent": expert["parent"] or "–", "the parent's prior": expert.get("parent_prior", float("nan"))}
        lineage[name] = begun | {"tokens": expert["tokens"], "steps": expert["steps"], "sha256": expert["sha256"][:12]}
    for column, rows in (("licence", data), ("EMAIL", replaced), ("the parent's prior", lineage)):
        assert not table_with(card, column).wrong(pd.DataFrame.from_dict(rows, orient="index"))
    about = read_json(models / "model.json")
    shared, expert = about["shared_parameters"], about["expert_parameters"]
    assert all(f"{value:,}" in card for value in (about["tokens"], shared, expert, shared + 5 * expert))


def test_what_others_wrote_stays_text(frozen: Run) -> None:
    training = frozen.config.values["domains"]["training"]
    domains = {"training": training | {"licenses": training["licenses"] | {"licence": EVIL, "anonymize": False}}}
    card = model_card(changed(frozen, domains=domains), "demix")
    text = " ".join(EVIL.split())
    # No address that a page would make a link of.
    assert table_with(card, "licence").cells.at["licenses", "licence"].replace("\u200b", "") == text
    assert "https://" not in card
    assert {*table_with(card, "EMAIL").cells.loc["licenses"]} == {"–"}, "a domain that is not anonymized"


def test_the_command_writes_a_card_for_every_model(frozen: Run, tmp_path: Path) -> None:
    run, output = with_models(frozen, tmp_path / "run", "demix", "dense"), tmp_path / "cards"
    succeeds("card", run.folder, "--output", output)
    models = {path.parent.name for path in (run.folder / "models").glob("*/model.json")}
    assert {path.stem for path in output.glob("*.md")} == {path.stem for path in output.glob("*.html")} == models
    card = model_card(run, "demix")
    assert (output / "demix.md").read_text() == card
    page = (output / "demix.html").read_text()
    assert "model-index" not in page
    assert re.findall("<(?:title|h1)>(.*?)</", page) == ["DEMix", "DEMix"], "as the first page names it"
    assert page.count("<table>") == len(parts(card)[1]) > 2
    with refused("demos"):
        model_card(run, "demos")


def test_each_artefact_has_a_card_of_its_own(frozen_copy: Run, tmp_path: Path) -> None:
    """An exported expert and a merged model have nothing of the mixture's results, nor of its tokens."""
    model = frozen_copy.folder / "models" / "demix"

    def card(folder: str, *words: object) -> str:
        succeeds(*words, "--output", tmp_path / folder)
        return (tmp_path / folder / "README.md").read_text()

    def index_of(card: str) -> list[Any]:
        return parts(card)[0].get("model-index", [])

    exported = card("hf", "export", model, "--expert", "licenses")
    ((entry,),) = (one["results"] for one in index_of(exported))
    rows = rows_of(frozen_copy).query(
        "model == 'demix' and experts == 'all' and method == 'expert' and seed == 1 and expert == domain"
    )
    known = rows.set_index("domain")["perplexity"]
    assert entry["metrics"][0]["value"] == pytest.approx(known["licenses"], abs=1e-4)
    assert table_with(exported, "licence").cells.index.tolist() == ["licenses"]

    succeeds("card", frozen_copy.folder, "demix", "dense", "--output", tmp_path / "cards")
    copy, bare = (shutil.copytree(model, tmp_path / name) for name in ("copy", "bare"))
    (bare / "usual.json").unlink()
    assert index_of(card("hf2", "export", copy, "--expert", "licenses"))[0]["results"] == [entry]
    for name, other in (("same", model), ("unknown", bare)):
        succeeds("experts", "add", copy, other / "experts" / "licenses.safetensors", "--name", name)
        assert not (copy / "README.md").exists(), "its results are those of the experts before"
    assert usual_of(copy).keys() == {*usual_of(model), "same"}
    assert index_of(card("hf3", "export", copy, "--expert", "same"))[0]["name"] == "copy-same"
    assert not index_of(card("hf4", "export", copy, "--expert", "unknown"))
    succeeds("experts", "remove", copy, "same")
    assert usual_of(copy).keys() == usual_of(model).keys()

    merged = card("merged", "merge", copy, "--weights", "licenses=0.25,parliament=0.75")
    assert not index_of(merged)
    assert table_with(merged, "weight").cells["weight"].to_dict() == {"licenses": "0.2500", "parliament": "0.7500"}
    whole = card("hf5", "export", tmp_path / "merged", "--expert", "dense")
    assert parts(whole)[0] == parts(merged)[0] | {"library_name": "transformers"}
    dense = card("hf6", "export", frozen_copy.folder / "models" / "dense", "--expert", "dense")
    assert {one["dataset"]["name"] for one in index_of(dense)[0]["results"]} == {*frozen_copy.domains}
