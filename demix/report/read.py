"""Reading evaluations: the rows of `results.parquet` behind each line of the paper's tables."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from demix.config.models import KINDS
from demix.errors import DemixError
from demix.files import is_made, read_json, read_json_lines, read_parquet
from demix.files.database import ask
from demix.run.models import Model, adapted, left_out, one_more, trained_without
from demix.run.run import Run
from demix.run.systems import BASES, System, label_of, row_systems, systems_of, table_rows

RESULT_COLUMNS = (
    *("model", "experts", "n_experts", "method", "weights", "top_k", "domain", "kind", "split", "expert"),
    *("oracle", "documents", "pieces", "tokens", "nll", "perplexity", "tokens_sha256", "variant", "decay"),
    *("dev_blocks", "perplexity_low", "perplexity_high", "bits_per_byte", "seed"),
)
OVERLAP_COLUMNS = ("domain", "expert", "overlap", "train_tokens", "test_bigrams")
POSTERIOR_COLUMNS = (
    *("model", "experts", "weights", "decay", "domain", "kind", "split", "block", "expert", "posterior", "seed"),
)
DIFFERENCE_COLUMNS = (
    *("model", "experts", "method", "weights", "against", "domain", "kind", "documents", "pieces", "seed"),
    *("nats_per_token", "nats_per_token_low", "nats_per_token_high"),
    *("perplexity", "perplexity_low", "perplexity_high"),
)
AUDIT_COLUMNS = ("domain", "system", "split", "document", "matched", "share", "nll")
TASK_COLUMNS = (
    *("task", "model", "routing", "top_k", "expert", "reads", "shots", "seeds", "examples", "accuracy"),
    *("accuracy_low", "accuracy_high", "chance", "judged"),
)
PRIOR_COLUMNS = ("model", "experts", "weights", "domain", "kind", "expert", "prior", "seed")


(DENSE,), (BALANCED,), (DOMAIN_TOKEN,), (NAIVE, AVERAGE, UNIFORM, UPDATING, CACHED) = (
    systems_of(name, KINDS[name]) for name in ("dense_unbalanced", "dense", "domain_token", "demix")
)


def added(run: Run) -> tuple[System, System]:
    """Two systems of the model with added experts, over all its experts: each domain's own expert, and the mixture."""
    row = run.receiver.row
    label = label_of(row, run.receiver.kind)
    return (
        System(f"{label}, all experts (naive)", row, "all", "naive"),
        System(f"{label}, all experts (cached)", row, "all", "cached", "history"),
    )


def before_adding(run: Run) -> tuple[System, System]:
    """Two systems of the model with added experts, over its training experts: each domain's own, and the mixture."""
    model = run.receiver
    naive, *_, cached = systems_of(model.row, model.kind)
    return naive, cached


def before_removal(run: Run) -> System:
    """The model of the removal experiments with all its experts: +Expert of Table 7."""
    model = run.whole
    return systems_of(model.row, model.kind)[-1]


def one_added(run: Run) -> Callable[[str], System]:
    """A function from a novel domain to the mixture of the training experts and the domain's own: section 6.2."""
    row = run.receiver.row
    return lambda domain: System("+ one expert (cached)", row, one_more(domain), "cached", "history")


def without_expert(run: Run) -> Callable[[str], System]:
    """A function from a domain to the system without the expert of that domain: −Expert of Table 7."""
    row = run.whole.row
    return lambda domain: System("−Expert", row, left_out(domain), "cached", "history")


def without_domain(domain: str) -> System:
    """The model trained on a replacement instead of `domain`: −Domain of Table 7."""
    return System("−Domain", trained_without(domain), "training", "cached", "history")


def seed_note(run: Run) -> tuple[str, ...]:
    """What the seed phase of the model of the removal experiments does to them; nothing without a seed phase."""
    model = run.whole
    if not model.settings.seed_tokens:
        return ()
    return (
        f"{model.row} and −Domain began with what the model {model.parent} had learned of every domain in its first "
        f"{model.settings.seed_tokens:,} tokens: a seed that has seen a domain weakens its removal.",
    )


def before_dense_dapt(run: Run) -> System:
    """The dense model that Dense-DAPT starts from."""
    return DENSE if run.config.adaptation.dense == DENSE.model else BALANCED


def dense_adapted(run: Run) -> Callable[[str], System]:
    """A function from a novel domain to the dense model after Dense-DAPT to the domain: Table 13."""
    row = run.config.adaptation.dense
    return lambda domain: System("Dense-DAPT", adapted(row, domain), "dense", "dense")


def trained_systems(run: Run) -> dict[str, tuple[System, ...]]:
    """The systems of every row of `models` over its training experts: first the paper's rows, then further rows."""
    return {row: row_systems(row, kind, run) for row, kind in table_rows(run).items()}


