"""Answers to a grid of questions as one file, `results/tables/advise.json`, which the site's first form reads.

    speeds      by size, length and GPUs: of each format the speed-up, its words and their source
    pairs       each format with each of its corrections
    accuracies  by deployed weights and mismatch: of each pair, and of BF16, its standing, cells and their source
    words       every sentence once; the others name it by its place

A recipe is a speed and an accuracy of the same format, in the order of `recipes.advise`. Left out: batches other than
512, GPUs other than the H200, and mismatches between those of the grid, which `lowbit advise` answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.foundation.whole_file import write_atomic
from harness.studies.advise.accuracy import NONE, STANDINGS, Accuracy, Table, accuracy, control, corrections
from harness.studies.advise.question import DEPLOY, FORMATS, Question, given_mismatch
from harness.studies.advise.report import header, speed_words
from harness.studies.advise.speed import Evidence, speed

NAME = "advise.json"
SIZES = ("0.5b", "1.5b", "7b", "14b", "32b")
LENGTHS = (250, 1024, 4096, 8192, 16384)
GPUS = (1, 8, 16)
MISMATCHES = ("not measured", "1e-5", "1e-4", "1e-3", "1e-2")
"""Mismatches, k3 in nats a token: none, or one number for every format."""


def answers(evidence: Evidence, tables: Mapping[str, Table]) -> dict[str, Any]:
    """The grid as JSON. `tables`: deployed weights -> what word problems say."""
    words: dict[str, int] = {}

    def place(sentence: str) -> int:
        return words.setdefault(sentence, len(words))

    def row(found: Accuracy) -> list[Any]:
        return [found.standing, [place(cell) for cell in (*found.cells, found.k3)], place(found.words)]

    speeds = {
        f"{size} {length} {gpus}": [
            [_number(found.value), place(speed_words(found)), place(found.words)]
            for found in (
                speed(evidence, Question(size=size, length=length, gpus=gpus, mismatch={}), name) for name in FORMATS
            )
        ]
        for size in SIZES for length in LENGTHS for gpus in GPUS
    }  # fmt: skip
    some_table = next(iter(tables.values()))  # what ran is the same for either kind of deployed weights
    pairs = [(name, how) for name in FORMATS for how in corrections(some_table, name)]
    accuracies: dict[str, Any] = {}
    for deploy, table in tables.items():
        for k3 in MISMATCHES:
            mismatch = {} if k3 == MISMATCHES[0] else given_mismatch(k3)
            asked = Question(size=SIZES[0], length=LENGTHS[0], mismatch=mismatch)
            accuracies[f"{deploy} {k3}"] = [
                row(found)
                for found in (
                    *(accuracy(table, asked, name, how) for name, how in pairs), control(table),
                )
            ]  # fmt: skip
    tokens = tuple(some_table.tokens.values())
    return {
        "sizes": SIZES, "lengths": LENGTHS, "gpus": GPUS, "deploy": DEPLOY, "mismatches": MISMATCHES,
        "formats": FORMATS, "pairs": pairs, "none": NONE, "standings": STANDINGS, "header": header(tokens),
        "words": list(words), "speeds": speeds, "accuracies": accuracies,
    }  # fmt: skip


def write_answers(found: Mapping[str, Any], tables: Path) -> Path:
    """Write `advise.json`; the path."""
    path = tables / NAME
    write_atomic(path, (json.dumps(found, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n").encode())
    return path


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.6g}")
