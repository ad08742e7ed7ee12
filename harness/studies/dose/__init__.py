"""Dose: does the lost accuracy follow k3 x length, whatever the format, the length, the size and the engine?

    packed records -> runs with their loss against BF16 rollouts of the same base and seed, and their doses (`points`)
                   -> mean loss and rate of collapse by dose, per correction (`curve`)
                   -> what format, length, size and engine add to the dose (`beyond`)
                   -> doses compared by their error on held-out sizes and lengths (`candidates`)

    points.py       runs with their loss, and several doses of each
    curve.py        loss by dose, and the dose at which a loss is reached
    beyond.py       tests of what a factor adds to the dose
    candidates.py   candidate doses on held-out settings
    study.py        the whole study, and its finding
    predictions.py  predictions from a probe, and how they came out
    report.py       sentences and tables
    figure.py       the figure

Runs on one base share their start and their control, so bases are the clusters of every interval. Left out: doses that
the records do not allow (the variance of a response's log-ratio, weights by advantage).
"""
