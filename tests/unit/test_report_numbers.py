"""Every table and figure of a report, against a few lines of pandas over the files of the run.

The function of an element's name returns its cells, by line and column, or the records of its data. A table may have
more lines and columns.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import demix
from demix.config.config import Config
from demix.files import write_json_lines
from demix.plan.cost import plan_training
from demix.plan.flops import HARDWARE
from demix.report import report_items
from demix.report.item import FigureItem, TableItem
from demix.report.ranking import NOT_BELOW_NGRAMS, main_table, ranking
from demix.report.run_data import RunData, relation
from demix.run.run import Run
from support.configs import changed, small_run
from support.frozen import rows_of, run_data, with_models
from support.report import Shown, all_items, drawn, drawn_as, first_page, printed, says, shown, square_pairs, table_of

# How tables name a system, by its method and rule of weights; {} is the label of the model.
NAMES = {
    ("dense", ""): "{}",
    ("naive", ""): "{} (naive)",
    ("average", ""): "{} (average)",
    ("uniform", "history"): "{} (uniform prior)",
    ("updating", "history"): "{} (updating prior)",
    ("cached", "history"): "{} (cached prior)",
    ("uniform", "tempered"): "{} (tempered)",
    ("fitted", "switching"): "{} (switching)",
    ("uniform", "cluster"): "{} (cluster)",
}
# Tables 3 and 4 leave out the methods that Table 5 compares.
IN_DOMAIN = [key for key in NAMES if key not in (("average", ""), ("uniform", "history"), ("updating", "history"))]


@dataclass(frozen=True)
class Files:
    """The files of a run as pandas reads them; only results of `seeds` count."""

    folder: Path
    seeds: tuple[int, ...] = (1, 2)

    @cached_property
    def run(self) -> Run:
        return Run.read(self.folder)

    @cached_property
    def domains(self) -> dict[str, list[str]]:
        """The names of the domains by kind, as headings of columns begin with it."""
        return {kind.capitalize(): list(names) for kind, names in self.json("config.json")["domains"].items()}

    @cached_property
    def labels(self) -> dict[str, str]:
        """The labels of the causal models."""
        return {name: row.label for name, row in self.run.rows.items() if not row.masked}

    @property
    def own(self) -> "Files":
        """The files with the results of the run's own seed alone."""
        return Files(self.folder, (1,))

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def lines(self, name: str) -> pd.DataFrame:
        return pd.read_json(self.folder / name, lines=True)

    def table(self, name: str) -> pd.DataFrame:
        found = pd.read_parquet(self.folder / f"{name}.parquet")
        return found[found["seed"].isin(self.seeds)] if "seed" in found else found

    @cached_property
    def results(self) -> pd.DataFrame:
        """The results on test text, where top_k is 0 if all experts are mixed."""
        return self.table("results").query("split == 'test'").astype({"top_k": "float"}).fillna({"top_k": 0})

    def of(self, model: str, method: str, weights: str = "", experts: str = "", **more: Any) -> pd.Series:
        """The perplexity of one system by domain, a mean over seeds."""
        experts = experts or ("dense" if method == "dense" else "training")
        wanted = {"model": model, "method": method, "weights": weights, "experts": experts, "variant": "", "top_k": 0}
        wanted |= more
        found = self.results[(self.results[[*wanted]] == pd.Series(wanted)).all(axis=1)]
        return found.groupby("domain")["perplexity"].mean()

    def rule(self, name: str, **more: Any) -> pd.Series:
        """`of` the system that stands for a model in tables of families: by the rule of its paper."""
        row = self.run.rows[name]
        if not row.kind.has_experts:
            return self.of(name, "dense", **more)
        by_paper = ("uniform", "cluster") if row.settings.data else ("cached", "history")
        return self.of(name, *by_paper, **more)

    def means(self, rows: Mapping[str, pd.Series]) -> pd.DataFrame:
        """The means over the domains of each kind (columns) of perplexities by domain."""
        frame = pd.DataFrame({label: row.astype("float64") for label, row in rows.items()}).T
        columns = {kind: frame.reindex(columns=names) for kind, names in self.domains.items()}
        return pd.DataFrame({kind: found.mean(axis=1, skipna=False) for kind, found in columns.items()})

    @cached_property
    def named(self) -> pd.DataFrame:
        """The results of the systems of `NAMES` with the training experts, and their names."""
        rows = self.results.query("experts in ('training', 'dense') and variant == '' and top_k == 0")
        rows = rows.assign(key=list(zip(rows["method"], rows["weights"], strict=True)))
        # No domain has an expert of its own where experts are those of clusters.
        learned = [name for name in self.labels if self.run.rows[name].settings.data]
        rows = rows[rows["key"].isin(NAMES) & rows["model"].isin(self.labels)]
        rows = rows[~(rows["model"].isin(learned) & (rows["method"] == "naive"))]
        names = [NAMES[key].format(self.labels[model]) for key, model in zip(rows["key"], rows["model"], strict=True)]
        return rows.assign(system=names).replace({"system": {"+ Domain Token (naive)": "+ Domain Token"}})

    def systems(self, kind: str, *keys: tuple[str, str], **scored: pd.Series) -> pd.DataFrame:
        """Perplexities by system and by domain of a kind, after their means; `scored` by the released scorer."""
        frame = self.named[self.named["key"].isin(keys)].pivot_table("perplexity", "system", "domain")
        for prior, row in scored.items():
            frame.loc[f"DEMix ({prior} prior), released scorer"] = row
        frame = frame[self.domains[kind]]
        frame.insert(0, "Mean", frame.mean(axis=1, skipna=False))
        return frame

    def by_code(self, prior: str) -> pd.Series:
        """A mixture of DEMix by the scorer of the code released with the paper."""
        return self.of("demix", prior, "released", variant="" if prior == "uniform" else "released_scorer")


