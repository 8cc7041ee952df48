"""Loss of each model by the number of tokens trained on: on dev if the run measures it during training, else of the
batches.
"""

from typing import Any

from demix.progress import so_many
from demix.report.item import FigureItem, Group
from demix.report.material import Material

ITEM = FigureItem("Loss of each model in training", Group.FIGURES)
SKIPPED = 0.1


def make(material: Material) -> tuple[Any, str]:
    import altair as alt

    from demix.report.curves import POINTS, token_axis, training_curves
    from demix.report.look import coloured, dashed, data_of, finite

    # The loss of masked tokens is no loss of next tokens.
    own = [model for model in material.run.trained if model.seed == material.run.seed and not model.masked]
    # A model trained without a domain is no better for what it need not predict.
    common = [name for name in material.training if all(name in model.domains for model in own)]
    steps = training_curves(material.metrics, material.run)
    dev = training_curves(material.metrics, material.run, "dev_loss", common)
    measured = len(dev) and {model.name for model in own} <= set(dev["model"])
    curves, what = (dev, "dev loss") if measured else (steps, "training loss")
    # All models fall alike at first, and so steeply that later differences could not be seen.
    curves = curves[curves["tokens"] >= SKIPPED * curves.groupby("model")["tokens"].transform("max")]
    names = {model.name: model.label for model in own}
    curves = curves[curves["model"].isin(names)]
    models = [label for name, label in names.items() if (curves["model"] == name).any()]
    last = curves[~curves["model"].isin([model.name for model in own if model.removed])].groupby("model")["loss"].last()
    # Losses of other domains, or of each model's own batches, do not compare.
    best = names[last.idxmin()] if len(last) and measured and common else ""
    records = [
        {"model": names[row.model], "tokens": row.tokens, "loss": finite(row.loss)} for row in curves.itertuples()
    ]
    legend = alt.Legend(title="model", symbolSize=300, symbolType="stroke")
    chart = (
        alt.Chart(data_of(records))
        .mark_line(point=POINTS)
        .encode(
            x=alt.X("tokens:Q", title="training tokens", axis=token_axis(6)),
            y=alt.Y("loss:Q", title=f"{what} (nats per token)", scale=alt.Scale(zero=False)),
            color=coloured("model", models, legend, sort=models),
            strokeDash=dashed("model", models, legend, sort=models),
            strokeWidth=alt.condition(alt.datum.model == best, alt.value(3.2), alt.value(1.4)),
        )
        .properties(width=620, height=340)
    )
    return (
        alt.vconcat(chart),
        (
            f"Mean over the dev splits of the {so_many(len(common), 'domain')} that all models train on, by the tokens "
            "trained on so far."
            if measured and common
            else "Mean over the dev splits of the domains that a model trains on, by the tokens trained on so far."
            if measured
            else "Mean loss of the batches by the tokens trained on so far; models see different mixes of domains."
        )
        + f" The first {SKIPPED:.0%} of the tokens and other seeds are left out."
        + " Of models that train on all domains the thick line ends lowest." * bool(best),
    )
