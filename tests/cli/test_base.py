"""`lowbit base`: which bases a sweep still wants, the longest answers first."""

from __future__ import annotations

from pathlib import Path

from harness.cli.base import wanted
from harness.config.schema import Launch
from harness.start.prepare import base_folder

SWEEP = """
question: Which?
overrides: [model=xs, task=sort]
axes: {task.n: [4, 8]}
arms: [{method: bf16}, {method: naive, precision: int8}]
seeds: [0, 1]
"""


def test_every_missing_base_is_wanted_once_the_longest_first(tmp_path: Path) -> None:
    path = tmp_path / "two_lengths.yaml"
    path.write_text(SWEEP, encoding="utf-8")
    found = wanted([str(path)], [], tmp_path)
    assert [(cell.task.n, cell.base_seed) for cell in found] == [(8, 0), (8, 1), (4, 0), (4, 1)]
    folder = base_folder(found[1], Launch(results=str(tmp_path)))
    assert folder is not None
    folder.mkdir(parents=True)
    assert [(cell.task.n, cell.base_seed) for cell in wanted([str(path)], [], tmp_path)] == [(8, 0), (4, 0), (4, 1)]
