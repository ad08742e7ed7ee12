"""verl's synchronous trainer with our advantages, corrections, metrics, evaluations, pushes and checkpoints.

verl samples, scores log-probs, dispatches updates and moves weights; what decides the numbers is computed here from the
whole batch, as in `harness.run.loop`. Every step leaves a line in series.jsonl; a checkpoint is written after that
line, so that the two never disagree. Left out: profiles of whole vocabularies, updates that see each other (`checks`).
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer
from verl.workers.utils.padding import response_to_nested

from harness.api import KVProtocol, Step, TokenBatch
from harness.config.compose import has_hook
from harness.objective.advantage import shaped
from harness.objective.mismatch import batch_mismatch, correction_metrics
from harness.records.run_result import EvalRecord, write_atomic
from harness.start.prepare import task_of
from harness.trainers.checkpoint_clock import CheckpointClock
from harness.trainers.corrected_step import NUM_AFTER_SYNC, batch_correction, update_correction
from harness.trainers.local.policy import is_loss_scaled
from harness.trainers.local.trainer import Diverged
from harness.trainers.verl import objective, plugin, rows
from harness.trainers.verl.adapter import evaluation_step
from harness.trainers.verl.job import current_job, current_method
from harness.trainers.verl.parent import read_lines

READ = ("uid", "responses", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "entropy",
        "ref_log_prob", "extra_fields")  # fmt: skip
POLL_S = 0.05
"""Between two looks at whether a batch is sampled."""


class Stopped(RuntimeError):  # noqa: N818 - a request, not a defect
    """The run was asked to stop; a checkpoint of its last step is written."""


class Servers:
    """vLLM's replicas as far as a part's `after_sync` needs an engine."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def calibrate_kv(self, prompts: Any, protocol: KVProtocol = "trainer") -> None:
        """Calibrate every replica from the same prompts."""
        if current_method().plan.rollout_kv is not None:
            ray.get([h.lowbit_calibrate.remote([list(p) for p in prompts], protocol) for h in self.handles])


