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
# # QuRL: do updates reach the codes?
#
# **In the paper.** UAQ (arXiv 2602.13953, eq. 11 and 12) divides weights by s and multiplies the gains before them
# by s, once, so that an update is larger relative to a quantization step; updates of 1e-7 to 1e-6 are said to be
# swallowed by INT8 codes. Accuracy on AIME24 is reported as 30.63, 31.25 and 29.15 for s = 1, 1.5 and 2 (a second
# summary has 27.88, 31.25 and 29.62).
#
# **Here.** The share of codes that change from one push to the next at s = 1.25, 1.5 and 2, over that without UAQ,
# and the accuracy. Stars are the control that changes no weight and multiplies learning rates instead. Derived
# beforehand: under Adam the step of a scaled code grows by s, under SGD by s squared; the lines say what the flips
# would gain if they grew as the step does, on the part of the codes that UAQ scales.
#
# **What this cannot show.** The swallowed updates. At learning rates at which a model of 0.2M parameters learns in
# 80 steps, codes flip all the time without help, so UAQ can only show what a larger learning rate shows.
#
# From the sweep `ablate_qurl`; `lowbit figures qurl_flips` draws the same figure into `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("qurl_flips")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
