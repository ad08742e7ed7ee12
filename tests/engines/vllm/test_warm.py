"""Shapes and numbers of rows whose kernels are compiled beforehand, and what is remembered of it; no GPU is asked."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.config.load import load
from harness.config.schema import RunConfig
from harness.engines.vllm import warm
from harness.models.checkpoint import save_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.studies.throughput.shapes import shape_of

WIDE = DecoderConfig(
    vocab_size=40, num_layers=1, hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=64, intermediate_size=192
)
"""The smallest shape with layers that DeepGEMM takes: all but its down projection, whose K is 192."""


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if this machine had an H100; returns DeepGEMM's folder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM", raising=False)
    return tmp_path / "kernels"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)]),
        (2, [(2304, 3584), (3584, 1792), (18944, 3584), (3584, 9472)]),
        (4, [(1152, 3584), (3584, 896), (9472, 3584), (3584, 4736)]),
    ],
)
def test_layers_of_qwen25_7b(gpus: int, expected: list[tuple[int, int]]) -> None:
    """28 heads and 4 key-value heads of 128, 3584 wide, 18944 inside; vLLM fuses q, k, v and gate, up."""
    assert warm.layer_shapes(shape_of("7b"), gpus) == expected


def test_a_key_value_head_is_copied_where_gpus_are_more() -> None:
    """Eight GPUs, four key-value heads: each GPU has a whole one."""
    shape = replace(shape_of("7b"), num_heads=32, num_kv_heads=4, hidden_size=4096)
    assert warm.layer_shapes(shape, 8)[0] == (4 * 128 + 2 * 128, 4096)
    for heads, gpus in ((32, 3), (36, 3)):  # 36 heads divide by 3, their 4 key-value heads do not
        with pytest.raises(ValueError) as told:
            warm.layer_shapes(replace(shape, num_heads=heads), gpus)
        assert str(told.value) == (
            f"tensor-parallel=3: {heads} heads, 4 key-value heads and 18944 MLP channels do not divide by 3 devices"
        )


def test_layers_that_deepgemm_does_not_take_are_left_out() -> None:
    assert warm.layer_shapes(WIDE) == [(256, 128), (128, 128), (384, 128)]
    assert warm.layer_shapes(replace(WIDE, hidden_size=64, head_dim=32)) == []


def test_numbers_of_rows_by_hand() -> None:
    """64 outputs on two processors: tiles of 16 to 64 columns are 4, 2, 2 and 1 a row of tiles, so waves of them end at
    multiples of 32, 64 and 128 rows."""
    small = [1, 2, 4, *range(8, 65, 8)]
    assert warm.row_counts(64, 200, 2) == [*small, 96, 128, 160, 192]
    assert warm.row_counts(64, 60, 2) == small[:-1]


def test_numbers_of_rows_are_where_waves_of_tiles_end() -> None:
    """Every bound of ten waves is there, for each tile of up to 256 x 256, and none beyond what was asked for."""
    n, most, sms = 4608, 16384, 132
    found = warm.row_counts(n, most, sms)
    assert found == sorted(set(found)) and found[0] == 1 and found[-1] == most
    for rows in (64, 128, 256):
        assert set(range(rows, most + 1, rows)) <= set(found)
        for columns in (16, 112, 256):
            waves = [wave * sms * rows // -(-n // columns) for wave in range(1, 11)]
            assert {m for m in waves if 1 <= m <= most} <= set(found)
    assert 300 < len(found) < 800


def test_tasks_hold_every_call_once_and_shapes_take_turns() -> None:
    shapes = [(4608, 3584), (3584, 3584)]
    todo = warm.tasks(shapes, 16384, 132)
    counted = Counter((shape, count) for shape, counts in todo for count in counts)
    assert counted == Counter((shape, count) for shape in shapes for count in warm.row_counts(shape[0], 16384, 132))
    assert max(len(counts) for _, counts in todo) == warm.PART
    assert {shape for shape, _ in todo[:2]} == set(shapes)
    assert all(counts == sorted(counts) for _, counts in todo)


def test_what_was_warmed_is_remembered_for_its_gpu_and_vllm(hopper: Path) -> None:
    shapes, here = [(256, 128), (384, 128)], ["H100", "none"]
    assert warm.cold_shapes(shapes, here) == shapes
    warm._stamp(shapes[:1], 4096)
    warm._stamp(shapes[:1], 1024)  # fewer rows than before take nothing back
    assert json.loads((hopper / warm.STAMP).read_text())["rows"] == {"256x128": 4096}
    assert warm.cold_shapes(shapes, here) == shapes[1:]
    assert warm.cold_shapes(shapes, ["H200", "none"]) == shapes
    (hopper / warm.STAMP).write_text(json.dumps({"here": ["H200", "0.1"], "rows": {"384x128": 9}}))
    warm._stamp(shapes[:1], 1024)
    assert json.loads((hopper / warm.STAMP).read_text()) == {"here": here, "rows": {"256x128": 1024}}


@pytest.mark.parametrize("damaged", ["", "[]", '{"rows": 3}', '{"here": ["H100", "none"]}', "\x00"])
def test_a_damaged_stamp_tells_nothing(hopper: Path, damaged: str) -> None:
    hopper.mkdir()
    (hopper / warm.STAMP).write_text(damaged)
    assert warm.cold_shapes([(256, 128)], ["H100", "none"]) == [(256, 128)]


def test_the_folder_is_the_one_that_vllm_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DG_JIT_CACHE_DIR", "VLLM_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert warm.cache_folder() == tmp_path / ".cache" / "vllm" / "deep_gemm"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    assert warm.cache_folder() == tmp_path / "root" / "deep_gemm"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "own"))
    assert warm.cache_folder() == tmp_path / "own"
    for name in ("a/kernel.cubin", "b/c/kernel.cubin", "b/kernel.cu"):
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).touch()
    assert warm.num_kernels(warm.cache_folder()) == 2


def cell(folder: Path, *words: str) -> RunConfig:
    base = ("model=hf", f"model.path={folder}", "engine=vllm", "trainer.device=cuda", "method=naive")
    return load([*base, "precision=fp8_block", *words])


def test_cells_that_would_compile_while_they_sample_are_told(
    hopper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    save_decoder(Decoder(WIDE), folder)
    cells = [cell(folder), cell(folder, "seed=1"), cell(folder, "precision=fp8_block+kv8")]
    (note,) = warm.notes(cells)
    assert note.startswith(f"DeepGEMM will compile kernels for 3 layer shapes of {folder} while it samples")
    assert note.endswith(f"lowbit warm {folder}")
    for words in (("precision=int8",), ("engine=embedded",), ("trainer.device=cpu",)):
        assert warm.notes([cell(folder, *words)]) == []
    assert warm.notes([cell(tmp_path / "nowhere")]) == []
    warm._stamp(warm.layer_shapes(WIDE)[:2], warm.ROWS)
    assert "for 1 layer shapes" in warm.notes(cells)[0]
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    assert warm.notes(cells) == []
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM")
    warm._stamp(warm.layer_shapes(WIDE), warm.ROWS)
    assert warm.notes(cells) == []
    (hopper / warm.STAMP).unlink()
    assert len(warm.notes(cells)) == 1
    for capability in ((8, 0), (10, 0)):  # DeepGEMM is for Hopper
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert warm.notes(cells) == []


def test_a_mixture_of_experts_is_run_without_a_note(hopper: Path, tmp_path: Path) -> None:
    """`layer_shapes` refuses it, which must not stop a run."""
    mixture = replace(WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    save_decoder(Decoder(mixture), tmp_path / "model")
    assert warm.notes([cell(tmp_path / "model")]) == []


def test_machines_that_cannot_compile_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^warm: no CUDA device is visible; DeepGEMM compiles for the GPU"):
        warm.check_here()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    with pytest.raises(ValueError, match=r"^warm: this GPU has compute capability 8\.9; valid: 9\.0 \(Hopper\)$"):
        warm.check_here()
