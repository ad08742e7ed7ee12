"""Records on disk and the numbers made from them.

run_result.py      the result of one run: strict JSON, with its series in Parquet
sample_scores.py   avg@k, pass@k and maj@k of several answers a question
paths.py           the layout of a results folder
policies.py        the saved policies of a run
cell_progress.py   the step of a running cell, for its launcher
results_lock.py    the lock that keeps two sweeps out of one results folder
statuses.py        statuses of runs, and those that count as finished
sweep_file.py      a sweep's question and baselines, from its YAML file
looks.py           looks at a sweep that ran until its arms were decided
json_rows.py       JSON files with a row of a list on each line
packed.py          a large sweep in one file of the repository
folder.py          sweeps and comparisons that a results folder offers
arms.py            cells that differ only in their seeds, with labels
effective_bits.py  bits that a plan or a run stores for a weight
running_mean.py    the running mean of a series with gaps
metric_names.py    the meaning of every logged number, and its name in other frameworks
stats/             intervals over few seeds, paired differences, verdicts
"""
