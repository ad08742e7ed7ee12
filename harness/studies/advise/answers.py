"""Answers to a grid of questions as one file, `results/tables/advise.json`, which the site's first form reads.

    parts     speed by size, length and GPUs; accuracy by size, length, deployed weights and mismatch
    words     every sentence once; parts name it by its place

A recipe is a speed and an accuracy of the same format, in the order of `recipes.advise`. Left out: batches other than
512, GPUs other than the H200, and mismatches between those of the grid, which `lowbit advise` answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.records.run_result import write_atomic
from harness.studies.advise.accuracy import CORRECTIONS, Curves, accuracy
from harness.studies.advise.question import FORMATS, Mismatch, Question, given_mismatch
from harness.studies.advise.recipes import CONTROL
from harness.studies.advise.report import speed_words
from harness.studies.advise.speed import Evidence, speed

NAME = "advise.json"
SIZES = ("3m", "0.5b", "1.5b", "7b", "14b", "32b")
LENGTHS = (250, 1024, 4096, 8192, 16384)
GPUS = (1, 8, 16)
DEPLOY = {"bf16": "BF16 weights", "rollout": "the rollout format"}
TEXT = "as on word problems"
DOSES = ("not measured", TEXT, "1e-5", "1e-4", "1e-3", "1e-2")
"""Mismatches, k3 in nats a token: none, each format's on word problems, or one number for every format."""


def answers(evidence: Evidence, curves: Mapping[str, Curves], text: Mapping[str, Mismatch]) -> dict[str, Any]:
    """The grid as JSON. `curves`: deployed weights -> the dose study's curves; `text`: mismatch on word problems."""
    words: dict[str, int] = {}

    def place(sentence: str) -> int:
        return words.setdefault(sentence, len(words))

    text = {name: Mismatch(k3=float(f"{m.k3:.2g}"), source=m.source) for name, m in text.items() if name in FORMATS}
    doses = {name: text if name == TEXT else {} if name == DOSES[0] else given_mismatch(name) for name in DOSES}
    speeds: dict[str, Any] = {}
    accuracies: dict[str, Any] = {}
    for size in SIZES:
        for length in LENGTHS:
            for gpus in GPUS:
                asked = Question(size=size, length=length, gpus=gpus, mismatch={})
                speeds[f"{size} {length} {gpus}"] = [
                    [_number(found.value), place(speed_words(found)), place(found.words)]
                    for found in (speed(evidence, asked, name) for name in FORMATS)
                ]
            for deploy in DEPLOY:
                for dose, mismatch in doses.items():
                    asked = Question(size=size, length=length, deploy=deploy, mismatch=mismatch)  # type: ignore[arg-type]
                    accuracies[f"{size} {length} {deploy} {dose}"] = [
                        [found.kind == "known", _number(found.change), place(found.shown), place(found.words)]
                        for found in (
                            accuracy(curves[deploy], asked, name, how) for name in FORMATS for how in CORRECTIONS
                        )
                    ]
    return {
        "sizes": SIZES, "lengths": LENGTHS, "gpus": GPUS, "deploy": DEPLOY, "doses": DOSES, "formats": FORMATS,
        "corrections": CORRECTIONS, "control": CONTROL, "words": list(words), "speeds": speeds,
        "accuracies": accuracies, "k3": {DOSES[0]: "", TEXT: ",".join(f"{name}={m.k3:g}" for name, m in text.items())},
    }  # fmt: skip


def write_answers(found: Mapping[str, Any], tables: Path) -> Path:
    """Write `advise.json`; the path."""
    path = tables / NAME
    write_atomic(path, (json.dumps(found, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n").encode())
    return path


def _number(value: float) -> float | None:
    return None if value != value else float(f"{value:.6g}")
