"""Tables that the paper does not have: overlap, weights, grids, seeds, rates, every system, differences, audit."""

from dataclasses import replace

import numpy as np
import pandas as pd

from demix.config.models import KINDS
from demix.errors import DemixError
from demix.files.database import ask
from demix.report import read, title_of
from demix.report.affinity import affinities, relation_with_own, relations, with_overlap
from demix.report.cells import (
    COUNTED,
    INTERVAL_NOTE,
    POSTERIOR_MIXTURES,
    WITHIN_NOTE,
    kinds_of_domains,
    lowest,
    mean_of,
    percent,
)
from demix.report.read import Results, grid, perplexities, training_domains
from demix.report.render import Table
from demix.run.run import Run
from demix.run.systems import BASES, System, balanced_pairs, stream_systems


def overlap_table(results: Results, overlap: pd.DataFrame, run: Run) -> Table:
    """The correlation of the two halves of Figure 2: perplexity ratio and share of bigrams in common."""
    pairs = with_overlap(affinities(results, run), overlap)
    named = {f"{found.kind} domains": found for found in relations(pairs)}
    named["training domains, own experts too"] = relation_with_own(pairs)
    rows = {
        label: {
            "Domains": found.domains,
            "Pairs": found.pairs,
            "Spearman": found.spearman,
            "p of Spearman, domains permuted": found.permutation_p,
            "Pearson (log ratio)": found.pearson,
        }
        for label, found in named.items()
    }
    tokens = overlap["train_tokens"].max() if len(overlap) else 0
    return Table(
        "overlap",
        title_of("overlap"),
        "Correlation, over pairs of a domain and an expert, of the perplexity ratio (Figure 2) with the share of the "
        "bigrams of the domain's test split that occur in the expert's training text. Negative: an expert predicts a "
        "domain the better the more bigrams they share. A domain's own expert is left out but in the last row.",
        pd.DataFrame.from_dict(rows, orient="index"),
        notes=(
            "Each domain and each expert is in several pairs, so pairs are not independent. The p value permutes whole "
            "domains (9,999 random orders, or all where there are fewer; two-sided).",
            "The paper prints r = 0.40 (5.2), the better the more they share, over 64 pairs: own experts are among "
            "them. It does not print how overlap and gain are measured; the last row is the nearest.",
            f"Bigrams of tokens, none across documents; of each training text its first {tokens:,} tokens.",
        ),
        formats=dict.fromkeys(("Domains", "Pairs"), "{:.0f}")
        | dict.fromkeys(("Spearman", "Pearson (log ratio)"), "{:+.2f}")
        | {"p of Spearman, domains permuted": "{:.2g}"},
    )


def weights_table(results: Results, run: Run) -> Table:
    """Means over domains by every rule of weights, the released code's scorer, and two floors in hindsight."""
    beyond = stream_systems("demix", KINDS["demix"], run)
    own = {one.weights for one in beyond}
    named = dict.fromkeys(results.rows.loc[results.rows["method"].isin(["updating", "cached"]), "weights"])
    rules = [rule for rule in named if rule not in own]
    lines = {}
    for base in POSTERIOR_MIXTURES:
        for rule in rules:
            lines[base.label.removesuffix(")") + f", {_rule(rule)})"] = (base, replace(base, weights=rule))
        released = replace(base, weights="released", variant="released_scorer")
        lines[base.label.removesuffix(")") + ", released scorer)"] = (base, released)
    beyond += (System("DEMix (fitted, static)", "demix", "training", "fitted"),)
    lines |= {one.label: (read.CACHED if one.method == "fitted" else read.UNIFORM, one) for one in beyond}
    for label, method in (("block", "best_block"), ("token", "best_token")):
        floor = System(f"Best expert of each {label}, in hindsight", "demix", "training", method)
        lines[floor.label] = (read.UNIFORM, floor)
    frame = _against_history(results, lines, run)
    return Table(
        "weights",
        title_of("weights"),
        "Mean test perplexity of DEMix by the tokens that a token's weights look at, and how much higher it is than "
        "with all earlier tokens of the block (the paper's Eq. 5 and 6). Lower is better.",
        frame,
        notes=(
            "Released weights: the previous token only, and equal weights at a block's start whatever the prior. "
            "Released scorer: besides, the posterior of a block is taken at its last position, averaged over the "
            "released code's batches, and its running mean over-weights the first block and decays by 0.7.",
            "Tempered: all earlier text, in which older tokens count less and no expert is left alone; its parameters "
            "are chosen on the dev splits of the training domains, with and without the domain's own expert, so that "
            "it is not told the domain. Switching: a chain that may change its expert at each token. Fitted: the best "
            "static weights. Both are told the domain by its dev split, as the cached prior is. These are compared "
            "with history under the cached prior, all others with history under the same prior.",
            "The best expert of each block in hindsight is the floor of history alone, which picks one expert; the "
            "best of each token is the floor of every rule.",
        ),
        formats={column: "{:+.2f}" for column in frame if column.endswith("%")},
    )


