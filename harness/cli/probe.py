"""`lowbit probe`: how far the sampler of every rollout format is from the trainer, for model folders, untrained on."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.options import add_results, add_write, check_untrained, named_path, tell_written, word_list

if TYPE_CHECKING:
    from harness.config.schema import Launch, RunConfig
    from harness.studies.probe.record import Record


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "folder", type=named_path, metavar="FOLDER", help="a model folder, or the file of an earlier probe"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="FOLDER|OVERRIDE", help=(
        "more folders or files to compare with, such as the saved steps of one run; and overrides, e.g. task=gsm8k "
        "task.path=DIR algo.num_prompts=64 engine.max_new_tokens=512 engine=vllm trainer.device=cuda"))  # fmt: skip
    parser.add_argument("--precisions", type=word_list, default=(), metavar="A,B,...",
                        help="formats, e.g. int8,fp8_block+kv8, or int4=int4_g32 for int4 with other weights than "
                             "it has of its own (default: all that the engine can follow)")  # fmt: skip
    parser.add_argument("--noise-like", type=word_list, default=(), metavar="A,B,...",
                        help="formats of this probe, or numbers, whose k3 random noise in the weights is to have: "
                             "finds its sigma, knobs.WeightNoise.sigma of the method weight_noise")  # fmt: skip
    parser.add_argument("--untrained", action="store_true",
                        help="the weights are random: costs alone count, and the record says so")  # fmt: skip
    parser.add_argument(
        "--dump", type=named_path, metavar="FOLDER", help="also keep the log-probs of every format there"
    )
    add_write(parser, "the tables and the figure")
    add_results(parser, check=lambda a: _asked(a))


def run(a: argparse.Namespace) -> int:
    """Measure, record, print tables. Raises ValueError for what cannot be measured, before anything is."""
    from harness.records.paths import figures_folder, tables_folder
    from harness.studies.probe.report import LEGEND, asked, sentences, tables, write

    records = _records(a)
    print()
    for table in tables(records):
        print(f"{table.text()}\n")
    print(LEGEND)
    print("bf16_tis: token TIS alone, the correction of flashrl.\n")
    print("\n".join(f"- {line}" for record in records for line in (asked(record), *sentences(record))))
    if a.is_written:
        tell_written(write(records, tables_folder(a.results), figures_folder(a.results)))
    return 0


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Places of a call, and runs of those that are measured."""

    places: list[Path]
    launch: Launch
    planned: dict[Path, tuple[list[RunConfig], list[str]]]
    """Model folder -> (its runs, remarks)."""
    noises: dict[Path, RunConfig | None]
    found: dict[Path, Record]
    """File of an earlier probe -> its record."""


def _asked(a: argparse.Namespace) -> _Asked:
    """Places, runs and earlier records of a call. Raises ValueError for what cannot be measured."""
    from harness.config.load import check_overrides, launch_of, split_launch
    from harness.engines.factory import check_installed
    from harness.studies.probe.record import configs, noised, read

    places = [a.folder, *(Path(word) for word in a.overrides if "=" not in word)]
    overrides = [word for word in a.overrides if "=" in word]
    check_overrides(overrides)
    check_untrained(overrides)
    overrides, values = split_launch(overrides)
    launch = launch_of(values, results=str(a.results))
    planned = {place: configs(place, a.precisions, overrides) for place in places if place.suffix != ".json"}
    names = [place.resolve().name for place in planned]
    if a.dump is not None and len(set(names)) < len(names):
        twice = max(names, key=names.count)
        raise ValueError(f"--dump {a.dump}: two folders are called {twice}; probe them one by one")
    for runs, _ in planned.values():
        check_installed(runs[0])
    noises = {place: noised(place, runs, a.noise_like, overrides) for place, (runs, _) in planned.items()}
    found = {place: read(place) for place in places if place.suffix == ".json"}
    given = {"--precisions": a.precisions, "--noise-like": a.noise_like, "--untrained": a.untrained, "--dump": a.dump}
    ignored = [*(option for option, value in given.items() if value), *overrides]
    if ignored and not planned:
        raise ValueError(f"{ignored[0]}: nothing is measured for the file of an earlier probe; name a model folder")
    return _Asked(places=places, launch=launch, planned=planned, noises=noises, found=found)


def _records(a: argparse.Namespace) -> list[Record]:
    from harness.foundation.writable import check_writable
    from harness.records.paths import probes_folder
    from harness.studies.probe.record import probe, write

    asked = _asked(a)
    planned, found = asked.planned, dict(asked.found)
    dumps = {} if a.dump is None else {place: a.dump / place.resolve().name for place in planned}
    written = [("--dump", dump) for dump in dumps.values()] + [("--results", probes_folder(a.results))] * bool(planned)
    for option, folder in written:
        check_writable(folder, option)
    for place, (runs, remarks) in planned.items():
        for line in remarks:
            print(line)
        try:
            found[place] = probe(
                place, runs, asked.launch, is_untrained=a.untrained, dump=dumps.get(place),
                noise=asked.noises[place], like=a.noise_like, tell=lambda line: print(line, flush=True),
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f"{place} has no record: the same command measures all its formats anew") from stop
        print(f"record: {write(a.results, found[place])}")
    return [found[place] for place in dict.fromkeys(asked.places)]
