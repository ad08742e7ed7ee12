"""The table of layouts: which one a size and response length takes on so many GPUs, planned; and what was measured.

Both are BF16 rollouts and trainers. Planned rows are `fastest.fastest`; measured ones are whole steps of
`results/bench/verl_*.json` (`harness.devtools.bench`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.foundation.markdown_table import markdown_table
from harness.records.paths import bench_folder
from harness.studies.capacity.report import PlanRow
from harness.studies.stage_rates import read_json

PLANNED = ("size", "GPUs", "tokens", "layout", "responses at a time", "update, GiB", "sampling, GiB",
           "host, GiB", "s/step")  # fmt: skip
MEASURED = ("size", "GPUs", "tokens", "layout", "trainer's peak, GiB", "s/step", "tokens/s a GPU", "file")


def planned(cells: Sequence[PlanRow]) -> str:
    """A row per size, number of GPUs and length."""
    return markdown_table(PLANNED, [_planned(cell) for cell in cells], align="lrrl")


def _planned(cell: PlanRow) -> tuple[str, ...]:
    at, work = cell.place, cell.work
    fits = not at.reason
    words = at.layout.words + (", checkpoints" if at.is_checkpointed else "")
    return (
        work.size, str(at.gpus), str(work.length), words if fits else "does not fit",
        f"{min(at.at_once, at.share)} of {at.share}", f"{at.update_gib:.1f}", f"{at.sampling_gib:.1f}",
        f"{at.host_gib:.0f}", cell.words if not fits else "-" if cell.step is None else f"{cell.step.total:.1f}",
    )  # fmt: skip


def measured(results: Path) -> str:
    """A row per size, number of GPUs and kind of lengths of every committed file of whole steps under verl."""
    rows = [row for path in sorted(bench_folder(results).glob("verl_*.json")) for row in _measured(path)]
    return markdown_table(MEASURED, rows, align="lrrl")


def _measured(path: Path) -> Iterator[tuple[str, ...]]:
    record = read_json(path)
    device = str(record["hardware"].get("gpu", "-")).removeprefix("NVIDIA ").split(" ")[0]
    for part in record.get("parts", [record]):
        given: dict[str, Any] = part["settings"]
        if given.get("padded"):
            continue
        mean, ways, moved = given.get("mean_tokens"), given.get("tensor_parallel", 1), given.get("offload", "none")
        tokens = f"{mean} on average, at most {given['tokens']}" if mean else str(given["tokens"])
        words = [f"engines over {ways} GPUs"] * (ways > 1)
        words += [f"offloaded: {moved}"] * (moved != "none")
        words += [given["method"]] if "method" in given else []
        for row in part["summary"]:
            if row["precision"] != "bf16":
                continue
            cell = part["cells"][f"{row['size']} {row['gpus']} {row['precision']}"]
            layout = [*(words or ["data parallel"]), *["checkpoints"] * cell["checkpoint_layers"]]
            yield (
                row["size"], f"{row['gpus']} {device}", tokens, ", ".join(layout), f"{row['trainer_gib']:.1f}",
                f"{row['step_s']:.1f}", f"{row['tokens_per_s_gpu']:.0f}", f"`{path.name}`",
            )  # fmt: skip


def tables(results: Path, cells: Sequence[PlanRow]) -> str:
    """Both tables, with a title each."""
    bf16 = [cell for cell in cells if cell.work.arm == "bf16"]
    return f"Planned:\n\n{planned(bf16)}\n\nMeasured:\n\n{measured(results)}\n"
