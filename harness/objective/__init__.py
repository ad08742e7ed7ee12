"""One update as pure functions of tensors: advantages, the policy loss and the mismatch metrics.

advantage.py   group advantages, overlong penalty, groups that carry information
loss.py        surrogates, regularisers, and aggregation with global denominators
mismatch.py    metrics of sampler against trainer, of corrections and of clips
"""