def training_domains(run: Run) -> list[str]:
    """The training domains in the config's order."""
    return list(run.training)


def novel_domains(run: Run) -> list[str]:
    """The novel domains in the config's order."""
    return list(run.novel)


def read_results(path: str | Path) -> "Results":
    """The rows of `results.parquet`. Raises DemixError if a column is missing or rows are doubled or not comparable."""
    key = ("model", "experts", "method", "weights", "top_k", "variant", "decay", "dev_blocks", "context", "temperature")
    return Results(_read(path, RESULT_COLUMNS, (*key, "expert", "domain", "split", "seed")), path)


def read_priors(path: str | Path) -> pd.DataFrame:
    """The rows of `priors.parquet`. Raises DemixError if a column is missing or a row is doubled."""
    return _read(path, PRIOR_COLUMNS, ("model", "experts", "weights", "domain", "expert", "seed"))


def read_overlap(path: str | Path) -> pd.DataFrame:
    """The rows of `corpus/overlap.parquet`. Raises DemixError if a column is missing or a row is doubled."""
    return _read(path, OVERLAP_COLUMNS, ("domain", "expert"))


def read_differences(path: str | Path) -> pd.DataFrame:
    """The rows of `differences.parquet`. Raises DemixError if a column is missing or a row is doubled."""
    return _read(path, DIFFERENCE_COLUMNS, ("model", "experts", "method", "weights", "against", "domain", "seed"))


def read_posteriors(path: str | Path) -> pd.DataFrame:
    """The rows of `posteriors.parquet`. Raises DemixError if a column is missing or a row is doubled."""
    key = ("model", "experts", "weights", "decay", "domain", "split", "block", "expert", "seed")
    return _read(path, POSTERIOR_COLUMNS, key)


def read_audit(path: str | Path) -> pd.DataFrame:
    """The rows of `audit.parquet`; none where the run removes no domain and has no such file."""
    return _read(path, AUDIT_COLUMNS) if is_made(Path(path)) else pd.DataFrame(columns=list(AUDIT_COLUMNS))


def read_tasks(path: str | Path) -> pd.DataFrame:
    """The rows of `tasks.parquet`."""
    return _read(path, TASK_COLUMNS)


def _read(path: str | Path, columns: tuple[str, ...], key: tuple[str, ...] = ()) -> pd.DataFrame:
    """The rows of a table. Raises DemixError if one of `columns` is missing or two rows agree in all columns `key`."""
    table = read_parquet(path)
    if missing := [name for name in columns if name not in table.column_names]:
        raise DemixError(path, f"has no column {', '.join(missing)}", "rerun the evaluation with this version of demix")
    rows = table.to_pandas()
    # Runs of earlier versions have no column for what they do not have.
    known = [name for name in key if name in rows]
    if key and (doubled := rows.duplicated(known)).any():
        domain = rows.loc[doubled, "domain"].iloc[0]
        cause = f"holds rows of {domain} twice: the evaluation of one domain lies in the place of another's"
        raise DemixError(path, cause, f"delete {Path(path).parent / 'evaluations'} and the file, then rerun")
    return rows


def read_metrics(path: str | Path) -> Iterable[dict[str, Any]]:
    """The rows of a metrics file; nothing if the run has no such file. Raises DemixError on a row without tokens."""
    path = Path(path)
    if not is_made(path):
        return
    for number, row in enumerate(read_json_lines(path), start=1):
        if "tokens" not in row:
            raise DemixError(f"{path}:{number}", "has no tokens", "rerun the stage that makes it")
        yield row


def step_seconds(metrics: Path) -> float:
    """The seconds that the steps of a training took."""
    seconds, before = 0.0, 0
    for row in read_metrics(metrics):
        if "tokens_per_second" in row:
            seconds += (row["tokens"] - before) / row["tokens_per_second"]
        before = row["tokens"]
    return seconds


