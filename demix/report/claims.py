"""Which of the paper's claims a run shows, with the numbers that decide."""

from pathlib import Path

import numpy as np
import pandas as pd

from demix.files import write_text
from demix.report import left_out, left_out_notes, read, title_of
from demix.report.affinity import affinities, relation_with_own, with_overlap
from demix.report.all_tables import scale_note
from demix.report.cells import mean_of, so_many
from demix.report.clusters import Clusters
from demix.report.family_claims import family_claims
from demix.report.page import render
from demix.report.read import Parent, Results, each, expert_perplexities, novel_domains, perplexities, training_domains
from demix.report.render import as_markdown
from demix.report.verdict import HARM, UNCHANGED, Claim, Part, as_percent, claim_of, compare
from demix.run.run import Run
from demix.run.systems import System, bases


def claims(
    results: Results,
    overlap: pd.DataFrame,
    differences: pd.DataFrame,
    parents: dict[str, Parent],
    run: Run,
    clusters: Clusters | None = None,
) -> list[Claim]:
    """The paper's claims judged on this run: on its own seed, and on whether its other seeds say the same.

    Claims about what a run does not have are left out. `clusters` are those of a run whose models learn from some.
    """
    own = _judged(read.of_seed(results, run), overlap, differences, parents, run, clusters)
    seeds = [rows for seed, rows in results.by_seed.items() if seed != run.seed]
    others = [_judged(rows, overlap, differences.iloc[:0], parents, run, clusters) for rows in seeds]
    absent = left_out(run)
    return [claim.among(same) for claim, *same in zip(own, *others, strict=True) if claim.name not in absent]


