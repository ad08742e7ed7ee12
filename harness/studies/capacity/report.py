"""The capacity plan as a page, a CSV file and a figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.foundation.markdown_table import markdown_table
from harness.foundation.progress_bar import progress_bar
from harness.foundation.whole_file import write_atomic
from harness.records.paths import tables_folder
from harness.studies.capacity import check
from harness.studies.capacity.fastest import fastest
from harness.studies.capacity.memory import LORA_RANK, USABLE_GIB
from harness.studies.capacity.place import ARMS, GpuSplit, Work, check_gpus, remedy, works
from harness.studies.capacity.seconds import Links, StepTime
from harness.studies.stage_rates import RATES, Measured, read_measured
from harness.studies.throughput.estimates import DEVICE_GIB, UTILIZATION
from harness.studies.throughput.plan import read_sweep
from harness.studies.throughput.shapes import in_order

NAME, SMALLEST = "capacity_h200", "0.5b"
LEGEND = "Seconds of a step in each cell."
"""Start of the page's paragraphs that say what the cells of its tables mean."""
HEAD = """# Capacity plan for NVIDIA H200

A step of {batch} responses after prompts of {prompt} tokens, all of one length. Trainer and engine share every GPU;
the engine sleeps during the update. One GPU: `trainer=local` with `engine.sleep=true`. Several: `trainer=verl`, FSDP
over all of them. Each cell has the fastest layout of all that fit: GPUs of an engine (tensor parallel), GPUs that share
a sequence (Ulysses), masters and moments offloaded while the engine samples, and micro-batches with or without
checkpointed layers. `lowbit capacity --why` has a line for each that was not taken. Adapters of rank {rank} (LoRA) are
another method: taken where no layout that trains all weights fits. On either trainer the part
`bf16_train.BF16Compute` (or `jet_rl.FP8Flow`) with `launch.native_16bit=true launch.compile=true`. Of {device:.1f}
GiB a plan fills {usable:.1f}. Micro-batches of at most {tokens} tokens a GPU (one response at least).
No other GPU was measured, so there is no plan for one.

**Measured**: decode rates (bare vLLM), the push of BF16, FP8 and INT8 and one compiled layer at 7B. **Estimated** from
them: training of a whole model, other sizes, the push of 4-bit weights (as slow as the slowest). **Assumed**:
{nvlink:g} GB/s per GPU inside a node of 8, {network:g} GB/s per node between nodes, {host:g} GB/s per GPU to the host
(sleep and wake), {reduce:g} us per small all-reduce; communication is not overlapped, and an engine over N GPUs decodes
N times as fast but for its all-reduces; so **every number of more than one GPU is assumed**. Left out:
evaluation, checkpoints on disk, padding.

{legend} `^` rates of steps that waited for the host; `xN` an engine samples its responses in N
groups, because its cache (or the largest batch that was timed) holds no more at a time; `c` checkpointed layers; `tpN`
an engine over N GPUs; `spN` N GPUs share a sequence; `off` offloaded; `lora` adapters alone; `no: N` does not fit, N
GPUs would do; `-` fits, but its engine was not timed. The share is generation's of BF16's step. `{name}.csv` has every
part of every cell.

Memory: BF16, the peak of the update and what sampling takes beside the cache, GiB a GPU. The host's is of the first
machine, of {host_gib:g} GiB for each of its GPUs (`--host-gib`), {filled:.0%} of which a plan fills: what is offloaded
and engines that sleep, both pinned, for which torch takes a power of two of bytes a tensor; processes. Before the
steps one rank reads the whole model in float32, and where that takes more, it is what counts.
"""


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One answer."""

    work: Work
    place: GpuSplit
    step: StepTime | None
    """None where it does not fit or was not timed."""
    remedy: int | None
    """GPUs that would do, where it does not fit."""
    why: tuple[str, ...] = ()
    """A line for the layout and for each that was not taken (`fastest.Choice.why`)."""

    @property
    def words(self) -> str:
        """Text of a table's cell."""
        if self.place.reason:
            return f"no: {self.remedy or 'none'}"
        if self.step is None:
            return "-"
        marks = [f"x{self.step.rounds}"] * (self.step.rounds > 1) + ["c"] * self.place.is_checkpointed
        marks += self.place.layout.marks
        mark = "^" if self.step.is_host_bound else ""
        return " ".join([f"{mark}{self.step.total:.{1 if self.step.total < 100 else 0}f}", *marks])


def cells_of(
    found: Measured, wanted: Sequence[Work], gpus: Sequence[int], links: Links, trains: str = "any"
) -> list[PlanRow]:
    """The fastest layout of every work on every number of GPUs. `trains`: one of `fastest.TRAINS`."""
    cells: list[PlanRow] = []
    for work in progress_bar(wanted, "setting"):
        for n in gpus:
            choice = fastest(found, work, n, links, trains=trains)
            at = choice.taken.at
            more = remedy(work, n, is_lora=trains == "lora") if at.reason else None
            cells.append(PlanRow(work=work, place=at, step=choice.taken.step, remedy=more, why=tuple(choice.why())))
    return cells


