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
# # QeRL: reward of a shared 4-bit base
#
# **In the paper.** QeRL (arXiv 2510.11696) reports for GSM8K at 3B: LoRA over BF16 76.1, over NF4 76.1, over NVFP4
# 83.3, with AQN 83.7, full fine-tuning 84.4; at 7B 88.1, 85.0, 88.5, 90.8 and 91.2. On BigMath at 7B its AQN is
# below plain NVFP4 (36.4 against 37.0). One seed each, as far as the tables say.
#
# **Here.** The sampler's reward over 80 steps, and accuracy during training in the reference precision minus that
# of BF16 LoRA, over five seeds.
#
# **What this cannot show.** Whether a 4-bit base helps a pretrained model on mathematics. Here the base is small,
# stopped early, and every weight of it still has something to learn.
#
# From the sweep `ablate_aqn`; `lowbit figures qerl_reward` draws the same figure into `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("qerl_reward")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
