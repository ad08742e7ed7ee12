"""A stand-in for verl's driver: writes the files of one, and ends as the file `ending` beside job.json says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from safetensors.torch import load_file, save_file


def main(job: Path) -> int:
    folder, ending = job.parent, (job.parent / "ending").read_text()
    held = (folder / "series.jsonl").read_text().count("\n") if (folder / "series.jsonl").exists() else 0
    if ending == "die":
        os._exit(9)
    if ending == "raise":
        raise KeyError("told")
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "cwd").write_text(str(Path.cwd()))
    for step in range(held, 4):
        with (folder / "series.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "reward/accuracy": 0.25 * step}) + "\n")
        if ending in ("silent", "stages") and step == 1:
            for count in range(5):
                time.sleep(0.2)
                if ending == "stages":
                    (folder / "stage.json").write_text(json.dumps({"step": 1, "stage": "answers", "count": count}))
        if ending == "wait" and step == 1:
            while not (folder / "stop").exists():
                time.sleep(0.02)
            (folder / "outcome.json").write_text(json.dumps({"kind": "stopped", "reason": "step 2"}))
            return 0
    (folder / "final").mkdir(exist_ok=True)
    save_file(load_file(str(folder / "model" / "model.safetensors")), str(folder / "final" / "model.safetensors"))
    kind = {"wait": "ok", "silent": "ok", "stages": "ok"}.get(ending, ending)
    told = {"kind": kind, "reason": "step 3: train/loss is nan", "traceback": "where it was raised"}
    (folder / "outcome.json").write_text(json.dumps(told))
    return int(kind in ("failed", "memory"))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
