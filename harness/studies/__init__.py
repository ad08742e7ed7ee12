"""Studies: one question and one command each.

search/         knobs searched with Optuna
replay/         every correction on the same stored rollouts
parity/         the emulation of formats against vLLM's kernels
throughput/     tokens per second of vLLM by size, precision, batch and context
early_warning/  signals that rise before a run collapses
probe/          mismatch and costs of every rollout format for a model folder
fp8_cache/      scales of an FP8 cache, rule by rule, at equal weights
layers/         the linear layers in which a format's mismatch arises
dose/           lost accuracy against mismatch times length, over all records
advise/         format and correction for a model, a length and some GPUs
break_even/     sizes and lengths from which a precision pays for a whole step
capacity/       GPUs that a model takes
until_decided.py  further seeds for the arms of a sweep that need them
stage_rates.py  measured costs of the stages of a step on an H200
"""