def change(before: Any, after: Any) -> Any:
    """The change in percent."""
    return 100 * (after / before - 1)


def frame_of(rows: Mapping[str, Any]) -> pd.DataFrame:
    """A line for each of `rows`."""
    return pd.DataFrame.from_dict(rows, orient="index")


def against(files: Files, rows: Mapping[str, tuple[pd.Series, pd.Series]]) -> pd.DataFrame:
    """Means over the domains of each kind and their changes in percent, of perplexities beside others."""
    means, bases = (files.means({label: row[place] for label, row in rows.items()}) for place in (0, 1))
    return means.join(change(bases, means).add_suffix(", %"))


def table1(files: Files) -> pd.DataFrame:
    cards = {name: files.json(f"corpus/{name}/card.json") for names in files.domains.values() for name in names}
    return frame_of({name: card["words"] for name, card in cards.items()}).add_prefix("Words, ")


def table2(files: Files) -> pd.DataFrame:
    rows = {}
    for name, label in files.labels.items():
        about, row = files.json(f"models/{name}/model.json"), files.run.rows[name]
        experts = len(row.learned) if row.kind.has_experts else 1
        size = about["shared_parameters"] + experts * about["expert_parameters"]
        speed = files.lines(f"metrics/{name}.jsonl")["tokens_per_second"].median()
        rows[label] = {"Parameters": size, "Tokens": about["tokens"], "Tokens/s": speed}
    return frame_of(rows)


def table3(files: Files) -> tuple[pd.DataFrame, pd.DataFrame]:
    found, names = table4(files), files.domains["Training"]
    dense = found.loc["Dense (Balanced)"]
    better = found[names].lt(dense[names]).sum(axis=1).map("{} of 3".format)
    column = "Against Dense (Balanced), %"
    frame = pd.DataFrame({"Perplexity": found["Mean"], column: change(dense["Mean"], found["Mean"])})
    frame["Domains better than Dense (Balanced)"] = better
    by_seed = [Files(files.folder, (seed,)).systems("Training", *IN_DOMAIN)["Mean"] for seed in files.seeds]
    spreads = (pd.concat(of, axis=1).std(axis=1) for of in (by_seed, [change(one[dense.name], one) for one in by_seed]))
    beneath = pd.DataFrame(dict(zip(("Perplexity", column), spreads, strict=True))).map("± {:.2f}".format)
    return frame.drop(dense.name), beneath.drop(dense.name)


def ablations(files: Files) -> pd.DataFrame:
    own, rows = files.own, {}
    history = {prior: own.of("demix", prior, "history") for prior in ("uniform", "updating", "cached")}
    for prior, base in history.items():
        rows[f"DEMix: {prior} prior, released weights"] = own.of("demix", prior, "released"), base
        if prior != "uniform":
            rows[f"DEMix: {prior} prior, released scorer"] = own.by_code(prior), base
            for value in (0.1, 0.3):
                decayed = own.of("demix", prior, "history", variant="decay", decay=value)
                rows[f"DEMix: {prior} prior, λ = {value}"] = decayed, base
    rows |= {
        "DEMix: uniform prior, tempered": (own.of("demix", "uniform", "tempered"), history["uniform"]),
        "DEMix: fitted prior, switching": (own.of("demix", "fitted", "switching"), history["cached"]),
        "DEMix: fitted prior, static": (own.of("demix", "fitted"), history["cached"]),
        "DEMix: best expert of each block, in hindsight": (own.of("demix", "best_block"), history["uniform"]),
        "DEMix: best expert of each token, in hindsight": (own.of("demix", "best_token"), history["uniform"]),
    }
    for blocks in (2, 6):
        found = own.of("demix", "cached", "history", variant="dev_blocks", dev_blocks=blocks)
        # A domain with fewer blocks counts with all of its blocks.
        rows[f"DEMix: cached prior of {blocks} dev blocks"] = found.combine_first(history["cached"]), history["cached"]
    for name, k in itertools.product(("demix", "btm", "cbtm_3"), (1, 2)):
        rows[f"{files.labels[name]}: top-{k}"] = own.rule(name, top_k=k), own.rule(name)
    rows["Upcycled, top-2: top-3"] = own.rule("upcycled", top_k=3), own.rule("upcycled")
    for heat, k in itertools.product((0.1, 1), (0, 2)):
        how = {"variant": "routing", "temperature": heat, "context": "document", "top_k": k}
        label = f"{files.labels['cbtm_3']}: document, τ = {heat}" + ", top-2" * bool(k)
        rows[label] = own.rule("cbtm_3", **how), own.rule("cbtm_3")
    return against(files, rows)


