"""The process that holds Ray: `python -m harness.trainers.verl.driver JOB.json`, started by `parent.py`.

verl's own entry point does the same from a command line; here its configuration is composed with our settings, and its
task runner gets our trainer. What became of the run is written to outcome.json. Exit code 0 for a run that ended or was
stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness.foundation.whole_file import write_atomic
from harness.trainers.verl.job import GRACE_S, VerlJob, composed_of, current_job, read_job
from harness.trainers.verl.outcome import outcome
from harness.trainers.verl.settings import build_of, environment, merged, verl_settings

STARTS = 3
"""Starts of a local Ray before a run gives up: its node gives up on helper processes that take more than 15
seconds, which a busy machine or a cold disk exceeds; the next start finds their code in memory."""

PORTS = (10000, 16000)
"""Below those that Linux (32768 on) and gVisor (16000 on) hand out."""


def compose_config(job: VerlJob) -> Any:
    """verl's tree with our settings, checked by verl."""
    import verl
    from hydra import compose, initialize_config_dir
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from harness.trainers.verl.data import prompt_length

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        tree = compose("ppo_trainer")
    build = build_of(job.config.trainer.device)
    config = merged(tree, verl_settings(job, composed_of(job), build, prompt_length(job)))
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    return config


def runner() -> Any:
    """verl's task runner, as a Ray actor, with our trainer in the place of the synchronous one."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1

    base = TaskRunnerV1.__ray_metadata__.modified_class

    class Runner(base):
        def run(self, config: Any) -> None:
            from verl.single_controller.ray import RayWorkerGroup
            from verl.trainer.ppo.v1 import trainer_base

            from harness.trainers.verl.trainer import Trainer

            trainer_base.TRAINER_REGISTRY["sync"] = Trainer  # the mode's name also chooses verl's replay buffer
            if current_job().launch.ray_address is None:
                trainer_base.RayWorkerGroup = partial(RayWorkerGroup, master_port_range=own_ports(os.getpid()))
            super().run(config)

    return ray.remote(Runner)


def own_ports(pid: int) -> list[int]:
    """[First, end) of the ports from which the ranks' meeting point takes the first free one. Below those that systems
    hand out, and jobs that start together begin at different ones: verl lets go of a port that it found free, and
    listens there half a minute later."""
    return [PORTS[0] + pid % (PORTS[1] - PORTS[0] - 1000), PORTS[1]]


def _stop_when_alone(job: VerlJob) -> None:
    """End the step, write a checkpoint and leave where the cell is gone, as if it had asked."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    job.stop_file.touch()
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGTERM)


def attempt(action: Callable[[], None]) -> BaseException | None:
    """Run the action and return what ended it; None where it came to its end. Ray's start raises no class narrower than
    Exception."""
    try:
        action()
    except BaseException as caught:  # process edge: whatever ended the run, the cell must hear of it
        traceback.print_exception(caught)
        return caught
    return None


def main(path: str) -> int:
    """Run the job that a JSON file describes."""
    job = read_job(Path(path))
    os.environ.update(environment(job))
    import ray

    def leave(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def run() -> None:
        from verl.trainer.main_ppo import run_ppo

        run_ppo(compose_config(job), task_runner_class=runner())

    signal.signal(signal.SIGTERM, leave)
    fcntl.flock(os.open(job.folder, os.O_RDONLY), fcntl.LOCK_EX)  # until this process ends
    threading.Thread(target=_stop_when_alone, args=(job,), daemon=True).start()
    for _ in range(STARTS):
        error = attempt(run)
        is_start = isinstance(error, Exception) and not isinstance(error, ValueError | ImportError)
        if not is_start or ray.is_initialized() or job.launch.ray_address is not None:
            break
        print("Ray did not start", flush=True)
    found = outcome(error)
    write_atomic(job.folder / "outcome.json", json.dumps(found, indent=1).encode())
    attempt(ray.shutdown)  # a run that has its outcome is not lost by how Ray leaves
    return 0 if found["kind"] in ("ok", "stopped") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