def _rule(weights: str) -> str:
    if weights.isdigit():
        return f"last {weights} token{'s' * (weights != '1')}"
    return f"{weights} weights" if weights == "released" else weights


def _against_history(results: Results, lines: dict[str, tuple[System, System]], run: Run) -> pd.DataFrame:
    """The mean of the second system of each line over each kind of domain, and the change from the first in percent."""
    rows: dict[str, dict[str, float]] = {}
    for label, (base, system) in lines.items():
        rows[label] = {}
        for kind, domains in kinds_of_domains(run):
            if not domains:
                continue
            mean, reference = (mean_of(perplexities(results, one, domains)) for one in (system, base))
            rows[label][f"Mean of {len(domains)} {kind}"] = mean
            rows[label][f"{kind}: against history, %"] = percent(reference, mean) if system != base else np.nan
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return frame[frame.notna().any(axis=1)] if frame.notna().to_numpy().any() else frame


def decay_table(results: Results, run: Run) -> Table:
    """Mean test perplexity by the decay λ of the updating prior (Eq. 7) and of the cached prior."""
    settings = run.config.evaluation
    frame = _grid_frame(results, "decay", ("updating", "cached"), run)
    best = "; ".join(
        f"{column}: {values.idxmin() if values.round(2).nunique() > 1 else 'all alike'}"
        for column, values in frame.items()
        if values.notna().any()
    )
    return Table(
        "decay",
        title_of("decay"),
        "Mean test perplexity of DEMix over its training experts by the decay λ of Eq. 7, for the updating prior and "
        "for the cached one. Lower is better; the lowest of each column is bold.",
        frame,
        notes=(
            f"The other tables use {settings.decay}.",
            *([f"Lowest: {best}. Read off the test data, so no choice that a system could have made."] if best else []),
        ),
        best=lowest(frame, axis=0) if len(frame) else None,
    )


def dev_blocks_table(results: Results, run: Run) -> Table:
    """Mean test perplexity by the number of dev blocks from which the cached prior is computed."""
    settings = run.config.evaluation
    frame = _grid_frame(results, "dev_blocks", ("cached",), run)
    return Table(
        "dev_blocks",
        title_of("dev_blocks"),
        "Mean test perplexity of DEMix over its training experts with a cached prior, by the number of dev blocks that "
        "the prior is taken from. Lower is better; the lowest of each column is bold.",
        frame,
        notes=(
            f"The other tables use {settings.dev_blocks}; the paper 100.",
            f"The prior weighs a block λ times as much as the next: at λ = {decay:g} the last block alone weighs "
            f"{1 - decay:.2f}, so that more blocks can hardly matter."
            if (decay := settings.decay) < 1
            else "At λ = 1 all blocks weigh alike.",
        ),
        best=lowest(frame, axis=0) if len(frame) else None,
    )


def _grid_frame(results: Results, setting: str, methods: tuple[str, ...], run: Run) -> pd.DataFrame:
    columns = {
        f"{method} prior, {len(domains)} {kind}": grid(results, setting, method, domains)
        for kind, domains in kinds_of_domains(run)
        if domains
        for method in methods
    }
    frame = pd.DataFrame(columns).sort_index()
    frame.index = [f"{value:g}" for value in frame.index]
    return frame


def full_table(results: Results, run: Run) -> Table:
    """One row per system and domain: perplexity, interval, documents, tokens, bits per byte."""
    frame = ask(
        """select domain as Domain, kind as Kind, label as System, perplexity as Perplexity, low as Low, high as High,
            spread as "± seeds", bits_per_byte as "Bits per byte",
            documents as Documents, pieces as Pieces, tokens as Tokens
        from systems join evaluations using (domain, model, experts, method, weights, variant)
        where evaluations.top_k = 0 and expert = '' and perplexity is not null order by place""",
        systems=_every_system(run),
        evaluations=results.evaluations,
    )
    seeds = len(results.by_seed)
    frame = frame if seeds > 1 else frame.drop(columns="± seeds")
    frame.index = [str(number) for number in range(1, len(frame) + 1)]
    return Table(
        "full",
        title_of("full"),
        "Test perplexity, the bounds of its 95% interval, and bits per byte of the text, of every system of the tables "
        "on every domain. Lower is better. Bits per byte compare across tokenizers, perplexities do not.",
        frame,
        notes=(INTERVAL_NOTE,)
        if seeds == 1
        else (
            f"Means over {seeds} seeds, ± their standard deviation, where a system has them; else one seed's interval.",
        ),
        formats=COUNTED | {"Tokens": "{:,.0f}", "Bits per byte": "{:.3f}"},
        long=True,
    )