def families(files: Files) -> pd.DataFrame:
    models = {name: label for name, label in files.labels.items() if name != "domain_token"}
    others = {"cbtm_3_random": "cbtm_3", "cbtm_3_unbalanced": "cbtm_3", "demix_3": "cbtm_3"}
    rows = {label: (files.rule(name), files.rule(others.get(name, "dense"))) for name, label in models.items()}
    # Merged models are made with the run's own seed alone.
    for made in files.run.merged:
        how = "merged-routed" if made.weights == "routed" else f"averaged ({made.weights})"
        merged = files.own.of(made.model.row, "merged", made.weights)
        rows[f"{models[made.model.row]}, {how}"] = merged, files.own.rule("dense")
    frame = against(files, rows)
    for kind, names in files.domains.items():
        lower = {label: (own[names] < base[names]).sum() for label, (own, base) in rows.items()}
        frame[f"{kind}, lower"] = pd.Series(lower).map(f"{{}} of {len(names)}".format)
    frame.loc["Dense (Balanced)", [column for column in frame if "," in column]] = np.nan
    return frame


def table4(files: Files) -> pd.DataFrame:
    return files.systems("Training", *IN_DOMAIN, cached=files.by_code("cached"))


def table5(files: Files) -> pd.DataFrame:
    priors = {prior: files.by_code(prior) for prior in ("uniform", "updating", "cached")}
    frame = files.systems("Novel", *NAMES, **priors)
    frame.index = frame.index.str.replace("(naive)", "(naive, oracle)").str.replace(
        "Domain Token", "Domain Token (oracle)"
    )
    for label, model in (("DEMix (naive, chosen on dev)", "demix"), ("+ Domain Token (chosen on dev)", "domain_token")):
        found = files.of(model, "naive", variant="dev_choice")[files.domains["Novel"]]
        frame.loc[label] = [found.mean(), *found]
    return frame


def table6(files: Files) -> pd.DataFrame:
    own, columns = files.own, {"Training experts": "training", "With the added experts": "all"}
    frame = pd.DataFrame({column: own.of("demix", "cached", "history", set) for column, set in columns.items()})
    for told, rule in (("", "history"), (", released weights", "released")):
        means = own.means({column: own.of("demix", "cached", rule, set) for column, set in columns.items()})
        for kind, names in files.domains.items():
            frame.loc[f"Mean of {len(names)} {kind.lower()}{told}"] = means[kind]
    frame["Change, %"] = change(*(frame[column] for column in columns))
    counts = own.results.groupby("domain")[["documents", "pieces"]].max()
    return frame.join(counts.rename(columns=str.title))


def table7(files: Files) -> pd.DataFrame:
    own, names, frames = files.own, files.domains["Training"], {}
    for rule in ("history", "released"):
        less = {name: own.of("demix", "cached", rule, f"minus-{name}")[name] for name in names}
        never = {name: own.of(f"without-{name}", "cached", rule).get(name) for name in names}
        columns = {"+Expert": own.of("demix", "cached", rule), "−Expert": less, "−Domain": never}
        frames[rule] = pd.DataFrame(columns, names, dtype="float64")
    three, by_code = frames["history"], frames["released"].mean(skipna=False)
    frame = three.copy()
    for label, every, *system in (
        ("BTX from DEMix", "dense", "btx", "dense", ""),
        ("FlexOlmo, merged-routed", "training", "flexolmo", "merged", "routed"),
    ):
        frame[label] = own.of(*system, every)[names]
        frame[f"{label}, −Expert"] = pd.Series({name: own.of(*system, f"minus-{name}")[name] for name in names})
    means = {"Mean of all 3": frame.mean(skipna=False), "Mean of all 3, released weights": by_code}
    return pd.concat([frame, frame_of(means | {"Mean of the 1 that have all three": three.dropna().mean()})])


