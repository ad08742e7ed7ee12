"""Speed measurements: ratios inside one interleaved run, never single timings.

__main__.py               every bench by its name
runner.py                 the frame of all benches: options, refusals, JSON, tables
timing.py                 timing of calls, contestants in turns

start.py                  the start of the command line
overhead.py               time of a step outside its work, memory of a cell
sampler.py                the embedded sampler against transformers
grpo_step.py              a GRPO step against TRL and the bare update
trl_step.py               TRL's side of it
fp8_flow.py               a Jet-RL step, and new KV scales
preparations.py           GPTQ, UAQ, AQN and KV scales
rilq.py                   RILQ's fit, refit and staleness
wordmath.py               problems a second of the generator

head.py                   log-probs from a wide vocabulary's head
long_sequences.py         an update on long sequences
fp8_layers.py             decoder layers in FP8 against BF16
fp8_layers_model.py       the layers of that bench
fp8_layers_parts.py       its quantizers and products, each alone
sync.py                   a weight sync on one GPU
sync_model.py             the weights of that bench
sync_verl.py              verl's sync for it
vllm_engine.py            the vLLM engine on its device
vllm_engine_push.py       its pushes
vllm_engine_overhead.py   its rate against bare vLLM
vllm_engine_verl.py       verl's push beside ours
peers.py                  whole steps: ours, TRL's, verl's
peer_ours.py              our side of it
peer_verl_sampler.py      the replay buffer of verl's side
verl_scaling.py           steps under verl on 1, 2 and 4 GPUs
folder_run.py             whole runs on a Hugging Face model's shape

coverage.py               a simulation of intervals and verdicts
coverage_intervals.py     the intervals in it
coverage_figure.py        its figure
verdict_worlds.py         wrong verdicts in hard worlds
base_worlds.py            wrong words on single bases
look_worlds.py            wrong verdicts where a sweep is looked at while seeds arrive
"""
