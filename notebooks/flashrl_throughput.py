# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # FlashRL: decode rate by model size
#
# **In the paper.** FlashRL (blog, OpenReview 8MHqvb4lK9) reports that quantized rollouts pay from about 14B
# parameters and long outputs on, and that below that the overhead of quantization eats the gain. Numbers per size
# are QuRL's (arXiv 2602.13953): INT8 over BF16 1.2 to 1.3 at 7B, 1.3 to 1.56 at 14B, 1.7 (A100) to 1.9 (H100) at
# 32B. Reported by the authors, at a batch that they do not name.
#
# **Here.** Decode rate over BF16 at the same size, batch and context on one H200: bare vLLM 0.24.0, dense shapes of
# Qwen2.5, dummy weights, a context of 2048 tokens. Grey bands are what QuRL's authors report for INT8.
#
# **What this cannot show.** Sizes below 7B: there the engine waited for the host, so those rates are left out, and
# whether the gain ends there is not in these numbers. Other GPUs. Accuracy: the weights are dummies. Intervals: a
# rate is the median over the steps of one engine.
#
# From the throughput map `throughput_h200`; `lowbit figures flashrl_throughput` draws the same figure into
# `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("flashrl_throughput")
display(drawn)

# %% [markdown]
# The numbers behind it:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
