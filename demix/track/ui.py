"""MLflow's server for this machine's browser alone; `make ui` starts it by `mlflow server --app-name demix`."""

import json
import os
from urllib.parse import quote

from mlflow.server.fastapi_app import app as mlflow_app
from mlflow.tracking import MlflowClient

from demix.launch.guarded import Guarded

# MLflow holds a whole request in memory. The largest requests of `track` are a figure and a table.
MOST_BYTES = 256 << 20
MOST_BODIES = 4
# A request with a body waits so long in all for the other side to send or to take bytes.
SECONDS = 60.0


TRAININGS = "tags.`demix.kind` = 'training'"
PERPLEXITY = "metrics.`perplexity_training`"
# What MLflow's button "Share" would store: addresses name no columns.
VIEW = {
    "searchFilter": TRAININGS,
    "orderByKey": PERPLEXITY,
    "orderByAsc": True,
    "selectedColumns": [PERPLEXITY, "metrics.`perplexity_novel`", "metrics.`dev_loss`"],
}


def links(uri: str, address: str) -> list[str]:
    """One line per experiment of the store at `uri`: its models with their perplexities, their curves, and all runs.

    The first is a shared view, a tag of the experiment, which is written here.
    """
    # In order of time MLflow would show the models below the whole run, folded away.
    order = quote("tags.`mlflow.runName`", safe="")
    curves = f"searchFilter={quote(TRAININGS, safe='')}&orderByKey={order}&compareRunsMode=CHART"
    client, lines = MlflowClient(tracking_uri=uri), []
    for one in client.search_experiments():
        # MLflow makes this one by itself.
        if one.name != "Default":
            client.set_experiment_tag(one.experiment_id, "mlflow.sharedViewState.demix", json.dumps(VIEW))
            runs = f"{address}/#/experiments/{one.experiment_id}/runs"
            lines.append(f"{one.name}: models {runs}?viewStateShareKey=demix, curves {runs}?{curves}, all runs {runs}")
    return lines


def app() -> Guarded:
    """What `mlflow server` serves. Prints the links of the store in the variable URI, which it is about to serve."""
    print(*links(os.environ["URI"], f"http://127.0.0.1:{os.environ['PORT']}"), sep="\n", flush=True)
    return Guarded(mlflow_app, MOST_BYTES, MOST_BODIES, SECONDS)
