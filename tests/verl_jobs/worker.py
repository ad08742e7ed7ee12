"""Saved batches through verl's own training worker, a process per rank: `python -m ... STORE RANK RANKS FOLDER ...`.

In a folder stand job.json and batch.pt: tensors by name, [B, T] each, and `ids` [B, L], `prompt_lens` [B],
`lengths` [B]; data parallel rank r of R takes the rows r, r + R, .... out<RANKS>.pt gets, from rank 0, the whole
gradients by checkpoint name, the log-probs of its rows before the update, those of the reference, how far the update
moved the weights, the loss scale after it, the metrics of all ranks, and which rows each pass of the update took, in
the order in which they lay end to end.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils

COLUMNS = ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_prob", "lowbit_weight", "lowbit_keep",
           "lowbit_clip_low", "lowbit_clip_high", "loss_mask")  # fmt: skip


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def tensordict(saved: dict[str, torch.Tensor], **numbers: Any) -> Any:
    """The batch as verl's driver stores it: sequences of their own lengths."""
    from verl.utils import tensordict_utils as tu

    ids, prompts, lengths = saved["ids"], saved["prompt_lens"].tolist(), saved["lengths"].tolist()
    pairs = list(zip(prompts, lengths, strict=True))
    whole = [row[: p + n] for row, (p, n) in zip(ids, pairs, strict=True)]
    tensors = {
        "input_ids": nested(whole),
        "position_ids": nested([torch.arange(len(row)) for row in whole]),
        "prompts": nested([row[:p] for row, (p, _) in zip(ids, pairs, strict=True)]),
        "responses": nested([row[p : p + n] for row, (p, n) in zip(ids, pairs, strict=True)]),
        "response_mask": nested([torch.ones(n, dtype=torch.int64) for n in lengths]),
        "lowbit_step": torch.zeros(len(ids), dtype=torch.int64),
    }
    tensors |= {name: nested([row[:n] for row, n in zip(saved[name], lengths, strict=True)]) for name in COLUMNS
                if name in saved}  # fmt: skip
    return tu.get_tensordict(tensors, non_tensor_dict=numbers)


def make_worker(job: Any, role: str = "actor") -> Any:
    """verl's training worker as `ActorRolloutRefWorker.init_model` makes it, told what one on a GPU is told. `role`:
    actor, or ref, the frozen reference."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    from harness.trainers.verl import objective, plugin
    from harness.trainers.verl.driver import compose_config

    plugin.check_registered()
    on_gpu = replace(job, config=replace(job.config, trainer=replace(job.config.trainer, device="cuda")))
    config = compose_config(on_gpu).actor_rollout_ref
    model, actor = omega_conf_to_dataclass(config.model), omega_conf_to_dataclass(config.actor)
    engine = actor.engine if role == "actor" else omega_conf_to_dataclass(config.ref.fsdp_config)
    engine.use_dynamic_bsz = True
    engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = job.launch.micro_batch_tokens
    actor.optim.total_training_steps = job.config.trainer.steps
    worker = TrainingWorker(
        TrainingWorkerConfig(model_type="language_model", model_config=model, engine_config=engine,
                             optimizer_config=actor.optim, checkpoint_config=actor.checkpoint)
    )  # fmt: skip
    worker.reset()
    worker.set_loss_fn(objective.loss)
    return worker


def meet(store: str, rank: str = "0", ranks: str = "1") -> None:
    """Join the other ranks by a file."""
    os.environ |= {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": "0", "DIST_INIT_METHOD": f"file://{store}",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}  # fmt: skip


def metrics_of(done: Any) -> dict[str, float]:
    """Metrics of an update, over all ranks."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric

    metrics = {}
    for name, value in tu.get(done, "metrics").items():
        of_all = value if isinstance(value, list) else [value]
        metrics[name] = float(Metric.aggregate_dp(of_all) if isinstance(of_all[0], Metric) else of_all[0])
    return metrics


def held(worker: Any) -> dict[str, torch.Tensor]:
    """Tensors that a push would send."""
    return {name: tensor.clone() for name, tensor in worker.engine.get_per_tensor_param()[0]}


