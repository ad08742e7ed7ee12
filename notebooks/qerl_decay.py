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
# # QeRL: strength and decay of the noise
#
# **In the paper.** QeRL (arXiv 2510.11696) compares exponential, linear, cosine and logarithmic decay of AQN's
# sigma in a figure and chooses the exponential; start and end differ within the authors' own material (1e-2 or 5e-2
# to 5e-4 or 1e-4). Only the exponential formula is printed, the other three are reconstructed.
#
# **Here.** The four schedules at one strength and the accuracy of each against the same base without noise; beside
# them the exponential one at several strengths.
#
# **What this cannot show.** A benefit that needs exploration over thousands of steps. What it can show is whether
# noise hurts, and from which strength on.
#
# From the sweep `ablate_aqn`; `lowbit figures qerl_decay` draws the same figure into `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("qerl_decay")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
