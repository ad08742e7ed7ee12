"""verl 0.9.1 as the trainer: the same methods on Ray, FSDP and vLLM's servers, without a fork.

    checks.py     what verl cannot do of a method, with the reason     settings.py  a run's config -> verl's settings
    job.py        what every process of a run reads                    data.py      the folder that a run starts from
    parent.py     start, follow, stop, take up; the record             driver.py    the process that holds Ray
    outcome.py    how a run ended, in words                            rows.py      verl's metrics as ours
    reference.py  accuracy in the reference precision

    plugin.py     registration                                         cpu.py       verl's platform for a CPU
    trainer.py    the driver's loop: advantages, corrections, metrics  objective.py our loss in verl's worker
    engine.py     FSDP around our decoder                              adapter.py   what leaves the trainer at a push
    server.py     vLLM's server                                        extension.py what a vLLM worker does with a push
    agent.py      prompts and rewards of our tasks

The upper part imports without verl; the rest runs inside its processes. Left out: Megatron, several GPUs per engine,
asynchronous modes.
"""
