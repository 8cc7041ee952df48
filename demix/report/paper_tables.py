"""Tables 3, 4, 5, 6, 7 and 13 of the paper."""

import numpy as np
import pandas as pd

from demix.config.architecture import parameters
from demix.report import read, title_of
from demix.report.cells import (
    COUNTED,
    ORACLE_NOTE,
    POSTERIOR_MIXTURES,
    WEIGHTS_NOTE,
    always,
    by_domain,
    ends_lower,
    explained,
    in_domain,
    kinds_of_domains,
    lowest,
    mean_of,
    percent,
    released_means,
    second_lines,
    seeds_of,
    so_many,
)
from demix.report.read import (
    Parent,
    Results,
    evaluations,
    expert_perplexities,
    novel_domains,
    perplexities,
    training_domains,
)
from demix.report.render import Table
from demix.run.run import Run
from demix.run.systems import System

ADAPTATIONS = ("Dense-DAPT", "DEMix-DAPT", "One expert added")


def table3(results: Results, run: Run) -> Table:
    """Table 3: mean test perplexity over the training domains, of the dense baselines and of DEMix."""
    domains, systems = training_domains(run), in_domain(run)
    columns = {system.label: perplexities(results, system, domains) for system in systems}
    balanced = columns[read.BALANCED.label]
    rows = {}
    for label, values in columns.items():
        both = values.notna() & balanced.notna()
        other = label != read.BALANCED.label and both.any()
        rows[label] = {
            "Perplexity": mean_of(values),
            "Against Dense (Balanced), %": percent(mean_of(balanced), mean_of(values)) if other else np.nan,
            "Domains better than Dense (Balanced)": f"{(values < balanced)[both].sum()} of {both.sum()}"
            if other
            else "",
        }
    frame = pd.DataFrame.from_dict(rows, orient="index")
    seeds = len(results.by_seed)
    spread = {system.label: {"Perplexity": seeds_of(results, system, domains)} for system in systems}
    return Table(
        "table3",
        title_of("table3"),
        f"Test perplexity averaged over {so_many(len(domains), 'training domain')}, for two dense baselines, a dense "
        "model with domain tokens, and DEMix with the domain known (naive) or mixed with a cached prior. Lower is "
        "better.",
        frame,
        notes=(f"Means over {seeds} seeds, ± the standard deviation of a seed's mean.",) if seeds > 1 else (),
        formats={"Against Dense (Balanced), %": "{:+.1f}"},
        best=lowest(frame[["Perplexity"]], axis=0),
        beneath=pd.DataFrame.from_dict(spread, orient="index"),
    )


def table4(results: Results, run: Run) -> Table:
    """Table 4: test perplexity on each training domain, with the systems of Table 3 as columns."""
    domains, systems = training_domains(run), in_domain(run)
    frame, beneath, notes = by_domain(results, {one.label: always(one) for one in systems}, domains)
    label = f"Mean of {len(domains)}"
    frame.loc[label] = [*(mean_of(frame[system.label]) for system in systems), np.nan, np.nan]
    return Table(
        "table4",
        title_of("table4"),
        "Test perplexity on each training domain, for the systems of Table 3. Lower is better; the lowest of each "
        "domain is bold.",
        frame,
        notes=notes,
        formats=COUNTED,
        summaries=frozenset({label}),
        best=lowest(frame.drop(columns=list(COUNTED)), axis=1),
        beneath=beneath,
    )


def table5(results: Results, run: Run) -> Table:
    """Table 5: test perplexity on each novel domain, of baselines and mixtures; mixtures as in the released code last.

    The single token or expert of a novel domain is chosen on the dev split, or by an oracle on the test split.
    """
    domains = novel_domains(run)
    lines: dict[str, System] = {}
    for systems in read.trained_systems(run).values():
        for system in systems:
            if system.method == "naive":
                label = system.label.removesuffix(" (naive)")
                oracle, on_dev = (
                    (f"{label} (naive, oracle)", f"{label} (naive, chosen on dev)")
                    if label != system.label
                    else (f"{label} (oracle)", f"{label} (chosen on dev)")
                )
                lines |= {oracle: system, on_dev: system.chosen_on_dev()}
            else:
                lines[system.label] = system
    mixed = [system for system in lines.values() if system.weights == "history"]
    released = (
        system.released_scorer() if system in POSTERIOR_MIXTURES else system.with_weights("released")
        for system in mixed
    )
    lines |= {system.label: system for system in released}
    found = {label: evaluations(results, system, domains) for label, system in lines.items()}
    frame = pd.DataFrame({label: one["perplexity"] for label, one in found.items()}).T.reindex(columns=domains)
    frame["Mean"] = [mean_of(values) for _, values in frame.iterrows()]
    beneath, notes = explained(
        pd.DataFrame({label: second_lines(one) for label, one in found.items()}, index=domains).T, results
    )
    documents = found[read.BALANCED.label]["documents"].combine_first(found[read.CACHED.label]["documents"]).dropna()
    honest = frame.drop(index=[label for label in lines if label.endswith("oracle)")])
    return Table(
        "table5",
        title_of("table5"),
        f"Test perplexity by domain, on {so_many(len(domains), 'domain')} never trained on, for the baselines and for "
        "DEMix by the way its experts are mixed. Lower is better; the lowest of each column is bold, oracles left out.",
        frame,
        notes=(
            ORACLE_NOTE,
            WEIGHTS_NOTE,
            *notes,
            *(
                ["Test documents: " + ", ".join(f"{k} {n:.0f}" for k, n in documents.items()) + "."]
                * bool(len(documents))
            ),
        ),
        best=lowest(honest, axis=0),
        beneath=beneath,
    )


