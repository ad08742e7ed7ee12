"""Layers: the linear layers of a policy in which the mismatch of a rollout format arises, one by one.

    folder -> answers of the exact policy, and its log-probs (`harness.studies.fp8_cache.answers`)
           -> the same answers scored with one layer in the format, with all, and with all but the worst (`study`)
           -> records -> table (`report`)

    study.py        one policy measured
    report.py       results/layers/<name>.json, and the page

Everything but the layers at hand stays exact float32. Left out: mixtures of experts, kernels, a cache in low precision.
"""
