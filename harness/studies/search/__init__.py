"""Searches over knobs: Optuna proposes trials, every seed of a trial is an ordinary cell, and the study is committed.

    sweeps/search_x.yaml -> spec -> space (a trial's cells) -> trials (seed after seed, pruning) -> run (workers)
    results/searches/x.journal <- store      results/runs/x/ <- cells
    confirm, table, figures and tags read both

    spec.py      a search as its YAML file says it
    space.py     the cells of a trial
    run.py       the queue of workers
    trials.py    one trial, seed after seed
    cells.py     one cell of a trial
    pruning.py   rules that give a trial up
    store.py     the study on disk
    confirm.py   the best trial on fresh seeds
    table.py     tables and every trial as JSON
    figures.py   figures
    tags.py      the trial of a cell, for MLflow

Optuna is imported here alone, and directly. Left out: searches over several machines at once (one file system, whose
locks hold, is asked for) and choosing GPUs, since every worker here runs its own cell.
"""
