"""The replay laboratory: every correction on the same stored rollouts, against the step of an exact sampler.

    collect   policy --(exact sampler, R batches)------> reference      safetensors + JSON, one file per sampler
                     --(exact sampler, other draws, S)-> control
                     --(each format, S batches)--------> int8, nvfp4 ...
    evaluate  batch -> correction -> dloss/dlogp [B, T] -> gradient [D] --> bias, variance, cosine -> JSON
    report    JSON -> tables/replay.{csv,md}, figures/replay/*.png

    sampling.py     rollout batches of one policy by every sampler
    store.py        stored batches
    arms.py         loss-side methods as arms, and an arm's dloss/dlogp
    gradients.py    gradients of the policy from dloss/dlogp
    moments.py      bias, variance and cosine of a gradient estimator from few batches
    evaluation.py   every arm on every stored batch
    tables.py       CSV and Markdown
    figure.py       the figure

A batch is one rollout batch of the training loop, and its gradient is the one the loop would take, before clipping its
norm. The estimand is the expected step of the same algorithm with an exact sampler: E over batches from the trainer's
own float32 policy, group advantages and denominators included, without correction. A method that replaces the objective
has its own such step. So the control has no bias by
construction, and a rule pays for whatever makes its step another one. Batch b of every sampler has the same prompts and
the same random numbers (common random numbers): samplers that agree draw equal tokens and the noise cancels in the
difference. Parts of methods that change weights, modules or formats are left out; what is evaluated is the loss side.
"""
