"""Disturbed cells: which they are, that they are measured again and which measurement stays; the cores of processes."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.studies.throughput import cores, loading, worker
from harness.studies.throughput.loading import watch_compiling
from harness.studies.throughput.measure import check_steps, collecting
from harness.studies.throughput.plan import engine_specs, missing
from harness.studies.throughput.records import new_record
from harness.studies.throughput.settled import disturbed_cells, doubtful, quieter
from harness.studies.throughput.stepping import Stepper
from tests.studies.throughput import made


def cell(context: float, step: float, spread: float = 1.0, **more: Any) -> dict[str, Any]:
    """A measured cell whose p90 is `spread` times its p10."""
    return {
        "status": "ok", "context": context, "step_ms": step, "step_ms_p10": step, "step_ms_p90": spread * step, **more
    }  # fmt: skip


def row(*steps: float) -> dict[str, dict[str, Any]]:
    """A record with batch 8 at contexts 512, 1024, 2048, 4096."""
    return {"cells": {f"8x{n}": cell(n, step) for n, step in zip((512, 1024, 2048, 4096), steps, strict=False)}}


def test_wide_steps_are_disturbed() -> None:
    """Above 1.3 alone; cells that failed are none."""
    found = {"1x512": cell(512, 2.0, 1.3), "8x512": cell(512, 2.0, 1.31), "64x512": {"status": "failed", "reason": "x"}}
    assert disturbed_cells({"cells": found}) == {(8, 512)}


def test_a_whole_cell_that_is_slow_shows_against_its_neighbours() -> None:
    """The line from (1024, 3) to (4096, 6) is 4 at 2048: 4.4 is the limit there, 1.05 of the next one at the edge."""
    assert disturbed_cells(row(3.0, 3.0, 4.39, 6.0)) == set()
    assert disturbed_cells(row(3.0, 3.0, 4.41, 6.0)) == {(8, 2048)}
    assert disturbed_cells(row(3.14, 3.0)) == set()
    assert disturbed_cells(row(3.16, 3.0)) == {(8, 512)}
    # A step that is the host's up to 2048 and the device's beyond bends upwards, and is none.
    assert disturbed_cells(row(3.0, 3.0, 3.0, 6.0)) == set()


def test_other_batches_are_no_neighbours() -> None:
    """A batch of its own has its own line."""
    assert disturbed_cells({"cells": {"1x512": cell(512, 9.0), "8x1024": cell(1024, 3.0)}}) == set()


def test_the_quieter_of_two_stays_and_counts() -> None:
    """By the 90th percentile: neither a fast median with a long tail wins, nor a steady slow one."""
    first = cell(512, 10.3, 1.06)
    second = quieter(first, cell(512, 6.4, 1.4))
    assert (second["step_ms"], second["repeats"]) == (6.4, 1)
    third = quieter(second, cell(512, 10.9, 1.01))
    assert (third["step_ms"], third["repeats"]) == (6.4, 2)
    assert doubtful({"cells": {"8x512": second}}) == [(8, 512)] and doubtful({"cells": {"8x512": third}}) == []


def test_a_disturbed_cell_is_missing_until_it_was_measured_again_twice(tmp_path: Path) -> None:
    """Also one of an older record, which says nothing of repeats; and a check that says nothing of its steps."""
    sweep = made.sweep(tmp_path)
    spec = next(spec for spec in engine_specs(sweep) if spec.stem == "7b-int8")
    record = made.records(sweep)["7b-int8"]
    record["cells"]["8x512"] |= {"step_ms_p90": 2 * record["cells"]["8x512"]["step_ms"]}
    assert missing(sweep, spec, record) == ["8x512"]
    record["cells"]["8x512"]["repeats"] = 1
    assert missing(sweep, spec, record) == ["8x512"]
    record["cells"]["8x512"]["repeats"] = 2
    assert missing(sweep, spec, record) == []
    check = made.records(sweep)["7b-bf16-check"]
    del check["check"]["windows"]
    assert missing(sweep, engine_specs(sweep)[0], check) == ["check"]
    assert missing(sweep, engine_specs(sweep)[0], {"check": {"status": "failed", "reason": "x"}}) == []


def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: dict[str, list[float]]) -> worker.Bench:
    """A worker whose measurements are a script: key -> spreads, 1 when it runs out; it has measured what is missing."""
    sweep = made.sweep(tmp_path)
    spec = next(spec for spec in engine_specs(sweep) if spec.stem == "0.5b-bf16")
    one = worker.Bench(sweep, spec, tmp_path / "0.5b-bf16.json", time.monotonic() + 60)

    def measured(stepper: Any, sweep: Any, batch: int, length: int, *, is_filled: bool) -> dict[str, Any]:
        script = steps.get(f"{batch}x{length}", [])
        spread = script.pop(0) if script else 1.0
        if spread == 0:
            raise RuntimeError("out of luck")
        return cell(length, made.step_ms("bf16", batch, length), spread, tokens_per_s=1.0)

    monkeypatch.setattr(worker, "measure_cell", measured)
    monkeypatch.setattr(worker, "measure_breakdown", lambda *a: {"step_ms": 1.0})
    monkeypatch.setattr(worker, "measure_prefill", lambda *a: {"tokens_per_s": 1.0})
    one.record["engines"].append(made.engine())
    stepper = cast(Stepper, SimpleNamespace(num_blocks=10**6, block_size=16))
    worker.measure(one, stepper, set(missing(sweep, spec, one.record)))
    return one


def test_disturbed_cells_are_measured_again_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that calms down at once, one at the second try, one never, which stays as its quietest."""
    script = {"1x512": [1.5], "8x512": [1.5, 1.4], "64x512": [1.7, 1.4, 1.5, 1.0]}
    one = bench(tmp_path, monkeypatch, script)
    found = one.record["cells"]
    assert {key: cell["repeats"] for key, cell in found.items() if "repeats" in cell} == {
        "1x512": 1,
        "8x512": 2,
        "64x512": 2,
    }
    assert script["64x512"] == [1.0]
    assert disturbed_cells(one.record) == {(64, 512)}
    assert found["64x512"]["step_ms_p90"] == pytest.approx(1.4 * found["64x512"]["step_ms_p10"])
    assert missing(one.sweep, one.spec, one.record) == []


