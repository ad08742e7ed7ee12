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
from harness.devtools.faults.outcome import Outcome
from harness.devtools.faults.rounds import Done, Place, Settings, is_forked, open_place, run_round, start, wait
from harness.devtools.faults.schedule import Round, deal, plan_round

SMALL = (
    "model=xs", "task=chain", "model.spread=0", "trainer.steps=12", "trainer.eval_every=4", "task.num_eval=16",
    "algo.num_prompts=4", "algo.group_size=4",
)  # fmt: skip
ARMS = (("bf16", "bf16"), ("flashrl", "int8"), ("naive", "int4"), ("mis", "nvfp4"))


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """What came of it."""

    outcomes: tuple[Outcome, ...]
    cases: tuple[Case, ...]
    records: int
    unmeasured: int
    """Values that resumed runs lack (`harness.devtools.faults.audit.UNMEASURED`)."""
    ended: int
    """Cells that were stopped when their sweep was killed: they hold their folder until somebody ends them."""
    rounds: int
    starts: int
    """Of the sweep."""
    processes: int
    """Of cells."""
    volume: bool
    """Did full disks include real full volumes?"""


def run_campaign(settings: Settings, scratch: Path, bases: Path, tell: Callable[[str, int], None]) -> Campaign:
    """Run rounds below `scratch` until `settings.count` faults struck; `bases` may hold the trained base of the cells.

    Raises RuntimeError where the undisturbed reference does not finish.
    """
    configs = tuple(
        resolve(load([*SMALL, f"method={method}", f"precision={precision}", f"seed={seed}"]))
        for seed in range(-(-settings.cells // len(ARMS)))
        for method, precision in ARMS
    )[: settings.cells]
    reference = run_reference(settings, configs, scratch / "reference", bases)
    tell(f"reference: {len(configs)} cells", 0)
    dealt = deal(settings.kinds, settings.seed)
    done: list[Done] = []
    injected = 0
    while injected < settings.count and len(done) < 4 + settings.count:
        size = min(settings.size, max(4, settings.count - injected))
        abreast = 1 if settings.count - injected <= settings.size else settings.abreast
        steps = configs[0].trainer.steps
        numbers = range(len(done), len(done) + abreast)
        sizes = [size if is_forked(settings, number) else max(8, size // 3) for number in numbers]
        plans = [
            plan_round(dealt, settings.seed, number, len(configs), steps, size)
            for number, size in zip(numbers, sizes, strict=True)
        ]

        def one(number: int, planned: Round) -> Done:
            with ExitStack() as stack:
                place = open_place(scratch / f"round-{number:03d}", number, reference, configs, settings, stack)
                return run_round(place, planned)

        with ThreadPoolExecutor(abreast) as pool:
            done += pool.map(one, numbers, plans)
        injected = sum(len(each.outcomes) for each in done)
        cases = sum(len(each.cases) for each in done)
        tell(f"{len(done)} rounds: {injected} of {settings.count} faults injected, {cases} wrong", injected)
    return Campaign(
        outcomes=tuple(one for each in done for one in each.outcomes),
        cases=tuple(case for each in done for case in each.cases),
        records=len(configs) * len(done), unmeasured=sum(each.unmeasured for each in done),
        ended=sum(len(each.place.ended) for each in done), rounds=len(done),
        starts=sum(len(each.place.starts) for each in done),
        processes=sum(mark.what == "begin" for each in done for mark in read(each.place.control)),
        volume=any(each.place.volume is not None for each in done),
    )  # fmt: skip


def run_reference(settings: Settings, configs: Sequence[RunConfig], folder: Path, bases: Path) -> Path:
    """The results folder of the undisturbed cells, with the base that all start from."""
    place = Place(folder=folder, reference=folder, configs=tuple(configs), settings=settings)
    place.control.mkdir(parents=True)
    for base in bases.glob("xs-chain8-b0-*"):
        shutil.copytree(base, place.results / "bases" / base.name)
    process, log = start(place, configs, replace(place.launch, stall_s=1800.0), is_struck=False)
    if wait(place, process) != 0:
        raise RuntimeError(f"the reference did not finish: {log.read_text(encoding='utf-8')}")
    return place.results
