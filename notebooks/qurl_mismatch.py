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
# # QuRL: the mismatch grows while training
#
# **In the paper.** QuRL (arXiv 2602.13953, known to us through summaries, figure numbers are not) reports that the
# KL divergence of the INT8 sampler from the trainer grows from 0.002 to 0.025 over 1000 steps, and that single
# token ratios reach 1e5.
#
# **Here.** The same two quantities over 80 steps of sorting digits at int8 and int4, with emulated formats, and over
# 150 steps of word problems at int8, on vLLM's kernels: without a correction, with TIS (`flashrl`), with
# ACR (`qurl_acr`) and with ACR and UAQ (`qurl`): k3, which estimates that KL, and the largest |log ratio| of a
# batch.
#
# **What this cannot show.** The slow growth over a thousand steps of a 7B model. A model of 0.2M parameters moves
# further in 80 steps than theirs, so only the direction can be compared: up on digits, down on word problems.
#
# From the sweeps `ablate_qurl` and `main_wordmath`; `lowbit figures qurl_mismatch` draws the same figure into
# `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("qurl_mismatch")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
