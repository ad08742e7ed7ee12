"""Outside a clone: wrong input is told before the committed results are copied, and what only reads copies none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness.foundation.own_process import code_path
from tests.source_tree import ROOT

WRONG = {
    "run trainer.steps=0": "trainer.steps=0: must be at least 1; lowbit eval FOLDER evaluates without training",
    "run algo.num_minibatches=1000": "algo.num_minibatches=1000: must be 1 to num_prompts",
    "run --memory 80": "memory=80.0: only with --dry-run, which predicts for it",
    "sweep smoke algo.lr=3": "unknown key algo.lr; nearest: trainer.lr",
    "sweep smoke --where task.n=99": "where: no cell of smoke has task.n=99; valid task.n: 8",
    "sweep quick --seeds 1 --until-decided": (
        "seeds: not with --until-decided, where the file's `until` says how many"
    ),
    "sweep quick launch.offload=all": "launch.offload=all: trainer=verl alone does it; valid: none, or trainer=verl",
    "run trainer.device=cuda": "trainer.device=cuda: no CUDA device is visible; valid: trainer.device=cpu",
    "sweep smoke trainer.device=cuda": "trainer.device=cuda: no CUDA device is visible; valid: trainer.device=cpu",
    "base smoke base.target_accuracy=0.71 trainer.device=cuda": "trainer.device=cuda: no CUDA device is visible; ",
    "replay collect trainer.device=cuda": "trainer.device=cuda: no CUDA device is visible; valid: trainer.device=cpu",
    "base smoke seed=-1": "seed=-1: must be at least 0",
    "eval nowhere": "no run in RESULTS and no model folder is 'nowhere'; ",
    "eval FOLDER trainer.steps=3": "trainer.steps=3: nothing is trained here; valid of the trainer: trainer.device, ",
    "eval FOLDER": "evaluations=[]: nothing is asked; give 'evaluations=[{task:gsm8k,path:FOLDER,k:4}]'",
    "eval WORDS evaluations=[{task:wordmath,num:4}] engine=vllm": "engine=vllm: absent",
    "probe WORDS task=wordmath engine=vllm": "engine=vllm: absent",
    "throughput throughput_h200": "engine=vllm: absent",
    "paper fp8_rl model.max_positions=40000 --model 8b=WORDS --data dapo=FOLDER": "paper_fp8_rl: arm method=bf16 ",
    "probe nowhere": "nowhere: no such folder; a model's, with its config.json, is expected",
    "fp8-cache nowhere": "nowhere: no such folder; a model's, with its config.json, is expected",
    "layers --answers 3": "--answers: nothing is measured without a model folder; name one",
    "paper dapo --model x": "--model x: NAME=DIR is expected; other overrides stand before --model",
    "paper dapo --tiny base.n=3": "base.n=3: no base is trained here, the model is the folder; leave it out",
    "search search_aqm": "search 'search_aqm' not found; nearest: search_aqn",
    "report": "report: the name of a sweep is missing; only --html does without",
    "report nothing": "sweep 'nothing' has no results in RESULTS; ",
    "figures figure1": "'figure1' is no paper figure and no sweep with results; ",
    "browse nothing": "sweep 'nothing' has no results in RESULTS; ",
    "site nothing": "sweep 'nothing' has no results in RESULTS; ",
    "early-warning nothing": "sweep 'nothing' has no results in RESULTS; ",
    "dose --predict quik --doses-of dose": "sweep 'quik' not found; nearest: quick",
    "replay collect task=nope": "task=nope: no such choice; valid: ",
    "replay evaluate --stored nowhere": "nowhere: no stored rollouts; run `lowbit replay collect` first",
    "parity --formats int9": "formats: 'int9' is unknown; nearest: int8",
    "throughput nope": "throughput 'nope' not found; valid: throughput_cpu, throughput_h200",
    "advise --cases --write --size 7b": "--cases answers questions of its own: leave --size out",
    "claims --write --check": "claims: --write does not go with --check",
    "results import nowhere": "results import: nowhere: no such file or folder",
    "results unpack quik": "results unpack: no packed sweep 'quik'; ",
    "results pack": "results pack: which sweep? give the name of a folder of results/runs",
}
"""Command line -> beginning of what it says."""
READS = ("figures --list", "runs quick_vllm", "advise --size 7b --length 1024", "sweep smoke --dry-run")
"""Command lines that are right and write nothing."""
WRITES = "results unpack quick_vllm"
CHILD = """
import contextlib, io, json, sys
from harness.cli import main
from harness.engines.vllm import settings
def absent():
    raise ValueError("engine=vllm: absent")
settings.installed_build = absent
copied = []
main.bring_results = lambda: copied.append(1) or 1
for line in json.loads(sys.argv[1]):
    copied.clear()
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        code = main.main(line.split())
    print(json.dumps([line, code, len(copied), err.getvalue()]))
"""


def test_results_are_copied_for_no_wrong_input_and_nothing_that_only_reads(tmp_path: Path) -> None:
    bases = ROOT / "results" / "bases"
    folder, words = next(bases.glob("xs-chain8-*")), next(bases.glob("words_10m-*"))
    lines = [line.replace("FOLDER", str(folder)).replace("WORDS", str(words)) for line in (*WRONG, *READS, WRITES)]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(lines)], cwd=tmp_path, check=True, capture_output=True, text=True,
        env=code_path() | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    found = {line: rest for line, *rest in map(json.loads, child.stdout.splitlines())}
    for line, (told, said) in zip(lines, WRONG.items(), strict=False):
        code, copied, err = found[line]
        assert (code, copied, err.count("\n")) == (2, 0, 1), told
        assert err.startswith(f"lowbit: error: {said.replace('RESULTS', str(ROOT / 'results'))}"), told
    assert [found[line][:2] for line in READS] == [[0, 0]] * len(READS)
    assert found[WRITES][1] == 1
    assert not any(tmp_path.iterdir())
