"""`lowbit doctor`: can this installation run the laptop default, and which engines are there."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import torch

from harness.config.compose import rollout_plan
from harness.config.load import groups, load
from harness.engines.vllm import builds, settings
from harness.foundation import provenance


def doctor(results: Path) -> int:
    """Checks that this installation can run the laptop default; exit code 1 if one fails."""
    checks = [_python(), _torch(), _numerics(), _space(results), _bases(results), _tracking()]
    for is_good, name, words in checks:
        print(f"{'ok  ' if is_good else 'FAIL'}  {name:<10} {words}")
    print(f"      {'vllm':<10} {_vllm()}")
    for name, value in provenance.packages().items():
        print(f"      {name:<12} {value}")
    return 0 if all(is_good for is_good, _, _ in checks) else 1


Check = tuple[bool, str, str]


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    return (3, 11) <= sys.version_info[:2] <= (3, 12), "python", f"{found} (3.11 or 3.12 wanted)"


def _torch() -> Check:
    major, minor = (int(x) for x in torch.__version__.split(".")[:2])
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    words = f"{torch.__version__} (2.11 to 2.13 wanted), {provenance.cpu_name()}, {os.cpu_count()} cores, {gpu}"
    return (2, 11) <= (major, minor) <= (2, 13), "torch", words


def _vllm() -> str:
    """The build of vLLM that is here and the rollout precisions it can follow on this machine, or why there is none."""
    try:
        build = settings.installed_build()
    except ValueError as error:
        return str(error)
    usable: list[str] = []
    for name in groups()["precision"]:
        with suppress(ValueError):
            plan = rollout_plan(load([f"precision={name}"]).precision)
            builds.check_plan(build, plan)
            settings.check_device(build, "cuda" if build is builds.CUDA else "cpu", plan)
            usable.append(name)
    return f"{build.name} {build.version}; engine=vllm can follow precision={', '.join(usable)}"


def _numerics() -> Check:
    """The golden rows of precision.md sections 1.3 and 1.4, through our quantizer, on this machine."""
    from harness.numerics.formats import format_named
    from harness.numerics.quantize import quantize

    row = torch.tensor([[1.0, -0.5, 0.25, 0.1]])
    fp8 = quantize(row, format_named("e4m3_channel")).codes.float().flatten().tolist()
    int8 = quantize(row, format_named("int8_channel_ct")).codes.flatten().tolist()
    is_good = fp8 == [448.0, -224.0, 112.0, 44.0] and int8 == [127, -64, 32, 13]
    return is_good, "numerics", f"golden codes fp8 {fp8}, int8 {int8}"


def _space(results: Path) -> Check:
    parent = results if results.exists() else results.absolute().parent
    free_gib = shutil.disk_usage(parent).free / 2**30
    is_good = os.access(parent, os.W_OK) and free_gib > 1
    return (
        is_good,
        "results",
        f"{results}: {'writable' if os.access(parent, os.W_OK) else 'NOT writable'}, {free_gib:.0f} GiB free",
    )


def _bases(results: Path) -> Check:
    names = sorted(path.name for path in (results / "bases").glob("*") if path.is_dir())
    return True, "bases", f"{len(names)} trained ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _tracking() -> Check:
    from importlib.util import find_spec

    is_good = find_spec("mlflow") is not None
    return is_good, "mlflow", "installed" if is_good else "not installed: runs are kept, browsing is not possible"
