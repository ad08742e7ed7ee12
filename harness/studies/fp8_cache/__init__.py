"""FP8 cache: what the scales of an FP8 KV cache do to a policy's log-probs, rule by rule, at equal weights.

    folder -> answers of the exact policy, and how large its keys, values and queries get (`answers`, `magnitudes`)
           -> scales by every rule, and over a range of factors (`scales`)
           -> the same answers scored through a rounded cache (`attention`), a row a rule (`study`)
           -> records -> table, figure (`report`, `figure`)

    attention.py    softmax attention over a cache that is rounded, in place of a decoder's own
    answers.py      answers of the exact policy, log-probs of given answers, and their divergence
    magnitudes.py   largest keys, values and queries over prompts and over answers, and how sharp attention is
    scales.py       rules that give scales
    study.py        the rules of one folder measured
    record.py       results/fp8_cache/<name>.json
    report.py       the page
    figure.py       the figure

Weights and everything else stay exact, so that a row is the cache's alone. Left out: kernels, 16-bit arithmetic, and
scales of a token or a block.
"""
