"""Sleep of an engine that shares a GPU: the order of calls, and that a run is the same run with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.load import load, run_id
from harness.engines import factory
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.clock import GIB, Clock
from harness.run import gpu_sharing, loop
from harness.run.cell import run_cell
from harness.run.loop import evaluate, grpo_step, train
from harness.run.run import Run
from harness.trainers.local.trainer import LocalTrainer
from tests.toy import small_config, small_launch, small_run

SLEEP = "engine.sleep=true"


class Recorded:
    """An engine whose calls are written down, with the trainer's between them."""

    def __init__(self, engine: Any, calls: list[str]) -> None:
        self.engine, self.calls = engine, calls

    def __getattr__(self, name: str) -> Any:
        if name in ("wake", "sleep", "load_weights", "generate"):
            self.calls.append(name)
        return getattr(self.engine, name)


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Run, list[str]]:
    run, calls = small_run(folder, ["method=flashrl", "precision=int8", *words]), list[str]()
    run.engine = Recorded(run.engine, calls)  # type: ignore[assignment]
    for name in ("score", "step"):
        real = getattr(LocalTrainer, name)

        def noted(self: LocalTrainer, *args: Any, real: Any = real, name: str = name, **values: Any) -> Any:
            calls.append(name)
            return real(self, *args, **values)

        monkeypatch.setattr(LocalTrainer, name, noted)
    answered = run.reference.generate

    def referenced(*args: Any, **values: Any) -> Any:
        calls.append("reference")
        return answered(*args, **values)

    monkeypatch.setattr(run.reference, "generate", referenced)
    return run, calls


STEP = ["wake", "load_weights", "generate", "sleep", "score", "step"]
EVALUATION = ["sleep", "reference", "wake", "load_weights", "generate"]


def test_it_sleeps_from_generation_to_the_next_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = recorded(tmp_path, monkeypatch, SLEEP, "trainer.steps=4", "trainer.eval_every=2")
    train(run, lambda _: None)
    assert calls == [*EVALUATION, *STEP, *STEP, *EVALUATION, *STEP, *STEP, *EVALUATION]


def test_without_the_option_it_never_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = recorded(tmp_path, monkeypatch, "trainer.steps=1")
    train(run, lambda _: None)
    assert calls == ["reference", "load_weights", "generate", "load_weights", "generate", "score", "step",
                     "reference", "load_weights", "generate"]  # fmt: skip


