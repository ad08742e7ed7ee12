"""verl's synchronous trainer with our advantages, corrections, metrics, evaluations, pushes and checkpoints.

verl samples, scores log-probs, dispatches updates and moves weights; what decides the numbers is computed here from the
whole batch, as in `harness.run.loop`, and every update is a call of its own on the rows that the local trainer would
take, so that parts see the policy between two of them. Every step leaves a line in series.jsonl; a checkpoint is
written after that line, so that the two never disagree. Left out: profiles of whole vocabularies.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.utils.padding import response_from_nested, response_to_nested

from harness.api import Step, TokenBatch
from harness.config.compose import has_hook
from harness.foundation.whole_file import write_atomic
from harness.objective.advantage import shaped
from harness.objective.mismatch import batch_mismatch, correction_metrics
from harness.records.run_result import EvalRecord, TaskEvalRecord
from harness.start.prepare import evaluation_tasks, task_of
from harness.tasks.prompt_order import prompt_indices
from harness.trainers.checkpoint_clock import CheckpointClock
from harness.trainers.corrected_step import (
    NUM_AFTER_SYNC,
    batch_correction,
    minibatches,
    needs_current_policy,
    take_batch,
    take_correction,
    update_correction,
)
from harness.trainers.dynamic_sampling import num_drawn
from harness.trainers.engine_logp import check_engine_logp
from harness.trainers.local.policy import is_loss_scaled
from harness.trainers.local.trainer import Diverged
from harness.trainers.rollout_file import Answer, RolloutFile
from harness.trainers.staleness import is_scored, measured, sampled_by
from harness.trainers.task_evaluation import Asked, asked, task_evaluation
from harness.trainers.verl import objective, plugin, rows, sampling
from harness.trainers.verl.adapter import evaluation_step
from harness.trainers.verl.engine import VERSION
from harness.trainers.verl.job import current_job, current_method
from harness.trainers.verl.parent import read_lines
from harness.trainers.verl.servers import Servers, ends_of

READ = ("responses", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "entropy",
        "ref_log_prob", "extra_fields")  # fmt: skip
POLL_S = 0.05
"""Between two looks at whether a batch is sampled."""


class Stopped(RuntimeError):  # noqa: N818 - a request, not a defect
    """The run was asked to stop; a checkpoint of its last step is written."""


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
        self.wait, buffer.sample = buffer.sample, self._sampled
        return buffer

    def prepare_step(self) -> dict[str, Any]:
        """Submit nothing: `_sampled` draws prompts as the batch needs them."""
        return {}

    def _sampled(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Answers of a rollout batch, or of an evaluation."""
        if partition_id == "val":
            return self.wait(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)

        def wait(count: int) -> Any:
            return self.wait(global_steps=global_steps, partition_id=partition_id, batch_size=count)[0]

        found = sampling.collected(self.job.algo, self._draw, wait)
        self.keys = list(found.batch.keys)
        self.row_of_batch: dict[str, Any] = {
            "rollout/tokens": float(found.num_tokens), "rollout/gen_batches": float(found.num_batches),
        }  # fmt: skip
        return found.batch, {}

    def _draw(self) -> list[str]:
        """Submit the next prompts of the run's own order; returns their names. Raises ValueError for one that the
        servers have no room for: verl would cut its answer short without a word."""
        positions = range(self.next_prompt, self.next_prompt + num_drawn(self.job.algo))
        self.next_prompt = positions.stop
        items = self.task.sample("train", prompt_indices(self.job.config.seed, positions, self.task.num_train))
        longest, room = max(len(item.prompt) for item in items), self.config.data.max_prompt_length
        if longest > room and self.job.config.engine.max_model_len is None:
            need = longest + self.job.max_new_tokens
            raise ValueError(f"engine.max_model_len: a prompt of {longest} tokens was drawn; give {need} or more")
        uids, batch = sampling.prompt_batch(items)
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        self._submit_batch_to_rollout(batch)
        return uids

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
        self.age = self.job.config.algo.staleness
        self.row: dict[str, Any] = {}
        self.clock = CheckpointClock(self.job.launch)
        self.task = task_of(self.job.config)
        self.questions = self.task.sample("eval", range(len(self.val_dataset)))
        self.asked = asked(self.job.config.evaluations, evaluation_tasks(self.job.config))
        self._take_up()
        self.actor_rollout_wg.set_loss_fn(objective.loss)
        self._push(self.global_steps)

    def _take_up(self) -> None:
        """Cut the files back to the checkpoint that verl has loaded, and read the parts' memories."""
        done = read_lines(self.job.series_file)[: self.global_steps]
        if len(done) < self.global_steps:
            raise RuntimeError(f"{self.job.series_file} has {len(done)} rows, the checkpoint {self.global_steps} steps")
        self.next_prompt = sum(int(row["rollout/gen_batches"]) for row in done) * num_drawn(self.job.algo)
        evals = [e for e in read_lines(self.job.evals_file) if e["record"]["step"] <= self.global_steps]
        for path, lines in ((self.job.series_file, done), (self.job.evals_file, evals)):
            write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        if self.job.rollouts:
            path, count = Path(self.job.rollouts), self.job.launch.dump_rollouts
            self.answers = RolloutFile(path, self.task, count, self.global_steps)
        saved = self.job.checkpoints / f"global_step_{self.global_steps}" / "memory.json"
        if saved.exists():
            self.composed.memory[:] = json.loads(saved.read_text(encoding="utf-8"))

    @property
    def handles(self) -> list[Any]:
        """The first server of every replica."""
        return [replica.servers[0] for replica in self.checkpoint_manager.replicas]

    def _push(self, global_steps: int) -> None:
        """Push weights to every replica, run the parts' `after_sync`, and read the passport that all must share."""
        self._at("push")
        self.checkpoint_manager.update_weights(global_steps)
        servers = Servers(self.handles)
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
        """Push the updated weights, or with `algo.staleness` those whose turn it is, to the sampler."""
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self.finished, self.row = self.row, {}
            self._push(self.global_steps)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._at("log-probs")
        self.stale: Tensor | None = None
        if self.age and is_scored(step := self._step()):
            self.stale = self._logp(batch.select_keys(self.keys), {VERSION: sampled_by(step.index, self.age)})
        found = super()._compute_old_log_prob(batch, metrics)
        if self.job.rest_file.exists():
            self.row_of_batch |= json.loads(self.job.rest_file.read_text(encoding="utf-8"))
        return found

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._at("reference")
        return super()._compute_ref_log_prob(batch, metrics)

    def _is_pushed_apart(self) -> bool:
        """Is an evaluation of other weights than the rollouts, without noise or newer?"""
        has_noise = any(has_hook(part, "sync") for part in self.composed.parts)
        return has_noise or sampled_by(self.global_steps, self.age) != self.global_steps

    def on_validate_begin(self) -> None:
        """Push the newest weights without noise, before an evaluation."""
        self.eval_start, pushed = time.monotonic(), self.row
        if self._is_pushed_apart():
            self.checkpoint_manager.sleep_replicas()
            self._push(evaluation_step(self.global_steps))
        self.row = pushed

    def on_validate_end(self) -> None:
        """Push what samples again, after an evaluation."""
        pushed = self.row
        if self._is_pushed_apart():
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
        """One evaluation by the run's own sampler: the fixed questions, then the run's `evaluations`."""
        record = rows.evaluation(self.job, self.questions, reward_extra_infos_dict, self.global_steps)
        others = [self._asked(one) for one in self.asked]
        line = {"record": record.model_dump(), "evaluations": [other.model_dump() for other in others],
                "seconds": time.monotonic() - self.eval_start}  # fmt: skip
        with self.job.evals_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return {"val/accuracy": accuracy_of(record)}

    def _asked(self, one: Asked) -> TaskEvalRecord:
        """The answers to one entry of `evaluations`."""
        servers = Servers(
            self.handles, ends_of(self.job, one.task), lambda count: self._at(f"evaluation {one.number}", count)
        )
        return task_evaluation(
            servers,  # pyright: ignore[reportArgumentType]
            one, site="rollout", precision=self.job.config.precision.name, step=self.global_steps,
        )  # fmt: skip

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Rewards to advantages and log-probs to a correction, over the whole batch: what its updates are cut from."""
        data = tq.kv_batch_get(keys=self.keys, partition_id=batch.partition_id, select_fields=list(READ))
        facts = [extra["reward_extra_info"] for extra in data.pop("extra_fields").tolist()]
        dense = {name: data[name].to_padded_tensor(0) for name in data.keys()}  # noqa: SIM118 - a TensorDict
        self.scored, row = self._scored(dense, facts)
        self.row_of_batch = self.row_of_batch | row
        self.correction = batch_correction(self.composed, self.scored, self.job.algo)
        if self.job.rollouts:
            self.answers.append(self.global_steps - 1, self._answers(dense, facts))
        return batch

    def _answers(self, dense: dict[str, Tensor], facts: list[dict[str, Any]]) -> Iterator[Answer]:
        """The responses of a batch, in verl's order."""
        rows = zip(dense["responses"], dense["response_mask"].bool(), facts, strict=True)
        for ids, is_sampled, fact in rows:
            (item,) = self.task.sample("train", [int(fact["index"])])
            yield Answer(item=item, response=ids[is_sampled].tolist(), reward=fact["acc"],
                         is_parsable=fact["is_parsable"] > 0, is_truncated=fact["truncated"] > 0)  # fmt: skip

    def _scored(self, dense: dict[str, Tensor], facts: list[dict[str, Any]]) -> tuple[TokenBatch, dict[str, Any]]:
        """(the batch as the parts see it, its metrics). Raises Diverged, and RuntimeError as `check_engine_logp`."""
        job, algo = self.job, self.job.algo
        sampled = dense["response_mask"].bool()
        group = torch.arange(len(facts)) // algo.group_size
        rewards, truncated = [f["acc"] for f in facts], torch.tensor([f["truncated"] > 0 for f in facts])
        mask, adv, row = shaped(algo, job.max_new_tokens, rewards, sampled.sum(-1), truncated, sampled, group)
        row["reward/unparsable_frac"] = sum(f["is_parsable"] == 0 for f in facts) / len(facts)
        step = self._step()
        old, rollout = dense["old_log_probs"].float(), dense["rollout_log_probs"].float()
        if not torch.isfinite(old[sampled]).all():
            raise Diverged("a log-probability of the trainer is not finite")
        check_engine_logp(rollout, sampled, ", the trainer's not")
        extras = {"ref_logp": dense["ref_log_prob"].float()} if "ref_log_prob" in dense else {}
        batch = TokenBatch(token_ids=dense["responses"], mask=mask, adv=adv, rollout_logp=rollout, old_logp=old,
                           step=step, extras=extras, group=group, reward=torch.tensor(rewards).float())  # fmt: skip
        row |= batch_mismatch(batch, dense["entropy"].float()) | measured(batch, self.age, self.stale)
        return batch, row

    def _step(self) -> Step:
        """The policy step of the batch at hand."""
        return Step(index=self.global_steps - 1, total=self.job.config.trainer.steps, seed=self.job.config.seed)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Take the updates of a batch, on the rows that the local trainer would take, one call of the workers each."""
        composed, algo, sampled = self.composed, self.job.algo, self.scored.rollout_logp
        self.updates: list[rows.Update] = []
        for number, chosen in enumerate(minibatches(algo, self.scored.step)):
            self._at("update", number)
            some = batch.select_keys([self.keys[i] for i in chosen.tolist()])
            own, correction = take_batch(self.scored, chosen), take_correction(self.correction, chosen)
            if needs_current_policy(composed, algo):
                logp = own.old_logp if number == 0 else _as_wide(self._logp(some, {}), sampled.shape[1])
                correction = update_correction(composed, correction, own, logp, algo)
            some = self._store(some, objective.columns(correction, own))
            found = self._updated(some)
            row, sums = rows.update_row(found)
            self.updates.append((row | correction_metrics(correction, own.mask), sums))
            metrics.update(found)
        return batch

    def _logp(self, some: Any, asked: dict[str, Any]) -> Tensor:
        """[b, T] float32 nats of the policy as it is now, in the order of the rows, as wide as the longest of them.
        `asked`: more for the workers."""
        keys = list(some.keys)
        some = self._balance_batch(some.select_keys(some.keys), {})
        some.extra_info = {"calculate_entropy": False, "compute_loss": False, "temperature": self.temperature} | asked
        self.actor_rollout_wg.compute_log_prob(some)
        found = tq.kv_batch_get(keys=keys, partition_id=some.partition_id, select_fields=["log_probs", "response_mask"])
        return response_from_nested(found["log_probs"], found["response_mask"]).to_padded_tensor(0).float()

    def _store(self, some: Any, columns: dict[str, Tensor]) -> Any:
        """Put columns, [b, T] or [b], beside those of verl; returns the rows with them."""
        found = tq.kv_batch_get(keys=some.keys, partition_id=some.partition_id, select_fields=["response_mask"])
        fields = {n: response_to_nested(x, found["response_mask"]) if x.dim() == 2 else x for n, x in columns.items()}
        return tq.kv_batch_put(
            keys=some.keys, partition_id=some.partition_id, fields=TensorDict(fields, batch_size=len(some.keys))
        )

    def _updated(self, some: Any) -> dict[str, Any]:
        """Take one optimizer step on these rows: verl's metrics of it."""
        some, count = self._balance_batch(some, {}), len(some.keys)
        some.extra_info = {
            "calculate_entropy": True, "distillation_use_topk": False, "distillation_only": False,
            "global_batch_size": count, "mini_batch_size": count, "epochs": 1, "seed": 0,
            "dataloader_kwargs": {"shuffle": False}, "temperature": self.temperature,
        }  # fmt: skip
        output = self.actor_rollout_wg.update_actor(some)
        return reduce_metrics(rename_dict(output["metrics"], "actor/"))

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Rows divide by the ranks (`checks.check_launch`); mini-batches are cut here, not by verl."""
        return dp_size

    @property
    def temperature(self) -> float:
        """The temperature of the rollouts."""
        return self.config.actor_rollout_ref.rollout.temperature

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: Any, global_steps: int, epoch: int
    ) -> None:
        """Write the step's line, then a checkpoint where one is due, then end where that is asked for."""
        self.finished |= self.composed.memory_row()
        row = rows.step_row({**self.finished, **self.row_of_batch}, self.updates, metrics, timing_raw)
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


def _as_wide(logp: Tensor, width: int) -> Tensor:
    """[b, width] of [b, T]: 0 behind the longest row."""
    return torch.nn.functional.pad(logp, (0, width - logp.shape[1]))


def accuracy_of(record: EvalRecord) -> float:
    """Mean accuracy of the answers; NaN where nothing was answered."""
    return math.nan if record.accuracy is None else record.accuracy
