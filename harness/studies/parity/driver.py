"""Runs the workers of a comparison, one process per format, and turns their answers into rows."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from harness.foundation.own_process import code_path, exit_code, module_command
from harness.foundation.process_log import last_words, tail
from harness.studies.parity.statistics import compare
from harness.studies.parity.worker import FormatCase

LIMIT_S = 300.0
"""After which a worker is taken to hang."""


def run(case: FormatCase) -> dict[str, Any]:
    """The worker's answer; "failed" with its last words where it left none. The child never outlives the call."""
    with tempfile.TemporaryDirectory(prefix="lowbit-parity-") as name:
        folder = Path(name)
        case = dataclasses.replace(case, out=str(folder / "answer.json"))
        (folder / "case.json").write_text(json.dumps(dataclasses.asdict(case)), encoding="utf-8")
        command = module_command("harness.studies.parity.worker", str(folder / "case.json"))
        with (folder / "log").open("wb") as log:
            code = exit_code(command, LIMIT_S, stdout=log, stderr=subprocess.STDOUT, env=os.environ | code_path())
        if code is None:
            return {"status": "failed", "reason": f"no answer after {LIMIT_S:g} s"}
        if Path(case.out).is_file():
            return json.loads(Path(case.out).read_text(encoding="utf-8"))
        return {"status": "failed", "reason": last_words(tail(folder / "log"), "no output")}


def row_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The row of a record: statistics in place of every token's log-probs, and what of the passport names kernels."""
    if answer["status"] != "ok":
        return answer
    scores = {name: np.array(values, dtype=np.float64) for name, values in answer["scores"].items()}
    passport = answer["passport"]
    kernels = sorted({line["kernel"] for line in passport["weights"] if line["kernel"]})
    return {
        "status": "ok", "kernels": kernels, "attention": passport["state"]["attention"],
        "acts": sorted(set(passport["acts"].values())), "kv": passport["kv"], **compare(scores),
    }  # fmt: skip
