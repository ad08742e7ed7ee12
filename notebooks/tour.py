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
# # A tour
#
# Reinforcement learning of language models spends most of its time on rollouts, so people sample in 8 or 4 bits. The
# sampler is then no longer the policy that is trained. This project measures what that costs and what repairs it.
# Five minutes: the results of a sweep, its verdicts, what a run really computed with, how far the sampler was off, and
# one small run of your own.
#
# The results of the sweep `corrections` are in the repository: sorting 8 digits, a model of 0.2M parameters, 16
# combinations of method and rollout format, five seeds each.

# %%
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib as mpl
import pandas as pd
from IPython.display import Image, display

from harness.config.load import load
from harness.config.resolve import resolve
from harness.config.schema import Launch
from harness.published.figures import RESULTS
from harness.published.figures.drawn import png
from harness.records.arms import Arm, group_arms
from harness.records.folder import load_series
from harness.records.run_result import read_results
from harness.report.leaderboard import leaderboard
from harness.report.plots.bands import Band, over_steps
from harness.report.plots.style import STYLE, looks_of, small_multiples
from harness.report.tables import render_terminal
from harness.run.cell import run_cell

results = read_results(RESULTS / "runs" / "corrections")
print(len(results), "runs, for example:")
first = results[0]
print(first.name, first.status, {key: round(first.summary[key] or 0.0, 3) for key in ("auc", "k3_median")})

# %% [markdown]
# ## Verdicts
#
# One row per arm. *AUC* is the mean accuracy of the evaluations after step 0: of the *BF16 policy*, comparable between
# rows, and *as deployed*, in the arm's own format. *To control* is the AUC minus that of `bf16` over equal seeds and
# questions. The verdict says what the interval of that difference allows: `equal` only where it lies within 0.03.

# %%
print(render_terminal(leaderboard(results)))

# %% [markdown]
# ## Passports
#
# A format that did not take effect would make every number a lie, so each run reads back from the live engine, tensor
# by tensor, what it computed with. These are the tensors of the first layer of an int4 run.

# %%
run = next(run for run in results if run.config["precision"]["name"] == "int4")
tensors = pd.DataFrame((run.passport or {})["weights"])
display(tensors[tensors["name"].str.contains("layers.0.")])

# %% [markdown]
# ## Mismatch
#
# k3 estimates the KL divergence of the sampler from the trainer, in nats per token. One panel per rollout format,
# `bf16` in each, median of the seeds and all seeds as a band. A correction of the *loss* does not bring the sampler
# nearer: it changes what the trainer makes of the rollouts.

# %%
arms = group_arms(results)
series = load_series(RESULTS / "runs" / "corrections", results)


def k3(arm: Arm) -> Band:
    """Median over seeds of one arm's mismatch."""
    return over_steps(arm, series, "mismatch/kl_k3", "median", window=5)


looks = looks_of(arms, "bf16")
with mpl.rc_context(fname=STYLE):
    figure = small_multiples(arms, k3, "policy step", "k3, nats per token", looks=looks, control="bf16", is_log=True)
if figure is not None:
    display(Image(png(figure, dpi=110)))

# %% [markdown]
# ## A run of your own
#
# On the command line: `lowbit run method=flashrl precision=int4 model=xs task=chain trainer.steps=4`. Here one from
# Python: four small steps of the smallest model on a base that is in the repository, in a folder that is thrown away.

# %%
words = ["method=flashrl", "precision=int4", "model=xs", "model.spread=0", "task=chain", "task.num_eval=64"]
config = resolve(load([*words, "trainer.steps=4", "trainer.eval_every=2", "algo.num_prompts=8", "algo.group_size=4"]))
with TemporaryDirectory() as folder:
    for base in (RESULTS / "bases").glob("xs-chain8-b0-*"):
        shutil.copytree(base, Path(folder) / "bases" / base.name)
    own = run_cell(config, Launch(results=folder, sweep="tour"))
print(own.name, own.status, {key: round(own.summary[key] or 0.0, 4) for key in ("final_accuracy", "k3_median")})

# %% [markdown]
# ## From here
#
# * `lowbit methods` lists every method; `lowbit sweep quick` shows a comparison of 40 runs.
# * The other notebooks draw figures of the papers again from our results.
# * `results/tables/` has every sweep as a table, `LOG.md` what was tried, also in vain.
# * A method of your own is one file: `docs/add-a-method.md`.
