"""`lowbit warm`: what it says before it compiles; the compiling itself needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.engines.vllm import warm
from harness.foundation.project_files import HOME
from harness.models.checkpoint import save_decoder
from harness.models.decoder import Decoder, DecoderConfig

NARROW = DecoderConfig(
    vocab_size=40, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48
)


def test_a_model_without_such_layers_and_a_machine_without_a_gpu_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    save_decoder(Decoder(NARROW), tmp_path / "narrow")
    for words, said in (
        ((str(tmp_path / "narrow"),), "no layer has the sizes of DeepGEMM; valid: N % 64 = 0 and K % 128 = 0"),
        ((str(HOME / "README.md"),), f"{HOME / 'README.md'}: no model folder; it is a file"),
        (("7b",), "warm: no CUDA device is visible; DeepGEMM compiles for the GPU that it will run on"),
        (("7c",), "7c"),
    ):
        assert main(["warm", *words]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


def test_layers_rows_and_new_kernels_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[list[tuple[int, int]], int, int]] = []

    def compiled(shapes: Sequence[tuple[int, int]], most: int, workers: int) -> Iterator[tuple[int, int]]:
        asked.append((list(shapes), most, workers))
        for done in (1, 2):
            (tmp_path / f"{done}.cubin").touch()
            yield done, 2

    monkeypatch.setattr(warm, "check_here", lambda: None)
    monkeypatch.setattr(warm, "warm", compiled)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    (tmp_path / "0.cubin").touch()
    assert main(["warm", "7b", "--tensor-parallel", "2", "--workers", "3"]) == 0
    said = capsys.readouterr().out
    assert "7b: layers 2304 x 3584, 3584 x 1792, 18944 x 3584, 3584 x 9472; 3 processes" in said
    assert "2 kernels compiled in" in said and f"1 were there: {tmp_path}" in said
    assert main(["warm", "7b", "--rows", "512"]) == 0
    assert [most for _, most, _ in asked] == [16384, 512]
    assert asked[0][2] == 3