def one(folder: Path, rank: int, ranks: int) -> None:
    """The batch of one job's folder."""
    from verl.workers.utils.padding import no_padding_2_padding

    from harness.models.adapters import named_weights
    from harness.trainers.local import forward
    from harness.trainers.verl import job as jobs

    os.environ[jobs.JOB] = str(folder / "job.json")
    jobs.current_job.cache_clear()
    jobs.current_method.cache_clear()
    job = jobs.current_job()
    if job.launch.logits_mib == 1:
        forward.FLOATS_PER_MIB = 4 * job.shape.vocab_size
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    worker = make_worker(job)
    first, every = worker.engine.get_data_parallel_rank(), worker.engine.get_data_parallel_size()
    saved = {name: t[first::every] for name, t in torch.load(folder / "batch.pt", weights_only=True).items()}
    numbers = {"temperature": job.config.engine.temperature, "calculate_entropy": True, "compute_loss": False,
               "global_token_num": [int(n) for n in saved["prompt_lens"] + saved["lengths"]]}  # fmt: skip

    def scored(by: Any) -> torch.Tensor | None:
        found = by.infer_batch(tensordict(saved, **numbers))  # of ranks that share sequences one answers
        return None if found is None else no_padding_2_padding(found["log_probs"], tensordict(saved))

    logp = scored(worker)
    ref_logp = scored(make_worker(job, "ref")) if job.algo.kl_coef else None
    gradients: dict[str, torch.Tensor] = {}
    update = worker.engine.optimizer_step
    before = held(worker)

    def recorded() -> float:  # verl forgets them after the update
        named = named_weights(worker.engine.module.get_submodule("decoder"))
        gradients.update((name, p.grad.full_tensor().clone()) for name, p in named if p.grad is not None)
        return update()

    worker.engine.optimizer_step = recorded
    passes, lay_out = list[list[int]](), worker.engine.prepare_model_inputs
    lengths = (saved["prompt_lens"] + saved["lengths"]).tolist()
    numbered = {tuple(row[:n]): i for i, (row, n) in enumerate(zip(saved["ids"].tolist(), lengths, strict=True))}

    def noted(micro_batch: Any) -> Any:
        passes.append([numbered[tuple(row.tolist())] for row in micro_batch["input_ids"].unbind()])
        return lay_out(micro_batch)

    worker.engine.prepare_model_inputs = noted
    done = worker.train_batch(tensordict(saved, **numbers, global_batch_size=len(saved["ids"])))
    moved = max(float((tensor.double() - before[name].double()).abs().max()) for name, tensor in held(worker).items())
    metrics = {} if done is None else metrics_of(done)
    if rank == 0:
        found = {"logp": logp, "ref_logp": ref_logp, "gradients": gradients, "metrics": metrics}
        found |= {"moved": moved, "loss_scale": worker.engine.scaler.get_scale() if worker.engine.scaler else None}
        found["passes"] = passes
        found["products"] = json.loads(job.products_file.read_text(encoding="utf-8"))
        found["compiled_frames"] = torch._dynamo.utils.counters["frames"]["ok"]
        torch.save(found, folder / f"out{ranks}.pt")


def without_machine_code() -> None:
    """Everything of compiling but the last stage, which takes minutes on a CPU."""
    from harness.models.decoder import Layer
    from harness.trainers.local import compiling

    real = Layer.compile
    Layer.compile = lambda self, **values: real(self, **values, backend="aot_eager")
    compiling.check_compiler = lambda device: None


def with_kernels() -> None:
    """FP8 layers compute by the definition of the kernels, as those of a GPU would."""
    from harness.numerics import fp8_gemm
    from harness.trainers.local import products

    products.kernels_of = lambda device, wanted: fp8_gemm.reference()


def main(store: str, rank: str, ranks: str, *folders: str) -> None:
    from harness.trainers.verl.job import read_job
    from harness.trainers.verl.settings import environment

    os.environ.update(environment(read_job(Path(folders[0]) / "job.json")))
    meet(store, rank, ranks)
    without_machine_code()
    with_kernels()
    for folder in folders:
        one(Path(folder), int(rank), int(ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
