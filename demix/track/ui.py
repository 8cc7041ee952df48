"""MLflow's server, for browsers of this machine; `make ui` starts it by `mlflow server --app-name demix`."""

from mlflow.server.fastapi_app import app as mlflow_app

from demix.launch.guarded import Guarded

# MLflow keeps a whole request in memory. The largest requests of `track` are a figure and a table.
MAX_BYTES = 256 << 20


def app() -> Guarded:
    """The application that `mlflow server` serves."""
    return Guarded(mlflow_app, MAX_BYTES)
