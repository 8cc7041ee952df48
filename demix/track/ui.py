"""MLflow's server for this machine's browser alone; `make ui` starts it by `mlflow server --app-name demix`."""

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


def links(uri: str, address: str) -> list[str]:
    """One line per experiment of the store at `uri`: its runs, and the curves of all its models side by side."""
    filtered = quote("tags.`demix.kind` = 'training'", safe="")
    # In order of time MLflow would show the models below the whole run, folded away.
    query = f"searchFilter={filtered}&orderByKey={quote('tags.`mlflow.runName`', safe='')}&compareRunsMode=CHART"
    lines = []
    for one in MlflowClient(tracking_uri=uri).search_experiments():
        # MLflow makes this one by itself.
        if one.name != "Default":
            runs = f"{address}/#/experiments/{one.experiment_id}/runs"
            lines.append(f"{one.name}: runs {runs}, models {runs}?{query}")
    return lines


def app() -> Guarded:
    """What `mlflow server` serves. Prints the links of the store in the variable URI, which it is about to serve."""
    print(*links(os.environ["URI"], f"http://127.0.0.1:{os.environ['PORT']}"), sep="\n", flush=True)
    return Guarded(mlflow_app, MOST_BYTES, MOST_BODIES, SECONDS)
