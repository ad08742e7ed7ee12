"""Types and options that several commands declare."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from harness.foundation.project_files import RESULTS

OVERRIDES = (
    "Hydra overrides, e.g. model=m task.n=16 algo.mode=bypass_pg knobs.TIS.cap=4.0 launch.packing=true (every key: "
    "harness/config/schema.py)"
)

TRACKERS = ("mlflow", "wandb")

OF_SCORING = ("trainer.device", "trainer.compute")
"""Settings of the trainer that count where it scores and takes no step."""


def never(a: argparse.Namespace) -> bool:
    """Condition that no call meets."""
    return False


def always(a: argparse.Namespace) -> bool:
    """Condition that every call meets."""
    return True


def if_written(a: argparse.Namespace) -> bool:
    """Condition that a call with the option of `add_write` meets."""
    return a.is_written


def nothing(a: argparse.Namespace) -> None:
    """Check that accepts every call."""


def add_results(
    parser: argparse.ArgumentParser, *, reads: Callable[[argparse.Namespace], bool] = never,
    writes: Callable[[argparse.Namespace], bool] = always, check: Callable[[argparse.Namespace], object] = nothing,
) -> None:  # fmt: skip
    """The option that says where results are. `reads`: calls that need the folder and do not make it. `writes`: calls
    that write there, unless they are dry runs. `check`: raises ValueError for wrong input, before committed results are
    copied for a call that writes."""
    parser.add_argument("--results", type=named_path, default=RESULTS, help="results folder (default: results)")
    parser.set_defaults(reads=reads, writes=writes, check_input=check)


def named_path(text: str) -> Path:
    """A path that is not empty."""
    if not text:  # a shell's variable that is not set; Path takes it for the current folder
        raise argparse.ArgumentTypeError("'': a path is expected")
    return Path(text)


def check_results(a: argparse.Namespace) -> None:
    """Raises ValueError where the call needs a results folder and there is none, or none can be. `lowbit doctor` tells
    both by itself."""
    if not hasattr(a, "results") or a.command == "doctor":
        return
    if not a.reads(a):
        from harness.records.results_lock import check_folder

        check_folder(a.results)
    elif not a.results.is_dir():
        what = "a file, where a folder is expected" if a.results.exists() else "no such folder"
        raise ValueError(f"--results {a.results}: {what}; lowbit {a.command} reads results that are there")


def add_write(parser: argparse.ArgumentParser, what: str) -> None:
    """The option of a study, which prints, that also writes `what` into the results folder."""
    parser.add_argument("--write", action="store_true", dest="is_written", help=f"also write {what}")


def add_tracking(parser: argparse.ArgumentParser) -> None:
    """The options that say which trackers runs are logged to."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tracking", type=trackers, dest="trackers", default=("mlflow",), metavar="NAMES",
                       help="trackers, comma-separated: mlflow, wandb (Weights & Biases; default: mlflow)")  # fmt: skip
    which.add_argument("--no-tracking", action="store_const", const=(), dest="trackers", help="log to no tracker")


def check_trackers(names: tuple[str, ...]) -> None:
    """Raises ValueError for a tracker that is not installed."""
    if set(names) - {"mlflow"}:
        from harness.viewers.trackers import check_installed

        check_installed(names)


def add_workers(parser: argparse.ArgumentParser, what: str) -> None:
    """The option that says how many processes work at a time."""
    parser.add_argument("--workers", type=positive, default=os.cpu_count(), help=f"{what} at a time (default: cores)")


def add_again(parser: argparse.ArgumentParser, what: str) -> None:
    """The option that runs what is finished once more."""
    parser.add_argument("--again", action="store_true", dest="is_again",
                        help=f"run {what} once more; old records and policies go to results/replaced")  # fmt: skip


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The options that say for which GPU a dry run predicts, where it is not this machine's."""
    parser.add_argument("--gpu", metavar="NAME", help="with --dry-run: predict for h100, h200, a100 or b200 "
                        "(default: this machine's, or h200)")  # fmt: skip
    parser.add_argument("--memory", type=gibibytes, metavar="GIB", help="with --dry-run: memory of each GPU "
                        "(default: that of --gpu; of an A100 its larger kind's)")  # fmt: skip


