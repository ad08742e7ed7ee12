"""Any sweep, shown: leaderboard, verdict tables, sentences and figures.

scores.py        scores of an arm's runs
leaderboard.py   a row per arm: scores with intervals, difference to the control, verdict
tables.py        the leaderboard as Markdown, CSV and terminal text
collapse_times.py  when runs collapse, with a log-rank test against the control
failures.py      share of the answers by their first mistake
task_scores.py   scores of the runs' evaluations on other tasks
main_table.py    the table of a sweep for a README
verdicts.py      verdicts in words, and what single bases show where the mean is open
sentences.py     findings of a sweep in words
figures.py       the figures of a sweep
plots/           styles, curves, differences and profiles that figures are drawn from
"""
