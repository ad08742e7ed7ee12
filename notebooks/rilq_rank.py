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
# # RILQ: how much rank do compensating adapters need?
#
# **In the paper.** RILQ (arXiv 2412.01129, its tables 4 and 5 on rank) argues that adapters fitted on the output of
# the whole model hardly depend on their rank, while those fitted weight by weight (SVD, LoftQ) saturate above it.
# LLaMA-2-7B at 2 bits, perplexity on WikiText-2: 433.65 without adapters, 10.23 at rank 16, 10.01 at 32, 10.05 at
# 64, 10.12 at 128.
#
# **Here.** The adapters inside RL, which no paper has tried: median mismatch and accuracy against bf16 at ranks 2
# to 32, other starts, and the two other uses (trained by RL, refitted).
#
# **What this cannot show.** Ranks of large layers. A layer is 64 wide here, so rank 16 is a quarter of it; the
# paper's layers are 4096 wide.
#
# From the sweep `ablate_rilq`; `lowbit figures rilq_rank` draws the same figure into `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("rilq_rank")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