def table13(files: Files) -> tuple[pd.DataFrame, pd.DataFrame]:
    own, before, after = files.own, {}, {}

    def on(name: str, found: pd.Series) -> list[float]:
        return [own.means({"": found}).at["", "Training"], found.get(name, np.nan)]

    for name in files.domains["Novel"]:
        parent = str(files.json(f"models/demix/experts/{name}.json")["parent"])
        alone = own.of("demix", "expert", experts="all", expert=parent)[name]
        before[name] = [*on(name, own.of("dense", "dense")), on(name, own.of("demix", "naive"))[0], alone]
        after[name] = on(name, own.of(f"dense-dapt-{name}", "dense")) + on(name, own.of("demix", "naive", "", "all"))
        before[name] += [*on(name, own.of("demix", "cached", "history")), parent]
        after[name] += on(name, own.of("demix", "cached", "history", f"plus-{name}"))
    domains = ("training domains", "own domain")
    columns = [f"{how}: {on}" for how in ("Dense-DAPT", "DEMix-DAPT", "One expert added") for on in domains]
    one, other = pd.DataFrame(before, [*columns, "Parent expert"]).T, pd.DataFrame(after, columns).T
    numbers = one[columns].astype("float64")
    frame = change(numbers, other)
    frame.loc["Mean of 2"] = frame.mean()
    beneath = numbers.map("{:.2f}".format) + " to " + other.map("{:.2f}".format)
    return frame.assign(**{"Parent expert": [*one["Parent expert"], ""]}), beneath


def ratios(files: Files) -> pd.DataFrame:
    """The perplexity of each training expert on each domain, over that of the own or of the best one."""
    rows = files.own.results.query("model == 'demix' and experts == 'all' and method == 'expert' and variant == ''")
    found = rows.pivot(index="domain", columns="expert", values="perplexity")[files.domains["Training"]]
    own = {name: found.at[name, name] if name in found else found.loc[name].min() for name in found.index}
    frame = found.div(pd.Series(own), axis=0).stack().rename("ratio").reset_index()
    frame.insert(0, "kind", ["training" if name in found else "novel" for name in frame["domain"]])
    return frame.merge(files.table("corpus/overlap")[["domain", "expert", "overlap"]], validate="1:1")


def documents(files: Files) -> pd.DataFrame:
    """The clustering, cluster, domain and split of each document of the clusterings that models learn from."""
    frames = []
    for name in {row.settings.data for row in files.run.rows.values() if row.settings.data}:
        for domain in files.domains["Training"]:
            for split in ("train", "test"):
                found = files.table(f"clusters/{name}/assigned/{domain}.{split}").reset_index(names="document")
                found["cluster"] = found["cluster"].map("c{:02}".format)
                frames.append(found.assign(clustering=name, domain=domain, split=split))
    return pd.concat(frames, ignore_index=True)


def tasks(files: Files) -> tuple[pd.DataFrame, pd.DataFrame]:
    rows = files.table("tasks").query("metric.isna()")
    alone = rows[rows["routing"] == "one expert"].sort_values("accuracy", ascending=False, kind="stable")
    rows = pd.concat([rows[rows["routing"] != "one expert"], alone.drop_duplicates(["task", "model"])])
    labels, beneath = [], []
    for row in rows.itertuples():
        kept = "" if np.isnan(row.top_k) else f", top-{row.top_k:g}"
        how = {"dense": "", "one expert": " (best expert of the test (oracle))"}.get(
            row.routing, f" ({row.routing}{kept})"
        )
        labels.append(files.labels[row.model] + how + " (oracle)" * row.routing.startswith("updating"))
        marks = ", oracle" * (row.reads == "test labels") + ", as chance" * (not row.judged)
        known = f"{100 * row.accuracy_low:.1f} to {100 * row.accuracy_high:.1f}{marks}"
        beneath.append("too few examples" if np.isnan(row.accuracy_low) else known)
    rows = rows.assign(label=labels, beneath=beneath, accuracy=100 * rows["accuracy"])
    frame = rows.pivot(index="label", columns="task", values="accuracy")
    frame.loc["chance"] = 100 * rows.groupby("task")["chance"].first()
    for row in files.table("tasks").query("metric.notna()").itertuples():
        how = "" if row.routing == "dense" else f" ({row.routing})"
        frame.loc[files.labels[row.model] + how, f"{row.task}, {row.metric}"] = row.value
    return frame, rows.pivot(index="label", columns="task", values="beneath").fillna("")


def figure2(files: Files) -> list[pd.DataFrame]:
    pairs = ratios(files)
    cells = [pairs[["kind", "domain", "expert", name]].rename(columns={name: "value"}) for name in ("ratio", "overlap")]
    return [pd.concat(cells), pairs.loc[pairs["domain"] != pairs["expert"], ["domain", "expert", "overlap", "ratio"]]]


def of_demix(files: Files, name: str) -> pd.DataFrame:
    """The rows of a table that are of DEMix's training experts, weighted by the text of a block."""
    return files.own.table(name).query("model == 'demix' and experts == 'training' and weights == 'history'")


def figure4(files: Files) -> list[pd.DataFrame]:
    cells = of_demix(files, "priors").rename(columns={"prior": "value"})[["kind", "domain", "expert", "value"]]
    return [cells]


