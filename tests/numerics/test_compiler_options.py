"""Options of every compiled function: the width of this CPU's vectors is part of the compiler's key."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from harness.foundation.provenance import ROOT
from harness.numerics.compiler_options import compiler_options, vector_bits

CODE = """
import torch
from harness.numerics.compiler_options import compiler_options
print(compiler_options(torch.device("cpu"))["cpp.simdlen"])
"""


def test_a_cpus_width_is_in_the_options_and_a_gpus_are_its_own() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert compiler_options(cpu) == {"cpp.simdlen": vector_bits()}
    assert compiler_options(cuda) == {}
    assert compiler_options(cuda, is_dynamic=True) == {"triton.coalesce_tiling_analysis": False}
    assert compiler_options(cpu, is_dynamic=True) == compiler_options(cpu) | compiler_options(cuda, is_dynamic=True)


def test_torch_takes_every_option() -> None:
    """An unknown one raises when a function is compiled with it."""
    from torch import _inductor

    known = _inductor.list_options()
    assert set(compiler_options(torch.device("cpu"), is_dynamic=True)) <= set(known)


def test_a_process_told_another_width_has_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it looks elsewhere in the cache, where the one before it left code of its own width."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("a CPU with several widths")
    assert vector_bits() in (256, 512)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0
