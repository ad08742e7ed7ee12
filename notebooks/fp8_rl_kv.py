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
# # FP8-RL: FP8 weights, FP8 KV cache, FP8 training
#
# **In the paper.** FP8-RL (arXiv 2601.18150) reports that FP8 rollouts lose accuracy without a correction and match
# BF16 with TIS, that the KL is largest with FP8 rollouts alone, smaller end to end in FP8, smallest in BF16, and up
# to 44 % more rollout throughput with an FP8 cache. Scales of the cache are measured again after every update.
#
# **Here.** The same arms at block FP8: without a correction, with an FP8 cache besides, recalibrated with TIS or
# MIS, and with FP8 in the trainer too; Jet-RL's single flow below. Mismatch on the left, accuracy on the right: sorting
# at two lengths, emulated, and word problems of 430 and 1300 tokens, questions included, on vLLM's FP8 kernels.
#
# **What this cannot show.** Speed, and what thousands of tokens do to a cache of 8 bits.
#
# From the sweeps `standard` and `main_wordmath`; `lowbit figures fp8_rl_kv` draws the same figure into
# `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("fp8_rl_kv")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
