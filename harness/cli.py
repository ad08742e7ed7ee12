"""The command `lowbit`: parse, dispatch, and turn bad input into one line and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

OVERRIDES = "Hydra overrides, e.g. model=m task.n=16 algo.mode=bypass_pg knobs.TIS.cap=4.0"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 something failed, 2 bad input, 130 interrupted."""
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
    _add_long(commands)
    _add_replay(commands)
    _add_looking(commands)
    return top


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_long(commands: Commands) -> None:
    """Commands that compute."""
    sweep = _command(commands, "sweep", "run a sweep; finished cells are skipped, so starting again resumes", _sweep)
    sweep.add_argument("name", help="a file of sweeps/ without its ending, or a path to a YAML file")
    sweep.add_argument("overrides", nargs="*", help=f"{OVERRIDES}; they apply to every cell and come last")
    sweep.add_argument("--dry-run", action="store_true", help="list cells and an estimate of time, run nothing")
    sweep.add_argument("--workers", type=_positive, default=os.cpu_count(), help="cells at a time (default: cores)")
    sweep.add_argument("--seeds", type=_seeds, help="comma-separated seeds in place of the file's")
    sweep.add_argument("--no-tracking", action="store_true", help="do not log to MLflow")
    _places(sweep)

    run = _command(commands, "run", "run one cell", _run)
    run.add_argument("overrides", nargs="*", help=OVERRIDES)
    run.add_argument("--dry-run", action="store_true", help="print the resolved configuration, run nothing")
    _places(run)

    base = _command(commands, "base", "train the base models that sweeps start from, where they are missing", _base)
    base.add_argument("sweeps", nargs="*", default=[], help="sweeps whose bases to train (default: all)")
    base.add_argument("--workers", type=_positive, default=os.cpu_count(), help="bases at a time (default: cores)")
    _places(base)

    report = _command(commands, "report", "write tables and figures of a sweep from its results", _report)
    report.add_argument("name", help="a sweep with results")
    report.add_argument("--only", choices=("tables", "figures"), help="write one of the two")
    _places(report)


def _add_replay(commands: Commands) -> None:
    """The replay laboratory."""
    words = "store rollout batches and evaluate every correction on the same data"
    replay = commands.add_parser("replay", help=words, description=words[0].upper() + words[1:] + ".")
    actions = replay.add_subparsers(metavar="action", required=True)
    stored = Path("results/work/replay")

    collect = _command(actions, "collect", "sample one policy exactly and in every format", _replay_collect)
    collect.add_argument("overrides", nargs="*", help="Hydra overrides of model, task, base, algo, engine, seed")
    collect.add_argument("--precisions", type=_words, default=("int8", "fp8_block", "nvfp4", "int4"), metavar="A,B,...",
                         help="formats of the sampler (default: int8,fp8_block,nvfp4,int4)")  # fmt: skip
    collect.add_argument(
        "--lengths", type=_numbers, default=(), metavar="N,M,...", help="values of task.n (default: its own)"
    )
    collect.add_argument("--prompts", type=_positive, default=512,
                         help="prompts per sampler, a multiple of algo.num_prompts (default: 512)")  # fmt: skip
    collect.add_argument("--reference-factor", type=_positive, default=4,
                         help="how many times as many prompts the exact reference gets (default: 4)")  # fmt: skip
    collect.add_argument("--warmup", type=int, default=0, help="training steps with bf16 rollouts before (default: 0)")
    collect.add_argument("--out", type=Path, default=stored, help=f"folder of the batches (default: {stored})")
    _places(collect)

    evaluate = _command(
        actions, "evaluate", "every correction on the stored batches; tables and figures", _replay_evaluate
    )
    evaluate.add_argument("--methods", type=_words, default=(), metavar="A,B,...", help="these alone (default: all)")
    evaluate.add_argument("--modes", type=_words, default=("decoupled",), metavar="A,B,...",
                          help="of methods that fix none: decoupled, bypass_ppo, bypass_pg")  # fmt: skip
    evaluate.add_argument("--ages", type=_numbers, default=(0, 1), metavar="0,1",
                          help="optimizer steps since the batches were sampled (default: 0,1)")  # fmt: skip
    evaluate.add_argument("--stored", type=Path, default=stored, help=f"what collect wrote (default: {stored})")
    _places(evaluate)

    _places(_command(actions, "report", "tables and figures from the records alone", _replay_report))