def differences_table(differences: pd.DataFrame, run: Run) -> Table:
    """Each system minus each of `BASES`, and clusters minus balanced ones, on the same documents of a domain.

    Raises DemixError for a row whose system is none of the tables'.
    """
    named = {base.model: base.label for _, base in balanced_pairs(run)}
    named |= {name: base.label for name, base in BASES.items()}
    frame = ask(
        """select domain as Domain, label as System, base as Less,
            nats_per_token as "Nats a token", nats_per_token_low as "Nats low", nats_per_token_high as "Nats high",
            perplexity as Perplexity, perplexity_low as "Perplexity low", perplexity_high as "Perplexity high",
            documents as Documents, pieces as Pieces, seed::varchar as Seed
        -- What is subtracted is the oracle's choice, not that on dev.
        from differences left join (from systems where variant = '') using (domain, model, experts, method, weights)
        left join bases using (against) order by min(place) over (partition by domain), number""",
        differences=differences.assign(number=range(len(differences))),
        systems=_every_system(run),
        bases=pd.DataFrame(named.items(), columns=["against", "base"]),
    )
    if len(unknown := frame[frame["System"].isna() | frame["Less"].isna()]):
        cause = f"{len(unknown)} rows are of systems that no table has, such as on {unknown['Domain'].iloc[0]}"
        raise DemixError("differences.parquet", cause, "make it anew with this run's config: delete it, then rerun")
    if differences["seed"].nunique() < 2:
        frame = frame.drop(columns="Seed")
    frame.index = [str(number) for number in range(1, len(frame) + 1)]
    formats = {name: "{:+.4f}" for name in frame if name.startswith("Nats")}
    formats |= {name: "{:+.2f}" for name in frame if name.startswith("Perplexity")}
    return Table(
        "differences",
        title_of("differences"),
        "A system's test loss (nats a token) and perplexity less those of another, with the bounds of 95% intervals "
        "from resampling the domain's test documents, the same ones for both. Negative: better than the other; an "
        "interval that leaves out zero: other documents would hardly turn it round.",
        frame,
        notes=(
            "Where a domain has fewer than 20 test documents, blocks of their text are resampled, within these "
            f"documents. {WITHIN_NOTE} One training each: seeds are not in it.",
        ),
        formats=formats | COUNTED,
        long=True,
    )


def seeds_table(results: Results, run: Run) -> Table:
    """Every trained system against Dense (Balanced) of the same seed, and the spread of this change over seeds."""
    systems = [system for row in read.trained_systems(run).values() for system in row if system != read.BALANCED]
    rows: dict[str, dict[str, float]] = {system.label: {} for system in systems}
    by_seed = results.by_seed
    for kind, domains in kinds_of_domains(run):
        if not domains:
            continue
        base = {seed: mean_of(perplexities(found, read.BALANCED, domains)) for seed, found in by_seed.items()}
        for system in systems:
            changes = [
                percent(base[seed], mean_of(perplexities(found, system, domains))) for seed, found in by_seed.items()
            ]
            columns = {f"{kind.capitalize()}, seed {seed}": value for seed, value in zip(by_seed, changes, strict=True)}
            if len(changes) > 1:
                columns |= {
                    f"{kind.capitalize()}, mean": mean_of(changes),
                    f"±, {kind}": float(np.std(changes, ddof=1)),
                }
            rows[system.label] |= columns
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return Table(
        "seeds",
        title_of("seeds"),
        "The change of the mean test perplexity over domains from Dense (Balanced) to each system, in percent, both "
        "trained with the same seed on the same text. Negative: better than Dense (Balanced).",
        frame,
        notes=(
            "Compared within a seed, because a seed moves both systems of a pair.",
            "On novel domains single experts and domain tokens (naive) are oracles, chosen on the test data.",
            *(["± is the standard deviation over seeds."] if len(by_seed) > 1 else []),
        ),
        formats={column: "{:.2f}" if column.startswith("±") else "{:+.2f}" for column in frame},
    )


