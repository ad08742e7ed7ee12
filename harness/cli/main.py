"""The command `lowbit`: parse, dispatch, and turn bad input into one line and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from harness.cli.arguments import (
    analysing,
    claiming,
    faulting,
    figuring,
    inspecting,
    measuring,
    parity,
    replaying,
    searching,
    sweeping,
)
from harness.foundation import bytecode_cache

AREAS = (sweeping, searching, measuring, parity, replaying, analysing, claiming, figuring, faulting, inspecting)
"""In the order of `lowbit --help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 something failed, 2 bad input, 130 interrupted."""
    bytecode_cache.keep()
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    if rest:  # argparse gives up on positional words that follow an option; overrides may stand anywhere
        if not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest):
            top.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.overrides += rest
    try:
        return arguments.run(arguments)
    except ValueError as error:
        if os.environ.get("LOWBIT_TRACEBACK"):
            raise
        print(f"lowbit: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # no space, no permission: what is on disk is whole, for every file is written atomically
        if os.environ.get("LOWBIT_TRACEBACK"):
            raise
        print(f"lowbit: error: {error.filename or 'writing'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nlowbit: interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """Every command and its options."""
    top = argparse.ArgumentParser(
        prog="lowbit",
        description="Compare methods of reinforcement learning with low-precision rollouts, side by side.",
        epilog="LOWBIT_TRACEBACK=1 shows where an error came from.",
    )
    commands = top.add_subparsers(metavar="command", required=True)
    for area in AREAS:
        area.add(commands)
    return top


if __name__ == "__main__":
    sys.exit(main())
