"""`lowbit parity`: the emulation against vLLM's kernels."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.cli.arguments.kinds import Commands, command, positive, word_list


def add(commands: Commands) -> None:
    """The comparison of engines."""
    words = "score what vLLM samples with the embedded emulation and in float32, format by format"
    sub = command(commands, "parity", words, _parity)
    sub.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where a GPU is visible")
    sub.add_argument("--formats", type=word_list, default=(), metavar="NAME,...",
                     help="these precisions alone; rows of others stay (default: all)")  # fmt: skip
    sub.add_argument("--checkpoint", type=Path, metavar="DIR",
                     help="a trained Hugging Face folder (default: the base of --model on task sort)")  # fmt: skip
    sub.add_argument("--model", default="xs128", help="whose base is trained, or read (default: xs128)")
    sub.add_argument("--samples", type=positive, default=512, help="responses to score (default: 512)")
    sub.add_argument("--passports", action="store_true", help="also write every format's passport")
    sub.add_argument("--report", action="store_true", dest="is_report",
                     help="measure nothing; write the table and the figure of what is there")  # fmt: skip
    sub.add_argument("--results", "--out", type=Path, default=Path("results"), help="results folder (default: results)")


def _parity(a: argparse.Namespace) -> int:
    from harness.cli.commands.parity import parity, report

    if a.is_report:
        return report(a.results)
    return parity(
        a.results, device=a.device, formats=a.formats, checkpoint=a.checkpoint, model=a.model, num_samples=a.samples,
        has_passports=a.passports,
    )  # fmt: skip