def rates_table(trials: pd.DataFrame) -> Table:
    """What each learning rate of DEMix-DAPT and Dense-DAPT does to the training domains and to the new one, on dev."""
    rows = {
        f"{kind}, {factor:g} of the rate": {
            "Training domains": found["training"].mean(),
            "Own domain": found["own"].mean(),
            "Adaptations": len(found),
            "Chosen": int(found["chosen"].sum()),
        }
        for (kind, factor), found in trials.groupby(["kind", "factor"])
    }
    columns = ["Training domains", "Own domain", "Adaptations", "Chosen"]
    return Table(
        "rates",
        title_of("rates"),
        "Change of dev perplexity in percent (negative is better) by adapting with a fraction of the learning rate of "
        "training, averaged over the novel domains: on the training domains, which shows forgetting, and on the domain "
        "adapted to. The last column counts the adaptations that the run kept: those of the lowest loss on the own "
        "domain's dev split, or those of the only factor.",
        pd.DataFrame.from_dict(rows, orient="index", columns=columns).astype("float64"),
        notes=("The paper takes a tenth of the rate for both kinds.",),
        formats=dict.fromkeys(columns[:2], "{:+.1f}") | dict.fromkeys(columns[2:], "{:.0f}"),
    )


AUDITED = {
    "own": "own expert alone",
    "mixture": "all experts",
    "minus": "without its expert",
    "without": "never trained on it",
}


def audit_table(audit: pd.DataFrame, run: Run) -> Table:
    """How much of a removed domain's documents the models still continue word for word, train against test."""
    columns = {"matched": "Tokens word for word, {}", "share": "Tokens right, {} (%)", "nll": "Nats, {}"}
    rows = {}
    for domain in training_domains(run):
        for system, label in AUDITED.items():
            found = audit[(audit["domain"] == domain) & (audit["system"] == system)]
            if not len(found):
                continue
            means = found.groupby("split")[list(columns)].mean()
            rows[f"{domain}, {label}"] = {
                heading.format(split): means[name].get(split, np.nan) * (100 if name == "share" else 1)
                for name, heading in columns.items()
                for split in ("train", "test")
            } | {f"Documents, {split}": float((found["split"] == split).sum()) for split in ("train", "test")}
    headings = [heading.format(split) for heading in columns.values() for split in ("train", "test")]
    counts = [f"Documents, {split}" for split in ("train", "test")]
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=[*headings, *counts])
    return Table(
        "audit",
        title_of("audit"),
        "Documents of a removed domain are continued from 50 tokens of theirs, greedily: how many of the next 50 are "
        "the document's before the first that is not, the share of all 50 that are, and the loss of the document's own "
        "50 tokens (nats). Means over documents that were trained on and over test documents, which no model saw.",
        frame,
        notes=(
            "Train above test by more than chance means that training documents were memorized; without the domain's "
            "expert, by what all experts share.",
            *read.seed_note(run),
        ),
        formats=dict.fromkeys(counts, "{:.0f}"),
    )


def _every_system(run: Run) -> pd.DataFrame:
    """One row per domain and system of the tables that is evaluated on it, in order (column place)."""
    return pd.DataFrame(
        {"domain": domain, "kind": kind, **vars(system)}
        for kind, domains in kinds_of_domains(run)
        for domain in domains
        for system in _systems_on(domain, kind, run)
    ).reset_index(names="place")


def _systems_on(domain: str, kind: str, run: Run) -> list[System]:
    """The systems of all tables that are evaluated on `domain`, whose kind is `kind`."""
    dense, naive, mixed = [], [], []
    for systems in read.trained_systems(run).values():
        dense += [system for system in systems if system.method == "dense"]
        naive += [system for system in systems if system.method == "naive"]
        mixed += [system for system in systems if system.method not in ("dense", "naive")]
    oracle = [replace(system, label=f"{system.label}, oracle") for system in naive]
    single = naive if kind == "training" else [*oracle, *(system.chosen_on_dev() for system in naive)]
    released = [system.with_weights("released") for system in mixed if system.weights == "history"]
    by_code = [*POSTERIOR_MIXTURES, *(system for system in mixed if system.by_distance)]
    released += [one.released_scorer() for one in by_code if one.released_scorer().variant]
    removed = [
        replace(read.without_expert(run)(domain), label="DEMix without its expert (cached)"),
        replace(read.without_domain(domain), label="DEMix never trained on it (cached)"),
    ]
    adapted = [replace(read.dense_adapted(run)(domain), label="Dense-DAPT to it")]
    if kind == "novel":
        adapted.append(replace(read.one_added(run)(domain), label="DEMix-DAPT to it, 1 expert added (cached)"))
    return [*dense, *single, *mixed, *released, *read.added(run), *removed, *adapted]