def figure6(files: Files) -> pd.DataFrame:
    rows, old = [], [f"dev_loss/{name}" for name in files.domains["Training"]]
    for domain in files.domains["Novel"]:
        for model, kind in (("dense", "Dense-DAPT"), ("demix", "DEMix-DAPT")):
            own = f"dev_loss/{domain}"
            lines = files.lines(f"metrics/{model}-dapt-{domain}.jsonl").dropna(subset=[own])
            for values in (np.exp(lines[own]), np.exp(lines[old]).mean(axis=1)):
                rows += [(kind, *point) for point in zip(lines["tokens"], values, strict=True)]
    return pd.DataFrame(rows, columns=["kind", "tokens", "perplexity"])


def trace(files: Files, kind: str) -> pd.DataFrame:
    """The posteriors of experts after each dev block, by stretches of blocks that print alike."""
    rows = []
    posteriors = of_demix(files, "posteriors").query("split == 'dev' and kind == @kind")
    for (_, expert), found in posteriors.groupby(["domain", "expert"]):
        before = None
        for block, value in sorted(zip(found["block"], found["posterior"].round(2), strict=True)):
            if value and value == before:
                rows[-1][2] += 1
            elif value:
                rows.append([expert, block, block + 1, value])
            before = value
    return pd.DataFrame(rows, columns=["expert", "start", "end", "value"])


def figure7(files: Files) -> pd.DataFrame:
    return trace(files, "training")


def figure8(files: Files) -> pd.DataFrame:
    return trace(files, "novel")


def training(files: Files) -> pd.DataFrame:
    labels = files.labels | {f"without-{name}": f"DEMix without {name}" for name in files.domains["Training"]}
    frames = []
    for name, label in labels.items():
        if (files.folder / "metrics" / f"{name}.jsonl").exists():
            found = files.lines(f"metrics/{name}.jsonl").dropna(subset=["loss"])
            frames.append(found[found["tokens"] >= 0.1 * found["tokens"].max()].assign(model=label))
    return pd.concat(frames)[["model", "tokens", "loss"]]


def by_clusters(files: Files) -> pd.DataFrame:
    rows = []
    for name, label in files.labels.items():
        row = files.run.rows[name]
        if row.kind.expert_scope == "model" or row.settings.data or name == "dense":
            means = files.own.means({"": files.own.rule(name)}).loc[""]
            rows += [(label, len(row.learned) if row.kind.has_experts else 1, mean) for mean in means]
    return pd.DataFrame(rows, columns=["row", "clusters", "perplexity"])


def cluster_experts(files: Files) -> pd.DataFrame:
    found, frames = documents(files), []
    losses = pd.concat(files.own.table(f"evaluations/{name}.losses") for name in files.domains["Training"])
    for name, label in files.labels.items():
        data = files.run.rows[name].settings.data
        if data:
            test = found.query("clustering == @data and split == 'test'")[["domain", "document", "cluster"]]
            rows = losses[losses["model"] == name].merge(test, on=["domain", "document"])
            sums = rows.groupby(["cluster", "expert"])[["nll", "tokens"]].sum()
            nats = (sums["nll"] / sums["tokens"]).unstack()
            ratio = np.exp(nats.sub(pd.Series(np.diag(nats), nats.index), axis=0))
            frames.append(ratio.rename_axis(index="domain").stack().rename("value").reset_index().assign(kind=label))
    for data, rows in found[found["split"] == "train"].groupby("clustering"):
        shares = pd.crosstab(rows["domain"], rows["cluster"].rename("expert"), normalize="index").stack()
        frames.append(shares.rename("value").reset_index().assign(kind=data))
    return pd.concat(frames)[["kind", "domain", "expert", "value"]]


def cluster_sizes(files: Files) -> pd.DataFrame:
    test = documents(files).query("split == 'test'")
    counts = test.groupby(["clustering", "cluster"]).size().rename("documents").reset_index()
    counts["cluster"] = counts["cluster"].str.lstrip("c").astype(int)
    return counts.assign(share=counts["documents"] / counts.groupby("clustering")["documents"].transform("mean"))


@pytest.fixture(scope="module")
def files(frozen: Run) -> Files:
    return Files(frozen.folder)


TABLES = [name for name, item in all_items().items() if isinstance(item, TableItem)]
FIGURES = [name for name, item in all_items().items() if isinstance(item, FigureItem)]


def test_the_run_has_all_tables_and_figures(frozen: Run) -> None:
    assert {item.name for item in report_items(frozen)} >= {*TABLES, *FIGURES}


