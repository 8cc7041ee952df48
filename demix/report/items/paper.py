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

    A document that the config's key piece_words cuts into chunks counts once for each chunk here. Other tables count
    only the documents whose perplexity was measured. Model cards give a third count: all documents before the cut.
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

    Dense (Balanced) was trained on equally many tokens of each domain, Dense on tokens in proportion to the domains'
    sizes. “+ Domain Token”: a dense model that also reads a token with the domain's name.

    Updates, tokens and FLOPs include those of a dense warm start, in which one dense model is trained first and every
    expert then starts from its parameters.
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
    """Mean test perplexity over the training domains (lower is better). The words in parentheses name the rule that
    mixes the experts.

    “naive”: only the domain's own expert. “cached prior”: the posterior after the earlier tokens of the block (context
    window), with a fixed prior from dev text. “tempered”: the weights depend on all earlier text, where older tokens
    count less; the domain is not known. “switching”: the posterior if the expert may change at each token (fixed
    share), with a prior fitted on dev text. “cluster”: the weights depend on the distance of the text so far to each
    expert's cluster. “released scorer”: as in the authors' code, only their prior and the previous token set the
    weights.

    Compare the paper's mixtures with the rows “released scorer”, because Eq. 5 and 6 (our cached prior) cannot give the
    paper's numbers. Under these equations, with 8 experts and 1,024 tokens per block, the mixture with a uniform prior
    has at most 8^(1/1024) = 1.002 times the perplexity of one with another prior. In the paper's Table 5 this factor is
    24.5 / 21.4 = 1.145.
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

    A 95% interval is from resampling the domain's test documents, each with all of its chunks. The interval shows how
    other test documents could change the number. If a domain has fewer than 20 test documents, stretches of sqrt(N) of
    its N test tokens are resampled within these documents. Such an interval covers only other text of the same
    documents; one over documents would be wider. A text of fewer than 400 tokens has no interval.

    Table 3 defines the mixing rules. Compare the paper's mixtures with the rows “released scorer”; Table 3 says why.
    """
    systems = {system.label: system for system in in_domain(data.run)}
    return by_system(data.results, systems, data.training)


def table5(data: RunData) -> Table:
    """Test perplexity on each novel domain (columns; lower is better). No model of this table was trained on a novel
    domain. Bold: the lowest of a column, oracles excluded.

    Table 3 defines the other mixing rules. Compare the paper's mixtures with the rows “released scorer”; Table 3 says
    why. The paper has no numbers for the rules tempered and switching. Rules that use dev text know the domain.
    “oracle”: the single expert or domain token that is best on the test split. “chosen on dev”: the one that is best on
    dev text. “average”: equal weights. “uniform prior”: like the cached prior, but a block starts with equal weights.
    “updating prior”: a block starts with a decayed average of the posteriors after earlier blocks (Eq. 7). “released
    weights”: like the released scorer, with our priors.
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
    """Test perplexity on each domain (rows; lower is better) of two mixtures: the training experts, and these together
    with the experts that DEMix-DAPT (domain-adaptive pretraining) added, one for each novel domain. Bold: the lower of
    a row.

    Both mixtures have a cached prior: the weights at the start of a block (context window) were estimated on the
    domain's dev split. The weight at a later token is the expert's posterior probability after the earlier tokens of
    the block. “released weights”: only the prior and the previous token set the weights. Compare the paper's numbers
    with these means: they are nearest to “released scorer” (Table 3), which also has the prior of the authors' code.

    Pieces are the scored chunks of the documents.
    """
    few, many = "Training experts", "With the added experts"
    systems: dict[str, ByDomain] = {few: before_adding(data.run)[1], many: added(data.run)[1]}
    table = by_domain(data.own, systems, {f"Mean of {domains.counted}": domains.names for domains in data.kinds})
    table.frame.insert(2, "Change, %", percent(table.frame[few], table.frame[many]))
    table = table.noted(f"Both columns are mixtures of {data.run.receiver.label}.")
    return replace(table, formats={"Change, %": "{:+.2f}"}, best=lowest(table.frame[[few, many]], axis=1))


def table7(data: RunData) -> Table:
    """Test perplexity on each training domain (rows; lower is better), with all experts (+Expert) and with all except
    the domain's own expert (−Expert). A higher perplexity of −Expert means that the model loses what only this expert
    had learned of the domain. All other parameters stay.

    Mixtures have a cached prior: the weights at the start of a block (context window) were estimated on the domain's
    dev split. The weight at a later token is the expert's posterior probability after the earlier tokens of the block.
    “released weights”: only the prior and the previous token set the weights. Compare the paper's numbers with these
    means: they are nearest to “released scorer” (Table 3), which also has the prior of the authors' code.

    Pieces are the scored chunks of the documents.
    """
    run, domains = data.run, data.training
    systems: dict[str, ByDomain] = {"+Expert": before_removal(run), "−Expert": without_expert(run)}
    if run.config.removal.retrain_without:
        systems["−Domain"] = without_domain
    merged: dict[str, ByDomain] = {}
    for whole in merged_whole(run).values():
        merged |= {whole.label: whole, f"{whole.label}, −Expert": without_choice(whole)}
    table = by_domain(data.own, systems | merged, {f"Mean of all {len(domains)}": domains})
    complete = table.frame.loc[domains, [*systems]].dropna()
    label = f"Mean of the {len(complete)} that have all three"
    if 0 < len(complete) < len(domains):
        table.frame.loc[label] = complete.mean().reindex(table.frame.columns)
    never = f"−Domain: a model trained equally long, with {run.config.removal.replacement} in place of the domain. "
    never += f"{len(complete)} of the {len(domains)} domains have such a model."
    notes = [f"+Expert and −Expert: {run.whole.label}.", *[never] * ("−Domain" in systems), *seed_note(run)]
    if merged:
        notes.append(
            "Merged models are single models (of the run's own seed). An expert is removed with its router rows."
        )
    return replace(table, notes=(*notes, *table.notes), summaries=table.summaries | {label})


def table13(data: RunData) -> Table:
    """Change of test perplexity in percent (negative is better) after adaptation to the novel domain of each row. Below
    a change are the perplexities before and after. Each method has two columns: the mean over the training domains,
    where a rise is forgetting, and the domain adapted to (“own domain”).

    The last row has means of percentages.
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
        "started as the posterior-weighted average of the training experts and is compared with the likeliest of these."
        if data.averaged
        else "started as a copy of its parent expert and is compared with it."
    )
    return Table(
        frame,
        notes=(
            f"Dense-DAPT (domain-adaptive pretraining) trains {before_dense_dapt(run).label} further and is compared "
            "with it. “Dense and Dense-DAPT” mixes these two models by “tempered” with default parameters (weights "
            "from all earlier text, where older tokens count less) and is compared with the model before adaptation.",
            f"DEMix-DAPT trains one new expert of {run.receiver.label}. The expert {began} Each training domain is "
            "predicted by its own expert, which adaptation does not change.",
            f"One expert added: the mixture of {so_many(trained, 'training expert')} and the new one, compared with "
            "the mixture without it. The cached prior is estimated on each domain's dev split (as in section 6.2).",
            f"Dense-DAPT changes {adapts[run.config.adaptation.dense_trained]} ({sizes['Dense-DAPT']:,} bytes), "
            f"DEMix-DAPT one expert ({sizes['DEMix-DAPT']:,} bytes). From left to right, the methods run 1, 2, 1 and "
            f"{trained + 1} models or experts per token.",
        ),
        formats=dict.fromkeys(changes, "{:+.1f}"),
        summaries=frozenset({label}),
        beneath=beneath,
    )
