"""MLflow as a view of the results: an experiment per sweep, a run per arm, a child run per cell.

    lowbit/<sweep>      the question and saved comparisons in its description
      overview          tables and figures
      qurl int8 n=8     an arm: means over seeds with intervals, the difference to the control, the verdict
        ... seed 0      a cell: config, curves, evaluations, passport, data set, base model

    store.py      the connection, and the experiment of a sweep
    tracker.py    cells and arms logged one at a time
    rebuild.py    an experiment from result files
    links.py      addresses of filtered lists of runs
    server.py     `lowbit browse`

The only import of mlflow. Everything here is rebuilt from the result files (`lowbit results import`), so an outage
costs one warning and no run. By default the store is SQLite in `<results>/mlflow/`; MLFLOW_TRACKING_URI names another.
"""

from harness.viewers.mlflow.rebuild import log_sweep
from harness.viewers.mlflow.server import browse
from harness.viewers.mlflow.store import PREFIX, QUIET, store_uri
from harness.viewers.mlflow.tracker import Tracker

__all__ = ["PREFIX", "QUIET", "Tracker", "browse", "log_sweep", "store_uri"]
