"""Measurements of speed, as ratios inside one interleaved run, and simulations of the statistics.

__main__.py               every bench by its name
runner.py                 the frame of all benches: parsing, refusals, JSON, tables
timing.py                 timing of calls, contestants in turns

sampler.py                the embedded sampler against transformers
head.py                   log-probs from a wide vocabulary's head
long_sequences.py         an update on long sequences
fp8_layers.py             a decoder layer in FP8 against BF16
fp8_layers_model.py       the layer of that bench
vllm_engine.py            the vLLM engine on its device
vllm_engine_push.py       its pushes
vllm_engine_overhead.py   its rate against bare vLLM
vllm_engine_verl.py       verl's push beside ours
peers.py                  whole steps: ours, TRL's, verl's
peer_ours.py              our side of it
trl_step.py               TRL's side
peer_verl_sampler.py      the replay buffer of verl's side
verl_scaling.py           steps under verl on 1, 2 and 4 GPUs
folder_run.py             whole runs on a Hugging Face model's shape

coverage.py               a simulation of intervals and verdicts
coverage_figure.py        its intervals and figure
verdict_worlds.py         wrong verdicts in hard worlds
base_worlds.py            wrong words on single bases
look_worlds.py            wrong verdicts where a sweep is looked at while seeds arrive
"""
