"""Trainers: who holds the weights and takes the optimizer steps.

at_rest.py           frozen weights in bfloat16, between passes
checkpoint_clock.py  when a state to resume from is due, and at what share of a run's time
corrected_step.py    the update recipe of a batch: correct it, correct each update, its loss and metrics
dynamic_sampling.py  which prompts make a batch where those without a signal are dropped
engine_logp.py       log-probs that an engine gave, refused where they are NaN
evaluation.py        sampled accuracy on held-out questions, and its record
rollout_file.py      responses written out, where a launch asks for them
staleness.py         whose weights sample a step, and what is measured of their age
stopping.py          responses that end at a text of their task
task_evaluation.py   evaluations on tasks of their own: several answers a question, scored as matrices
local/               one process: float32 masters, forward, backward, optimizer
verl/                verl on Ray: FSDP and vLLM's servers
"""