def check_machine(a: argparse.Namespace) -> None:
    """Raises ValueError for a GPU or its memory without --dry-run, and for an unknown GPU."""
    for name in ("gpu", "memory"):
        if getattr(a, name) is not None and not a.dry_run:
            raise ValueError(f"{name}={getattr(a, name)}: only with --dry-run, which predicts for it")
    if a.gpu is not None:
        from harness.sweep.folder_time import check_gpu

        check_gpu(a.gpu)


def tell_written(paths: Iterable[Path]) -> None:
    """Name the files that a command wrote."""
    print("written: " + ", ".join(map(str, paths)))


def check_beside(a: argparse.Namespace, way: str, **unset: object) -> None:
    """Raises ValueError for an option that has no effect beside `way`, such as "--report, which measures nothing";
    `unset`: name of an option -> its value where it is not given."""
    if given := next((name for name, value in unset.items() if getattr(a, name) != value), None):
        raise ValueError(f"{a.command}: --{given.replace('_', '-')} does not go with {way}")


def check_untrained(overrides: Iterable[str]) -> None:
    """Raises ValueError for a setting of the optimizer, for a command that trains nothing."""
    for word in overrides:
        key = word.partition("=")[0].lstrip("+~")
        if key.startswith("trainer.") and key not in OF_SCORING:
            raise ValueError(f"{word}: nothing is trained here; valid of the trainer: {', '.join(OF_SCORING)}")


def check_named_folder(overrides: Iterable[str]) -> None:
    """Raises ValueError for another model, for a command that names its model's folder apart."""
    for word in overrides:
        if word.partition("=")[0].lstrip("+") in ("model", "model.path"):
            raise ValueError(f"{word}: the model is the folder that the command names; leave it out")


def check_exact_policy(a: argparse.Namespace, *options: str, counted: tuple[str, ...]) -> None:
    """Raises ValueError for wrong input of a command that measures the exact policy of a model folder on the CPU: for a
    folder or an override that is wrong, for one of another group than `counted`, which would change nothing, and where
    no folder is named, for one of `options`."""
    if a.folder is None:
        if given := next((name for name in options if getattr(a, name)), None):
            raise ValueError(f"--{given.replace('_', '-')}: nothing is measured without a model folder; name one")
        return
    from harness.config.load import load, of_folder
    from harness.models.checkpoint import check_folder

    check_folder(a.folder)
    load([*a.overrides, *of_folder(a.folder)])
    for word in a.overrides:
        if re.split(r"[.=]", word.lstrip("+"))[0] not in counted:
            raise ValueError(
                f"{word}: has no effect here, where the exact policy answers each question once, on the CPU; valid: "
                f"{', '.join(counted)}; --answers says how many, and task.options.max_new_tokens how long answers in "
                "text may be"
            )


def gibibytes(text: str) -> float:
    """A finite number of GiB above 0."""
    return _above_zero(text, "GiB above 0 are expected")


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above 0 is expected")
    return int(text)


def whole(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, 0 or more, is expected")
    return int(text)


def port(text: str) -> int:
    """A port number."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: a port from 1 to 65535 is expected")
    return int(text)


def minutes(text: str) -> float:
    """A finite number of minutes above 0."""
    return _above_zero(text, "minutes above 0 are expected")


def hours(text: str) -> float:
    """A finite number of hours above 0."""
    return _above_zero(text, "a number of hours above 0 is expected")


def rate(text: str) -> float:
    """A finite number of GB/s above 0."""
    return _above_zero(text, "GB/s above 0 are expected")


def _above_zero(text: str, wish: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: {wish}")
    return found


def word_list(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    words = tuple(word for word in text.split(",") if word)
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r}: words separated by commas are expected")
    return words


def trackers(text: str) -> tuple[str, ...]:
    """Names of trackers, separated by commas."""
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in TRACKERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no tracker; valid: {', '.join(TRACKERS)}")
    return names


def file_name(text: str) -> str:
    """The name of a file, without a folder."""
    if not text or text != Path(text).name:
        raise argparse.ArgumentTypeError(f"{text!r}: a name without a folder is expected")
    return text


def number_list(text: str) -> tuple[int, ...]:
    """Whole numbers, 0 or more, separated by commas; each once."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers, 0 or more, separated by commas are expected")
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def positive_list(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, separated by commas."""
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers above 0 are expected, separated by commas")
    return number_list(text)