def _judged(
    results: Results,
    overlap: pd.DataFrame,
    differences: pd.DataFrame,
    parents: dict[str, Parent],
    run: Run,
    clusters: Clusters | None,
) -> list[Claim]:
    """All claims, judged on one seed by test perplexities and the intervals of their differences."""
    training, novel = training_domains(run), novel_domains(run)
    (_, before), (_, added) = read.before_adding(run), read.added(run)
    oracle = {read.NAIVE: "best expert (oracle)", read.DOMAIN_TOKEN: "best domain token (oracle)"}

    def on(system: System, domains: list[str]) -> pd.Series:
        return perplexities(results, system, domains)

    def less(system: System, base: System, domains: list[str]) -> pd.DataFrame:
        found = read.paired(differences, lambda _: system, base, domains)
        turned = read.paired(differences, lambda _: base, system, domains)
        return -turned.rename(columns={"low": "high", "high": "low"}) if found.empty else found

    def lower(system: System, base: System, domains: list[str], labels: tuple[str, str] = ("", "")) -> Part:
        named = oracle if domains == novel else {}
        label, other = (given or named.get(one, one.label) for one, given in zip((system, base), labels, strict=True))
        return compare(label, on(system, domains), other, on(base, domains), bounds=less(system, base, domains))

    baselines = [base for base in (read.DENSE, read.BALANCED) if base in bases(run).values()]

    def below_dense(system: System, domains: list[str]) -> list[Part]:
        return [lower(system, base, domains) for base in baselines]

    kinds = [domains for domains in (training, novel) if domains]
    on_all = " and ".join(f"on the {kind} domains" for kind in ("training", "novel")[: len(kinds)])
    dense = "both dense baselines" if len(baselines) > 1 else baselines[0].label
    sets = ("All experts", "training experts")
    return [
        claim_of(
            "balancing_helps",
            f"Balancing the training domains helps: Dense (Balanced) has lower perplexity than Dense {on_all} "
            "(Tables 3 and 5).",
            *(lower(read.BALANCED, read.DENSE, domains) for domains in kinds),
        ),
        claim_of(
            "in_domain_naive",
            f"With the domain known, DEMix has lower perplexity than {dense} on the training domains "
            "(Table 3, for 125M to 760M; at 1.3B the paper's DEMix equals Dense).",
            *below_dense(read.NAIVE, training),
        ),
        claim_of(
            "in_domain_cached",
            "Mixing with a cached prior, for which it reads dev text of the domain, DEMix also has lower perplexity "
            f"than {dense} on the training domains (Table 3).",
            *below_dense(read.CACHED, training),
        ),
        claim_of(
            "cached_against_naive",
            "On the training domains a mixture with a cached prior has lower perplexity than the domain's own expert "
            "alone (5.4, Table 3).",
            lower(read.CACHED, read.NAIVE, training),
        ),
        _diagonal(results, run),
        _overlap_correlates(results, overlap, run),
        claim_of(
            "novel_against_best_expert",
            "On novel domains a mixture of experts (cached prior) beats the best single expert, chosen by an oracle "
            "(Table 5).",
            lower(read.CACHED, read.NAIVE, novel),
        ),
        claim_of(
            "novel_against_dense",
            "On novel domains a mixture of experts with a cached prior, for which it reads dev text of the domain, "
            f"beats {dense} (Table 5).",
            *below_dense(read.CACHED, novel),
        ),
        claim_of(
            "novel_untold_against_dense",
            "On novel domains a mixture of experts with an updating prior, which is not told the domain, beats "
            f"{dense} (Table 5, for 125M to 760M; at 1.3B it equals Dense (Balanced)).",
            *below_dense(read.UPDATING, novel),
        ),
        claim_of(
            "novel_against_domain_token",
            "On novel domains mixtures of experts (updating and cached prior) beat the model with domain tokens "
            "(Table 5).",
            *(lower(one, read.DOMAIN_TOKEN, novel) for one in (read.UPDATING, read.CACHED)),
        ),
        claim_of(
            "order_of_priors",
            "On novel domains perplexity falls from the average of experts to a uniform, an updating and a cached "
            "prior (Table 5).",
            lower(read.UNIFORM, read.AVERAGE, novel),
            lower(read.UPDATING, read.UNIFORM, novel),
            lower(read.CACHED, read.UPDATING, novel),
        ),
        _demix_adaptation(results, run, parents, training, novel),
        claim_of(
            "demix_dapt_against_dense_dapt",
            "On the domain adapted to, DEMix-DAPT (the training experts and the new one, cached prior) has lower "
            "perplexity than Dense-DAPT (6.2, Figure 6).",
            compare(
                "DEMix-DAPT",
                each(results, read.one_added(run), novel)["perplexity"],
                "Dense-DAPT",
                each(results, read.dense_adapted(run), novel)["perplexity"],
            ),
        ),
        _dense_forgets(results, run, training, novel),
        _one_added(results, before, run, training, novel),
        claim_of(
            "removal_hurts",
            "Leaving a domain's expert out at test time raises the perplexity of its domain (Table 7).",
            compare(
                "−Expert",
                each(results, read.without_expert(run), training)["perplexity"],
                "+Expert",
                on(read.before_removal(run), training),
                higher=True,
                bounds=read.paired(differences, read.without_expert(run), read.before_removal(run), training),
            ),
        ),
        _removal_level(results, run, training),
        claim_of(
            "added_experts_help",
            "Adding the adapted experts to the mixture lowers perplexity on the novel domains (Table 6).",
            lower(added, before, novel, sets),
        ),
        claim_of(
            "added_experts_reduce",
            "Adding the adapted experts to the mixture lowers perplexity on the training domains too (Table 6).",
            lower(added, before, training, sets),
        ),
        claim_of(
            "added_experts_do_no_harm",
            "Ours, weaker than the paper's: adding experts does no harm on the training domains "
            f"(at most {100 * HARM:g}% higher).",
            compare(
                sets[0],
                on(added, training),
                sets[1],
                on(before, training),
                allowance=HARM,
                bounds=less(added, before, training),
            ),
        ),
        *(
            claim_of(
                f"{mixture.model}_{mixture.weights}_against_dense",
                f"Ours, beyond the paper: {mixture.label}, not told the domain, has lower perplexity than {dense} "
                f"{on_all}.",
                *(part for domains in kinds for part in below_dense(mixture, domains)),
            )
            for systems in read.trained_systems(run).values()
            for mixture in systems
            if mixture.weights.startswith("tempered")
        ),
        *family_claims(results, clusters, lower, run),
    ]


