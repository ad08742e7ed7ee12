"""The drawing of reports: style, bands over seeds, differences with intervals, performance profiles.

style.py         panels of curves, one per precision
titles.py        titles that say what a figure shows, computed from the leaderboard and the curves
colours.py       the colours of every figure
save.py          a figure written to a file
bands.py         curves of an arm with a band over its seeds
bases.py         every run above the base that it started from
along.py         what age, updates a batch and rate cost
differences.py   differences from the control with their intervals
profiles.py      performance profiles, and the probability of improvement
"""
