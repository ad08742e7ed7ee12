"""Records of FP8 caches: `fp8_cache/<name>.json`, one policy each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.foundation import provenance
from harness.foundation.digits import significant
from harness.foundation.writable import check_writable
from harness.models.checkpoint import check_folder, content_hash, load_decoder
from harness.records.json_rows import read_json_records, write_json_rows
from harness.records.paths import fp8_cache_folder
from harness.studies.fp8_cache.answers import check_questions, policy_of
from harness.studies.fp8_cache.study import CALIBRATION, FIRST, Tell, accuracies, compare

Record = dict[str, Any]
DIGITS = 5
"""Significant digits of a number in a record."""


def measure(
    folder: Path, overrides: Sequence[str], *, name: str, first: Path | None, num_answers: int, is_scanned: bool,
    samples: tuple[int, int] | None, tell: Tell, results: Path,
) -> Record:  # fmt: skip
    """The record of one model folder. `first`: the folder whose weights were loaded first. `samples`: prompts, and
    answers to each, for accuracies. Raises ValueError for a bad folder or override, for too few or too many questions,
    and for a results folder that cannot be written, before anything is measured."""
    config, task, model = policy_of(folder, overrides)
    if first is not None:
        check_folder(first)
    if task.num_train is not None and task.num_train < CALIBRATION:
        raise ValueError(f"task={task.name}: {task.num_train} training questions, {CALIBRATION} are calibrated on")
    check_questions(task, num_answers, "--answers")
    if samples is not None:
        check_questions(task, samples[0], "--accuracy")
    check_writable(fp8_cache_folder(results), "--results")
    earlier = None if first is None else load_decoder(first)
    found = compare(model, task, first=earlier, num_answers=num_answers, is_scanned=is_scanned, tell=tell)
    told = None if samples is None else accuracies(
        found, model, task, num_prompts=samples[0], each=samples[1], tell=tell
    )  # fmt: skip
    head, is_dirty = provenance.commit()
    return significant({
        "name": name, "hash": content_hash(folder),
        "first": None if first is None else first.resolve().name,
        "task": task.name, "n": config.task.n, "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_answers": num_answers, "num_tokens": found.num_tokens, "first_prompts": FIRST,
        "calibration_questions": CALIBRATION, "magnitudes": found.seen.summary(), "rows": found.rows,
        "accuracies": told, "samples": None if samples is None else list(samples),
        "commit": head, "is_dirty": is_dirty, "packages": provenance.packages(),
        "hardware": provenance.hardware("cpu"),
    }, DIGITS)  # fmt: skip


def write(results: Path, record: Record) -> Path:
    """Write the record; its path."""
    path = fp8_cache_folder(results) / f"{record['name']}.json"
    write_json_rows(path, record, "rows")
    return path


def read_all(results: Path) -> list[Record]:
    """The records of every policy, by name. Raises ValueError where there is none, and for a damaged file."""
    return read_json_records(fp8_cache_folder(results))
