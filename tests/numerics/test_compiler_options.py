"""Options of the compiler: the width of the CPU's vectors is among them, whatever process asks."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from harness.numerics.compiler_options import compiler_options, vector_bits

CODE = (
    "import torch; from harness.numerics.compiler_options import compiler_options; "
    "print(compiler_options(torch.device('cpu'))['cpp.simdlen'])"
)


def test_options_by_device_and_sizes() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert compiler_options(cpu) == {"cpp.simdlen": vector_bits()}
    assert compiler_options(cuda) == {}
    assert compiler_options(cuda, is_dynamic=True) == {"triton.coalesce_tiling_analysis": False}
    assert compiler_options(cpu, is_dynamic=True) == compiler_options(cpu) | compiler_options(cuda, is_dynamic=True)


def test_a_process_without_vectors_asks_for_other_code() -> None:
    """The cache's key holds the options, so that code for wide vectors is never taken where there are none."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    out = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    assert int(out.stdout) == 0
