"""Sweeps: a YAML file of values becomes cells; cells without a finished result run; every cell leaves a record.

    sweeps/<name>.yaml -> plan -> cells, skipped, excluded -> queue -> results/runs/<name>/

`plan` derives the cells and `rules` leaves some out; `queue` runs what has no result. Left out: what a cell costs
(`harness.sweep.forecast`), and what is tried again or is too late (`harness.sweep.retry`).
"""

from harness.sweep.planning import SWEEPS as SWEEPS
from harness.sweep.planning import Planned as Planned
from harness.sweep.planning import Sweep as Sweep
from harness.sweep.planning import plan as plan
from harness.sweep.planning import read_sweep as read_sweep
from harness.sweep.planning import sweep_names as sweep_names
from harness.sweep.planning import with_default_precision as with_default_precision
from harness.sweep.queue import FINISHED as FINISHED
from harness.sweep.queue import finished as finished
from harness.sweep.queue import run_sweep as run_sweep
from harness.sweep.queue import stored as stored
