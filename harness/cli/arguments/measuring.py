"""`lowbit throughput`: the speed of bare vLLM by size, precision, batch and context."""

from __future__ import annotations

import argparse

from harness.cli.arguments.kinds import Commands, command, minutes, places, positive


def add(commands: Commands) -> None:
    """The throughput map."""
    words = "measure vLLM's decode rate by size, precision, batch and context; starting again measures what is missing"
    sub = command(commands, "throughput", words, _throughput)
    sub.add_argument("name", help="a file sweeps/throughput_*.yaml without its ending, or a path to a YAML file")
    sub.add_argument("--gpus", type=positive, default=1, help="GPUs to use, one engine on each (default: 1)")
    sub.add_argument("--minutes", type=minutes, metavar="M",
                     help="start no engine that has too little time left, and end those that run after so many "
                          "minutes; everything measured stays")  # fmt: skip
    sub.add_argument("--only", metavar="KEY=VALUE,...",
                     help="these engines alone: size=7b,precision=int8; a key twice means either value")  # fmt: skip
    sub.add_argument("--retry", action="store_true", help="also try engines again that died before")
    sub.add_argument("--dry-run", action="store_true", help="list what is missing and about how long it takes")
    sub.add_argument("--report", action="store_true", dest="is_report",
                     help="run nothing; write tables and figures of what is measured")  # fmt: skip
    places(sub)


def _throughput(a: argparse.Namespace) -> int:
    from harness.cli.commands.measuring import report, throughput

    if a.is_report:
        return report(a.name, a.results)
    return throughput(
        a.name, a.results, num_gpus=a.gpus, minutes=a.minutes, only=a.only, is_retried=a.retry, is_dry=a.dry_run
    )