def table6(results: Results, run: Run) -> Table:
    """Table 6: test perplexity with the training experts, and with the adapted experts added; cached prior."""
    training, novel = training_domains(run), novel_domains(run)
    few, many = "Training experts", "With the added experts"
    (_, before), (_, after) = read.before_adding(run), read.added(run)
    parts, lines, summaries, notes = [], [], [], ()
    for kind, domains in (("training", training), ("novel", novel)):
        if not domains:
            continue
        systems = {few: always(before), many: always(after)}
        part, beneath, told = by_domain(results, systems, domains)
        summaries.append(f"Mean of {len(domains)} {kind}")
        part.loc[summaries[-1]] = [mean_of(part[few]), mean_of(part[many]), np.nan, np.nan]
        summaries.append(f"{summaries[-1]}, released weights")
        part.loc[summaries[-1]] = [*released_means(results, systems, domains), np.nan, np.nan]
        parts.append(part)
        lines += [beneath] if beneath is not None else []
        # The note that no domain has an interval is kept only if it holds for both kinds.
        notes = told if beneath is not None or not notes else notes
    frame = pd.concat(parts)
    best = lowest(frame[[few, many]], axis=1)
    frame.insert(2, "Change, %", percent(frame[few], frame[many]))
    return Table(
        "table6",
        title_of("table6"),
        f"Test perplexity with a cached prior, over {so_many(len(training), 'expert')} trained together and over these "
        f"and the {len(novel)} that DEMix-DAPT added, first on the training, then on the novel domains. Lower is "
        "better.",
        frame,
        notes=notes,
        formats={"Change, %": "{:+.2f}"} | COUNTED,
        summaries=frozenset(summaries),
        best=best,
        beneath=pd.concat(lines) if lines else None,
    )


def table7(results: Results, run: Run) -> Table:
    """Table 7: test perplexity on a training domain, with and without its expert, and of a model trained without it."""
    domains = training_domains(run)
    systems = {
        "+Expert": always(read.before_removal(run)),
        "−Expert": read.without_expert(run),
        "−Domain": read.without_domain,
    }
    frame, beneath, notes = by_domain(results, systems, domains)
    complete = frame[list(systems)].dropna()
    every = f"Mean of all {len(domains)}"
    summaries = [every]
    frame.loc[every] = [*(mean_of(frame[column]) for column in systems), np.nan, np.nan]
    summaries.append(f"{every}, released weights")
    frame.loc[summaries[-1]] = [*released_means(results, systems, domains), np.nan, np.nan]
    if 0 < len(complete) < len(domains):
        summaries.append(f"Mean of the {len(complete)} that have all three")
        frame.loc[summaries[-1]] = [*complete.mean(), np.nan, np.nan]
    replacement = run.config.removal.replacement
    return Table(
        "table7",
        title_of("table7"),
        "Test perplexity on a training domain with all experts (+Expert), with the domain's own expert left out "
        "(−Expert), and by a model never trained on the domain (−Domain). All three with a cached prior. Higher "
        "without the expert means that leaving it out takes the domain away.",
        frame,
        notes=(
            "−Domain puts a replacement"
            + (f" ({replacement})" if replacement else "")
            + " in the domain's place and trains for the same steps; it is run for "
            + (f"{len(complete)} of the {len(domains)} domains." if len(complete) else "none of the domains."),
            *read.seed_note(run),
            *notes,
        ),
        formats=COUNTED,
        summaries=frozenset(summaries),
        beneath=beneath,
    )


