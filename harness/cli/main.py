"""The command `lowbit`: find the command's file, parse, run it, and turn bad input into one line and exit code 2.

A command `some-name` is the file `harness/cli/some_name.py` with `arguments(parser)`, which declares its options, and
`run(arguments)`, which returns the exit code. Only the file of the chosen command is imported, and it imports what
is slow to import (torch, Hydra, pandas) when it runs, so that help and typing errors answer at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from harness.cli import completion
from harness.cli.options import check_results
from harness.foundation import bytecode_cache
from harness.foundation.did_you_mean import nearest
from harness.foundation.project_files import HOME, RESULTS, bring_results

GROUPS: Mapping[str, Mapping[str, str]] = {
    "run": {
        "sweep": "run a sweep; finished cells are skipped, so starting again resumes",
        "run": "run one cell",
        "eval": "evaluate the policy of a run, or any model folder",
        "export": "copy the saved policy of a run, or its codes, as a model folder",
        "base": "train the base models that sweeps start from, where they are missing",
        "warm": "compile DeepGEMM's kernels for block FP8 before a run",
        "paper": "published recipes: list them with what this machine lacks, launch one",
        "search": "search knobs with Optuna; starting again goes on",
    },
    "look": {
        "report": "write tables and figures of a sweep from its results",
        "figures": "draw paper figures (all, or those named) and the figures of named sweeps from their results",
        "methods": "list the methods: parts, precisions, paper",
        "metrics": "list the metrics: unit, direction, definition",
        "runs": "list the runs of a sweep by name, or the sweeps that have results",
        "passport": "show planned and realized formats of a run, tensor by tensor",
        "browse": "serve MLflow's pages over the results on this machine",
        "site": "write the static site of the results: leaderboard, figures, passports",
    },
    "study": {
        "claims": "test published claims on the results and show the table of badges",
        "mismatch": "mismatch of our stand-ins beside published values of real models",
        "replay": "store rollout batches and evaluate every correction on the same data",
        "throughput": "measure vLLM's decode rate by size, precision, batch and context; "
        "starting again measures what is missing",
        "parity": "score what vLLM samples with the embedded emulation and in float32, format by format",
        "early-warning": "which signal moved first before runs collapsed, and by how many steps",
        "probe": "mismatch and costs of every rollout format for a model folder, without training",
        "fp8-cache": "what the scales of an FP8 KV cache do to log-probs, rule by rule, at equal weights",
        "layers": "the linear layers of a policy in which the mismatch of a rollout format arises",
        "dose": "lost accuracy against mismatch x length, over all committed records",
        "advise": "rollout format and correction for a model, a length and some GPUs, with evidence and configurations",
        "break-even": "from which size and length on a low precision pays for a whole step, "
        "from what was measured on the GPU",
        "capacity": "memory and time of a step by size, length and precision on so many NVIDIA H200, "
        "checked against measurements",
    },
    "check": {
        "doctor": "check this installation and machine",
        "results": "verify, import, track or pack result files",
        "completion": "print the code with which a shell's tab key completes this command",
    },
}
"""Group -> command -> its line in `lowbit --help`."""
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
LISTS = ("overrides", "sweeps", "names")
"""Arguments that take any number of words; a command has one of them at most."""
COLUMNS = 88
"""Width of `lowbit --help`."""


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError on bad input, where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with the command, what is wrong, and where to read on."""
        command = self.prog.removeprefix("lowbit").strip()
        raise ValueError(f"{command}: " * bool(command) + f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 something failed, 2 bad input, 130 interrupted."""
    bytecode_cache.keep()
    if argv is None:  # a process of its own: a request to end is Ctrl-C, also where a background job ignores that
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
    if completion.VARIABLE in os.environ:  # the shell asks what may come next
        completion.complete(parser())
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        _bring_results(arguments)
        check_results(arguments)
        return arguments.run(arguments)
    except ValueError as error:
        if os.environ.get("LOWBIT_TRACEBACK"):
            raise
        print(f"lowbit: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # no space, no permission: what is on disk is whole, for every file is written atomically
        if os.environ.get("LOWBIT_TRACEBACK"):
            raise
        print(f"lowbit: error: {error.filename or 'writing'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("\nlowbit: " + "; ".join(["interrupted", *map(str, stop.args)]), file=sys.stderr)
        return 130
    finally:
        if argv is None:  # all is said and written: nothing is left to interrupt but torch's own end
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The words of a command line as values; `run` is the command's function. Raises ValueError on bad input."""
    command = words[0] if words and not words[0].startswith("-") else ""
    if command and command not in COMMANDS:
        raise ValueError(f"unknown command {command}; {nearest(command, COMMANDS)}")
    if words and not command and not any(option.startswith(words[0]) for option in ("-h", "--help", "--version")):
        raise ValueError(f"unknown option {words[0]}; a command comes first; see lowbit --help")
    top = parser(command)
    arguments, rest = top.parse_known_args(words)
    if rest:  # argparse gives up on positional words that follow an option; those of a list may stand anywhere
        name = next((name for name in LISTS if hasattr(arguments, name)), "")
        wrong = [word for word in rest if word.startswith("-") or not name]
        if wrong:
            raise ValueError(f"{command}: unknown arguments {' '.join(wrong)}; see lowbit {command} --help")
        getattr(arguments, name).extend(rest)
    return arguments


def _bring_results(arguments: argparse.Namespace) -> None:
    """Outside a clone, where a command names no other folder, it reads the committed results as they lie. For one that
    writes they are copied to where it expects them, once its input is right."""
    if arguments.command == "doctor" or getattr(arguments, "results", None) != RESULTS or RESULTS.exists():
        return
    arguments.results = HOME / RESULTS
    if getattr(arguments, "dry_run", False) or not arguments.writes(arguments):
        return
    arguments.check_input(arguments)
    arguments.results = RESULTS
    if count := bring_results():
        print(f"{RESULTS}: {count} files of committed results copied from {HOME / RESULTS}", file=sys.stderr)


class Version(argparse.Action):
    """The option `--version`: print the package's version, and the commit of a checkout, and leave."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print one line and leave."""
        from importlib.metadata import version

        from harness.foundation.provenance import commit

        head, is_changed = commit()
        told = f" (commit {head}{', with changes' if is_changed else ''})" if head else ""
        print(f"lowbit-rl-bench {version('lowbit-rl-bench')}{told}")
        parser.exit()


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Every command, with the options of `command` alone (default: of all)."""
    top = Parser(
        prog="lowbit",
        usage="lowbit [-h] [--version] command ...",
        description="Compare methods of reinforcement learning with low-precision rollouts, side by side.\n\n"
        + _listed(),
        epilog="lowbit COMMAND --help shows a command's options; LOWBIT_TRACEBACK=1 shows where an error came from.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=Version, nargs=0, help="print the version, with the commit of a checkout")
    commands = top.add_subparsers(prog="lowbit", required=True, dest="command", help=argparse.SUPPRESS)
    for name, line in COMMANDS.items():
        sub = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        if command in (None, name):
            module = import_module(f"harness.cli.{name.replace('-', '_')}")
            module.arguments(sub)
            sub.set_defaults(run=module.run)
    return top


def _listed() -> str:
    """The commands by group, as `lowbit --help` shows them."""
    lines: list[str] = []
    for group, commands in GROUPS.items():
        lines.append(f"{group}:")
        for name, line in commands.items():
            lines += textwrap.wrap(f"  {name:<14} {line}", COLUMNS, subsequent_indent=" " * 17)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
