"""The figure of a throughput map for a README: decode rate over BF16 by batch, its title computed from the records.

Left out: sizes where a cell of this context waited for the host or was disturbed, and sizes with a format unmeasured.
Maps without an 8-bit format have no such figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import takewhile

from matplotlib.figure import Figure

from harness.report.plots.style import INK
from harness.studies.throughput.cost import baseline_of, decode_ratios
from harness.studies.throughput.figures import LOOKS, OTHER, batch_axis
from harness.studies.throughput.map_cells import Records
from harness.studies.throughput.plan import BASELINE, Sweep
from harness.studies.throughput.settled import disturbed_cells
from harness.studies.throughput.shapes import in_order
from harness.studies.throughput.tables import shown_length
from harness.studies.throughput.waiting import host_bound_cells

FOUR_BIT = ("nvfp4", "int4", "mxfp4", "nf4")
"""Formats with weights of 4 bits and inputs of 16."""
WIDE = ("fp16", "bf16+kv8")
"""Formats with weights of 16 bits; every other one that is drawn has 8."""
NAMES = {
    "fp8_block": "block FP8",
    "fp8_block+kv8": "block FP8, FP8 cache",
    "int8": "INT8",
    "nvfp4": "NVFP4 weights",
    "int4": "INT4 weights",
}
Ratios = Mapping[str, Mapping[str, Mapping[int, float]]]
"""size -> precision -> batch -> decode rate over BF16's."""


def quiet_ratios(sweep: Sweep, records: Records) -> Ratios:
    """The ratios at the context that is shown, of the sizes where all formats were measured and none was disturbed,
    smallest first; none without an 8-bit format."""
    if not any(map(_has_8_bits, sweep.precisions)):
        return {}
    length, found = shown_length(sweep), dict[str, dict[str, dict[int, float]]]()
    for size in in_order(sweep.sizes):
        every = [records.get(f"{size}-{precision}", {}) for precision in sweep.precisions]
        marked = (disturbed_cells(record) | host_bound_cells(record) for record in every)
        ratios = {
            precision: dict(decode_ratios(record, baseline_of(records, size), sweep.batches, length))
            for precision, record in zip(sweep.precisions, every, strict=True)
            if precision != BASELINE
        }
        if ratios and all(ratios.values()) and not any(context == length for cells in marked for _, context in cells):
            found[size] = ratios
    return found


def _has_8_bits(precision: str) -> bool:
    return precision not in (BASELINE, *FOUR_BIT, *WIDE)


def title(ratios: Ratios) -> str:
    """Title of the figure: the range of 8-bit formats, and which 4-bit format is ahead of them, up to which batch.

    Only batches that every size and format was measured at count. Raises ValueError where there is none.
    """
    formats = [cells for size in ratios.values() for cells in size.values()]
    batches = sorted(set[int].intersection(*(set(cells) for cells in formats))) if formats else []
    if not batches:
        raise ValueError("no batch is measured at every size and format")
    eight = [[size[name] for name in size if _has_8_bits(name)] for size in ratios.values()]
    values = [cells[batch] for cells_of in eight for cells in cells_of for batch in batches]
    names = [size.upper() for size in ratios]
    where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    words = (
        f"At {where} 8-bit rollouts decode {min(values):.1f} to {max(values):.1f} times as fast as BF16 "
        f"up to batch {batches[-1]}"
    )

    def is_ahead(name: str, batch: int) -> bool:
        sizes = zip(ratios.values(), eight, strict=True)
        return all(name in size and size[name][batch] > max(cells[batch] for cells in high) for size, high in sizes)

    ahead = {name: list(takewhile(partial(is_ahead, name), batches)) for name in FOUR_BIT}
    best = max(ahead, key=lambda name: len(ahead[name]))
    if not ahead[best]:
        return words
    return f"{words};\n{NAMES.get(best, best)} are faster still up to batch {ahead[best][-1]} only"


def draw_decode(sweep: Sweep, records: Records) -> Figure:
    """A panel per size, a line per format, BF16 at 1. Raises ValueError where `title` does."""
    ratios = quiet_ratios(sweep, records)
    figure = Figure(figsize=(6.75, 2.6), layout="constrained")
    figure.suptitle(title(ratios), fontsize=9, fontweight="bold", x=0.01, ha="left")
    axes = figure.subplots(1, len(ratios), sharey=True, squeeze=False)[0]
    for ax, (size, formats) in zip(axes, ratios.items(), strict=True):
        ax.axhline(1.0, color=INK, linewidth=0.8)
        for name, cells in formats.items():
            look = LOOKS.get(name, OTHER)
            ax.plot([*cells], [*cells.values()], color=look.colour, linestyle=look.dash, marker=look.marker,
                    label=NAMES.get(name, name))  # fmt: skip
        ax.set_title(f"{size.upper()} parameters", fontsize=8)
        ax.set_xlabel("responses at a time (batch)")
        batch_axis(ax, sweep.batches)
    axes[0].set_ylabel(f"decode rate over BF16\nat {shown_length(sweep)} tokens of context", fontsize=7)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure
