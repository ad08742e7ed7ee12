"""The Python interface in one script: compose a cell, run it, plan and run a sweep, read and judge the records.

    python from_python.py RESULTS_FOLDER

It runs four tiny cells on a CPU, in seconds, or in a minute where the base model is not there yet.
"""

import sys
from pathlib import Path

from harness.config.load import load
from harness.config.resolve import resolve
from harness.config.schema import Launch
from harness.records.run_result import read_results, read_series
from harness.report.leaderboard import contrasts, leaderboard
from harness.run.cell import run_cell
from harness.sweep import plan, read_sweep, run_sweep

TINY = [
    "model=xs", "task=chain", "model.spread=0", "trainer.steps=4", "trainer.eval_every=2", "task.num_eval=32",
    "algo.num_prompts=4", "algo.group_size=4",
]  # fmt: skip


def main(results: Path) -> None:
    """Run a cell and a sweep, and print what was found."""
    cell = resolve(load([*TINY, "method=flashrl", "precision=int4"]))
    record = run_cell(cell, Launch(results=str(results)))
    series = read_series(results / "runs" / "runs", record.run_id)
    print(record.status, record.name, f"k3 of the last step {series['mismatch/kl_k3'][-1]:.2e}")

    file = results / "three_arms.yaml"
    file.write_text(
        "question: Does INT4 cost accuracy, and does TIS give it back?\n"
        f"overrides: [{', '.join(TINY)}]\n"
        "arms:\n  - {method: bf16}\n  - {method: [naive, flashrl], precision: int4}\n"
        "seeds: [0]\n"
    )
    sweep = read_sweep(str(file))
    planned = plan(sweep)
    run_sweep(planned, Launch(results=str(results), sweep=sweep.name), workers=1, on_event=lambda event: None)
    records = read_results(results / "runs" / sweep.name)
    judged = ["control", "difference", "verdict"]
    print(leaderboard(records)[["arm", "seeds", "auc", *judged]].to_string(index=False))  # against BF16 rollouts
    print(contrasts(records, baseline="naive")[["arm", *judged]].to_string(index=False))  # at the same precision


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python from_python.py RESULTS_FOLDER")
    try:
        main(Path(sys.argv[1]))
    except ValueError as error:  # of the user, one line
        sys.exit(f"error: {error}")
