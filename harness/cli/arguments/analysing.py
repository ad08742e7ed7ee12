"""`lowbit early-warning | break-even | capacity`: analyses over several sweeps."""

from __future__ import annotations

import argparse

from harness.cli.arguments.kinds import Commands, command, number_list, places, positive, word_list


def add(commands: Commands) -> None:
    """Analyses over several sweeps."""
    words = "which signal moved first before runs collapsed, and by how many steps"
    early = command(commands, "early-warning", words, _early_warning)
    early.add_argument("sweeps", nargs="*", help="sweeps with results (default: standard corrections)")
    places(early)

    words = "from which size and length on a low precision pays for a whole step, from what was measured on the GPU"
    even = command(commands, "break-even", words, _break_even)
    even.add_argument("--batches", type=number_list, default=(64, 256), help="responses per step (default: 64,256)")
    places(even)
    _add_capacity(commands)


def _add_capacity(commands: Commands) -> None:
    words = "memory and time of a step by size, length and precision on so many GPUs, checked against measurements"
    plan = command(commands, "capacity", words, _capacity)
    plan.add_argument("--gpus", type=number_list, default=(1, 8, 64), help="numbers of GPUs (default: 1,8,64)")
    plan.add_argument("--sizes", type=word_list, default=(), help="of Qwen2.5 (default: all that were timed)")
    plan.add_argument("--lengths", type=number_list, default=(), help="response tokens (default: all that were timed)")
    plan.add_argument("--batch", type=positive, help="responses of a step (default: 512)")
    plan.add_argument("--micro-batch-tokens", type=positive, dest="pass_tokens", help="on a GPU (default: 16896)")
    plan.add_argument("--nvlink", type=float, metavar="GB/S", help="assumed, per GPU in a node (default: 350)")
    plan.add_argument("--network", type=float, metavar="GB/S", help="assumed, per node between nodes (default: 320)")
    plan.add_argument("--host", type=float, metavar="GB/S", help="assumed, from a GPU to the host (default: 40)")
    places(plan)


def _early_warning(a: argparse.Namespace) -> int:
    from harness.cli.commands.analysing import early_warning

    return early_warning(a.sweeps, a.results)


def _break_even(a: argparse.Namespace) -> int:
    from harness.cli.commands.analysing import break_even

    return break_even(a.results, a.batches)


def _capacity(a: argparse.Namespace) -> int:
    from harness.cli.commands.analysing import capacity

    work, links = (
        {name: value for name in names if (value := getattr(a, name)) is not None}
        for names in (("batch", "pass_tokens"), ("nvlink", "network", "host"))
    )
    return capacity(a.results, a.gpus, work, links, a.sizes, a.lengths)
