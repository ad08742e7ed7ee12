"""Break-even of a whole step at sizes that no run here trains, put together from what was measured on the GPU.

    generation, push    as measured (`harness.studies.stage_rates`)
    training            one forward pass for old log-probs, one forward and backward, AdamW

One GPU holds everything: memory, sharding and communication are left out, and so is the price of checkpointed layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.engines.vllm.memory import num_parameters
from harness.foundation.markdown_table import markdown_table
from harness.foundation.whole_file import write_atomic
from harness.records.paths import figures_folder, tables_folder
from harness.studies.break_even.answer import Answer, crossings_of
from harness.studies.break_even.costs import StepCost
from harness.studies.break_even.figure import draw
from harness.studies.break_even.laws import fit_speedup
from harness.studies.stage_rates import ARMS, RATES, Measured, adam_s, push_s, read_measured, training_s
from harness.studies.throughput.cost import generation_s
from harness.studies.throughput.plan import read_sweep
from harness.studies.throughput.shapes import in_order, shape_of
from harness.studies.throughput.waiting import host_bound_cells

NAME = "break_even_h200"

HEAD = """# Break-even of a whole step on an NVIDIA H200

After prompts of {prompt} tokens, all responses of one length. Generation is measured (bare vLLM). The push is measured
at 7B and estimated elsewhere by parameters; a format that was not pushed costs what the slowest one does. Training is
**estimated**: one measured layer of 7B, compiled (`launch.compile`), scaled by operations, with a forward pass for old
log-probs and one update, and AdamW by bytes. Memory, sharding, communication and the prefill are left out. A speedup is
BF16's step over the arm's; `^`: the rates rest on steps that waited for the host, which says nothing about the format
and decides nothing here.
"""


def step_cost(
    found: Measured, size: str, precision: str, arithmetic: str, *, batch: int, prompt: int, length: int
) -> StepCost | None:
    """A step of `batch` responses; None where the engine was not timed so far."""
    config = shape_of(size)
    generate = generation_s(found.records.get(f"{size}-{precision}", {}), batch, prompt, length)
    if generate is None:
        return None
    score, learn = training_s(found, config, arithmetic, prompt + length)
    rest = batch * (prompt + length) * (score + learn) + adam_s(found, config)
    seconds = {"generate": generate, "sync": push_s(found, size, precision), "rest": rest}
    return StepCost(size=num_parameters(config), length=length, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """An arm's step and that of BF16."""

    own: StepCost
    base: StepCost
    is_host_bound: bool
    """The rates rest on steps that waited for the host: they say nothing about the format."""

    @property
    def ratio(self) -> float:
        """Speed of the arm over that of its base."""
        return self.base.total / self.own.total


Comparisons = Mapping[tuple[str, int], Compared]
"""(size, response tokens) -> an arm and BF16 there."""


def table_of(
    found: Measured, sizes: Sequence[str], lengths: Sequence[int], *, batch: int, prompt: int
) -> dict[str, Comparisons]:
    """Arm -> all steps that both it and BF16 were timed for."""
    costs: dict[str, dict[tuple[str, int], Compared]] = {}
    for (arm, (precision, arithmetic)), size, length in itertools.product(ARMS.items(), sizes, lengths):
        at = {"batch": batch, "prompt": prompt, "length": length}
        own = step_cost(found, size, precision, arithmetic, **at)
        base = step_cost(found, size, "bf16", "bf16", **at)
        if own is not None and base is not None:
            used = {(batch, n) for n in lengths if n <= max(length, min(lengths))}
            records = (found.records[f"{size}-{name}"] for name in (precision, "bf16"))
            waits = any(used & host_bound_cells(record) for record in records)
            costs.setdefault(arm, {})[size, length] = Compared(own=own, base=base, is_host_bound=waits)
    return dict(costs)