def check(found: Shown, name: str, files: Files) -> None:
    """Whether a table shows what the function of its name expects."""
    made = globals()[name](files)
    expected, *beneath = made if isinstance(made, tuple) else (made,)
    assert not found.wrong(expected)
    for lines in beneath:
        assert found.beneath.loc[lines.index, [*lines]].to_dict() == lines.to_dict()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_numbers_of_the_files(name: str, files: Files) -> None:
    check(shown(name, run_data(files.run)), name, files)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_the_numbers_of_the_files(name: str, files: Files, report: Path) -> None:
    made = globals()[name](files)
    for expected in made if isinstance(made, list) else [made]:
        found = drawn_as(report / "figures" / f"{name}.json", *expected)
        expected, found = (
            frame.drop_duplicates().sort_values([*expected], ignore_index=True) for frame in (expected, found)
        )
        pd.testing.assert_frame_equal(found, expected, check_dtype=False, rtol=1e-5)


@pytest.mark.parametrize("name", ["table4", "table5"])
def test_a_run_of_one_seed_has_its_numbers(name: str, files: Files) -> None:
    one = files.own
    check(shown(name, run_data(one.run, results=one.table("results"))), name, one)


@pytest.mark.parametrize(("measured", "expected"), [("dev_loss", (2.0, 4.0, 1.0)), ("loss", (5.5, 6.5, 2.0))])
def test_losses_are_of_the_domains_that_all_models_train_on(
    measured: str, expected: tuple[float, ...], tmp_path: Path
) -> None:
    models = {"dense_unbalanced": None, "domain_token": None}
    run = small_run(models=models, removal={"retrain_without": ["law"], "replacement": "songs"})
    lost = {"demix": {"law": 9.0, "news": 2.0}, "dense": {"law": 9.0, "news": 4.0}}
    lost["without-law"] = {"songs": 3.0, "news": 1.0}
    for name, losses in lost.items():
        mean = {measured: sum(losses.values()) / 2}
        by_domain = {f"{measured}/{domain}": loss for domain, loss in losses.items()}
        write_json_lines(tmp_path / f"{name}.jsonl", [{"step": 1, "tokens": 100} | mean | by_domain])
    figure = drawn("training", RunData(run, {"metrics": tmp_path}))
    (records,) = figure["datasets"].values()
    labels = ("DEMix", "Dense (Balanced)", "DEMix without law")
    assert {row["model"]: row["loss"] for row in records} == dict(zip(labels, expected, strict=True))


def test_p_is_that_of_all_orders_of_the_domains() -> None:
    """Whole domains are permuted, since pairs are not independent; the own experts are left out."""
    names, others = [f"d{number}" for number in range(5)], ~np.eye(5, dtype=bool)
    ratio, shared = np.random.default_rng(0).uniform(1, 4, (2, 5, 5))
    pairs = square_pairs(names, ratio, shared)
    found, with_own = relation(pairs, "training"), relation(pairs, "training", own=True)
    moved = (ratio[np.ix_(order, order)] for order in map(list, itertools.permutations(range(5))))
    every = np.array([stats.spearmanr(one[others], shared[others]).statistic for one in moved])
    p = 2 * min((sign * every >= sign * every[0] - 1e-9).mean() for sign in (1, -1))
    pearson = stats.pearsonr(np.log(ratio[others]), shared[others]).statistic
    assert (found.domains, found.pairs) == (5, 20)
    assert (found.spearman, found.pearson, found.permutation_p) == pytest.approx((every[0], pearson, p))
    assert with_own.pearson == pytest.approx(stats.pearsonr(np.log(ratio.ravel()), shared.ravel()).statistic)


# Perplexities of the lines by model, method and weights; all other systems have 150.
DENSE, TEMPERED, CACHED = ("dense", "dense", ""), ("demix", "uniform", "tempered"), ("demix", "cached", "history")
LINES = {
    DENSE: 130.0,
    ("dense_unbalanced", "dense", ""): 140.0,
    ("domain_token", "naive", ""): 120.0,
    ("demix", "naive", ""): 90.0,
    CACHED: 101.0,
    TEMPERED: 102.0,
    ("demix", "fitted", "switching"): 100.0,
}
OTHERS = 150.0
RULE = ["model", "method", "weights"]


def lined(run: Run, **models: float) -> pd.DataFrame:
    """The results of the run's own seed with the perplexities of `LINES`; `models` has those of whole models."""
    results = rows_of(run).query("seed == 1")
    keys = results[RULE].apply(tuple, axis=1)
    perplexity = results["model"].map(models).fillna(keys.map(LINES)).fillna(OTHERS)
    # All experts, and those of other sets, are no line of these.
    known = results["experts"].isin(["training", "dense"]) & (results["variant"] == "")
    return results.assign(perplexity=perplexity.where(known, OTHERS))


def less(run: Run, half: float | tuple[float, float], against: str, *systems: tuple[str, str, str]) -> pd.DataFrame:
    """What `systems` have less than the base `against`, with intervals of `half` to either side, by kind if two."""
    known = rows_of(run, "differences").query(
        f"seed == 1 and against == '{against}' and experts in ('training', 'dense')"
    )
    keys = known[RULE].apply(tuple, axis=1)
    known, keys = known[keys.isin(systems)], keys[keys.isin(systems)]
    value = keys.map(LINES) - LINES[{"dense": DENSE, "demix_cached": CACHED}[against]]
    by_kind = half if isinstance(half, tuple) else (half, half)
    widths = known["kind"].map(dict(zip(("training", "novel"), by_kind, strict=True)))
    return known.assign(perplexity=value, perplexity_low=value - widths, perplexity_high=value + widths)


