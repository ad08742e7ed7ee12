"""A round while it runs: the settings of the campaign, the folders of the round, and what was seen in it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from harness.config.schema import Launch, RunConfig
from harness.devtools.faults.audit import Case, Wrong
from harness.devtools.faults.journal import note
from harness.devtools.faults.schedule import FORMS
from harness.records.paths import runs_folder
from harness.sweep.queue import finished

SWEEP = "faults"
"""Name of the sweep that every round runs."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a campaign."""

    count: int = 200
    """Faults to inject, at least."""
    seed: int = 0
    kinds: tuple[str, ...] = tuple(FORMS)
    cells: int = 6
    """Per round."""
    size: int = 42
    """Faults planned per round."""
    rounds_at_a_time: int = 3
    """Rounds at a time: most of a round is waiting for one process to start."""
    workers: int = 3
    """Cells at a time in a round."""
    stall_s: float = 30.0
    """Longer than a cell needs to its first step on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class OpenRound:
    """A round while it runs: its folders, and what was seen so far."""

    folder: Path
    reference: Path
    configs: tuple[RunConfig, ...]
    settings: Settings
    volume: Path | None = None
    starts: list[int] = field(default_factory=list[int])
    """Exit codes."""
    ended: list[int] = field(default_factory=list[int])
    """Stopped orphans that had to be ended by hand."""
    cases: list[Case] = field(default_factory=list[Case])

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def control(self) -> Path:
        return self.folder / "control"

    @property
    def records(self) -> Path:
        return runs_folder(self.results, SWEEP)

    @property
    def launch(self) -> Launch:
        return Launch(
            results=str(self.results), sweep=SWEEP, checkpoint_every_s=0.0, stall_s=self.settings.stall_s, threads=1
        )

    def injected(self, fault: str) -> None:
        """Note the id of a fault from outside in the journal."""
        note(self.control, "inject", "", fault=fault)

    def told(self, fault: str, became: str) -> None:
        """Note that the sweep said so, and what became of the fault (one of `outcome.OUTCOMES`)."""
        note(self.control, "told", "", fault=fault, status=became)

    def found_wrong(self, wrong: Wrong, words: str, path: Path | None = None) -> None:
        """Keep a case of a file, or of the round as a whole."""
        self.cases.append(Case(wrong=wrong, where=self.folder.name if path is None else str(path), words=words))

    def unfinished(self) -> list[RunConfig]:
        """Cells without a finished record."""
        return [config for config in self.configs if finished(config, self.launch) is None]
