"""Probe: how far the sampler of every rollout format is from the trainer, for one model folder, without training.

    folder x formats -> engine with the format, trainer in its own precision, both with the folder's weights
                     -> a batch of answers, scored by the trainer (`measure`)
                     -> mismatch, profiles, what corrections would do, accuracy, speed -> one record (`record`)

    measure.py   one format measured
    noise.py     the random noise that has a format's k3
    record.py    the formats of a folder, the record and its file
    report.py    sentences and tables
    figure.py    the figure

The BF16 rows are the noise floor, sampled twice with other prompts and random numbers. Left out: training, and so
everything that a mismatch does to it, which `harness.studies.dose` looks at.
"""
