"""`lowbit completion`: the tab key completes commands, options, sweeps, recipes, methods and other choices.

    eval "$(lowbit completion)"          (bash and zsh; `lowbit completion --shell fish | source` for fish)

argcomplete does the work: the shell calls `lowbit` with `_ARGCOMPLETE` set, and `complete` answers in place of a
command. Names are read from the files of `sweeps/` and of the configuration, methods from their registry. Left out:
values of keys that are no choice between names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from harness.foundation.project_files import STARTS, SWEEPS

VARIABLE = "_ARGCOMPLETE"
"""Environment variable that the shell sets when it asks for completions."""
CONF = Path(__file__).resolve().parents[1] / "config" / "conf"
SWEEP_ARGUMENTS = ("name", "sweep", "sweeps")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--shell", choices=("bash", "zsh", "fish"), default="bash", help="the shell (default: bash)")


def run(a: argparse.Namespace) -> int:
    """Print the shell's code."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["lowbit"], shell=a.shell))
    return 0


def complete(top: argparse.ArgumentParser) -> None:
    """Answer the shell and exit."""
    from argcomplete import autocomplete

    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                _attach(name, sub)
    autocomplete(top, always_complete_options=False)


def _attach(name: str, parser: argparse.ArgumentParser) -> None:
    """Tell argcomplete what the words of one command may be."""
    for action in parser._actions:
        words = _words(name, action)
        if words is not None:
            action.completer = lambda prefix, words=words, **_: words(prefix)  # pyright: ignore[reportAttributeAccessIssue]


def _words(name: str, action: argparse.Action) -> Callable[[str], list[str]] | None:
    """Words that one argument of a command may be, as a function of its beginning; None where nothing is known."""
    if action.option_strings:
        return None
    if action.dest == "overrides":
        return overrides
    if action.dest in SWEEP_ARGUMENTS:
        return lambda _: sweeps(name)
    return (lambda _: methods()) if name == "methods" else None


def sweeps(name: str) -> list[str]:
    """The files of `sweeps/` that a command runs, without their ending; of `lowbit paper` the recipes."""
    stems = sorted(path.stem for path in (SWEEPS / "papers" if name == "paper" else SWEEPS).glob("*.yaml"))
    if name in STARTS:
        return [stem for stem in stems if stem.startswith(STARTS[name])]
    return [stem for stem in stems if not stem.startswith(tuple(STARTS.values()))]


def methods() -> list[str]:
    """Every method, those of other packages too."""
    from methods import METHODS

    return list(METHODS)


def overrides(prefix: str) -> list[str]:
    """`key=value` of what is a choice between names: the method and the groups of the configuration; `key=` before the
    equals sign is typed."""
    groups = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())
    key, equals, _ = prefix.partition("=")
    if not equals:
        return [f"{group}=" for group in ("method", *groups)]
    if key == "method":
        return [f"method={name}" for name in methods()]
    return sorted(f"{key}={path.stem}" for path in CONF.glob(f"{key}/*.yaml"))
