"""Parameters of each row of models and of a token by the number of experts that it takes, FLOPs of a token and of
training, bytes of gradients that experts exchange in training, and the time to add a domain.
"""

from typing import TYPE_CHECKING, Any

from demix.report.domains import mean_of
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import FAMILIES
from demix.report.table import Table
from demix.run.models import Model, adapted

if TYPE_CHECKING:
    from demix.report.families import Family

ITEM = TableItem("Families of models: parameters, FLOPs, bytes and seconds", Group.FAMILIES, 3, needs=(FAMILIES,))
# The numbers of experts a token whose cost is told.
TOP_K = (1, 2, 4)


def make(material: Material) -> Table:
    import pandas as pd

    from demix.report.families import by_label
    from demix.report.read import parent_notes

    rows = {label: _row(material, family) for label, family in by_label(material.run).items()}
    numbered = [
        f"{what} a token, {k}" for what in ("Parameters", "FLOPs") for k in (*(f"top-{k}" for k in TOP_K), "all")
    ]
    columns = ["Parameters", *numbered, "Updates", "FLOPs of training", "Bytes synchronised", "Seconds to add a domain"]
    return Table(
        "What a family costs: its parameters; the parameters and FLOPs of a token, by the number of experts that the "
        "token takes (top-k); the updates and FLOPs of training; the bytes of gradients that all experts must agree on "
        "in training; and the time to add a domain.",
        pd.DataFrame.from_dict(rows, orient="index").reindex(columns=columns),
        notes=(
            "Only weights by clusters, or one known domain, choose experts before any is computed. By all other rules "
            "a token costs what “all” says, whatever top-k is. Of a token-routed model “all” are the experts that a "
            "token chooses.",
            "FLOPs of training include activation checkpointing (section 5.1 of Narayanan et al. 2021) and a seed "
            "phase, which updates include, too. Bytes synchronised are 4 per update and parameter that experts share; "
            "in a seed phase they are 4 per parameter of the whole model. Several ranks of one expert also exchange "
            "the expert's own.",
            "Seconds to add a domain are those of steps, as a mean: over the adaptations to novel domains, or, where "
            "experts are whole models, over the experts' trainings after the seed phase.",
            *parent_notes(material.run, material.tokens_before),
        ),
        formats=dict.fromkeys(columns[:5], "{:,.0f}")
        | dict.fromkeys([*columns[5:9], "FLOPs of training"], "{:.3g}")
        | {"Updates": "{:,.0f}", "Bytes synchronised": "{:,.0f}", "Seconds to add a domain": "{:,.1f}"},
    )


def _row(material: Material, family: "Family") -> dict[str, Any]:
    """What one family costs, by column."""
    from demix.config.counts import parameters, unchosen_parameters
    from demix.plan.flops import scoring_flops
    from demix.report.families import all_training_flops

    vocab_size, model, architecture = material.run.types, family.model, family.architecture
    scope = model.kind.expert_scope
    shared, expert = parameters(architecture, vocab_size, expert_scope=scope)
    dense = architecture.unrouted
    # What all ranks must agree on after each update; a seed phase is that of a dense model.
    agreed = shared if model.kind.has_experts else shared + expert
    row: dict[str, Any] = {"Parameters": float(shared + family.experts * expert)}
    for most, k in (*((f"top-{k}", k) for k in TOP_K if k < family.experts), ("all", family.experts)):
        row[f"Parameters a token, {most}"] = float(shared + k * expert - unchosen_parameters(architecture))
        row[f"FLOPs a token, {most}"] = float(scoring_flops(architecture, vocab_size, k, scope))
    synchronised = agreed * (model.updates - model.first_step) + sum(parameters(dense, vocab_size)) * model.seed_step
    return row | {
        "Updates": float(model.updates),
        "FLOPs of training": all_training_flops(model, material.run, material.tokens_before),
        "Bytes synchronised": 4.0 * synchronised,
        "Seconds to add a domain": _seconds_to_add(material, model),
    }


def _seconds_to_add(material: Material, model: Model) -> float:
    """The mean seconds of steps of the trainings of the model's experts, or of its adaptations; NaN for none."""
    from demix.report.read import step_seconds

    if model.kind.expert_scope == "model":
        places = [part.place for part in model.parts]
    else:
        places = [adapted(model.row, domain) for domain in material.novel]
    seconds = [step_seconds(material.metrics / f"{place}.jsonl") for place in places]
    return mean_of(each for each in seconds if each)