def _diagonal(results: Results, run: Run) -> Claim:
    ratios = affinities(results, run)
    ratios = ratios[(ratios["kind"] == "training") & (ratios["domain"] != ratios["expert"])].dropna()
    best = ratios.groupby("domain")["ratio"].min()
    agreeing = int((best > 1).sum())
    sentence = (
        f"The best other expert's perplexity is {best.mean():.2f} times the own expert's on average; the own expert is "
        f"the best on {agreeing} of {so_many(len(best), 'domain')}."
        if len(best)
        else "Perplexities of single experts: no rows."
    )
    return claim_of(
        "own_expert_best",
        "On each training domain the domain's own expert is the best of all (Figure 2, the diagonal).",
        Part(bool(best.mean() > 1), agreeing, len(best), sentence),
    )


def _overlap_correlates(results: Results, overlap: pd.DataFrame, run: Run) -> Claim:
    found = relation_with_own(with_overlap(affinities(results, run), overlap))
    r, known = -found.pearson, np.isfinite(found.pearson)
    sentence = (
        f"Pearson r = {r:.2f} over {found.pairs} pairs of a domain and an expert, of the share of bigrams with minus "
        f"the log perplexity ratio (p = {found.permutation_p:.2g} for Spearman's with whole domains permuted)."
        if known
        else "Overlap of bigrams and perplexities of single experts: no rows."
    )
    return claim_of(
        "overlap_correlates",
        "An expert predicts a training domain the better, the more text they share (5.2: r = 0.40 over 64 pairs, own "
        "experts included; the paper does not print its measure of overlap).",
        # One number over all pairs: there is no majority of domains.
        Part(bool(r > 0), int(r > 0), int(known), sentence, bool(found.permutation_p < 0.05)),
    )


def _one_added(results: Results, before: System, run: Run, training: list[str], novel: list[str]) -> Claim:
    """Each novel domain's expert alone added to the training experts: the mean over the training domains."""
    means = {name: mean_of(perplexities(results, read.one_added(run)(name), training)) for name in novel}
    base = mean_of(perplexities(results, before, training))
    return claim_of(
        "one_added_expert_reduces",
        "Adding one adapted expert to the mixture lowers perplexity on the training domains too (6.2, Figure 6).",
        compare(
            "With one more expert, averaged over the training domains,",
            pd.Series(means, dtype="float64"),
            "training experts",
            pd.Series(base, index=novel, dtype="float64"),
            over="added expert",
        ),
    )


def _demix_adaptation(
    results: Results, run: Run, parents: dict[str, Parent], training: list[str], novel: list[str]
) -> Claim:
    (naive, _), (all_naive, _) = read.before_adding(run), read.added(run)
    likeliest = pd.Series(
        [
            expert_perplexities(results, naive.model, name, [parents[name].likeliest]).iloc[0]
            if name in parents
            else None
            for name in novel
        ],
        index=novel,
        dtype="float64",
    )
    averaged = any(parent.averaged for parent in parents.values())
    base = "the likeliest training expert" if averaged else "its parent"
    own = compare("Adapted expert", perplexities(results, all_naive, novel), base, likeliest)
    before = perplexities(results, naive, training)
    change = (perplexities(results, all_naive, training) / before - 1).abs().dropna()
    agreeing = int((change <= UNCHANGED).sum())
    sentence = (
        f"Training domains by their own experts: unchanged on {agreeing} of {len(change)}, by construction "
        f"(largest change {100 * change.max():.3g}%)."
        if len(change)
        else "Training domains by their own experts: no rows."
    )
    kept = Part(bool(len(change)) and agreeing == len(change), agreeing, len(change), sentence)
    return claim_of(
        "demix_dapt",
        f"DEMix-DAPT adapts without forgetting: the new expert beats {base} on the new domain, and the training "
        "domains stay as they were (Figure 6, Table 13)."
        + (" Here it began as the average of all training experts, by posterior." if averaged else ""),
        own,
        kept,
    )


def _dense_forgets(results: Results, run: Run, training: list[str], novel: list[str]) -> Claim:
    start = read.before_dense_dapt(run)
    dense = perplexities(results, start, training)
    adapted = pd.DataFrame(
        {name: perplexities(results, read.dense_adapted(run)(name), training) for name in novel}, index=training
    ).dropna(axis="columns")
    changes = adapted.mean() / dense.mean() - 1 if dense.notna().all() else pd.Series(dtype="float64")
    if changes.empty:
        part = Part(False, 0, 0, f"Dense-DAPT against {start.label}: no rows.")
    else:
        agreeing = int((changes > 0).sum())
        part = Part(
            bool(changes.mean() > 0),
            agreeing,
            len(changes),
            f"Dense-DAPT changes the mean perplexity of the training domains by {as_percent(changes.mean())} on "
            f"average ({as_percent(changes.min())} to {as_percent(changes.max())}), a rise for {agreeing} of "
            f"{so_many(len(changes), 'novel domain')}.",
        )
    return claim_of(
        "dense_dapt_forgets",
        "Dense-DAPT forgets: adapting all parameters to a novel domain raises perplexity on the training domains "
        "(Figure 6, Table 13).",
        part,
    )


