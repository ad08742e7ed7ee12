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
# # Corrections on the same rollouts
#
# **In the papers.** TIS (FlashRL), MIS, IcePop and the sequence-level rules are each shown by their authors through
# training curves, where the rollouts of two runs differ from the first update on, so that a better curve may be
# luck.
#
# **Here.** The replay laboratory: every correction on the *same* stored rollouts, compared with the expected step
# of an exact sampler. Bias, direction and variance of one step, in units of the exact step.
#
# **What this cannot show.** Training. A rule with little bias may still learn worse over many steps, and one that
# drops nearly everything has little variance and no use.
#
# From the records of `lowbit replay`; `lowbit figures replay_corrections` draws the same figure into
# `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("replay_corrections")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
