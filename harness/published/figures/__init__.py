"""Figures of the papers, drawn again from our results: one module per figure, `draw(results folder) -> Drawn`.

    drawn.py                what drawing a figure returns: figure, numbers, sentences
    records.py              arms of a sweep by name, and one number per seed
    estimates.py            means, differences and ratios over seeds, with intervals
    marks.py                colours and marks shared by the figures
    grid.py                 speed, mismatch and accuracy by size and length (the README's figure)
    flashrl_throughput.py   FlashRL: decode rate over BF16 by model size, on an H200
    qurl_mismatch.py        QuRL: mismatch over training
    qurl_clip.py            QuRL: tokens that the clip stops
    qurl_flips.py           QuRL: updates that reach the codes
    qerl_entropy.py         QeRL: entropy under quantization noise
    qerl_reward.py          QeRL: reward of LoRA over a 4-bit base
    qerl_decay.py           QeRL: strength and decay of the noise
    jet_rl_length.py        Jet-RL: gap to bf16 by response length
    fp8_rl_kv.py            FP8-RL: FP8 KV cache, corrections, training in FP8
    fp16_mismatch.py        FP16 in place of BF16
    qat_start.py            Reasoning-QAT: starts of quantization-aware RL
    rilq_rank.py            RILQ: rank of compensating adapters
    replay_corrections.py   TIS and others: corrections on one batch

Each names its sweep (or the replay laboratory) and shows our numbers alone, unless a line says "reported". What a
paper's own figure shows, and what ours cannot show, is in the notebook of the same name. Left out: the figures of a
sweep (`harness.report.figures`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from harness.foundation.did_you_mean import nearest
from harness.foundation.project_files import HOME
from harness.records.folder import all_sweeps
from harness.records.paths import replay_folder, throughput_folder

if TYPE_CHECKING:
    from harness.published.figures.drawn import Drawn

RESULTS = HOME.absolute() / "results"
REPLAY = "replay"
"""Stands for the records of the replay laboratory, which are no sweep."""
THROUGHPUT = "throughput_h200"
"""The throughput map, whose cells are no runs."""


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """One figure: its module is `harness.published.figures.<name>`."""

    name: str
    paper: str
    sweep: str
    title: str


FIGURES = {
    figure.name: figure
    for figure in (
        PaperFigure(name="flashrl_throughput", paper="FlashRL", sweep=THROUGHPUT, title="Decode rate by model size"),
        PaperFigure(name="qurl_mismatch", paper="QuRL", sweep="ablate_qurl", title="Mismatch grows while training"),
        PaperFigure(name="qurl_clip", paper="QuRL", sweep="ablate_qurl", title="What the clip range lets through"),
        PaperFigure(name="qurl_flips", paper="QuRL", sweep="ablate_qurl", title="Updates that reach the codes"),
        PaperFigure(name="qerl_entropy", paper="QeRL", sweep="ablate_aqn", title="Entropy under quantization noise"),
        PaperFigure(name="qerl_reward", paper="QeRL", sweep="ablate_aqn", title="Reward of a shared 4-bit base"),
        PaperFigure(name="qerl_decay", paper="QeRL", sweep="ablate_aqn", title="Strength and decay of the noise"),
        PaperFigure(name="jet_rl_length", paper="Jet-RL", sweep="length", title="Gap to bf16 by response length"),
        PaperFigure(name="fp8_rl_kv", paper="FP8-RL", sweep="standard", title="FP8 weights, FP8 KV cache, both sides"),
        PaperFigure(name="fp16_mismatch", paper="FP16", sweep="fp16", title="FP16 against BF16 mismatch"),
        PaperFigure(name="qat_start", paper="Reasoning-QAT", sweep="ablate_qat", title="Distilled, tuned, GPTQ, RTN"),
        PaperFigure(name="rilq_rank", paper="RILQ", sweep="ablate_rilq", title="Rank of compensating adapters"),
        PaperFigure(name="replay_corrections", paper="TIS and others", sweep=REPLAY, title="Corrections on one batch"),
    )
}


def draw(name: str, results: Path = RESULTS) -> Drawn:
    """Draw one figure from the results folder. Raises ValueError for an unknown name and for missing results."""
    if name not in FIGURES:
        raise ValueError(f"paper figure {name!r} is unknown; {nearest(name, FIGURES)}")
    if reason := missing(FIGURES[name], results):
        raise ValueError(f"paper figure {name}: {reason}")
    return import_module(f"harness.published.figures.{name}").draw(results)


def missing(figure: PaperFigure, results: Path) -> str:
    """Results that a figure lacks and the command that makes them; empty where its results are there."""
    if figure.sweep == REPLAY:
        command = "lowbit replay collect && lowbit replay evaluate"
        return "" if any(replay_folder(results).glob("*.json")) else f"no records of the replay laboratory; `{command}`"
    if figure.sweep == THROUGHPUT:
        command = f"lowbit throughput {THROUGHPUT}"
        folder = throughput_folder(results, THROUGHPUT)
        return "" if any(folder.glob("*.json")) else f"no rates in {folder}; `{command}`"
    if figure.sweep in all_sweeps(results):
        return ""
    return f"sweep {figure.sweep} has no results; `lowbit sweep {figure.sweep}`"