def adapting(results: Results, run: Run, parents: dict[str, Parent]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Test perplexities before and after the adaptation to each novel domain: one row per domain.

    The columns are Dense-DAPT, DEMix-DAPT and the mixture with one expert added, each on the training domains (the
    mean) and on the domain adapted to. `parents` maps a novel domain to what its expert began with; before it stands
    the training expert of highest posterior.
    """
    training, novel = training_domains(run), novel_domains(run)
    (naive, cached), (all_naive, _) = read.before_adding(run), read.added(run)
    dense = perplexities(results, read.before_dense_dapt(run), [*training, *novel])
    eight = perplexities(results, cached, [*training, *novel])
    experts = perplexities(results, all_naive, [*training, *novel])
    own_experts = (mean_of(perplexities(results, naive, training)), mean_of(experts[training]))
    rows = {}
    for name in novel:
        adapted = perplexities(results, read.dense_adapted(run)(name), [*training, name])
        nine = perplexities(results, read.one_added(run)(name), [*training, name])
        likeliest = [parents[name].likeliest] if name in parents else [""]
        parent = expert_perplexities(results, naive.model, name, likeliest).iloc[0]
        rows[name] = (
            *((mean_of(dense[training]), mean_of(adapted[training])), (dense[name], adapted[name])),
            *(own_experts, (parent, experts[name])),
            *((mean_of(eight[training]), mean_of(nine[training])), (eight[name], nine[name])),
        )
    columns = [f"{kind}: {part}" for kind in ADAPTATIONS for part in ("training domains", "own domain")]
    before, after = (
        pd.DataFrame(
            {name: [pair[which] for pair in pairs] for name, pairs in rows.items()}, index=columns, dtype="float64"
        ).T
        for which in (0, 1)
    )
    return before, after


def changed_bytes(run: Run) -> dict[str, int]:
    """The bytes (fp32) of the parameters that the adaptation to one domain changes, by the names of `ADAPTATIONS`."""
    receiver, types = run.receiver, run.types
    dense = next(model for model in run.trained if model.name == run.config.adaptation.dense)
    whole = sum(parameters(dense.architecture, types))
    _, expert = parameters(receiver.architecture, types, expert_scope=receiver.kind.expert_scope)
    return dict(zip(ADAPTATIONS, (4 * whole, 4 * expert, 4 * expert), strict=True))


def adaptation_table(results: Results, run: Run, parents: dict[str, Parent]) -> Table:
    """What adaptation to one domain gains there, and what it costs: forgetting and bytes; means over novel domains."""
    before, after = adapting(results, run, parents)
    training, novel = (f"{len(domains)} {kind}" for kind, domains in kinds_of_domains(run))
    frame = pd.DataFrame({
        f"{name}, {when}": [mean_of(found[f"{kind}: {part}"]) for kind in ADAPTATIONS]
        for part, name in (("own domain", novel), ("training domains", training))
        for when, found in (("before", before), ("after", after))
    }, index=list(ADAPTATIONS))  # fmt: skip
    frame["bytes changed"] = changed_bytes(run)
    return Table(
        "adaptation",
        "Adapting to one novel domain: mean test perplexity before and after (lower is better)",
        "On the domain adapted to and on the training domains, averaged over the novel domains. DEMix-DAPT's training "
        "domains are each under its own expert, the same by construction. Dense-DAPT makes a "
        f"model for each domain out of {read.before_dense_dapt(run).label}, DEMix-DAPT an expert out of another; "
        "one expert added is the mixture of the training experts and the new one with a cached prior.",
        frame,
        formats={"bytes changed": "{:,.0f}"},
    )


def table13(results: Results, run: Run, parents: dict[str, Parent]) -> Table:
    """Table 13: change of perplexity in percent by Dense-DAPT and DEMix-DAPT, on the training and on the novel domain.

    Below each change stand the perplexities. `parents` is that of `adapting`.
    """
    training, novel = training_domains(run), novel_domains(run)
    before, after = adapting(results, run, parents)
    frame, label = percent(before, after), f"Mean of {len(novel)}"
    for rows in (frame, before, after):
        rows.loc[label] = [mean_of(rows[column]) for column in rows]
    beneath = before.map("{:.2f}".format) + " to " + after.map("{:.2f}".format)
    sizes = changed_bytes(run)
    formats = dict.fromkeys(frame, "{:+.1f}")
    averaged = any(parent.averaged for parent in parents.values())
    shown = {name: "average" if parent.averaged else parent.likeliest for name, parent in parents.items()}
    frame["Parent expert"] = [*(shown.get(name, "") for name in novel), " "]
    own, old = (
        ends_lower(*(after.loc[novel, f"{kind}: {part}"] for kind in ADAPTATIONS[:2]))
        for part in ("own domain", "training domains")
    )
    return Table(
        "table13",
        title_of("table13"),
        "Change of test perplexity in percent (negative is better) by adapting to the domain of each row, and below it "
        f"the perplexities before and after: averaged over {so_many(len(training), 'training domain')}, which shows "
        f"forgetting, and on the domain adapted to. On the domain adapted to, {own}; on the training domains, {old}. "
        f"Dense-DAPT starts from {read.before_dense_dapt(run).label} and is compared with it; DEMix-DAPT's expert "
        + (
            "began as the average of the training experts by posterior and is compared with the likeliest of them"
            if averaged
            else "with the parent expert it was copied from"
        )
        + ", and on training domains each domain's own expert before and after "
        "the experts were added, the same by construction: no file of theirs is written. One expert added: the mixture "
        f"of {so_many(len(training), 'training expert')} and the new one with a cached prior (6.2, Figure 6), compared "
        f"with that of the {len(training)}.",
        frame,
        notes=(
            f"Dense-DAPT changes every parameter of a model, {sizes['Dense-DAPT']:,} bytes per domain; DEMix-DAPT "
            f"those of one expert, {sizes['DEMix-DAPT']:,} bytes.",
            "Per cents of the last row are means of those above it.",
            "The table of learning rates of adaptation has what each rate does to both kinds of domains, on dev.",
        ),
        formats=formats,
        summaries=frozenset({label}),
        beneath=beneath.where(frame[beneath.columns].notna(), ""),
    )