@dataclass(frozen=True, eq=False)
class Results:
    """The rows of `results.parquet`, and what the tables show of them.

    Raises DemixError unless all rows of a domain's split were scored on the same tokens. Each seed is checked alone:
    runs of different seeds split their domains differently.
    """

    rows: pd.DataFrame
    path: object = "results"

    def __post_init__(self) -> None:
        mixed = ask(
            """select domain, split, count(distinct tokens_sha256) as sequences from results
            group by domain, split, seed having sequences > 1 order by sequences desc, domain, split, seed limit 1""",
            results=self.rows,
        )
        for row in mixed.itertuples():
            raise DemixError(
                self.path,
                f"holds perplexities of {row.domain}.{row.split} over {row.sequences} different token sequences",
                "delete the evaluations of that domain and rerun, so that all models are scored on the same tokens",
            )

    @cached_property
    def by_seed(self) -> dict[int, "Results"]:
        """The rows of each seed."""
        return {seed: Results(rows, self.path) for seed, rows in self.rows.groupby("seed")}

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """The test results by system and domain; those of single experts by expert too. Grids are left out.

        The columns up to domain are the key (top_k 0 for none, and where dev chose), which the index holds as tuples.
        Then come perplexity, low, high (bounds of the 95% interval over documents), spread, bits_per_byte, documents,
        pieces, tokens and seeds. With several seeds all numbers are means over the seeds, spread is the standard
        deviation of the perplexity, and there is no interval. With one seed spread is NaN.
        """
        found = ask(
            """select model, experts, method, weights, variant,
                if(variant = 'dev_temperature', 0, coalesce(top_k, 0))::int as top_k,
                if(method = 'expert', expert, '') as expert, domain,
                avg(perplexity) as perplexity,
                if(count(*) = 1, min(perplexity_low), null) as low,
                if(count(*) = 1, min(perplexity_high), null) as high,
                stddev_samp(perplexity) as spread, avg(bits_per_byte) as bits_per_byte,
                avg(documents) as documents, avg(pieces) as pieces, avg(tokens) as tokens, count(*)::double as seeds
            from results where split = 'test' and variant not in ('decay', 'dev_blocks', 'routing')
            group by all order by all""",
            results=self.rows,
        )
        return found.set_axis(_flat(found.loc[:, :"domain"].itertuples(index=False, name=None)))


def of_seed(results: Results, run: Run) -> Results:
    """The rows of the run's own seed, without the rows of models trained again with another seed."""
    return Results(results.rows[results.rows["seed"] == run.seed], results.path)


def _looked_up(results: Results, keys: Iterable[tuple[System, str, str]], labels: Iterable[str]) -> pd.DataFrame:
    """The evaluations of (system, expert, domain), under `labels`; NaN where there is none."""
    wanted = [(*one.key, one.variant, one.top_k or 0, expert, domain) for one, expert, domain in keys]
    return results.evaluations.reindex(_flat(wanted)).set_axis(list(labels))


def _flat(keys: Iterable[tuple[str | int, ...]]) -> pd.Index:
    # A report looks up hundreds of systems: 6 ms each in the levels of a MultiIndex, 0.6 ms here.
    return pd.Index(list(keys), tupleize_cols=False, dtype=object)


def each(results: Results, system: Callable[[str], System], domains: Iterable[str]) -> pd.DataFrame:
    """`Results.evaluations` on each domain of the system that belongs to it; NaN where that was not evaluated."""
    names = list(domains)
    return _looked_up(results, ((system(name), "", name) for name in names), names)


def evaluations(results: Results, system: System, domains: Iterable[str]) -> pd.DataFrame:
    """`Results.evaluations` of `system` on each of `domains`; NaN where `system` was not evaluated."""
    return each(results, lambda _: system, domains)


def perplexities(results: Results, system: System, domains: Iterable[str]) -> pd.Series:
    """The column perplexity of `evaluations`: test perplexity of `system` on each of `domains`."""
    return evaluations(results, system, domains)["perplexity"]


def expert_perplexities(
    results: Results, model: str, domain: str, experts: Iterable[str], label: str = "all"
) -> pd.Series:
    """Test perplexity on `domain` of each single expert of `model`; `label` names the expert set's rows."""
    names, alone = list(experts), System("", model, label, "expert")
    return _looked_up(results, ((alone, name, domain) for name in names), names)["perplexity"]


def paired(
    differences: pd.DataFrame, system: Callable[[str], System], base: System, domains: Iterable[str]
) -> pd.DataFrame:
    """Bounds (low, high) of the 95% interval of `system` minus `base` in perplexity, on the same documents of a domain.

    Only `BASES` and the second systems of `balanced_pairs` have such intervals. Domains without an interval are left
    out.
    """
    by_row = base.model if base.by_distance and base.top_k is None and not base.variant else None
    against = next((key for key, one in BASES.items() if one == base), by_row)
    key = ["domain", "model", "experts", "method", "weights"]
    found = ask(
        f"""select domain, perplexity_low as low, perplexity_high as high
        from differences join systems using ({", ".join(key)})
        where against = '{against}' and low is not null and high is not null order by domain""",
        differences=differences,
        systems=pd.DataFrame([(name, *system(name).key) for name in domains], columns=key, dtype="str"),
    )
    return found.set_index("domain")