class Trainer(PPOTrainerSync):
    """Trainer of one run, in verl's driver."""

    def _build_replay_buffer(self) -> Any:
        """Make verl's buffer, but look for finished answers more often than its fixed 2 s."""
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = POLL_S
        look = buffer._sync_metadata_from_transfer_queue

        def look_and_tell() -> None:
            look()
            self._at("answers", sum(len(answers) for answers in buffer.partitions.values()))

        buffer._sync_metadata_from_transfer_queue = look_and_tell
        return buffer

    def _at(self, stage: str, count: int = 0) -> None:
        """Tell the cell where the step is, where that is news: a driver that hangs writes nothing."""
        news = {"step": getattr(self, "global_steps", 0), "stage": stage, "count": count}
        if news != getattr(self, "told", None):
            self.told = news
            write_atomic(current_job().stage_file, json.dumps(news).encode())

    def on_init_end(self) -> None:
        """Set our loss, read our files and push once, after verl has built and loaded everything."""
        plugin.check_registered()
        self.job, self.composed = current_job(), current_method()
        self.row: dict[str, Any] = {}
        self.clock = CheckpointClock(self.job.launch)
        task, count = task_of(self.job.config), len(self.val_dataset)
        self.questions = task.sample("eval", range(count))
        self._take_up()
        self.actor_rollout_wg.set_loss_fn(objective.loss)
        self._push(self.global_steps)

    def _take_up(self) -> None:
        """Cut the files back to the checkpoint that verl has loaded, and read the parts' memories."""
        done = read_lines(self.job.series_file)[: self.global_steps]
        if len(done) < self.global_steps:
            raise RuntimeError(f"{self.job.series_file} has {len(done)} rows, the checkpoint {self.global_steps} steps")
        evals = [e for e in read_lines(self.job.evals_file) if e["record"]["step"] <= self.global_steps]
        for path, lines in ((self.job.series_file, done), (self.job.evals_file, evals)):
            write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        saved = self.job.checkpoints / f"global_step_{self.global_steps}" / "memory.json"
        if saved.exists():
            self.composed.memory[:] = json.loads(saved.read_text(encoding="utf-8"))

    def _push(self, global_steps: int) -> None:
        """Push weights to every replica, run the parts' `after_sync`, and read the passport that all must share."""
        self._at("push")
        self.checkpoint_manager.update_weights(global_steps)
        servers = Servers([replica.servers[0] for replica in self.checkpoint_manager.replicas])
        prompts = [item.prompt for item in self.questions[:NUM_AFTER_SYNC]]
        if any(has_hook(part, "after_sync") for part in self.composed.parts):
            self.composed.after_sync(servers, prompts)  # pyright: ignore[reportArgumentType]
        found = ray.get([h.collective_rpc.remote("lowbit_passport") for h in servers.handles])
        told = [json.loads(answer) for answers in found for answer in answers]
        shared = rows.one_passport([answer["passport"] for answer in told])
        write_atomic(self.job.passport_file, json.dumps(shared).encode())
        row = {f"sync/{name}": value for name, value in told[0]["metrics"].items()}
        row["sync/num_replicas"] = float(len(servers.handles))
        if (pushed := self.job.folder / "push.json").exists():
            row |= json.loads(pushed.read_text(encoding="utf-8"))
        self.row = self.row | row  # another dictionary: an evaluation puts the one before its pushes back

    def on_step_end(self) -> None:
        """Push the updated weights to the sampler."""
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self.finished, self.row = self.row, {}
            self._push(self.global_steps)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._at("log-probs")
        return super()._compute_old_log_prob(batch, metrics)

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._at("reference")
        return super()._compute_ref_log_prob(batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._at("update")
        return super()._update_actor(batch, metrics)

    def _has_noise(self) -> bool:
        return any(has_hook(part, "sync") for part in self.composed.parts)

    def on_validate_begin(self) -> None:
        """Push without noise, before an evaluation."""
        self.eval_start, pushed = time.monotonic(), self.row
        if self._has_noise():
            self.checkpoint_manager.sleep_replicas()
            self._push(evaluation_step(self.global_steps))
        self.row = pushed

    def on_validate_end(self) -> None:
        """Push with noise again, after an evaluation."""
        pushed = self.row
        if self._has_noise():
            self.checkpoint_manager.sleep_replicas()
            self._push(self.global_steps)
        self.row = pushed

    def _validate(self) -> dict[str, float]:
        """Evaluate where an evaluation is due: verl also asks when a run is resumed in between."""
        trainer, step = self.job.config.trainer, self.global_steps
        is_due = step % trainer.eval_every == 0 or step >= trainer.steps
        if not is_due or any(line["record"]["step"] == step for line in read_lines(self.job.evals_file)):
            return {"val/accuracy": math.nan}
        return super()._validate()

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: dict[str, list[Any]], *args: Any,
        **kwargs: Any,
    ) -> dict[str, float]:  # fmt: skip
        """One evaluation of the fixed questions by the run's own sampler."""
        record = rows.evaluation(self.job, self.questions, reward_extra_infos_dict, self.global_steps)
        line = {"record": record.model_dump(), "seconds": time.monotonic() - self.eval_start}
        with self.job.evals_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return {"val/accuracy": accuracy_of(record)}

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Rewards to advantages, log-probs to corrections, over the whole batch; stored for `objective.loss`."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(READ))
        nested, uids = data["response_mask"], data.pop("uid").tolist()
        facts = [extra["reward_extra_info"] for extra in data.pop("extra_fields").tolist()]
        dense = {name: data[name].to_padded_tensor(0) for name in data.keys()}  # noqa: SIM118 - a TensorDict
        found, self.row_of_batch = self._corrected(dense, uids, facts)
        columns = {name: response_to_nested(tensor, nested) for name, tensor in found.items() if tensor.dim() == 2}
        columns |= {name: tensor for name, tensor in found.items() if tensor.dim() == 1}
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(columns, batch_size=len(batch))
        )

    def _corrected(
        self, dense: dict[str, Tensor], uids: list[str], facts: list[dict[str, Any]]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Correct a batch: (columns for the workers, the batch's metrics)."""
        job, composed, algo = self.job, self.composed, self.job.algo
        sampled = dense["response_mask"].bool()
        numbers = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
        group = torch.tensor([numbers[uid] for uid in uids])
        lengths = sampled.sum(-1)
        truncated = torch.tensor([f["truncated"] > 0 for f in facts])
        mask, adv, row = shaped(algo, job.max_new_tokens, [f["acc"] for f in facts], lengths, truncated, sampled, group)
        row["reward/unparsable_frac"] = sum(f["is_parsable"] == 0 for f in facts) / len(facts)
        step = Step(index=self.global_steps - 1, total=job.config.trainer.steps, seed=job.config.seed)
        old, rollout = dense["old_log_probs"].float(), dense["rollout_log_probs"].float()
        if not torch.isfinite(old[sampled]).all():
            raise Diverged("a log-probability of the trainer is not finite")
        extras = {"ref_logp": dense["ref_log_prob"].float()} if "ref_log_prob" in dense else {}
        batch = TokenBatch(token_ids=dense["responses"], mask=mask, adv=adv, rollout_logp=rollout, old_logp=old,
                           step=step, extras=extras)  # fmt: skip
        row |= batch_mismatch(batch, dense["entropy"].float())
        # One update a batch: the current policy is the old one.
        c = update_correction(composed, batch_correction(composed, batch, algo), batch, old, algo)
        row |= correction_metrics(c, mask) | {"rollout/tokens": float(lengths.sum()), "rollout/gen_batches": 1.0}
        columns = objective.columns(c, step) | {"advantages": adv, "returns": adv, "loss_mask": mask.long()}
        return columns, row

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: Any, global_steps: int, epoch: int
    ) -> None:
        """Write the step's line, then a checkpoint where one is due, then end where that is asked for."""
        self.finished |= self.composed.memory_row()
        row = rows.step_row({**self.finished, **self.row_of_batch}, metrics, timing_raw)
        with self.job.series_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        rows.check_finite(row, global_steps - 1, is_scaled=is_loss_scaled(self.composed.plan))
        if self.job.is_timed:
            return
        is_last = global_steps >= self.job.config.trainer.steps
        is_stopping = self.job.stop_file.exists()
        if is_last or is_stopping or self.clock.is_due(global_steps):
            with self.clock.saving():
                self._save_checkpoint()
        if is_stopping and not is_last:
            raise Stopped(f"step {global_steps}")

    def _save_checkpoint(self) -> None:
        self._at("checkpoint")
        folder = self.job.checkpoints / f"global_step_{self.global_steps}"
        write_atomic(folder / "memory.json", json.dumps(self.composed.memory).encode())
        super()._save_checkpoint()


def accuracy_of(record: EvalRecord) -> float:
    """Mean accuracy of the answers; NaN where nothing was answered."""
    return math.nan if record.accuracy is None else record.accuracy
