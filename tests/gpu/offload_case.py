"""Two updates of verl's worker on a GPU, of random sequences: `python -m tests.gpu.offload_case FOLDER`.

`out.pt` gets the losses, all weights before and after as one vector, their bytes, and the bytes at rest.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.verl_jobs.worker import held, make_worker, meet, metrics_of, tensordict


def batch() -> dict[str, torch.Tensor]:
    """Eight rows: prompts of 6 tokens and responses of 12."""
    draws = torch.Generator().manual_seed(2)
    ids, rows = torch.randint(3, 32, (8, 18), generator=draws), (8, 12)
    values = {name: torch.randn(rows, generator=draws) * 0.01 - 3.4 for name in ("rollout_log_probs", "old_log_probs")}
    ones = {f"lowbit_{name}": torch.ones(rows) for name in ("weight", "keep")}
    clips = {"lowbit_clip_low": torch.full(rows, 0.2), "lowbit_clip_high": torch.full(rows, 0.28)}
    return {
        "ids": ids, "prompt_lens": torch.full((8,), 6), "lengths": torch.full((8,), 12),
        "advantages": torch.randn(8, 1, generator=draws).expand(rows).contiguous(),
        "loss_mask": torch.ones(rows, dtype=torch.int64), **values, **ones, **clips,
    }  # fmt: skip


def main(folder: str) -> None:
    from harness.trainers.verl import job as jobs
    from harness.trainers.verl.settings import environment

    path = Path(folder)
    os.environ.update(environment(jobs.read_job(path / "job.json")))
    meet(str(path / "store"))
    job = jobs.current_job()
    worker, saved = make_worker(job), batch()
    numbers = {"temperature": 1.0, "calculate_entropy": True, "compute_loss": False,
               "global_token_num": [18] * 8}  # fmt: skip
    before, losses = held(worker), list[float]()
    for _ in range(2):
        worker.infer_batch(tensordict(saved, **numbers).to("cuda"))
        done = worker.train_batch(tensordict(saved, **numbers, global_batch_size=8).to("cuda"))
        losses.append(metrics_of(done)["lowbit_loss"])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    at_rest = torch.cuda.memory_allocated()
    after = held(worker)
    whole = [torch.cat([tensor.flatten().cpu().double() for tensor in some.values()]) for some in (before, after)]
    torch.save({"losses": losses, "before": whole[0], "after": whole[1], "at_rest": at_rest,
                "bytes": 4 * len(whole[0])}, path / "out.pt")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
