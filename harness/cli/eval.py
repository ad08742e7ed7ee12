"""`lowbit eval`: the policy of a run, or any model folder, asked what `evaluations` lists."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.options import add_results, check_named_folder, check_untrained
from harness.foundation.text_table import text_table
from harness.foundation.writable import check_writable

if TYPE_CHECKING:
    from harness.config.schema import RunConfig
    from harness.records.run_result import RunResult, TaskEvalRecord
    from harness.trainers.task_evaluation import Asked

LEGEND = """\
One row per score: mean over the questions with Wilson's interval over them (95 %). avg@k: share of right samples.
pass@k: chance that k samples hold a right one, unbiased. maj@k: score of the most frequent answer. greedy: of the most
probable tokens. reference: weights in BF16 on vLLM, in float32 on the embedded engine; rollout: as rolled."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", metavar="RUN|FOLDER", help="a run whose policy launch.save kept, or a model folder")
    parser.add_argument("overrides", nargs="*", default=[], help=(
        "overrides, e.g. 'evaluations=[{task:gsm8k,path:DIR,k:4,greedy:true}]' engine=vllm trainer.device=cuda; of a "
        "run its own evaluations are asked where none are given"))  # fmt: skip
    add_results(parser, reads=lambda a: not _is_folder(a.what), check=_check)


def _check(a: argparse.Namespace) -> None:
    if _is_folder(a.what):
        _config_of_folder(Path(a.what), a.overrides)
    else:
        _config_of_run(a.what, a.overrides, a.results)


def run(a: argparse.Namespace) -> int:
    """Evaluate, print a table, write the record. Exit code 1 where an evaluation ended in an error."""
    if _is_folder(a.what):
        records = _of_folder(Path(a.what), a.overrides, a.results)
    else:
        records = _of_run(a.what, a.overrides, a.results)
    return 1 if any(record.error for record in records) else 0


def _is_folder(words: str) -> bool:
    """Do the words name a model folder, not a run?"""
    folder = Path(words)
    return folder.is_dir() or (folder.is_absolute() and not folder.exists())


def _of_folder(folder: Path, overrides: Sequence[str], results: Path) -> list[TaskEvalRecord]:
    """Evaluate a model folder and keep the records apart from any run."""
    config, ones = _config_of_folder(folder, overrides)
    check_writable(results, "--results")
    records = _asked(config, folder, ones, 0)
    _keep(results, folder.resolve().name, config, records)
    return records


def _config_of_folder(folder: Path, overrides: Sequence[str]) -> tuple[RunConfig, list[Asked]]:
    """(configuration of a model folder, what is asked). Raises ValueError for a bad folder or override, and for what
    cannot be asked here."""
    from harness.config.load import load, of_folder
    from harness.config.resolve import resolve
    from harness.models.checkpoint import check_folder, content_hash
    from harness.run.evaluate import questions

    check_folder(folder)
    check_untrained(overrides)
    check_named_folder(overrides)
    config = resolve(load([*of_folder(folder), *overrides]), lambda path: content_hash(Path(path)))
    return config, questions(config, folder)


def _keep(results: Path, name: str, config: RunConfig, records: Sequence[TaskEvalRecord]) -> None:
    """Write `results/evaluations/<name>-<id>.json`; the id is that of the configuration."""
    from harness.config.load import run_id, to_json
    from harness.records.json_rows import write_json_rows
    from harness.records.paths import evaluations_path

    path = evaluations_path(results, name, run_id(config))
    rows = [record.model_dump(mode="json") for record in records]
    written = {"folder": name, "config": to_json(config), "evaluations": rows}
    write_json_rows(path, written, "evaluations", allow_nan=True)
    print(f"result: {path}")


