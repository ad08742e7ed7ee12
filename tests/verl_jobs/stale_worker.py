"""A few steps of stale rollouts through verl's own training worker, a process per rank:
`python -m tests.verl_jobs.stale_worker STORE RANK RANKS FOLDER`.

In the folder stand job.json and batch.pt as in `worker.py`. stale<RANKS>.pt gets, from rank 0, a row per step:
the whole weights before it, what a push for its rollouts and one for an evaluation send, the log-probs of rank 0's rows
by the weights of now and by those that sampled, the loss scale, and the same rows of a second worker that went on from
a checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.verl_jobs.worker import make_worker, meet, tensordict

STEPS, SAVED_AT = 5, 3


def stepped(
    worker: Any, saved: dict[str, torch.Tensor], numbers: dict[str, Any], first: int, folder: Path
) -> list[Any]:
    """Steps from `first` on; after SAVED_AT of them a checkpoint is written, as by the driver after a push."""
    from verl.workers.utils.padding import no_padding_2_padding

    from harness.trainers.staleness import sampled_by
    from harness.trainers.verl.engine import VERSION

    age, rows = worker.engine.past.age, list[dict[str, Any]]()

    def scored(**asked: Any) -> torch.Tensor:
        found = worker.infer_batch(tensordict(saved, **numbers, **asked))["log_probs"]
        return no_padding_2_padding(found, tensordict(saved))

    def held(stream: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in stream}

    for step in range(first, STEPS):
        stream = worker.engine.get_per_tensor_param()[0]
        pushed, version = stream.for_rollouts(step)
        row: dict[str, Any] = {"version": version, "pushed": held(pushed), "evaluated": held(stream)}
        row["kept"] = list(worker.engine.past.versions)
        row["scale"] = worker.engine.scaler.get_scale()
        if step == SAVED_AT and not first:
            worker.engine.save_checkpoint(str(folder), global_step=step)
        row["stale"] = scored(**{VERSION: sampled_by(step, age)})
        row["now"] = scored()
        row["after"] = held(stream)
        worker.train_batch(tensordict(saved, **numbers, global_batch_size=len(saved["ids"])))
        rows.append(row)
    return rows


def main(store: str, rank: str, ranks: str, folder: str) -> None:
    from harness.trainers.verl import job as jobs
    from harness.trainers.verl.job import read_job
    from harness.trainers.verl.settings import environment

    job = read_job(Path(folder) / "job.json")
    os.environ.update(environment(job))
    meet(store, rank, ranks)
    os.environ[jobs.JOB] = str(Path(folder) / "job.json")
    saved = {name: t[int(rank) :: int(ranks)] for name, t in torch.load(Path(folder) / "batch.pt").items()}
    numbers = {"temperature": job.config.engine.temperature, "calculate_entropy": True, "compute_loss": False,
               "global_token_num": [int(n) for n in saved["prompt_lens"] + saved["lengths"]]}  # fmt: skip
    kept = Path(folder) / f"checkpoint{ranks}"
    rows = stepped(make_worker(job), saved, numbers, 0, kept)
    again = make_worker(job)
    again.engine.load_checkpoint(str(kept), del_local_after_load=False)
    resumed = stepped(again, saved, numbers, SAVED_AT, kept)
    if rank == "0":
        torch.save({"rows": rows, "resumed": resumed}, Path(folder) / f"stale{ranks}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