def grid(results: Results, setting: str, method: str, domains: Iterable[str]) -> pd.Series:
    """Mean test perplexity over `domains` of DEMix's training experts by each value of `setting` that was tried.

    `setting` is `decay` or `dev_blocks`. Values that a domain lacks are left out, except for large numbers of dev
    blocks: there, a domain with fewer blocks counts with all of its blocks.
    """
    domains = list(domains)
    tried = ask(
        f"""select {setting}, domain, avg(perplexity) as perplexity from results join domains using (domain)
        where variant = '{setting}' and split = 'test' and top_k is null
            and (model, experts, method, weights) = ('demix', 'training', '{method}', 'history')
        group by all order by all""",
        results=results.rows,
        domains=pd.DataFrame({"domain": domains}, dtype="str"),
    )
    table = tried.pivot(index=setting, columns="domain", values="perplexity").reindex(columns=domains)
    if setting == "dev_blocks":
        table = table.fillna(table.ffill().where(table.bfill().isna()))
    return table.dropna().mean(axis=1) if domains else pd.Series(dtype="float64")


def tokens_before(run: Run) -> dict[str, int | None]:
    """The tokens that the model in a folder had learned from when a row of `models` began with it, by row.

    None if they are not known.
    """
    files = {model.row: run.folder / "models" / model.name / "model.json" for model in _from_folders(run)}
    made = {row: read_json(path) if is_made(path) else {} for row, path in files.items()}
    return {row: (description.get("parent") or {}).get("tokens") for row, description in made.items()}


def parent_notes(run: Run, before: dict[str, int | None]) -> list[str]:
    """What stands below a table with the tokens of rows; `before` is that of `tokens_before`."""
    return ["Tokens of the model in a folder that a row began with count, too."] * any(before.values()) + [
        f"Tokens of the parent {model.base.initial} of {model.row} are not known; the row's own training took "
        f"{model.settings.tokens:,}."
        for model in _from_folders(run)
        if before[model.row] is None
    ]


def _from_folders(run: Run) -> list[Model]:
    return [model for model in run.trained if model.base.initial and model.name == model.row]


@dataclass(frozen=True)
class Parent:
    """What the expert of a novel domain began with: a copy of the training expert `likeliest`, that of highest
    posterior, or the average of all by posterior."""

    likeliest: str
    averaged: bool = False


def read_parents(experts: str | Path, novel: list[str]) -> dict[str, Parent]:
    """The parent of each novel domain's expert, from `models/<model>/experts/<domain>.json`.

    Domains without such a file are left out.
    """
    files = {domain: Path(experts) / f"{domain}.json" for domain in novel}
    lineages = {domain: read_json(path) for domain, path in files.items() if is_made(path)}
    return {domain: _parent(lineage) for domain, lineage in lineages.items()}


def _parent(lineage: Mapping[str, Any]) -> Parent:
    weights = {name: origin["weight"] for name, origin in lineage.get("parents", {}).items()}
    return Parent(max(weights, key=weights.__getitem__), averaged=True) if weights else Parent(lineage["parent"])


def read_trials(models: str | Path, run: Run) -> pd.DataFrame:
    """What each learning rate of adaptation came to: columns kind, domain, factor, training, own, chosen.

    `models` is the run's folder of models. `training` and `own` are changes of dev perplexity in percent, of the mean
    over the training domains and of the domain adapted to. A factor at which training diverged has none.
    """
    rows = []
    for domain in novel_domains(run):
        files = {
            "DEMix-DAPT": Path(models) / run.receiver.row / "experts" / f"{domain}.json",
            "Dense-DAPT": Path(models) / adapted(run.config.adaptation.dense, domain) / "model.json",
        }
        for kind, path in files.items():
            lineage = read_json(path) if is_made(path) else {}
            for trial in lineage.get("trials", ()):
                factor = trial["learning_rate_factor"]
                start, best = (_dev_perplexities(trial.get(when, {}), run, domain) for when in ("start", "best"))
                change = 100 * (best / start - 1)
                chosen = factor == lineage["adaptation"]["learning_rate_factor"]
                rows.append((kind, domain, factor, *change, chosen))
    return pd.DataFrame(rows, columns=["kind", "domain", "factor", "training", "own", "chosen"])


def _dev_perplexities(losses: dict[str, float], run: Run, domain: str) -> np.ndarray:
    """The mean over the training domains, and that of `domain`; NaN where a loss is missing."""
    training = [losses.get(f"dev_loss/{name}", np.nan) for name in training_domains(run)]
    return np.array([np.exp(training).mean(), np.exp(losses.get(f"dev_loss/{domain}", np.nan))])


def prior_table(priors: pd.DataFrame, model: str, training: list[str], domains: list[str]) -> pd.DataFrame:
    """Cached priors (`history`) of the training experts of `model`: one row per domain, one column per expert."""
    rows = priors.query("model == @model and experts == 'training' and weights == 'history'")
    table = rows.pivot(index="domain", columns="expert", values="prior")
    return table.reindex(index=domains, columns=training).astype("float64")
