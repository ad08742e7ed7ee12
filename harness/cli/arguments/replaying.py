"""`lowbit replay`: the replay laboratory."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.cli.arguments.kinds import Commands, command, number_list, places, positive, word_list


def add(commands: Commands) -> None:
    """The replay laboratory."""
    words = "store rollout batches and evaluate every correction on the same data"
    replay = commands.add_parser("replay", help=words, description=words[0].upper() + words[1:] + ".")
    actions = replay.add_subparsers(metavar="action", required=True)
    stored = Path("results") / "work" / "replay"

    collect = command(actions, "collect", "sample one policy exactly and in every format", _replay_collect)
    collect.add_argument("overrides", nargs="*", help="Hydra overrides of model, task, base, algo, engine, seed")
    collect.add_argument("--precisions", type=word_list, metavar="A,B,...",
                         default=("int8", "fp8_block", "nvfp4", "int4"),
                         help="formats of the sampler (default: int8,fp8_block,nvfp4,int4)")  # fmt: skip
    collect.add_argument(
        "--lengths", type=number_list, default=(), metavar="N,M,...", help="values of task.n (default: its own)"
    )
    collect.add_argument("--prompts", type=positive, default=512,
                         help="prompts per sampler, a multiple of algo.num_prompts (default: 512)")  # fmt: skip
    collect.add_argument("--reference-factor", type=positive, default=4,
                         help="how many times as many prompts the exact reference gets (default: 4)")  # fmt: skip
    collect.add_argument("--warmup", type=int, default=0, help="training steps with bf16 rollouts before (default: 0)")
    collect.add_argument("--out", type=Path, default=stored, help=f"folder of the batches (default: {stored})")
    places(collect)

    evaluate = command(
        actions, "evaluate", "every correction on the stored batches; tables and figures", _replay_evaluate
    )
    evaluate.add_argument("--methods", type=word_list, default=(), metavar="A,B,...", help="these alone (default: all)")
    evaluate.add_argument("--modes", type=word_list, default=("decoupled",), metavar="A,B,...",
                          help="of methods that fix none: decoupled, bypass_ppo, bypass_pg")  # fmt: skip
    evaluate.add_argument("--ages", type=number_list, default=(0, 1), metavar="0,1",
                          help="optimizer steps since the batches were sampled (default: 0,1)")  # fmt: skip
    evaluate.add_argument("--stored", type=Path, default=stored, help=f"what collect wrote (default: {stored})")
    places(evaluate)

    places(command(actions, "report", "tables and figures from the records alone", _replay_report))


def _replay_collect(a: argparse.Namespace) -> int:
    from harness.cli.commands.replaying import replay_collect
    from harness.studies.replay.sampling import Demand

    demand = Demand(
        overrides=tuple(a.overrides), precisions=a.precisions, lengths=a.lengths, num_prompts=a.prompts,
        reference_factor=a.reference_factor, warmup=a.warmup,
    )  # fmt: skip
    return replay_collect(demand, a.out, a.results)


def _replay_evaluate(a: argparse.Namespace) -> int:
    from harness.cli.commands.replaying import replay_evaluate
    from harness.studies.replay.evaluation import Question

    return replay_evaluate(a.stored, Question(methods=a.methods, modes=a.modes, ages=a.ages), a.results)


def _replay_report(a: argparse.Namespace) -> int:
    from harness.cli.commands.replaying import replay_report

    return replay_report(a.results)
