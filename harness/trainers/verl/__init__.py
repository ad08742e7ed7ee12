"""verl 0.9.1 as the trainer: the same methods on Ray, FSDP and vLLM's servers, without a fork.

    checks.py      runs that verl cannot do, refused with the reason
    settings.py    a run's configuration as verl's settings
    job.py         the files of a run that every process reads
    data.py        the folder that a run starts from
    parent.py      the cell: start, follow, stop and resume the driver
    driver.py      the process that holds Ray
    outcome.py     the end of a run, in words
    rows.py        verl's metrics as ours
    reference.py   accuracy in the reference precision

    plugin.py      our classes in verl's registries
    cpu.py         verl's platform for a CPU
    trainer.py     verl's training loop with our advantages, corrections, updates and metrics
    sampling.py    prompts and answers of a rollout batch
    objective.py   our loss in verl's worker
    engine.py      FSDP around our decoder
    ulysses.py     ranks that share a sequence
    past.py        earlier versions of a rank's weights, for stale rollouts
    adapter.py     the weights that leave the trainer at a push
    server.py      vLLM's server
    servers.py     all of them as an engine, for evaluations and calibration
    extension.py   a push inside a vLLM worker
    agent.py       prompts and rewards of our tasks

The upper part imports without verl; the rest runs inside its processes. Left out: Megatron, and verl's asynchronous
modes, which 0.9.1 does not have stable: `one_step_off_policy` and `fully_async_policy` stand in `verl.experimental`;
`separate_async` stops at its start without replicas on the trainer's GPUs (its `logger.info(..., flush=True)` raises
TypeError) and sends weights past the rollout's update, where our parts transform them; `colocate_async` aborts
unfinished answers at every push and goes on with the new weights, so a response has tokens of several versions.
"""
