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
# # QeRL: entropy under quantization noise
#
# **In the paper.** QeRL (arXiv 2510.11696) claims that quantization noise acts as exploration: a 4-bit base, and
# more so one with noise on its norm gains (AQN), raises the entropy of the policy and with it the reward. We have
# its tables, not the values of its entropy curves.
#
# **Here.** Entropy of the trainer over 80 steps with full BF16 training, with LoRA over a BF16, NF4 and shared
# NVFP4 base, and with the paper's noise (sigma from 1e-2 to 5e-4) on the last and on BF16. On the right the first
# 20 steps alone, against the same base without noise.
#
# **What this cannot show.** Exploration of long reasoning. The task has one right answer per question and short
# responses. A less trained policy has more entropy too, which is why the right panel looks at the first steps,
# where accuracies are still close.
#
# From the sweep `ablate_aqn`; `lowbit figures qerl_entropy` draws the same figure into `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("qerl_entropy")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
