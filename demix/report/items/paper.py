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
    """Words and documents of each domain (rows) in its train, dev and test split, after duplicates were removed.
    Training domains come first.

    A document that the config's key piece_words cuts into chunks counts once for each chunk.
    """
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
    """Size and training cost of each model: the number of experts, the parameters of the whole model with all its
    experts, the updates, tokens and FLOPs of training, and the median training speed in tokens per second, on the
    machine that trained the model.

    Updates, tokens and FLOPs include those of a dense warm start, in which one dense model trains before every expert
    starts from its parameters.
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
    """Mean test perplexity over the training domains (lower is better), for dense models, a dense model that reads a
    token with the domain's name (+ Domain Token), and models with experts. The words in parentheses say how experts are
    mixed.

    Dense (Balanced) trains on the same number of tokens of each domain, Dense in proportion to the domains' sizes.

    Naive: only the domain's own expert predicts. Cached prior: the output probabilities of all experts are mixed; the
    weight of an expert is its posterior probability after the earlier tokens of the block (context window). The prior
    was estimated on the domain's dev split and then fixed. Tempered: the weights follow from all earlier text, where
    older tokens count less; the domain is not known. Switching: the posterior of a chain that may change its expert at
    each token, with a prior that was fitted on the domain's dev split. Cluster: the weights follow from the distance of
    the text so far to each expert's cluster. Released scorer: only the previous token sets the weights, and the prior
    is computed as in the code that the paper's authors published.
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
    """Test perplexity on each training domain (columns; lower is better), for the rows of Table 3. Bold: the lowest of
    a column.

    Naive: only the domain's own expert predicts. Cached prior: the output probabilities of all experts are mixed; the
    weight of an expert is its posterior probability after the earlier tokens of the block (context window), from a
    prior that was estimated on the domain's dev split and then fixed. Table 3 defines the other rows.
    """
    systems = {system.label: system for system in in_domain(data.run)}
    return by_system(data.results, systems, data.training)


def table5(data: RunData) -> Table:
    """Test perplexity on each novel domain (columns; lower is better). No model of this table was trained on a novel
    domain. Rows are the dense baselines and, for models with experts, each way to mix the experts (in parentheses).
    Bold: the lowest of a column, oracles excluded.

    Oracle: the single expert or domain token with the lowest perplexity on the test split itself. No real system could
    know it. Chosen on dev: the single expert or domain token with the lowest perplexity on the dev split.

    Average: all experts have equal weights. Prior: the weights of the experts at the start of each block (context
    window). The weight at a later token is the posterior probability of the expert after all earlier tokens of the
    block (Eq. 5 and 6 of the paper). A uniform prior has equal weights. An updating prior is a decayed average of the
    posteriors after earlier blocks (Eq. 7). A cached prior was estimated on the domain's dev split and then fixed.

    Released scorer, released weights: only the previous token of the block sets the weights, as in the code that the
    paper's authors published; the scorer also computes priors as this code does.

    Three rules are not in the paper. Tempered: the weights follow from all earlier text, where older tokens count less.
    Switching: the posterior of a chain that may change its expert at each token. Cluster: the weights follow from the
    distance of the text so far to each expert's cluster. Switching and the cached prior know the domain, since the
    prior of each was computed on the domain's dev split.
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
    """Test perplexity on each domain (rows; lower is better) of a mixture of experts with a cached prior: of the
    training experts only, and of these together with the experts that DEMix-DAPT added. DEMix-DAPT (domain-adaptive
    pretraining) trains one more expert for each novel domain. Training domains come first, then the novel ones.

    Cached prior: the weights of the experts at the start of a block (context window), estimated on the domain's dev
    split and then fixed. The weight at a later token is the posterior probability of the expert after the earlier
    tokens of the block. Released weights: only the previous token sets the weights, as in the authors' published code.
    """
    few, many = "Training experts", "With the added experts"
    systems: dict[str, ByDomain] = {few: before_adding(data.run)[1], many: added(data.run)[1]}
    table = by_domain(data.own, systems, {f"Mean of {domains.counted}": domains.names for domains in data.kinds})
    table.frame.insert(2, "Change, %", percent(table.frame[few], table.frame[many]))
    return replace(table, formats={"Change, %": "{:+.2f}"}, best=lowest(table.frame[[few, many]], axis=1))


def table7(data: RunData) -> Table:
    """Test perplexity on each training domain (rows): with all experts (+Expert), with all but the domain's own expert
    (−Expert), and of a model that never trained on the domain (−Domain). All three mix their experts with a cached
    prior. A higher perplexity of −Expert than of +Expert means that leaving the expert out removes the domain.

    Cached prior: the weights of the experts at the start of a block (context window), estimated on the domain's dev
    split and then fixed. The weight at a later token is the posterior probability of the expert after the earlier
    tokens of the block. Released weights: only the previous token sets the weights, as in the authors' published code.
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
    how = f"trains for as many steps, with a novel domain ({replacement or 'none'}) in place of the domain"
    notes = [f"−Domain {how}. There is such a model for {trained} of the {len(domains)} domains.", *seed_note(run)]
    if merged:
        notes.append(
            "Merged models: only of the run's own random seed; deleting an expert's row of each router removes it."
        )
    return replace(table, notes=(*notes, *table.notes), summaries=table.summaries | {label})


def table13(data: RunData) -> Table:
    """Change of test perplexity in percent (negative is better) after adaptation to the novel domain of each row. Below
    a change are the perplexities before and after. Each method has two columns: the mean over the training domains,
    where a rise is forgetting, and the domain adapted to (“own domain”).

    DAPT is domain-adaptive pretraining: further training on the novel domain. Cached prior: the weights of the experts
    at the start of a block (context window), estimated on the domain's dev split and then fixed. Tempered: a rule that
    weights each model by its probabilities of all earlier text, where older tokens count less.

    The percentages of the last row are the means of the percentages above.
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
        "began as the average of the training experts by posterior, and is compared with the likeliest of these."
        if data.averaged
        else "began as a copy of the parent expert and is compared with it."
    )
    return Table(
        frame,
        notes=(
            f"Dense-DAPT starts from {before_dense_dapt(run).label} and is compared with it.",
            f"DEMix-DAPT trains one new expert, which {began} On training domains each domain's own expert predicts, "
            "before and after; both numbers are the same, since adaptation does not change the files of these experts.",
            f"One expert added: {so_many(trained, 'training expert')} and the new one, mixed with a cached prior "
            f"(section 6.2, Figure 6), compared with the mixture of only the {so_many(trained, 'training expert')}.",
            "Dense and Dense-DAPT: the models before and after adaptation, mixed by tempered with default parameters.",
            f"For each domain Dense-DAPT changes {adapts[run.config.adaptation.dense_trained]} of a model "
            f"({sizes['Dense-DAPT']:,} bytes), and DEMix-DAPT changes the parameters of one expert "
            f"({sizes['DEMix-DAPT']:,} bytes). Per token, Dense-DAPT and DEMix-DAPT's own experts run one model, Dense "
            f"and Dense-DAPT together two models, and the mixture with one expert added {trained + 1} experts.",
        ),
        formats=dict.fromkeys(changes, "{:+.1f}"),
        summaries=frozenset({label}),
        beneath=beneath,
    )
