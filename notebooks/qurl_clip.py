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
# # QuRL: what the clip stops and ACR lets through
#
# **In the paper.** ACR (arXiv 2602.13953) divides the upper clip bound by the ratio of the truncated to the raw
# weight, so that tokens with a positive advantage are not clipped just because the sampler gave them a low
# probability. The summaries we have give no clip fractions, so there is no number to compare with; one of them even
# reads the rule the other way round, and the direction is marked as reconstructed in `lowbit methods qurl`.
#
# **Here.** The fraction of clipped tokens over training, and the part of it at the upper clip with a positive
# advantage, with four updates per batch.
#
# **What this cannot show.** Whether the authors' clip fraction looks like this. With one update per batch every
# ratio is 1 and nothing is clipped, so the fraction depends on the number of updates.
#
# From the sweep `ablate_qurl`; `lowbit figures qurl_clip` draws the same figure into `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("qurl_clip")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
