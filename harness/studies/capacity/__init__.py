"""Capacity: the number of GPUs that a model takes, from memory and time of a step by size, response length, precision
and number of GPUs.

    memory.py    bytes of a GPU while it samples and while it updates, from shapes
    host.py      bytes of a machine's main memory, from shapes
    place.py     work laid on GPUs: layouts, responses at a time, checkpoints, and what does not fit
    seconds.py   a step, from the rates of one H200 (`harness.studies.stage_rates`) and assumed bandwidths
    fastest.py   the fastest layout, and why not the others
    layouts.py   the table of layouts, planned and measured
    check.py     predictions against measurements
    report.py    tables
    figure.py    the picture

One GPU is the local trainer with an engine that sleeps, several are verl: FSDP over all GPUs, and the fastest of its
layouts. Left out: responses that end early (all have one length), shared prefixes, and everything
outside a step (evaluation, checkpoints on disk).
"""