def test_the_best_is_known_before_test_text_is_read(frozen: Run, tmp_path: Path) -> None:
    """Lower are the rules that are told the domain, and the expert that the test text chose."""
    differences = less(frozen, 20, "dense", TEMPERED)
    main, rest = first_page(run_data(frozen, results=lined(frozen), differences=differences), tmp_path)
    assert main.marked == ("DEMix (tempered)",)
    means = main.numbers["3 training domains"].drop("+ Domain Token")
    assert means.is_monotonic_increasing
    assert main.cells.index[-1] == "+ Domain Token", "an oracle on novel domains"
    assert means["DEMix (tempered)"] == 102
    assert says(main.cells.at["DEMix (tempered)", "Training, change in %"], 100 * (102 / 130 - 1))
    # Errors of three domains add up as those of independent ones.
    low, high = (100 * (102 - 130 + sign * 20 / np.sqrt(3)) / 130 for sign in (-1, 1))
    below = main.beneath.at["DEMix (tempered)", "Training, change in %"]
    assert below == f"{low:+.1f} to {high:+.1f}".replace("-", "−")
    assert main.cells.loc["DEMix (tempered)", ["Training, significant", "Novel, significant"]].tolist() == [
        "3 of 3",
        "2 of 2",
    ]
    oracles = [label.endswith("(naive)") for label in rest.cells.index]
    assert any(oracles)
    assert oracles == sorted(oracles)
    assert {*rest.beneath.loc[oracles, "Novel, change in %"]} == {"oracle"}


def test_models_with_other_training_stand_apart_and_no_model_may_be_below_dense(frozen: Run, tmp_path: Path) -> None:
    results = lined(frozen, dense=50, btx=10, dense_short=10)
    main, rest = first_page(run_data(frozen, results=results), tmp_path)
    assert main.marked == ("Dense (Balanced)",)
    remarks = pd.concat([main.cells, rest.cells])["Remark"]
    assert all(remarks[frozen.rows[name].label].strip() for name in ("btx", "dense_short"))
    assert not remarks[["DEMix (tempered)", "Dense (Balanced)"]].str.strip().any()


def test_what_began_with_the_same_models_folder_has_equal_flops(frozen: Run, tmp_path: Path) -> None:
    """However many tokens that model had learned from, which is not known."""
    run = with_models(frozen, tmp_path / "own", "demix", "dense")
    run = changed(run, models={name: {"kind": name, "parent": "imported/one"} for name in ("dense", "demix")})
    main, _ = first_page(run_data(run, results=lined(frozen)), tmp_path)
    assert "Remark" not in main.cells


def test_a_warm_start_stands_beside_the_same_rule_without_it(frozen: Run, tmp_path: Path) -> None:
    main, _ = first_page(run_data(frozen, results=lined(frozen, demix_seeded=95, btm=96)), tmp_path)
    seeded = f"{frozen.rows['demix_seeded'].label} (tempered)"
    assert main.marked == (seeded,)
    assert {seeded, "DEMix (tempered)", "DEMix (cached prior)", "Dense (Balanced)"} <= {*main.cells.index}


def test_a_model_counts_once_by_whatever_rules_it_predicts(frozen: Run) -> None:
    def counted(results: pd.DataFrame) -> int:
        found = ranking(run_data(frozen, results=results))
        assert f"Of {found.models} models" in found.verdict
        return found.models

    results = lined(frozen)
    equal = {one.system.model for one in ranking(run_data(frozen, results=results)).entries if one.fair}
    models = {model.name for model in frozen.own}
    assert counted(results) == len(equal & models)
    assert counted(results.query("weights != 'switching'")) == counted(results)
    assert counted(results.query("model != 'btm'")) == counted(results) - 1


def test_means_that_are_not_below_the_best_ngrams_are_marked(frozen: Run) -> None:
    found = ranking(run_data(frozen))
    shown, counts = main_table(found, found.entries), {one.label for one in found.entries if one.counts}
    for column in shown.frame.filter(regex="domains$"):
        marked = shown.beneath[column] == NOT_BELOW_NGRAMS
        above = shown.frame[column] >= shown.frame.loc[[*counts], column].min()
        assert {*shown.frame.index[marked]} == {*shown.frame.index[above]} - counts
    assert marked.any()
    assert counts


