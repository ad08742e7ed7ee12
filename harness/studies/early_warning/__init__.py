"""Early warning: which signal moved first before a run collapsed, and by how many steps.

    series of every run -> collapsed at step t, healthy, or neither (`collapse`)
                        -> a statistic per signal and step; an alarm where it passes a threshold (`alarms`)
                        -> thresholds from healthy runs of other seeds, all signals at one false-alarm rate
                        -> recall, precision, lead in steps, and who was first (`scores`)

    collapse.py   the step at which a run collapsed
    alarms.py     signals as statistics per step, and their alarms
    scores.py     recall, precision and lead of every signal
    report.py     sentences and table
    figure.py     figures

A signal earns its place by warning before the reward itself does, so the drop of the reward is one of them. Left out:
why runs collapse.
"""
