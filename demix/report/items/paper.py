"""The tables of Gururangan et al. 2022."""

from dataclasses import replace

import pandas as pd

from demix.files import read_json
from demix.progress import so_many
from demix.report.cells import (
    adapting,
    by_domain,
    by_system,
    changed_bytes,
    compared,
    lowest,
    seed_note,
)
from demix.report.read import mean_of, percent, read_metrics
from demix.report.run_data import RunData
from demix.report.systems import (
    BALANCED,
    POSTERIOR_MIXTURES,
    ByDomain,
    before_adding,
    before_dense_dapt,
    before_removal,
    in_domain,
    training_flops,
    without_choice,
    without_domain,
    without_expert,
)
from demix.report.table import Table
from demix.run.systems import System, added, merged_whole, trained_systems


def table1(data: RunData) -> Table:
    """The corpus: words and documents of each domain by split, without duplicates. Training domains come first."""
    rows: dict[str, dict[str, float]] = {}
    for name in data.run.domains:
        card = read_json(data.run.folder / "corpus" / name / "card.json")
        rows[name] = {
            f"{what.title()}, {split}": float(card[what][split])
            for what in ("words", "documents")
            for split in ("train", "dev", "test")
        }
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return Table(frame, formats=dict.fromkeys(frame, "{:,.0f}"))


def table2(data: RunData) -> Table:
    """Size and cost of each model: its experts, the parameters of all of them together, the updates, tokens and FLOPs
    of training (those of a seed phase included), and the median speed in training, on whatever machine trained it.
    """
    run, rows = data.run, {}
    for model in run.own:
        about = read_json(run.folder / model.folder / "model.json")
        steps = read_metrics(data.metrics / f"{model.name}.jsonl")
        rows[model.label] = {
            "Experts": float(len(model.experts)),
            "Parameters": float(about["shared_parameters"] + len(model.experts) * about["expert_parameters"]),
            "Updates": float(about["steps"]),
            "Tokens": float(about["tokens"]),
            "FLOPs": training_flops(model, run)[0],
            "Tokens/s": pd.Series([step.get("tokens_per_second") for step in steps], dtype="float64").median(),
        }
    whole = dict.fromkeys(("Experts", "Parameters", "Updates", "Tokens/s"), "{:,.0f}")
    return Table(pd.DataFrame.from_dict(rows, orient="index"), formats=whole | {"FLOPs": "{:.3g}"})


def table3(data: RunData) -> Table:
    """Test perplexity averaged over the training domains, for two dense baselines, a dense model with domain tokens,
    and DEMix with the domain known (naive) or mixed with a cached prior. Lower is better.
    """
    lines = {system.label: (system, BALANCED) for system in in_domain(data.run)}
    return compared(data, lines, data.kinds[:1]).renamed(
        {
            "Training": "Perplexity",
            "Training, %": "Against Dense (Balanced), %",
            "Training, lower": "Domains better than Dense (Balanced)",
        }
    )


def table4(data: RunData) -> Table:
    """Test perplexity by training domain, for the systems of Table 3. Lower is better; the lowest of each column is
    bold.
    """
    systems = {system.label: system for system in in_domain(data.run)}
    return by_system(data.results, systems, data.training)


def table5(data: RunData) -> Table:
    """Test perplexity by domain, on domains never trained on, for the baselines and for DEMix by the way its experts
    are mixed. Lower is better; the lowest of each column is bold, oracles left out.

    Oracle: the single best domain token or expert is chosen on the test data itself, so that no real system could have
    known it.

    Rows without a remark weight experts by all earlier tokens of the block (Eq. 5 and 6 of the paper). 'released
    scorer' and 'released weights' look at the previous token only, as the paper's published code does. Two rules are
    not the paper's: 'tempered' sums over all earlier text, in which older tokens count less; 'switching' is a chain
    that may change its expert at each token. 'switching' knows the domain by a prior fitted on dev, as 'cached' does
    by its prior.
    """
    lines: dict[str, System] = {}
    for system in trained_systems(data.run):
        if system.method == "naive":
            label, naive, _ = system.label.partition(" (naive)")
            how = "naive, " * bool(naive)
            lines |= {f"{label} ({how}oracle)": system, f"{label} ({how}chosen on dev)": system.chosen_on_dev()}
        else:
            lines[system.label] = system
    scored = (
        system.released_scorer() if system in POSTERIOR_MIXTURES else system.with_weights("released")
        for system in list(lines.values())
        if system.weights == "history"
    )
    lines |= {system.label: system for system in scored}
    return by_system(data.results, lines, data.novel)


