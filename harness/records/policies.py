"""Saved policies in a results folder: which there are of a run. Left out: writing them (`harness.run.policies`)."""

from __future__ import annotations

from pathlib import Path

from harness.records.paths import policy_folder
from harness.records.run_result import RunResult

QUANTIZED = "quantized"
"""Name of the folder of a run's codes."""
STEP = "step-"
"""Beginning of the name of a folder of weights; the number of steps follows."""


def last_policy(results: Path | str, sweep: str, run_id: str) -> Path:
    """The policy of the most steps that was saved. Raises ValueError where none was."""
    home = policy_folder(results, sweep, run_id)
    steps = {int(path.name.removeprefix(STEP)): path for path in home.glob(f"{STEP}*") if path.is_dir()}
    if not steps:
        raise ValueError(f"{home}: no saved policy; {_anew('hf')}")
    return steps[max(steps)]


def has_policy(results: Path | str, found: RunResult, save: str) -> bool:
    """Did a finished run keep what `launch.save` asks for? Where codes cannot be kept, its record says so."""
    folder = policy_folder(results, found.sweep, found.run_id)
    is_lacking = save == QUANTIZED != found.launch.get("save") and not (folder / QUANTIZED).is_dir()
    return save == "none" or (folder.is_dir() and not is_lacking)


def saved_codes(results: Path | str, sweep: str, run_id: str) -> Path:
    """The codes of the policy. Raises ValueError where none were saved."""
    folder = policy_folder(results, sweep, run_id) / QUANTIZED
    if not folder.is_dir():
        raise ValueError(f"{folder}: no codes of a policy; {_anew('quantized')}")
    return folder


def _anew(save: str) -> str:
    """The advice for a run that has ended, whose weights are gone."""
    return f"to have one, repeat its lowbit run or lowbit sweep with --again launch.save={save}"


def step_of(folder: Path) -> int:
    """Steps after which a policy was saved."""
    return int(folder.name.removeprefix(STEP))
