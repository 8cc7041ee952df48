"""What each family of models costs: parameters, FLOPs, bytes exchanged, seconds."""

from typing import Any

import pandas as pd

from demix.config.architecture import parameters, training_flops_per_token, unchosen_parameters
from demix.plan.flops import scoring_flops
from demix.report import read, title_of
from demix.report.cells import mean_of
from demix.report.families import by_label
from demix.report.read import novel_domains, step_seconds
from demix.report.render import Table
from demix.run.models import Model, adapted
from demix.run.run import Run

# The numbers of experts a token whose cost is told.
TOP_K = (1, 2, 4)


def family_costs_table(run: Run) -> Table:
    """What each family costs: parameters, updates, FLOPs of training and of a token, bytes exchanged, seconds."""
    vocab_size = run.types
    before = read.tokens_before(run)
    rows: dict[str, dict[str, Any]] = {}
    for label, family in by_label(run).items():
        model, scope = family.model, family.model.kind.expert_scope
        architecture = family.architecture
        shared, expert = parameters(architecture, vocab_size, expert_scope=scope)
        dense, context = architecture.unrouted, architecture.context
        updates, own = model.updates, model.updates - model.first_step
        # What all ranks must agree on after each update; a seed phase is that of a dense model.
        agreed = shared if model.kind.has_experts else shared + expert
        row: dict[str, Any] = {"Parameters": float(shared + family.experts * expert)}
        active = [*((f"top-{k}", k) for k in TOP_K if k < family.experts), ("all", family.experts)]
        for most, k in active:
            row[f"Parameters a token, {most}"] = float(shared + k * expert - unchosen_parameters(architecture))
            row[f"FLOPs a token, {most}"] = float(scoring_flops(architecture, vocab_size, k, scope))
        row["Updates"] = float(updates)
        known = (family.learned(before) - family.tokens) * training_flops_per_token(dense, vocab_size, context)
        row["FLOPs of training"] = training_flops(model, run)[0] + known
        row["Bytes synchronised"] = 4.0 * (agreed * own + sum(parameters(dense, vocab_size)) * model.seed_step)
        row["Seconds to add a domain"] = _seconds_to_add(run, model)
        rows[label] = row
    numbered = [
        f"{what} a token, {k}" for what in ("Parameters", "FLOPs") for k in (*(f"top-{k}" for k in TOP_K), "all")
    ]
    columns = ["Parameters", *numbered, "Updates", "FLOPs of training", "Bytes synchronised", "Seconds to add a domain"]
    frame = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=columns)
    return Table(
        "family_costs",
        title_of("family_costs"),
        "Parameters of a family and of a token by the experts that the token takes (top-k), the updates of training, "
        "the FLOPs to predict a token and to train, the bytes of gradients that all experts must agree on in training, "
        "and the time to add a domain.",
        frame,
        notes=(
            "Only weights by clusters, or one known domain, choose experts before these are computed: by all other "
            "rules a token costs what “all” says, whatever top-k is. Of a token-routed model “all” are the chosen.",
            "FLOPs of training include activation checkpointing and a seed phase (section 5.1 of Narayanan et al. "
            "2021), as updates do. Bytes synchronised are 4 per parameter and update, of what each expert shares with "
            "others, and of the whole model in a seed phase; several ranks of an expert exchange its own besides.",
            "Seconds are those of steps: of the adaptation to a novel domain (their mean), or of one expert's training "
            "where experts are whole models (their mean), after the seed phase.",
            *read.parent_notes(run, before),
        ),
        formats=dict.fromkeys(columns[:5], "{:,.0f}")
        | dict.fromkeys([*columns[5:9], "FLOPs of training"], "{:.3g}")
        | {"Updates": "{:,.0f}", "Bytes synchronised": "{:,.0f}", "Seconds to add a domain": "{:,.1f}"},
    )


def training_flops(model: Model, run: Run) -> tuple[float, float]:
    """The FLOPs of all updates of a model, those that its seed phase stands for included, and of its last update.

    The parent of a seed phase is a dense model.
    """
    architecture, vocab_size = model.architecture, run.types
    begun = model.first_step
    dense, own = (
        model.step_tokens * training_flops_per_token(one, vocab_size, architecture.context)
        for one in (architecture.unrouted, architecture)
    )
    return dense * begun + own * (model.updates - begun), own


def _seconds_to_add(run: Run, model: Model) -> float:
    """The mean seconds of steps of the trainings of the model's experts, or of its adaptations; NaN for none."""
    if model.kind.expert_scope == "model":
        places = [part.place for part in model.parts]
    else:
        places = [adapted(model.row, domain) for domain in novel_domains(run)]
    seconds = [step_seconds(run.folder / "metrics" / f"{place}.jsonl") for place in places]
    return mean_of(each for each in seconds if each)