def test_a_repeat_that_fails_leaves_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands, marked, with the reason; the process ends as it does on any error."""
    with pytest.raises(RuntimeError) as error:
        bench(tmp_path, monkeypatch, {"8x512": [1.5, 0]})
    sweep = made.sweep(tmp_path)
    spec = next(spec for spec in engine_specs(sweep) if spec.stem == "0.5b-bf16")
    again = worker.Bench(sweep, spec, tmp_path / "0.5b-bf16.json", 0.0)
    again.doing = "8x512"
    monkeypatch.setattr(os, "_exit", lambda code: None)
    again.failed(RuntimeError, error.value, None)
    kept = again.record["cells"]["8x512"]
    assert (kept["status"], kept["repeats"]) == ("ok", 2)
    assert kept["note"] == "measuring it again failed: RuntimeError: out of luck"
    again.doing = "1x4096x"
    again.failed(RuntimeError, error.value, None)
    assert again.record["cells"]["1x4096x"]["status"] == "failed"
    assert new_record(sweep, spec)["cells"] == {}


def test_cores_are_split_between_lanes_and_within() -> None:
    """A quarter of a lane's is its importing process's; fewer than eight are not split."""
    assert cores.shares(range(7), 1) is None
    assert cores.shares(range(8), 1) == [([0, 1, 2, 3, 4, 5], [6, 7])]
    assert cores.shares(range(8), 2) == [([0, 1, 2], [3]), ([4, 5, 6], [7])]
    assert cores.shares(range(8), 5) is None
    split = cores.shares(range(32), 2)
    assert split is not None
    assert [(len(a), len(b)) for a, b in split] == [(12, 4), (12, 4)]
    assert sorted(core for a, b in split for core in (*a, *b)) == list(range(32))


def test_threads_of_a_core_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads i and i + 2 of a core i come next to each other."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    assert cores.visible(tmp_path) == [0, 1, 2, 3]
    for core, text in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text)
    assert cores.visible(tmp_path) == [0, 2, 1, 3]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_pinning_reaches_threads_that_are_there_already() -> None:
    """A process with a second thread: both are on the one core afterwards; a process that has ended is no error."""
    code = "import threading; threading.Thread(target=input).start(); print('up', flush=True)"
    with Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, stderr=DEVNULL) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"up\n"
        core = max(os.sched_getaffinity(0))
        cores.pin(process.pid, [core])
        threads = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
        assert len(threads) > 1
        assert [os.sched_getaffinity(thread) for thread in threads] == [{core}] * len(threads)
        process.stdin.close()
    cores.pin(process.pid, [core])


def test_calls_that_compile_are_told_from_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps by 2 s in two of three calls; arguments and results pass through."""
    ticks = iter([0.0, 2.0, 2.0, 2.001, 5.0, 7.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    module = SimpleNamespace(fp8_gemm_nt=lambda a, *, b: a + b)
    found = watch_compiling(module)
    assert [module.fp8_gemm_nt(1, b=i) for i in range(3)] == [1, 2, 3]
    assert found == {"calls": 2, "seconds": 4.5}


def test_steps_of_a_generation_by_stretch_and_around_the_maps_contexts() -> None:
    """Step i takes i ms after a prompt of 10: stretches of 20 of 320, and windows of 128 where they fit."""
    times = [0.0]
    for i in range(320):
        times.append(times[-1] + i / 1e3)
    found = check_steps(times, 10, [74, 200, 4096])
    assert [stretch["step_ms"] for stretch in found["steps"]] == pytest.approx([9.5 + 20 * i for i in range(16)])
    assert [stretch["context"] for stretch in found["steps"]] == [20 + 20 * i for i in range(16)]
    assert [window["context"] for window in found["windows"]] == [74, 200]
    # 200 - 10 = 190: steps 126 to 253, mean and median 189.5, tenths at 12.7 and 114.3 of 127.
    last = found["windows"][1]
    assert (last["step_ms"], last["median_ms"]) == pytest.approx((189.5, 189.5))
    assert (last["p10_ms"], last["p90_ms"]) == pytest.approx((138.7, 240.3))


def test_garbage_collections_are_timed_and_the_collector_is_left_as_it_was() -> None:
    """Off before and after, on within; two collections by hand."""
    gc.disable()
    try:
        with collecting() as taken:
            assert gc.isenabled()
            taken.clear()
            gc.collect()
            gc.collect()
            assert len(taken) >= 2 and all(seconds > 0 for seconds in taken)
        assert not gc.isenabled()
        count = len(taken)
        gc.collect()
        assert len(taken) == count
    finally:
        gc.enable()


def test_loading_tells_the_memory_in_use_on_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """140 GiB of which 20 are free; the engine holds 2^34 bytes of weights and 9 blocks of 16 tokens."""
    made_stepper = SimpleNamespace(runner=SimpleNamespace(model_memory_usage=2**34), num_blocks=9, block_size=16)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **_: None, __version__="0"))
    monkeypatch.setattr(loading, "listen", list)  # it would change logging for good
    monkeypatch.setattr(loading, "Stepper", lambda _: made_stepper)
    monkeypatch.setattr(loading, "llm_arguments", lambda *_: {"model": "x", "seed": 0})
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (20 * 2**30, 140 * 2**30))
    sweep = made.sweep(tmp_path)
    stepper, told = loading.load(sweep, engine_specs(sweep)[0], 1.0)
    assert stepper is made_stepper and told["arguments"] == {"seed": 0}
    assert (told["used_gib"], told["weights_gib"], told["kv_tokens"]) == (120.0, 16.0, 144)