def test_dynamic_sampling_sleeps_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rounds of generation, one sleep."""
    run, calls = recorded(tmp_path, monkeypatch, SLEEP, "algo=dapo", "algo.num_prompts=8")
    rounds = grpo_step(run)["rollout/gen_batches"]
    assert rounds > 1
    assert calls == ["wake", "load_weights", *["generate"] * int(rounds), "sleep", "score", "step"]


def test_an_engine_is_awake_where_it_is_needed_and_asleep_elsewhere(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=bf16", SLEEP])
    grpo_step(run)
    with pytest.raises(RuntimeError, match=r"asleep: call wake\(\) first"):
        run.engine.generate([[1]], num_samples=1, max_new_tokens=1, temperature=1.0, seed=0)
    evaluate(run)
    run.engine.generate([[1]], num_samples=1, max_new_tokens=1, temperature=1.0, seed=0)


def test_a_run_with_it_is_the_same_run(tmp_path: Path) -> None:
    words = ("method=fp8_rl", "precision=fp8_block+kv8", "algo.num_minibatches=2")
    plain, other = small_config(*words), small_config(*words, SLEEP)
    assert run_id(plain) == run_id(other) and plain != other
    results = [run_cell(config, small_launch(tmp_path / name)) for name, config in (("a", plain), ("b", other))]
    assert [r.status for r in results] == ["ok", "ok"]
    assert results[0].hashes == results[1].hashes and results[0].evals == results[1].evals
    assert results[1].config["engine"]["sleep"] is True
    assert 0.0 <= (results[1].time_s["sleep"] or 0.0) < 0.5 * (results[1].time_s["total"] or 0.0)
    assert results[0].memory_gib == results[1].memory_gib == {}  # a CPU has none of its own


def test_the_engine_is_started_so_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("harness.engines.vllm.engine.VLLMEngine", lambda *args, **values: given.append(values))
    config = load(["engine=vllm", "model=xs128"])
    for engine in (config.engine, replace(config.engine, sleep=True)):
        factory.make_engine(replace(config, engine=engine), None, None, trainer_model=None, keeps_log_probs=False)  # type: ignore[arg-type]
    assert [values["can_sleep"] for values in given] == [False, True]


def test_peaks_of_stages_and_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's counters: GiB allocated at most since the last reset, in the order of the borders."""
    peaks, gib = iter([7.0, 1.0, 5.0, 2.0, 3.0, 0.5, 4.0, 1.0]), 2**30
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)

    def counters() -> dict[str, Any]:
        peak = next(peaks)
        return {
            f"{kind}_bytes": {"all": {"peak": more * gib}}
            for kind, more in (("allocated", peak), ("reserved", peak + 2))
        }

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counters)
    clock = Clock("cuda")  # 7: what came before it
    with clock("generate"):  # 1, 5
        pass
    with clock("update"):  # 2, 3
        pass
    with clock("update"):  # 0.5, 4
        pass
    clock.stop()
    assert clock.stage_gib == {"generate": 5.0, "update": 4.0}
    assert clock.peaks == {"allocated": 7.0, "reserved": 9.0}
    assert clock.memory() == {"memory/generate_gib": 5.0, "memory/update_gib": 4.0, "memory/reserved_gib": 9.0}
    assert Clock("cpu").memory() == {}


def test_the_engine_of_evaluations_holds_no_weights_between_two_of_them(tmp_path: Path) -> None:
    """Only where the GPU is shared; its answers are those of one that keeps them."""
    found: list[list[Any]] = []
    for number, words in enumerate(((), (SLEEP,))):
        run = small_run(tmp_path / str(number), ["method=flashrl", "precision=int8", *words])
        evaluate(run)
        assert isinstance(run.reference, EmbeddedEngine)
        assert {tensor.device.type for tensor in run.reference.weights.stacks.values()} == {("cpu", "meta")[number]}
        run.series.append(grpo_step(run))
        run.step += 1
        evaluate(run)
        found.append([(one.step, one.site, one.accuracy, one.length_mean) for one in run.evals])
    assert found[0] == found[1] and len(found[0]) == 4


def test_the_engine_of_evaluations_has_no_weights_before_the_first_one(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=naive", "precision=int8"])
    assert isinstance(run.reference, EmbeddedEngine)
    grpo_step(run)
    assert {tensor.device.type for tensor in run.reference.weights.stacks.values()} == {"meta"}
    evaluate(run)
    assert {tensor.device.type for tensor in run.reference.weights.stacks.values()} == {"cpu"}


def test_a_peak_of_an_evaluation_leaves_out_what_the_sleeping_engine_has_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invented GPU: 60 GiB of a trainer and 40 of an engine that torch counts whether it sleeps or not; the float32
    model of the evaluation takes 30 more, where 20 of the 40 are lent."""
    run, peak = small_run(tmp_path, ["method=bf16", SLEEP]), [100.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, 100.0))
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict",
        lambda: {f"{kind}_bytes": {"all": {"peak": peak[0] * GIB}} for kind in ("allocated", "reserved")},
    )  # fmt: skip
    monkeypatch.setattr(loop, "Clock", lambda _, lent: Clock("cuda", lent))
    free = iter([10.0, 30.0])  # before it sleeps and when it does
    monkeypatch.setattr(gpu_sharing, "free_gib", lambda _: next(free))
    answered = run.reference.generate

    def referenced(*args: Any, **values: Any) -> Any:
        peak[0] = 130.0
        return answered(*args, **values)

    monkeypatch.setattr(run.reference, "generate", referenced)
    evaluate(run)
    assert run.memory_gib["allocated"] == 110.0
