"""`lowbit capacity`: memory and time of a step by size, length and precision on so many NVIDIA H200."""

from __future__ import annotations

import argparse

from harness.cli.options import (
    add_results,
    add_write,
    always,
    gibibytes,
    if_written,
    positive,
    positive_list,
    rate,
    tell_written,
    word_list,
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "Rates were measured on NVIDIA H200 alone, so there is no plan for another GPU."
    parser.add_argument("--gpus", type=positive_list, default=(1, 8, 64), help="numbers of H200 (default: 1,8,64)")
    parser.add_argument("--sizes", type=word_list, default=(), help="sizes of Qwen2.5 (default: all that were timed)")
    parser.add_argument("--lengths", type=positive_list, default=(), help="tokens of a response (default: all timed)")
    parser.add_argument("--batch", type=positive, help="responses of a step (default: 512)")
    parser.add_argument("--micro-batch-tokens", type=positive, dest="pass_tokens", metavar="N",
                        help="tokens that a GPU trains on at once (default: 16896)")  # fmt: skip
    parser.add_argument("--nvlink", type=rate, metavar="GB/S", help="assumed rate of a GPU in its node (default: 350)")
    parser.add_argument("--network", type=rate, metavar="GB/S", help="assumed rate of a node to others (default: 320)")
    parser.add_argument("--host", type=rate, metavar="GB/S", help="assumed rate of a GPU to the host (default: 40)")
    parser.add_argument(
        "--host-gib", type=gibibytes, metavar="GIB",
        help="main memory of a machine for each of its GPUs (default: 256, 2 TiB beside 8 H200)",
    )  # fmt: skip
    parser.add_argument(
        "--train", choices=("any", "full", "lora"), default="any", dest="trains",
        help="all weights or adapters; any (default): adapters where all weights do not fit",
    )  # fmt: skip
    parser.add_argument("--why", action="store_true", help="say why each other layout was not taken")
    parser.add_argument("--layouts", action="store_true", help="show the layouts alone, planned and measured")
    add_write(parser, "the tables and the figure")
    add_results(parser, reads=always, writes=if_written)


def run(a: argparse.Namespace) -> int:
    """Print the tables. Raises ValueError for an unknown size, or a length or batch that cannot be."""
    from harness.records.paths import figures_folder
    from harness.studies.capacity.place import Work
    from harness.studies.capacity.report import LEGEND, NAME, SMALLEST, report, write
    from harness.studies.capacity.seconds import Links

    work, links = (
        {name: value for name in names if (value := getattr(a, name)) is not None}
        for names in (("batch", "pass_tokens", "host_gib"), ("nvlink", "network", "host"))
    )
    base = Work(size=SMALLEST, arm="bf16", length=1, **work)
    page, cells = report(a.results, a.gpus, base, Links(**links), a.sizes, a.lengths, a.trains)
    if a.layouts:
        from harness.studies.capacity.layouts import tables

        print(tables(a.results, cells))
    else:
        print(page.partition("\n")[0] + "\n")
        print(page[page.index("## ") : page.index("| what | where |")].strip())
        print("\n" + page[page.index(LEGEND) : page.index("## ")].strip())
    for cell in cells if a.why else ():
        print(f"\n{cell.work.size}, {cell.work.length} tokens, {cell.work.arm}, {cell.place.gpus} GPUs")
        print("\n".join(f"  {line}" for line in cell.why))
    if a.is_written:
        from harness.studies.capacity.figure import draw

        tell_written([*write(a.results, page, cells), *draw(cells, figures_folder(a.results) / f"{NAME}.png")])
    return 0
