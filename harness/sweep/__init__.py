"""Sweeps: a YAML file of values becomes cells; cells without a finished result run; every cell leaves a record.

sweeps/<name>.yaml -> plan -> cells, skipped, excluded -> queue -> results/runs/<name>/

planning.py     cells of a sweep from its YAML file
rules.py        cells that a sweep leaves out, or that are picked from it
queue.py        cells that have no result yet, run one after another
retry.py        failures that are tried again, and the time limit
progress.py     a bar of steps and a line per finished cell on the terminal
preview.py      what a sweep will do and take
folder_time.py  seconds of a Hugging Face model from its config.json and a device's rates
forecast.py     seconds that cells will take, from finished cells
timetable.py    the same on workers and GPUs that cells share
launchers/      processes of this machine, of a Ray cluster, or jobs of Slurm
"""

from harness.sweep.planning import SWEEPS as SWEEPS
from harness.sweep.planning import Planned as Planned
from harness.sweep.planning import Sweep as Sweep
from harness.sweep.planning import check_possible as check_possible
from harness.sweep.planning import file_of as file_of
from harness.sweep.planning import narrowed as narrowed
from harness.sweep.planning import plan as plan
from harness.sweep.planning import read_sweep as read_sweep
from harness.sweep.planning import seed_words as seed_words
from harness.sweep.planning import sweep_names as sweep_names
from harness.sweep.planning import with_default_precision as with_default_precision
from harness.sweep.planning import with_seeds as with_seeds
from harness.sweep.queue import finished as finished
from harness.sweep.queue import run_sweep as run_sweep
from harness.sweep.queue import stored as stored
from harness.sweep.rules import read_rule as read_rule
