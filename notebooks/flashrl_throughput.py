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
# # FlashRL: rollout throughput by model size
#
# **In the paper.** FlashRL (blog, OpenReview 8MHqvb4lK9) reports that quantized rollouts pay from about 14B
# parameters and long outputs on, and that below that the overhead of quantization eats the gain. Numbers per size
# are QuRL's (arXiv 2602.13953): INT8 over BF16 1.2 to 1.3 at 7B, 1.3 to 1.56 at 14B, 1.7 (A100) to 1.9 (H100) at
# 32B. Reported by the authors, not reproduced.
#
# **Here.** Rollout tokens per second of the embedded engine at sizes xs to l, and the ratio to bf16 at the same
# size and seeds.
#
# **What this cannot show.** Hardware. Every format is emulated in torch: a low-bit rollout does the work of a
# full-precision one and rounds besides, so its ratio is the cost of the emulation. The right panel has the reported
# ratios of real kernels beside it. `harness.studies.break_even` and the GPU engine are where speed is measured.
#
# From the sweep `size`; `lowbit figures flashrl_throughput` draws the same figure into `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("flashrl_throughput")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
