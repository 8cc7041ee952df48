"""The clusters that each task uses most, by routing, with their terms: of models that learn from clusters; as in
appendix A.7 of the c-BTM paper.
"""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import CLUSTERS, TASKS
from demix.report.table import Table
from demix.run.systems import clustered

ITEM = TableItem("The clusters that tasks use most", Group.TASKS, 2, needs=(TASKS, CLUSTERS))
# The clusters of a model and task that are shown.
MOST = 3


def make(material: Material) -> Table:
    import pandas as pd

    rows, parts = material.task_weights, []
    routings = list(dict.fromkeys(rows["routing"]))
    for model in clustered(material.run):
        of_model, terms = rows[rows["model"] == model.row], material.clusters.terms[model.data]
        for task in material.run.config.tasks:
            weights = of_model[of_model["task"] == task].pivot(index="expert", columns="routing", values="weight")
            used = 100 * weights.nlargest(MOST, "cluster").reindex(columns=routings)
            used["Terms"] = [", ".join(terms[cluster]) for cluster in used.index]
            parts.append(used.set_axis([f"{model.label}, {task}: {cluster}" for cluster in used.index]))
    frame = pd.concat(parts).rename_axis(columns=None)
    return Table(
        "The mean weight of a cluster's expert over the tests of a task, in percent, by routing (c-BTM, appendix A.7): "
        f"of each model and task the {MOST} clusters that the routing by clusters weights most, with the terms that "
        "weigh most in their centres.",
        frame,
        notes=(
            "A weight is that with which a routing predicts the first token of a label, by demonstrations and text "
            "alone. “updating” reads test labels. Columns are routings of the table of accuracies.",
        ),
        formats=dict.fromkeys(routings, "{:.1f}"),
        long=len(frame) > 40,
    )