def answers(costs: Mapping[str, Comparisons]) -> list[Answer]:
    """Laws and crossings of every arm with two sizes and two lengths that do not wait for the host."""
    found: list[Answer] = []
    for arm, all_cells in costs.items():
        cells = {key: cell for key, cell in all_cells.items() if not cell.is_host_bound}
        if not cells or min(len({size for size, _ in cells}), len({length for _, length in cells})) < 2:
            continue
        own = [cell.own for cell in cells.values()]
        speedup = fit_speedup(own, [cell.base for cell in cells.values()])
        size, length = max(cells, key=lambda key: (cells[key].own.size, key[1]))
        found.append(
            Answer(
                name=arm, precision=ARMS[arm][0], speedup=speedup,
                measured=[(cell.own.size, cell.own.length, cell.ratio) for cell in cells.values()],
                crossings=crossings_of(speedup, [], own), race=None, step_ratio=cells[size, length].ratio,
                setting=f"{size}, {length} tokens",
            )
        )  # fmt: skip
    return found


def pays_from(cells: Comparisons, size: str) -> str:
    """From which response length on a step of this size is cheaper than BF16's, in words."""
    every = {length: cell for (own, length), cell in cells.items() if own == size}
    ratios = sorted((length, cell.ratio) for length, cell in every.items() if not cell.is_host_bound)
    if not ratios:
        return "waits for the host" if every else "-"
    start = len(ratios)
    while start and ratios[start - 1][1] > 1:
        start -= 1
    low, high = min(r for _, r in ratios), max(r for _, r in ratios)
    span = f"{low:.2f} to {high:.2f}" if len(ratios) > 1 else f"{low:.2f}"
    where = "never" if start == len(ratios) else "always" if start == 0 else f"from {ratios[start][0]} tokens"
    return f"{where} ({span})"


def section(costs: Mapping[str, Comparisons], sizes: Sequence[str], batch: int) -> list[str]:
    """One batch size: from where each arm pays, and every step."""
    pays = [(arm, *(pays_from(cells, size) for size in sizes)) for arm, cells in costs.items()]
    head = (
        "arm", "size", "tokens", "generate, s", "push, s", "training, s", "generation's share of BF16's step",
        "speedup of generation", "of the step",
    )  # fmt: skip
    rows = list[tuple[str, ...]]()
    for arm, cells in costs.items():
        for (size, length), cell in sorted(cells.items(), key=lambda item: (item[1].own.size, item[0][1])):
            s, t, mark = cell.own.seconds, cell.base.seconds, "^" if cell.is_host_bound else ""
            rows.append((
                arm, size, str(length), f"{s['generate']:.1f}", f"{s['sync']:.3f}", f"{s['rest']:.2f}",
                f"{t['generate'] / cell.base.total:.0%}", f"{mark}{t['generate'] / s['generate']:.2f}",
                f"{mark}{cell.ratio:.2f}",
            ))  # fmt: skip
    return [
        f"## {batch} responses a step", "",
        "From which response length on it pays, and the range of the speedup over the lengths:", "",
        markdown_table(("arm", *sizes), pays, align="lr"), "",
        markdown_table(head, rows, align="llr"), "",
    ]  # fmt: skip


def report(results: Path, batches: Sequence[int] = (64, 256)) -> tuple[str, dict[int, list[Answer]]]:
    """The page, and the answers per batch. Raises ValueError for what is missing."""
    plan = read_sweep(RATES)
    for batch in batches:
        if batch not in plan.batches:
            raise ValueError(f"batch={batch} was not measured; valid: {', '.join(map(str, plan.batches))}")
    found = read_measured(results, plan)
    sizes = in_order(plan.sizes)
    lines, found_by_batch = [HEAD.format(prompt=plan.prompt)], dict[int, list[Answer]]()
    for batch in batches:
        costs = table_of(found, sizes, plan.lengths, batch=batch, prompt=plan.prompt)
        lines += section(costs, sizes, batch)
        found_by_batch[batch] = answers(costs)
    return "\n".join(lines), found_by_batch


def write(results: Path, page: str, found: Mapping[int, Sequence[Answer]]) -> list[Path]:
    """Write `tables/break_even_h200.md` and a figure per batch that has an answer; the paths."""

    path, drawn = tables_folder(results) / f"{NAME}.md", list[Path]()
    write_atomic(path, page.encode())
    for batch, shown in found.items():
        if shown:
            drawn += draw(shown, figures_folder(results) / f"{NAME}_b{batch}.png")
    return [path, *drawn]
