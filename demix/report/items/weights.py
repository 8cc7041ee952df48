"""Mean test perplexity of DEMix by the tokens that set the weights of its experts: all earlier tokens of the block, the
last few tokens, or the previous token as in the code released with the paper; and with that code's whole scorer.
"""

from dataclasses import replace

from demix.config.models import KINDS
from demix.report.domains import percent
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.systems import CACHED, POSTERIOR_MIXTURES, UNIFORM
from demix.report.table import Table
from demix.run.systems import System, stream_systems

ITEM = TableItem("How experts are weighted: by all earlier text, by the last tokens, or as released", Group.FURTHER, 1)


def make(material: Material) -> Table:
    import numpy as np
    import pandas as pd

    rows: dict[str, dict[str, float]] = {}
    for label, (base, system) in _lines(material).items():
        rows[label] = {}
        for domains in material.kinds:
            mean, reference = (material.own.mean(one, domains.names) for one in (system, base))
            rows[label][f"Mean of {domains.counted}"] = mean
            change = percent(reference, mean) if system != base else np.nan
            rows[label][f"{domains.kind}: against history, %"] = change
    frame = pd.DataFrame.from_dict(rows, orient="index")
    frame = frame[frame.notna().any(axis=1)] if frame.notna().to_numpy().any() else frame
    return Table(
        "Mean test perplexity of DEMix by the tokens that a token's weights look at, and how much higher it is than "
        "with all earlier tokens of the block (the paper's Eq. 5 and 6). Lower is better.",
        frame,
        notes=(
            "Released weights: the previous token only, and equal weights at a block's start whatever the prior. "
            "Released scorer: in addition the posterior of a block is taken at its last position and averaged over the "
            "released code's batches; its running mean over-weights the first block and decays by 0.7.",
            "Tempered: all earlier text, in which older tokens count less and no expert is left alone; its parameters "
            "are chosen on the dev splits of the training domains, with and without the domain's own expert, so that "
            "it is not told the domain. Switching: a chain that may change its expert at each token. Fitted: the best "
            "static weights. Switching and fitted are told the domain by its dev split, as the cached prior is. They "
            "are compared with history under the cached prior, all others with history under the same prior.",
            "The best expert of each block in hindsight is the floor of history alone, which picks one expert; the "
            "best of each token is the floor of every rule.",
        ),
        formats={column: "{:+.2f}" for column in frame if column.endswith("%")},
    )


def _lines(material: Material) -> dict[str, tuple[System, System]]:
    """By label, the system of a line after the one that it is compared with."""
    beyond = stream_systems("demix", KINDS["demix"], KINDS["demix"].label, material.run)
    own, rows = {one.weights for one in beyond}, material.own.rows
    named = dict.fromkeys(rows.loc[rows["method"].isin(["updating", "cached"]), "weights"])
    lines = {}
    for base in POSTERIOR_MIXTURES:
        label = base.label.removesuffix(")")
        for rule in (rule for rule in named if rule not in own):
            lines[f"{label}, {_rule(rule)})"] = (base, replace(base, weights=rule))
        lines[f"{label}, released scorer)"] = (base, replace(base, weights="released", variant="released_scorer"))
    beyond += (System("DEMix (fitted, static)", "demix", "training", "fitted"),)
    lines |= {one.label: (CACHED if one.method == "fitted" else UNIFORM, one) for one in beyond}
    for label, method in (("block", "best_block"), ("token", "best_token")):
        floor = System(f"Best expert of each {label}, in hindsight", "demix", "training", method)
        lines[floor.label] = (UNIFORM, floor)
    return lines


def _rule(weights: str) -> str:
    if weights.isdigit():
        return f"last {weights} token{'s' * (weights != '1')}"
    return f"{weights} weights" if weights == "released" else weights