def _of_run(words: str, overrides: Sequence[str], results: Path) -> list[TaskEvalRecord]:
    """Evaluate the last saved policy of a run. Its own evaluations go into its record, in place of failed or older ones
    of the same step, site and question; others are kept as those of a model folder are.

    Raises ValueError where the record is to be written and the run's cell is at work, or another such command is.
    """
    from harness.foundation.lock_file import folder_held
    from harness.records.packed import make_available
    from harness.records.paths import record_path, runs_folder, work_folder
    from harness.records.policies import step_of

    found, folder, config, ones = _config_of_run(words, overrides, results)
    check_writable(results, "--results")
    if overrides:
        records = _asked(config, folder, ones, step_of(folder))
        _keep(results, f"{found.run_id}-{folder.name}", config, records)
        return records
    refusal = f"{words}: the run, or another evaluation of it, is at work; wait for its end"
    with folder_held(work_folder(results, found.run_id), refusal):
        records = _asked(config, folder, ones, step_of(folder))
        make_available(results, found.sweep)
        _write_into(runs_folder(results, found.sweep), found.run_id, records)
    print(f"result: {record_path(results, found.sweep, found.run_id)}")
    return records


def _config_of_run(
    words: str, overrides: Sequence[str], results: Path
) -> tuple[RunResult, Path, RunConfig, list[Asked]]:
    """(run, its last saved policy, configuration with the evaluations that are asked, these). Raises ValueError where
    there is none, for an override of anything else, and for what cannot be asked here."""
    from dataclasses import replace

    from harness.cli.passport import find_run
    from harness.config.load import load, parse
    from harness.config.resolve import resolve
    from harness.config.schema import RunConfig
    from harness.records.policies import last_policy
    from harness.run.evaluate import questions

    found = find_run(words, results, also=" and no model folder")
    folder = last_policy(results, found.sweep, found.run_id)
    config = parse(RunConfig, found.config)
    if other := next((word for word in overrides if not word.startswith("evaluations=")), None):
        raise ValueError(f"{other}: of a run only evaluations=[...] can be set; its own settings stand")
    if overrides:
        config = replace(config, evaluations=resolve(load(overrides)).evaluations)
    return found, folder, config, questions(config, folder)


def _write_into(folder: Path, run_id: str, records: Sequence[TaskEvalRecord]) -> None:
    """Put records into a run's own file; its series stays."""
    from harness.records.run_result import read_result, write_result

    path = folder / f"{run_id}.json"
    result = read_result(path)
    made = {(record.number, record.step, record.site) for record in records}
    kept = [record for record in result.evaluations if (record.number, record.step, record.site) not in made]
    every = sorted([*kept, *records], key=lambda record: (record.step, record.site, record.number))
    series = path.with_suffix(".parquet")
    write_result(
        folder, result.model_copy(update={"evaluations": every}), series.read_bytes() if series.exists() else None
    )


def _asked(config: RunConfig, folder: Path, ones: list[Asked], step: int) -> list[TaskEvalRecord]:
    from harness.run.evaluate import evaluate_folder

    def tell(record: TaskEvalRecord) -> None:
        print(f"{record.task} ({record.site}): {record.error or 'done'}, {record.seconds or 0.0:.0f} s", flush=True)

    records, remarks = evaluate_folder(config, folder, ones, step, tell)
    print()
    print(score_table(records))
    print(f"\n{LEGEND}")
    for line in remarks:
        print(line)
    return records


def score_table(records: Sequence[TaskEvalRecord]) -> str:
    """A row per score of every record."""
    from harness.records.sample_scores import over_questions, question_scores

    rows: list[tuple[str, ...]] = []
    for record in records:
        for name, values in question_scores(record.model_dump()).items():
            found = over_questions(values)
            interval = f"{found.low:.3f} to {found.high:.3f}" if not math.isnan(found.low) else "-"
            rows.append(
                (record.task, record.site, record.precision, str(len(values)), name, f"{found.mean:.3f}", interval)
            )
        if record.error:
            rows.append((record.task, record.site, record.precision, "-", "error", "-", record.error))
    return text_table(("task", "site", "precision", "questions", "score", "mean", "interval"), rows)
