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
# # Reasoning-QAT: distillation or fine-tuning, GPTQ or rounding
#
# **In the paper.** arXiv 2601.14888 reports that RL from a low-bit model needs a good start. For
# R1-Distill-Qwen-1.5B at W3G128 its ablation has GPTQ and fine-tuning 55.27, GPTQ and distillation 56.45, with GRPO
# after it 58.51 (a reviewer called the last step inside the noise); RL from a rounded model is said to collapse.
# Taken from summaries; learning rates and steps of the distillation were not reachable.
#
# **Here.** Accuracy in the run's own format before and after RL, and accuracy during RL in the reference precision
# against bf16, for each start at int4 and int3.
#
# **What this cannot show.** Whether distillation beats fine-tuning on reasoning text. The teacher here is a small
# model that was stopped early, and the settings of the stage are ours.
#
# From the sweep `ablate_qat`; `lowbit figures qat_start` draws the same figure into `results/figures/paper`.

# %%
from IPython.display import display

from harness.published.figures import draw
from harness.published.figures.drawn import folded

drawn = draw("qat_start")
display(drawn)

# %% [markdown]
# The numbers behind it, with 95 % intervals over seeds in brackets:

# %%
display(folded(drawn.numbers))

# %% [markdown]
# What they say, computed from them:

# %%
print(*drawn.says, sep="\n")