def section(cells: Sequence[PlanRow], gpus: int) -> list[str]:
    """The table of one number of GPUs."""
    by_key = {(c.work.size, c.work.length, c.work.arm): c for c in cells if c.place.gpus == gpus}
    title = "## 1 GPU (estimated)" if gpus == 1 else f"## {gpus} GPUs (assumed)"
    head = ("size", "tokens", "update, GiB", "sampling, GiB", "host, GiB", "at a time", "generation", *ARMS)
    rows = list[tuple[str, ...]]()
    for size, length in dict.fromkeys(key[:2] for key in by_key):
        base = by_key[size, length, "bf16"]
        at, cost = base.place, base.step
        share = f"{cost.seconds['generate'] / cost.total:.0%}" if cost else "-"
        shown = [by_key[size, length, arm].words for arm in ARMS]
        at_once = f"{min(at.at_once, at.share)} of {at.share}"
        needs = (f"{at.update_gib:.1f}", f"{at.sampling_gib:.1f}", f"{at.host_gib:.0f}", at_once, share)
        rows.append((size, str(length), *needs, *shown))
    return [title, "", markdown_table(head, rows, align="lr"), ""]


def rows_of(cells: Sequence[PlanRow]) -> list[dict[str, object]]:
    """Every part of every cell."""
    rows: list[dict[str, object]] = []
    for cell in cells:
        work, at = cell.work, cell.place
        row: dict[str, object] = {
            "size": work.size, "response_tokens": work.length, "arm": work.arm, "gpus": at.gpus, "batch": work.batch,
            "basis": "estimated" if at.gpus == 1 else "assumed", "verdict": at.verdict, "reason": at.reason,
            "gpus_that_fit": cell.remedy or "", "gpus_per_engine": at.ways, "gpus_per_sequence": at.layout.split,
            "offloaded": at.layout.is_offloaded, "lora": at.layout.is_lora, "responses_per_engine": at.share,
            "at_a_time": at.at_once, "checkpoint_layers": at.is_checkpointed, "responses_per_pass": at.rows,
        }  # fmt: skip
        for phase, parts in (("sampling", at.sampling), ("update", at.update), ("host", at.host)):
            row |= {f"{phase}: {name}, GiB": f"{gib:.2f}" for name, gib in parts.items()}
        stages = ("generate", "push", "sleep", "score", "update", "communicate", "offload")
        row |= {f"{name}, s": f"{cell.step.seconds[name]:.3f}" if cell.step else "" for name in stages}
        row |= {"step, s": f"{cell.step.total:.3f}" if cell.step else ""}
        row |= {
            "rounds": cell.step.rounds if cell.step else "",
            "host_bound": bool(cell.step and cell.step.is_host_bound),
        }
        rows.append(row)
    return rows


def report(
    results: Path, gpus: Sequence[int], base: Work, links: Links, sizes: Sequence[str], lengths: Sequence[int],
    trains: str = "any",
) -> tuple[str, list[PlanRow]]:  # fmt: skip
    """The page, and the cells in it. `base`: batch, prompt and micro-batch of all cells; `sizes` and `lengths`: none
    for those of the throughput sweep; `trains`: one of `fastest.TRAINS`. Raises ValueError for what is unknown
    or missing."""
    for n in gpus:
        check_gpus(n)
    plan = read_sweep(RATES)
    wanted = works(in_order(sizes or plan.sizes), list(lengths or plan.lengths), base)
    found = read_measured(results, plan)
    cells = cells_of(found, wanted, gpus, links, trains)
    head = HEAD.format(
        batch=base.batch, prompt=base.prompt, rank=LORA_RANK, device=DEVICE_GIB, usable=USABLE_GIB,
        tokens=base.pass_tokens, nvlink=links.nvlink, network=links.network, host=links.host,
        reduce=links.all_reduce_us, name=NAME, legend=LEGEND, host_gib=base.host_gib, filled=UTILIZATION,
    )  # fmt: skip
    lines = [head, *(line for n in gpus for line in section(cells, n)), *check.section(results, found, plan)]
    return "\n".join(lines), cells


def write(results: Path, page: str, cells: Sequence[PlanRow]) -> list[Path]:
    """Write `tables/capacity_h200.md` and `.csv`; the paths."""
    path, table = (tables_folder(results) / f"{NAME}.{kind}" for kind in ("md", "csv"))
    write_atomic(path, page.encode())
    rows, text = rows_of(cells), io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(table, text.getvalue().encode())
    return [path, table]
