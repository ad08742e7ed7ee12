"""The drawing of reports: style, bands over seeds, differences with intervals, performance profiles.

style.py         panels of curves, one per precision
bands.py         curves of an arm with a band over its seeds
differences.py   differences from the control with their intervals
profiles.py      performance profiles, and the probability of improvement
"""
