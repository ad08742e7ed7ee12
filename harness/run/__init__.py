"""One run in one process: the GRPO step, rollout batches, evaluations and the record.

cell.py          the process of a run: resume, train, and leave a record whatever happens
checks.py        refusals before a run starts
build.py         model, trainer and engines, built from the configuration
run.py           the live parts of a run, and its state for a resume
loop.py          the GRPO step
collect.py       one rollout batch: prompts, samples, rewards, layout
samplers.py      several samplers of one batch, each with its share of every prompt
policies.py      the trained policy as a Hugging Face folder, and its codes
partial.py       responses that go on over several steps and versions of the policy
staleness.py     weights of earlier steps for the sampler, as in asynchronous training
dump.py          responses written out, where a launch asks for them
gpu_sharing.py   one GPU for trainer and engine, which sleeps while the trainer updates
evaluate.py      evaluation of saved weights apart from training
record.py        the result of a run from what it reached
"""
