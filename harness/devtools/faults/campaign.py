"""The campaign: a reference, then rounds of the same cells under faults until enough have really been injected."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from harness.config.load import load
from harness.config.resolve import resolve
from harness.config.schema import RunConfig
from harness.devtools.faults.audit import Case
from harness.devtools.faults.journal import read
from harness.devtools.faults.open_round import OpenRound, Settings
from harness.devtools.faults.outcome import FaultOutcome
from harness.devtools.faults.rounds import Done, open_round, run_round, start, wait
from harness.devtools.faults.schedule import Round, endless, plan_round
from harness.records.paths import bases_folder

SMALL = (
    "model=xs", "task=chain", "model.spread=0", "trainer.steps=12", "trainer.eval_every=4", "task.num_eval=16",
    "algo.num_prompts=4", "algo.group_size=4",
)  # fmt: skip
ARMS = (("bf16", "bf16"), ("flashrl", "int8"), ("naive", "int4"), ("mis", "nvfp4"))


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Results of a campaign."""

    outcomes: tuple[FaultOutcome, ...]
    cases: tuple[Case, ...]
    records: int
    unmeasured: int
    """Values that resumed runs lack (`harness.devtools.faults.audit.UNMEASURED`)."""
    ended: int
    """Cells that were stopped when their sweep was killed: they hold their folder until somebody ends them."""
    rounds: int
    starts: int
    """Starts of the sweep."""
    processes: int
    """Processes of cells."""
    volume: bool
    """Did full disks include real full volumes?"""


def run_campaign(settings: Settings, scratch: Path, bases: Path, tell: Callable[[str, int], None]) -> Campaign:
    """Run rounds below `scratch` until `settings.count` faults were injected, four more than that many rounds at most.

    `bases` may hold the trained base of the cells. Raises RuntimeError where the undisturbed reference does not finish.
    """
    configs = tuple(
        resolve(load([*SMALL, f"method={method}", f"precision={precision}", f"seed={seed}"]))
        for seed in range(-(-settings.cells // len(ARMS)))
        for method, precision in ARMS
    )[: settings.cells]
    reference = run_reference(settings, configs, scratch / "reference", bases)
    tell(f"reference: {len(configs)} cells", 0)
    following = endless(settings.kinds, settings.seed)
    done: list[Done] = []
    injected = 0
    while injected < settings.count and len(done) < 4 + settings.count:
        size = min(settings.size, max(4, settings.count - injected))
        rounds_at_a_time = 1 if settings.count - injected <= settings.size else settings.rounds_at_a_time
        numbers = range(len(done), len(done) + rounds_at_a_time)
        plans = [
            plan_round(following, settings.seed, number, len(configs), configs[0].trainer.steps, size)
            for number in numbers
        ]

        def one(number: int, planned: Round) -> Done:
            with ExitStack() as stack:
                opened = open_round(scratch / f"round-{number:03d}", reference, configs, settings, stack)
                return run_round(opened, planned)

        with ThreadPoolExecutor(rounds_at_a_time) as pool:
            done += pool.map(one, numbers, plans)
        injected = sum(len(each.outcomes) for each in done)
        cases = sum(len(each.cases) for each in done)
        tell(f"{len(done)} rounds: {injected} of {settings.count} faults injected, {cases} wrong", injected)
    return Campaign(
        outcomes=tuple(one for each in done for one in each.outcomes),
        cases=tuple(case for each in done for case in each.cases),
        records=len(configs) * len(done),
        unmeasured=sum(each.unmeasured for each in done),
        ended=sum(len(each.opened.ended) for each in done),
        rounds=len(done),
        starts=sum(len(each.opened.starts) for each in done),
        processes=sum(mark.what == "begin" for each in done for mark in read(each.opened.control)),
        volume=any(each.opened.volume is not None for each in done),
    )


def run_reference(settings: Settings, configs: Sequence[RunConfig], folder: Path, bases: Path) -> Path:
    """The results folder of the undisturbed cells, with the base that all start from."""
    opened = OpenRound(folder=folder, reference=folder, configs=tuple(configs), settings=settings)
    opened.control.mkdir(parents=True)
    for base in bases.glob("xs-chain8-b0-*"):
        shutil.copytree(base, bases_folder(opened.results) / base.name)
    process, log = start(opened, configs, replace(opened.launch, stall_s=1800.0), has_faults=False)
    if wait(opened, process) != 0:
        raise RuntimeError(f"the reference did not finish: {log.read_text(encoding='utf-8')}")
    return opened.results
