"""Parity: one policy, the same sampled tokens, scored by vLLM's kernels, by the emulation of its formats, in float32.

    measuring (command) -> driver -> one worker process per format -> statistics -> record -> table, figure

    measuring.py    the formats asked for on one device
    driver.py       one worker process per format
    worker.py       the process of one format
    scoring.py      log-probs of given responses
    statistics.py   differences of three scores of the same tokens
    record.py       results/parity/<device>.json
    table.py        the table
    figure.py       the figure

It answers what a number of the embedded engine means: how much of its distance to float32 is the format that both
share, and how much is left to kernels. Left out: speed, and whether training is affected.
"""
