"""The command line: a file per command, named as the command is.

main.py            the command `lowbit`: find the command's file, parse, run, say what was wrong
options.py         types and options that several commands declare
docs_site/         the hook of the documentation site

sweep.py           run a sweep
run.py             run one cell
paper.py           published recipes, launched
eval.py            evaluate a saved policy or a model folder
export.py          copy the saved policy of a run
base.py            train base models
search.py          search knobs
warm.py            DeepGEMM's kernels, compiled beforehand

report.py          tables and figures of a sweep
figures.py         paper figures, figures of sweeps, notebooks
methods.py         the methods with parts, precisions and paper
metrics.py         the metrics of a step
runs.py            runs of a sweep by name
passport.py        planned and realized formats of a run
browse.py          MLflow's pages over the results
site.py            the static site of the results

claims.py          published claims, tested
replay.py          stored rollouts, and every correction on them
throughput.py      the speed of bare vLLM
parity.py          the emulation against vLLM's kernels
early_warning.py   the signal that moves first before a collapse
probe.py           the mismatch of every format for a model folder
mismatch.py        mismatch of the stand-ins beside published values
fp8_cache.py       an FP8 cache's scales, rule by rule
layers.py          the linear layers in which a format's mismatch arises
dose.py            lost accuracy against mismatch times length
advise.py          format and correction for a model, a length and some GPUs
break_even.py      the size and length from which a precision pays
capacity.py        memory and time of a step on so many GPUs

doctor.py          check of the installation
results.py         verify, import, track or pack result files
completion.py      completion by the shell's tab key
"""