def _add_looking(commands: Commands) -> None:
    """Commands that look at methods, results and this machine."""
    methods = _command(commands, "methods", "list the methods: parts, precisions, paper", _methods)
    methods.add_argument("names", nargs="*", metavar="NAME", help="these alone, with knobs (default: a table of all)")
    methods.add_argument("--json", action="store_true", help="machine-readable")

    metrics = _command(commands, "metrics", "list the metrics: unit, direction, definition", _metrics)
    metrics.add_argument("--translate", action="store_true", help="our names beside those of other frameworks")

    _places(_command(commands, "doctor", "check this installation and machine", _doctor))

    passport = _command(commands, "passport", "show planned and realized formats of a run, tensor by tensor", _passport)
    passport.add_argument("run_id", help="a run id or the beginning of one")
    _places(passport)

    results = _command(commands, "results", "verify, import, track or pack result files", _results)
    results.add_argument("action", choices=("verify", "import", "pack", "unpack"),
                         help="verify files, import runs, pack a sweep into one file, unpack it")  # fmt: skip
    results.add_argument("source", nargs="?", help="import: a results folder (without it MLflow is rebuilt from ours); "
                                                   "pack, unpack: a sweep")  # fmt: skip
    _places(results)

    browse = _command(commands, "browse", "open the MLflow UI on the results", _browse)
    browse.add_argument("--port", type=_positive, default=5000)
    _places(browse)


def _command(
    commands: Commands, name: str, words: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
    sub.set_defaults(run=run)
    return sub


def _places(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above 0 is expected")
    return int(text)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers separated by commas are expected") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _numbers(text: str) -> tuple[int, ...]:
    if not all(part.isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers separated by commas are expected")
    return tuple(int(part) for part in text.split(","))


def _sweep(a: argparse.Namespace) -> int:
    from harness.commands.sweeping import sweep

    return sweep(
        a.name,
        a.overrides,
        results=a.results,
        workers=a.workers,
        is_dry=a.dry_run,
        seeds=a.seeds,
        is_tracked=not a.no_tracking,
    )


def _run(a: argparse.Namespace) -> int:
    from harness.commands.sweeping import run

    return run(a.overrides, results=a.results, is_dry=a.dry_run)


def _base(a: argparse.Namespace) -> int:
    from harness.commands.sweeping import base

    return base(a.sweeps, results=a.results, workers=a.workers)


def _report(a: argparse.Namespace) -> int:
    from harness.commands.sweeping import report

    return report(a.name, a.results, only=a.only)


def _replay_collect(a: argparse.Namespace) -> int:
    from harness.commands.replaying import replay_collect
    from harness.replay.sampling import Demand

    demand = Demand(
        overrides=tuple(a.overrides), precisions=a.precisions, lengths=a.lengths, num_prompts=a.prompts,
        reference_factor=a.reference_factor, warmup=a.warmup,
    )  # fmt: skip
    return replay_collect(demand, a.out, a.results)


def _replay_evaluate(a: argparse.Namespace) -> int:
    from harness.commands.replaying import replay_evaluate
    from harness.replay.evaluation import Question

    return replay_evaluate(a.stored, Question(methods=a.methods, modes=a.modes, ages=a.ages), a.results)


def _replay_report(a: argparse.Namespace) -> int:
    from harness.commands.replaying import replay_report

    return replay_report(a.results)


def _methods(a: argparse.Namespace) -> int:
    from harness.commands.inspecting import methods

    return methods(a.names, is_json=a.json)


def _metrics(a: argparse.Namespace) -> int:
    from harness.commands.inspecting import metrics

    return metrics(is_translated=a.translate)


def _doctor(a: argparse.Namespace) -> int:
    from harness.commands.inspecting import doctor

    return doctor(a.results)


def _passport(a: argparse.Namespace) -> int:
    from harness.commands.inspecting import passport

    return passport(a.run_id, a.results)


def _results(a: argparse.Namespace) -> int:
    from harness.commands.inspecting import import_all, pack_one, verify_all

    if a.action in ("pack", "unpack"):
        return pack_one(a.source, a.results, is_packing=a.action == "pack")
    return verify_all(a.results) if a.action == "verify" else import_all(a.source, a.results)


def _browse(a: argparse.Namespace) -> int:
    from harness.tracking import browse

    return browse(a.results, a.port)


if __name__ == "__main__":
    sys.exit(main())