def test_costs_are_those_of_the_plan_summed_over_the_models_of_a_line(frozen: Run) -> None:
    plans = {one.name: one for one in plan_training(frozen, None, HARDWARE["cpu"])}
    found = {
        one.system.key: one for one in ranking(run_data(frozen, ngrams={"ngram3": 70, "ngram3_domains": 90})).entries
    }
    sizes = {name: one.shared + one.experts * one.expert for name, one in plans.items()}
    for model in ("dense", "demix", "demix_seeded", "switch"):
        lines = [one for one in found.values() if (one.system.model, one.system.experts) == (model, "training")]
        for one in lines or [found[model, "dense", "dense", ""]]:
            assert one.parameters == sizes[model]
            assert one.flops == pytest.approx(plans[model].all_flops)
    assert (found["ngram3", "dense", "dense", ""].parameters, found["ngram3", "dense", "dense", ""].flops) == (70, 0)
    mixed, paired = found["mixed", "dense", "dense", ""], found["paired", "training", "uniform", "tempered"]
    assert (mixed.parameters, paired.parameters) == (sizes["demix"] + 70, sizes["demix"] + 90)
    assert mixed.flops == paired.flops == pytest.approx(plans["demix"].all_flops)
    shared, expert = plans["demix"].shared, plans["demix"].expert
    (every,) = (one for one in found.values() if one.system.experts == "all" and one.system.weights == "history")
    assert every.parameters == shared + len(frozen.domains) * expert
    assert np.isnan(every.flops)


def test_a_run_without_dense_has_no_changes(frozen: Run, tmp_path: Path) -> None:
    results = lined(frozen).query("model != 'dense'")
    main, _ = first_page(run_data(frozen, results=results), tmp_path)
    assert main.numbers["Training, change in %"].isna().all()


@pytest.mark.parametrize(
    ("half", "direct", "bold"),
    # Tempered is 1 above cached on the mean, which is exact on the same resamples and wide by way of Dense.
    [((0.01, 5), None, (True, False)), ((5, 0.01), (0.01, 5), (True, False))],
)
def test_bold_is_surely_below_the_next(
    half: tuple[float, float], direct: tuple[float, float] | None, bold: tuple[bool, bool], frozen: Run, tmp_path: Path
) -> None:
    """On training domains, and on novel ones."""
    known = [less(frozen, half, "dense", TEMPERED, CACHED)]
    known += [less(frozen, direct, "demix_cached", TEMPERED)] if direct else []
    results = lined(frozen)
    main, _ = first_page(run_data(frozen, results=results, differences=pd.concat(known)), tmp_path)
    for column, expected in zip(("3 training domains", "2 novel domains"), bold, strict=True):
        shown = main.bold[column]
        assert shown[shown].index.tolist() == ["DEMix (cached prior)"] * expected


PRINTED = json.loads((Path(demix.__file__).parent / "report" / "paper.json").read_text())
SIZES = {"gpt3-small": "125M", "gpt3-medium": "350M", "gpt3-large": "760M", "gpt3-xl": "1.3B"}


def with_paper(name: str, frozen: Run, architecture: dict[str, Any]) -> pd.DataFrame:
    """The cells of a table of the run, were it of another size."""
    run = Run(Config.complete(frozen.config.values | {"architecture": architecture}), frozen.folder)
    return printed(table_of(name, run_data(run))).cells


@pytest.mark.parametrize("entry", PRINTED, ids=lambda entry: f"{entry['table']}, {entry['preset']}")
def test_every_printed_number_stands_beside_a_run_of_its_size(entry: dict[str, Any], frozen: Run) -> None:
    cells = with_paper(entry["table"], frozen, {"preset": entry["preset"], "context": 1024})
    label = f"Paper, {SIZES[entry['preset']]}"
    columns = (
        {label: entry["column"]}
        if "column" in entry
        else {f"{label}: {name}": values for name, values in entry.get("columns", {}).items()}
    )
    for column, values in columns.items():
        shown = cells[column][cells[column] != "–"]
        assert shown.astype(float).to_dict() == values
    for row, values in entry.get("rows", {}).items():
        assert {column: float(cells.at[f"{label}: {row}", column].replace("−", "-")) for column in values} == values
    # The printed means are those of the printed rows.
    lines = entry.get("rows") or entry.get("columns") or {}
    if len(lines) > 2:
        frame = pd.DataFrame(lines).T
        assert (frame.drop(index="mean").mean() - frame.loc["mean"]).abs().max() < 0.06


def test_all_sizes_of_all_tables_are_printed() -> None:
    sizes = {(entry["table"], entry["preset"]) for entry in PRINTED}
    several = {(f"table{number}", size) for number in (3, 5, 6, 13) for size in SIZES}
    assert sizes == several | {("table4", "gpt3-xl"), ("table7", "gpt3-small")}


def test_another_size_stands_beside_the_smallest(frozen: Run) -> None:
    cells = with_paper("table5", frozen, {"preset": "gpt3-xl", "context": 1024, "layers": 3})
    assert [column for column in cells if column.startswith("Paper")] == ["Paper, 125M"]
