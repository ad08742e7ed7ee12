"""Searches over knobs: Optuna proposes trials, every seed of a trial is an ordinary cell, and the study is committed.

    sweeps/search_x.yaml -> spec -> space (a trial's cells) -> trials (seed after seed, pruning) -> run (workers)
    results/searches/x.journal <- store      results/runs/x/ <- cells
    confirm, table, figures and tags read both

Optuna is imported here alone, and directly. Left out: searches over several machines at once (one file system, whose
locks hold, is asked for) and choosing GPUs, since every worker here runs its own cell.
"""