def _removal_level(results: Results, run: Run, training: list[str]) -> Claim:
    rows = pd.DataFrame(
        {
            "with": perplexities(results, read.before_removal(run), training),
            "without": each(results, read.without_expert(run), training)["perplexity"],
            "never": each(results, read.without_domain, training)["perplexity"],
        }
    ).dropna()
    if rows.empty:
        part = Part(False, 0, 0, "+Expert, −Expert and −Domain: no domain has all three.")
    else:
        mean = rows.mean()
        nearer = (rows["without"] - rows["never"]).abs() < (rows["without"] - rows["with"]).abs()
        part = Part(
            abs(mean["without"] - mean["never"]) < abs(mean["without"] - mean["with"]),
            int(nearer.sum()),
            len(rows),
            f"+Expert {mean['with']:.2f}, −Expert {mean['without']:.2f}, −Domain {mean['never']:.2f}; −Expert is "
            f"nearer to −Domain than to +Expert on {int(nearer.sum())} of the "
            f"{so_many(len(rows), 'domain')} trained without.",
        )
    return claim_of(
        "removal_like_never_trained",
        "Without its expert, a domain fares about as with a model that never saw the domain (Table 7).",
        part,
    )


_SIGNS = {"shown": "✓", "weak": "≈", "mixed": "~", "not shown": "✗", "cannot be judged": "?"}
_GREY = "#555555"
_COLOURS = {"shown": "#00664b", "weak": _GREY, "mixed": "#7a5200", "not shown": "#a33b00", "cannot be judged": _GREY}
_RULE = (
    "Shown: the mean over domains and more than half of the domains agree, in every comparison of the claim. Mixed: a "
    "part of this agrees. Weak: the run cannot tell the difference of the means from none, since it is within 0.01%, "
    "or its 95% interval holds zero, or its sign differs between seeds; this makes a claim weak where no other "
    "comparison speaks against it. Intervals are of the difference on the same test documents and of one "
    "training. Where a domain has fewer than 20 documents, its interval is one within them, from resampling blocks of "
    "their text, and narrower than one over documents would be: it can make a claim weak, but never shows one. Numbers "
    "are those of the run's first seed."
)


def write_claims(
    results: Results,
    overlap: pd.DataFrame,
    differences: pd.DataFrame,
    parents: dict[str, Parent],
    run: Run,
    output_dir: str | Path,
    clusters: Clusters | None = None,
) -> list[Claim]:
    """Write `claims.html` and `claims.md` into `output_dir`. Returns the claims."""
    judged, note = claims(results, overlap, differences, parents, run, clusters), scale_note(results, run)
    title = title_of("claims")
    notes = [*left_out_notes(run), note]
    counts = {verdict: sum(claim.verdict == verdict for claim in judged) for verdict in _SIGNS}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) + f", of {len(judged)}."
    html = render(
        "claims",
        title=title,
        paragraphs=[summary, _RULE],
        notes=notes,
        claims=[
            {
                "statement": claim.statement,
                "verdict": claim.verdict,
                "numbers": claim.numbers,
                "sign": _SIGNS[claim.verdict],
                "colour": _COLOURS[claim.verdict],
            }
            for claim in judged
        ],
    )
    write_text(Path(output_dir) / "claims.html", html)
    lines = [f"# {title}", "", summary.capitalize(), "", _RULE, ""]
    lines += [f"- **{claim.verdict}**: {as_markdown(claim.statement)} {as_markdown(claim.numbers)}" for claim in judged]
    write_text(
        Path(output_dir) / "claims.md",
        "\n\n".join(["\n".join(lines), *(f"*{as_markdown(note)}*" for note in notes)]) + "\n",
    )
    return judged
