"""The engine's benchmarks without a GPU: their arithmetic, what they watch, how children fail, one toy run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.devtools.bench import runner, vllm_engine
from harness.devtools.bench import timing as clock
from harness.devtools.bench import vllm_engine_overhead as overhead
from harness.devtools.bench import vllm_engine_push as push
from harness.devtools.bench import vllm_engine_verl as verl
from harness.foundation.provenance import ROOT
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.studies.throughput.shapes import plan_of, shape_of


def test_summary_is_in_milliseconds() -> None:
    found = clock.summary([0.001 * n for n in range(20, 0, -1)])
    assert found == pytest.approx({"median_ms": 10.5, "p90_ms": 18, "min_ms": 1, "max_ms": 20, "count": 20})
    assert clock.summary([0.5])["p90_ms"] == 500


def test_breakdown_gives_the_rest_to_nobody() -> None:
    stages = [{"a": 0.1, "b": 0.3}, {"a": 0.2, "b": 0.2}, {"a": 0.3, "b": 0.1}]
    found = clock.breakdown([1.0, 2.0, 0.5], stages)
    assert found == pytest.approx({"a": 200, "b": 200, "rest": 600})


def test_stages_are_summed_and_functions_put_back() -> None:
    owner = SimpleNamespace(slow=lambda seconds: time.sleep(seconds) or 7, never=lambda: None)
    before = owner.slow
    with clock.watched({"slow": (owner, "slow"), "never": (owner, "never")}, "cpu") as spent:
        assert [owner.slow(0.02), owner.slow(seconds=0.03)] == [7, 7]
    assert owner.slow is before
    assert 0.05 <= spent["slow"] < 0.5 and spent["never"] == 0.0
    assert clock.queued_seconds(lambda: None, "cpu") is None


def test_bytes_of_a_push_by_hand() -> None:
    config = DecoderConfig(
        vocab_size=512, num_layers=2, hidden_size=256, num_heads=2, num_kv_heads=1, head_dim=128, intermediate_size=384,
        rope_theta=1e4, rms_eps=1e-6, qk_norm=False, attention_bias=True, tie_embeddings=False, max_positions=64,
        bos_id=0, eos_id=0,
    )  # fmt: skip
    # Per layer: q 256 + k 128 + v 128, o 256, gate and up 384 rows of 256 columns; down 256 of 384.
    linear = 2 * ((512 + 256 + 768) * 256 + 256 * 384)
    blocks = 2 * ((4 + 2 + 6) * 2 + 2 * 3)
    plain = 2 * 512 * 256 + 256 + 2 * (512 + 2 * 256)
    assert push.moved_bytes(config, plan_of("fp8_block")) == linear * (2 + 1) + blocks * 4 + plain * 2 * 2
    assert push.moved_bytes(config, plan_of("bf16")) == 4 * (linear + plain)


def test_trainer_has_every_tensor_once() -> None:
    found = push.trainer_tensors(shape_of("toy"), "cpu")
    assert {name: tuple(w.shape) for name, w in found.items()} == tensor_shapes(shape_of("toy"))
    assert {w.dtype for w in found.values()} == {torch.bfloat16}
    assert float(found["model.norm.weight"].float().mean()) == pytest.approx(1.0, abs=0.01)
    assert (
        float(found["lm_head.weight" if "lm_head.weight" in found else "model.embed_tokens.weight"].float().std())
        < 0.03
    )


class FakeEngine:
    """Pushes by ten calls of the kernel; `guards` tells whether it notices one that did not end."""

    def __init__(self, kernels: Any, guards: bool) -> None:
        self.kernels, self.guards, self.is_ready = kernels, guards, True
        writer = SimpleNamespace(quantized={"a": dict.fromkeys(range(10))}, forget=lambda: None)
        self.weights = SimpleNamespace(writer=writer)

    def load_weights(self, weights: Iterator[Any]) -> None:
        """Ten calls."""
        self.is_ready = False
        for _ in range(10):
            self.kernels.quantize_into()
        self.is_ready = True

    def generate(self, *_: Any, **__: Any) -> Any:
        """Finite log-probs."""
        if self.guards and not self.is_ready:
            raise RuntimeError("the engine's weights are of a swap that did not end")
        return SimpleNamespace(logp=torch.tensor([-1.0]))

    def realized_plan(self) -> Any:
        """Always the same."""
        return SimpleNamespace(weights=("w",))


@pytest.mark.needs_vllm("triton")
@pytest.mark.parametrize("guards", [True, False])
def test_a_broken_push_must_be_noticed(guards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.kernels import quantize as kernels

    monkeypatch.setattr(kernels, "quantize_into", lambda: None)
    engine: Any = FakeEngine(kernels, guards)
    found = push.half_done(engine, {})
    assert found["broken_at"] == 5 and found["push_said"] == "broken on purpose"
    assert (found["is_refused"], found["is_healed"]) == (guards, True)


def test_ratios_are_of_medians() -> None:
    rates = {overhead.OURS: [90.0, 99.0, 500.0], overhead.BARE: [100.0, 1.0, 300.0], overhead.FLAT: [110.0, 110.0, 1.0]}
    assert overhead.ratios(rates) == pytest.approx({overhead.BARE: 0.99, overhead.FLAT: 0.9})


def test_sides_take_turns_with_prompts_of_their_own() -> None:
    seen: list[tuple[str, int]] = []
    prompts: set[tuple[int, ...]] = set()

    def side(name: str) -> Any:
        def call(new: int, given: list[list[int]]) -> int:
            seen.append((name, new))
            prompts.update(map(tuple, given))
            return len(given) * new

        return call

    sides = {name: side(name) for name in (overhead.OURS, overhead.BARE)}
    cell = overhead.measure_cell(sides, 4, 32, 3, vocab=1000)
    first, second = overhead.OURS, overhead.BARE
    assert [name for name, _ in seen] == [first, second, first, second, second, first, first, second]
    assert [new for _, new in seen] == [16, 16, *[32] * 6] and len(prompts) == 8 * 4
    assert {len(rates) for rates in cell["tokens_per_s"].values()} == {3}
    sides[second] = lambda new, given: 1
    with pytest.raises(AssertionError, match="1 tokens of 4 x 32"):
        overhead.measure_cell(sides, 4, 32, 1, vocab=1000)


def test_verls_buckets_hold_copies_in_order() -> None:
    tensors = {str(n): torch.full((size,), n, dtype=torch.bfloat16) for n, size in enumerate((30, 20, 80, 10, 5))}
    bucket = torch.zeros(100, dtype=torch.uint8)
    got: list[list[str]] = []
    for part in verl.buckets(tensors, bucket):
        got.append([name for name, _ in part])
        for name, w in part:
            assert torch.equal(w, tensors[name])
            inside = w.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()
            assert inside == (tensors[name].nbytes <= 100)
    assert got == [["0", "1"], ["2", "3", "4"]]


def test_a_handle_stands_for_its_tensor() -> None:
    transport = SimpleNamespace(reduce_tensor="theirs", rebuild_ipc="theirs")
    one, two = torch.zeros(1), torch.ones(1)
    with verl.handed_over(transport):
        handles = [transport.reduce_tensor(one), transport.reduce_tensor(two)]
        assert all(isinstance(handle, str) for handle in handles)
        assert transport.rebuild_ipc(handles[1], 0) is two and transport.rebuild_ipc(handles[0]) is one
    assert (transport.reduce_tensor, transport.rebuild_ipc) == ("theirs", "theirs")


def test_ratio_to_ours_is_to_the_direct_push(tmp_path: Path) -> None:
    def part(precision: str, way: str, ms: float) -> dict[str, Any]:
        return {"precision": precision, "way": way, "push": {"median_ms": ms}}

    ours = {"parts": [part("int8", "direct", 1.0), part("fp8_block", "reload", 2.0), part("fp8_block", "direct", 4.0)]}
    found = {"rows": [{"what": "x", "push": {"median_ms": 100.0}}]}
    path = tmp_path / "sync.json"
    path.write_text(json.dumps(ours), encoding="utf-8")
    assert verl.against(found, verl.own_push_ms(path)) == {"x": 25.0}
    died = {"precision": "fp8_block", "way": "direct", "failed": "killed"}
    for parts in (ours["parts"][:2], [died], []):
        path.write_text(json.dumps({"parts": parts}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"^--ours .*sync\.json: no direct push of fp8_block in it; run `sync"):
            verl.own_push_ms(path)


def test_children_of_a_command() -> None:
    def told(*words: str) -> list[tuple[Any, ...]]:
        given = runner.parsed("vllm_engine", words)
        return [
            tuple(asked.get(key) for key in ("precision", "is_direct", "pushes"))
            for asked in vllm_engine.children(given)
        ]

    assert told("sync") == [
        ("fp8_block", True, 20), ("fp8_block", False, 3), ("fp8_channel", True, 20), ("int8", True, 20),
        ("bf16", True, 20),
    ]  # fmt: skip
    assert told("sync", "--device", "cpu", "--pushes", "2") == [("bf16", None, 2)]
    assert told("overhead") == [("bf16", None, None), ("fp8_block", None, None)]
    assert told("verl") == [(None, None, None)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sync", "--size", "8b"], "8b"),
        (["sync", "--formats", "fp9"], "fp9"),
        (["overhead", "--cells", "64"], "--cells '64'"),
        (["overhead", "--cells", "0x5"], "--cells '0x5'"),
        (["sync", "--pushes", "0"], "--pushes: 0; valid: >= 1"),
        (["verl", "--ours", "nowhere.json"], "nowhere.json"),
        (["verl", "--ours", "broken.json"], "broken.json: not a JSON file of a bench: "),
        (["sync", "--ours", "x.json"], "--ours: sync has no ratio; valid with verl"),
        (["verl", "--formats", "int8"], "--formats: verl has one, block FP8; valid with sync, overhead"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("no JSON")
    assert runner.run("vllm_engine", words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0]


def test_a_child_that_dies_leaves_its_last_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "verl.json"
    assert runner.run("vllm_engine", ["verl", "--size", "toy", "--device", "cpu", "--out", str(out)]) == 1
    part = json.loads(out.read_text(encoding="utf-8"))["parts"][0]
    assert part["size"] == "toy" and part["failed"].startswith("vllm_engine: ")
    assert "verl" in part["failed"] and "FAILED" in capsys.readouterr().out


@pytest.mark.needs_vllm
def test_toy_run_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "sync.json"
    words = ["sync", "--size", "toy", "--device", "cpu", "--formats", "bf16", "--pushes", "2", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "harness.devtools.bench", "vllm_engine", *words], capture_output=True, text=True,
        check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    part = json.loads(out.read_text(encoding="utf-8"))["parts"][0]
    assert (part["way"], part["push"]["count"], part["has_finite_logp"]) == ("reload", 2, True)
    assert part["num_bytes"] == push.moved_bytes(shape_of("toy"), plan_of("bf16"))
    assert part["formats"] == ["bf16"] and part["passport_tensors"] == len(tensor_shapes(shape_of("toy")))
    assert {"reload", "compare", "read the stream", "rest"} <= part["inside_ms"].keys()
    assert part["inside_ms"]["reload"] < part["inside_ms"]["all"]
    assert "x the copy" in done.stdout
