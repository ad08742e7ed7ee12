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
# # FP16 against BF16
#
# **In the paper.** arXiv 2510.26788 reports up to 24 times less mismatch of sampler and trainer in FP16 than in
# BF16 (sequence level; KL 7.64 against 0.32), no loss of speed, and that the collapses of BF16 runs disappear
# without any correction.
#
# **Here.** k3 over 80 steps of bf16 with and without TIS, FP16 at both sites with loss scaling, FP16 or FP32 in the
# sampler alone, a head in FP32, and a sampler that is the trainer itself.
#
# **What this cannot show.** Kernel noise: both sites run the same torch code, so what differs is rounding alone,
# and `bf16` here means float32 training with rollouts rounded to BF16. The collapses that the paper starts from do
# not occur.
#
# From the sweep `fp16`; `lowbit figures fp16_mismatch` draws the same figure into `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("fp16_mismatch")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