def table6(data: RunData) -> Table:
    """Test perplexity with a cached prior, mixing the experts trained together, without and with those that DEMix-DAPT
    added, one for each novel domain. First come the training domains, then the novel ones.
    Lower is better.
    """
    few, many = "Training experts", "With the added experts"
    systems: dict[str, ByDomain] = {few: before_adding(data.run)[1], many: added(data.run)[1]}
    table = by_domain(data.own, systems, {f"Mean of {domains.counted}": domains.names for domains in data.kinds})
    table.frame.insert(2, "Change, %", percent(table.frame[few], table.frame[many]))
    return replace(table, formats={"Change, %": "{:+.2f}"}, best=lowest(table.frame[[few, many]], axis=1))


def table7(data: RunData) -> Table:
    """Test perplexity on a training domain with all experts (+Expert), with the domain's own expert left out (−Expert),
    and by a model never trained on the domain (−Domain). All three with a cached prior. Higher without the expert means
    that leaving it out removes the domain.
    """
    run, domains = data.run, data.training
    systems: dict[str, ByDomain] = {
        "+Expert": before_removal(run),
        "−Expert": without_expert(run),
        "−Domain": without_domain,
    }
    merged: dict[str, ByDomain] = {}
    for whole in merged_whole(run).values():
        merged |= {whole.label: whole, f"{whole.label}, −Expert": without_choice(whole)}
    table = by_domain(data.own, systems | merged, {f"Mean of all {len(domains)}": domains})
    complete = table.frame.loc[domains, [*systems]].dropna()
    label = f"Mean of the {len(complete)} that have all three"
    if 0 < len(complete) < len(domains):
        table.frame.loc[label] = complete.mean().reindex(table.frame.columns)
    replacement, trained = run.config.removal.replacement, len(complete) or "none"
    how = f"puts a replacement ({replacement or 'none'}) in the domain's place and trains for the same steps"
    notes = [f"−Domain {how}; it is run for {trained} of the {len(domains)} domains.", *seed_note(run)]
    if merged:
        notes.append(
            "Merged models are of the run's own seed. The expert is removed by deleting its row of the routers."
        )
    return replace(table, notes=(*notes, *table.notes), summaries=table.summaries | {label})


def table13(data: RunData) -> Table:
    """Change of test perplexity in percent (negative is better) by adapting to the domain of each row, and below it the
    perplexities before and after. Columns: the training domains' mean, which shows forgetting, and the domain adapted
    to.

    The last row's percentages are means of those above.
    """
    run, novel, trained = data.run, data.novel, len(data.training)
    before, after = adapting(data)
    frame, label = percent(before, after), f"Mean of {len(novel)}"
    for rows in (frame, before, after):
        rows.loc[label] = [mean_of(rows[column]) for column in rows]
    beneath = (before.map("{:.2f}".format) + " to " + after.map("{:.2f}".format)).where(frame.notna(), "")
    changes, sizes = list(frame), changed_bytes(run)
    adapts = {"all": "every parameter", "feedforwards": "the feedforwards"}
    shown = {name: "average" if parent.averaged else parent.likeliest for name, parent in data.parents.items()}
    frame["Parent expert"] = [*(shown.get(name, "") for name in novel), " "]
    began = (
        "began as the average of the training experts by posterior, and is compared with the likeliest of them."
        if data.averaged
        else "is compared with the parent expert that it was copied from."
    )
    return Table(
        frame,
        notes=(
            f"Dense-DAPT starts from {before_dense_dapt(run).label} and is compared with it.",
            f"DEMix-DAPT's expert {began} On training domains each domain's own expert is used before and after: the "
            "same by construction, as its files are not written.",
            f"One expert added: the mixture of {so_many(trained, 'training expert')} and the new one with a cached "
            f"prior (6.2, Figure 6), compared with the mixture of the {trained}.",
            "Dense and Dense-DAPT: both are kept for the domain, and mixed by tempered with the default parameters.",
            f"Dense-DAPT changes {adapts[run.config.adaptation.dense_trained]} of a model, "
            f"{sizes['Dense-DAPT']:,} bytes per domain; DEMix-DAPT "
            f"those of one expert, {sizes['DEMix-DAPT']:,} bytes. Dense-DAPT and DEMix-DAPT's own experts run one "
            f"model per token, both dense models two, and the mixture with one expert added {trained + 1}.",
        ),
        formats=dict.fromkeys(changes, "{:+.1f}"),
        summaries=frozenset({label}),
        beneath=beneath,
    )
