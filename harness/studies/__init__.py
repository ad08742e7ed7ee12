"""Studies: one question and one command each.

search/         knobs searched with Optuna
replay/         every correction on the same stored rollouts
parity/         the emulation of formats against vLLM's kernels
throughput/     tokens per second of vLLM by size, precision, batch and context
early_warning/  signals that rise before a run collapses
break_even/     sizes and lengths from which a precision pays for a whole step
capacity/       GPUs that a model takes
until_decided.py  further seeds for the arms of a sweep that need them
stage_rates.py  measured costs of the stages of a step on an H200
"""
