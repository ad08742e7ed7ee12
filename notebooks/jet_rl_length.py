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
# # Jet-RL: the gap to bf16 by response length
#
# **In the paper.** Jet-RL (arXiv 2601.14243) reports that a BF16 trainer with FP8 rollouts loses more the longer
# responses are: at 8K tokens Llama3.1-8B falls to 13.0 on average (BF16 23.2, Jet-RL 25.2), at 16K the mixed recipe
# collapses within 20 steps. One FP8 flow for both sides stays within about a point of BF16. The mixed baseline has
# no importance correction.
#
# **Here.** Accuracy during training minus that of bf16 at the same length and seeds, and the median mismatch. Emulated
# on a CPU for 8 to 32 digits to sort: FP8, and 4 bits, where the same question has a larger answer. With vLLM's FP8
# kernels on an H200 for 64 and 256 digits: there TIS and one FP8 flow stand beside uncorrected rollouts.
#
# **What this cannot show.** Lengths of thousands of tokens. Accuracy is that in BF16; `jet_rl` and uncorrected FP8 lose
# it together, and keep it as rolled (`results/tables/main_h200_main.md`).
#
# From the sweeps `length` and `main_h200`; `lowbit figures jet_rl_length` draws the same figure into
# `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("jet_rl_length")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
