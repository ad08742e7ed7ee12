"""The process that holds Ray: `python -m harness.trainers.verl.main JOB.json`, started by `watch.py`.

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
from pathlib import Path
from typing import Any

from harness.results import write_atomic
from harness.trainers.verl.job import GRACE_S, Job, composed_of, read_job
from harness.trainers.verl.settings import build_of, environment, merged, verl_settings


def compose_config(job: Job) -> Any:
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
            from verl.trainer.ppo.v1 import trainer_base

            from harness.trainers.verl.trainer import Trainer

            trainer_base.TRAINER_REGISTRY["sync"] = Trainer  # the mode's name also chooses verl's replay buffer
            super().run(config)

    return ray.remote(Runner)


def outcome(error: BaseException | None) -> dict[str, str]:
    """How a run ended, by the class of what Ray brought here."""
    if error is None:
        return {"kind": "ok", "reason": ""}
    cause = getattr(error, "cause", None) or error
    kinds = {"Stopped": "stopped", "Diverged": "diverged"}
    kind = kinds.get(type(cause).__name__, "failed")
    words = str(cause).strip().splitlines() or [type(cause).__name__]
    reason = words[0] if kind != "failed" else f"{type(cause).__name__}: {words[-1]}"
    return {"kind": kind, "reason": reason, "traceback": "".join(traceback.format_exception(error))}


def _stop_when_alone(job: Job) -> None:
    """Where the cell is gone, end the step, write a checkpoint and leave, as if it had asked."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    job.stop_file.touch()
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGTERM)


def main(path: str) -> int:
    """Run the job that a JSON file describes."""
    job = read_job(Path(path))
    os.environ.update(environment(job))
    import ray
    from ray.exceptions import RayError
    from verl.trainer.main_ppo import run_ppo

    def leave(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    fcntl.flock(os.open(job.folder, os.O_RDONLY), fcntl.LOCK_EX)  # until this process ends
    threading.Thread(target=_stop_when_alone, args=(job,), daemon=True).start()
    error: BaseException | None = None
    try:
        run_ppo(compose_config(job), task_runner_class=runner())
    except (RayError, ValueError, RuntimeError, AssertionError, KeyboardInterrupt, OSError) as caught:
        error = caught
        traceback.print_exception(caught)
    finally:
        ray.shutdown()
    found = outcome(error)
    write_atomic(job.folder / "outcome.json", json.dumps(found, indent=1).encode())
    return 0 if found["kind"] in ("ok", "stopped") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
