"""Whole jobs of these tests: `lowbit run` as a user calls it, and what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from harness.foundation.seeds import generator
from harness.models.checkpoint import save_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.models.tokenizer import save_tokenizer
from harness.records.run_result import RunResult, read_result, read_series

SMALL = ("model=xs128", "task.n=4", "task.num_eval=32", "algo.num_prompts=8", "algo.group_size=4", "trainer.steps=3",
         "trainer.eval_every=3")  # fmt: skip
QUICK_S = 900.0


def command(results: Path, *words: str, trainer: str = "verl") -> subprocess.Popen[str]:
    """`lowbit run`, which hears Ctrl-C also where these tests run in the background of a shell."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LOWBIT_", "VERL_"))}
    lowbit = [sys.executable, "-m", "harness.cli.main", "run", f"trainer={trainer}", *words, "--results", str(results)]
    return subprocess.Popen(
        lowbit, env=env | {"OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def done(results: Path, *words: str, trainer: str = "verl") -> tuple[RunResult, dict[str, list[float]]]:
    """(record, series) of a job that ended well."""
    process = command(results, *words, trainer=trainer)
    said = process.communicate(timeout=QUICK_S)[0]
    assert process.returncode == 0, said
    path = Path(next(line for line in said.splitlines() if line.startswith("result: ")).removeprefix("result: "))
    return read_result(path), read_series(path.parent, path.stem)


def kinds(record: RunResult) -> set[str]:
    """Formats of the linear layers in the passport."""
    assert record.passport is not None
    return {t["format"] for t in record.passport["weights"] if "_proj.weight" in t["name"]}


def text_model(folder: Path, num_layers: int = 2) -> Path:
    """A random Qwen2-style Hugging Face folder with the 128-character tokenizer, small enough for a CPU."""
    config = DecoderConfig(
        vocab_size=128, num_layers=num_layers, hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=32,
        intermediate_size=96, qk_norm=False, attention_bias=True, max_positions=512, eos_id=1, pad_id=0, bos_id=2,
    )  # fmt: skip
    save_decoder(Decoder(config, generator=generator("cpu", 0, "text model")), folder)
    save_tokenizer(folder, config.vocab_size)
    return folder
