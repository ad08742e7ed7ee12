"""The study on disk: Optuna's journal, a lock that dies with its holder, and who is still alive.

`results/searches/<name>.journal` is text, only ever appended to, and committed; locks are under `results/work`. The
journal's lock is the system's (`flock`): a worker killed with -9 leaves it free at once, where Optuna's own file locks
stay for half a minute. A last line that a killed writer left unfinished is cut off by the next one.

A trial belongs to the worker process named in it, and that process holds a lock file for as long as it lives. A running
trial whose owner is gone is told failed and enqueued again; its finished cells are found by their run ids.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Literal

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from harness.foundation.lock_file import held
from harness.foundation.seeds import stable_seed
from harness.records.paths import journal_path, work_folder
from harness.studies.search.space import combinations
from harness.studies.search.spec import Search, changes, identity

Direction = Literal["minimize", "maximize"]
IDENTITY = "identity"
MAX_ATTEMPTS = 3
"""Number of times that a trial is started whose worker dies each time."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


def lock_folder(results: Path, name: str) -> Path:
    """Folder of a search's locks (`cells`: of cells, which searches share): not committed, not wanted elsewhere."""
    return work_folder(results, "searches") / name


class SystemLock(JournalFileOpenLock):
    """Owns `flock` on a file beside the locks, and mends the journal's end whenever it gets it."""

    def __init__(self, journal: Path, lock: Path) -> None:
        super().__init__(str(journal))
        self.journal, self.path = journal, lock
        self.handle: IO[str] | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = self.path.open("a")
        fcntl.flock(handle, fcntl.LOCK_EX)
        self.handle = handle
        mend(self.journal)
        return True

    def release(self) -> None:
        """Free the lock."""
        assert self.handle is not None
        self.handle.close()
        self.handle = None


def mend(journal: Path) -> None:
    """Cut off an unfinished last line: nobody has read it, and what is appended to it would be lost."""
    if not journal.exists() or journal.stat().st_size == 0:
        return
    with journal.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            whole = journal.read_bytes().rfind(b"\n") + 1
            file.truncate(whole)


def storage_of(results: Path, name: str) -> JournalStorage:
    """The journal, opened. Raises ValueError naming a file that is not one."""
    path = journal_path(results, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = SystemLock(path, lock_folder(results, name) / "journal.lock")
    try:
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
        _check_last_line(path)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a journal of trials ({error}); put it aside with --restart") from None
    return storage


def _check_last_line(journal: Path) -> None:
    """Raises ValueError where the last whole line is no JSON: Optuna says so once another line follows it."""
    lines = journal.read_bytes().split(b"\n")[:-1]
    if lines:
        json.loads(lines[-1])


@contextmanager
def present(results: Path, name: str) -> Iterator[str]:
    """Be a worker: its id, whose lock file is held until the end, whatever that is."""
    worker = uuid.uuid4().hex[:8]
    with held(lock_folder(results, name) / f"worker-{worker}.lock"):
        yield worker


def is_alive(results: Path, name: str, worker: str | None) -> bool:
    """Does the worker process still run? One of another machine, or without a name, does not."""
    path = lock_folder(results, name) / f"worker-{worker}.lock"
    if worker is None or not path.exists():
        return False
    with suppress(FileNotFoundError), path.open("r") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        path.unlink(missing_ok=True)
    return False


def open_studies(search: Search, results: Path, *, is_writing: bool = True) -> dict[str, optuna.Study]:
    """One study per share of the budget, made where missing. Raises ValueError where the stored one is another search.

    The sampler's seed is hashed from the number of times the study was opened for work, so that a search that goes on
    does not propose its first trials again.
    """
    storage = storage_of(results, search.name)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    names = study_names(search)
    with held(lock_folder(results, search.name) / "study.lock") if is_writing else nullcontext():
        known = {study.study_name: study.user_attrs for study in storage.get_all_studies()}
        for attrs in known.values():
            _check_identity(search, results, attrs.get(IDENTITY))
        studies: dict[str, optuna.Study] = {}
        for share, name in names.items():
            opened = int(known.get(name, {}).get("opened", 0))
            directions: list[Direction | StudyDirection] = [o.direction for o in search.objectives]
            sampler = _sampler(search, stable_seed(search.sampler.seed, "search", opened, share))
            if name in known:  # creating with `load_if_exists` would write to the journal even to read it
                study = optuna.load_study(study_name=name, storage=storage, sampler=sampler)
            else:
                study = optuna.create_study(storage=storage, study_name=name, directions=directions, sampler=sampler)
            if IDENTITY not in study.user_attrs:
                study.set_user_attr(IDENTITY, identity(search))
                study.set_metric_names([o.metric for o in search.objectives])
            if is_writing:
                _enqueue_baselines(search, study, share)
                _enqueue_grid(search, study, share)
                study.set_user_attr("opened", opened + 1)
            studies[share] = study
    return studies


def study_names(search: Search) -> dict[str, str]:
    """Share -> name of its study."""
    return {share: f"{search.name}.{share}" if share else search.name for share in search.shares}


def _check_identity(search: Search, results: Path, stored: Any) -> None:
    lines = [] if stored is None else changes(stored, identity(search))
    if lines:
        raise ValueError(
            f"{search.name}: {journal_path(results, search.name)} holds trials of another search: {'; '.join(lines)}. "
            "Give the file of the search a new name, or start anew with --restart (the old study is kept aside)"
        )


def _sampler(search: Search, seed: int) -> optuna.samplers.BaseSampler:
    """The sampler, by the name in the file. Conditional knobs are modelled jointly, group by group."""
    seed %= 2**32
    if search.sampler.name in ("random", "grid"):  # the trials of a grid are enqueued
        return optuna.samplers.RandomSampler(seed=seed)
    if search.sampler.name == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=max(2, search.sampler.startup))
    return optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=search.sampler.startup, multivariate=True, group=True, constant_liar=True
    )


def _enqueue_baselines(search: Search, study: optuna.Study, share: str) -> None:
    known = {trial.user_attrs.get("baseline") for trial in study.get_trials(deepcopy=False)}
    for name, values in search.baselines.items():
        if name in known:
            continue
        if not share or str(values.get(search.budget.per or "")) == share:
            knobs = {key: value for key, value in values.items() if key != search.budget.per}
            study.enqueue_trial(knobs, user_attrs={"baseline": name})


def _enqueue_grid(search: Search, study: optuna.Study, share: str) -> None:
    """Enqueue every combination of the choices that no trial has had."""
    if search.sampler.name != "grid":
        return
    known = [{**t.system_attrs.get("fixed_params", {}), **t.params} for t in study.get_trials(deepcopy=False)]
    per = search.budget.per
    for values in combinations(search.space):
        knobs = {key: value for key, value in values.items() if key != per}
        if knobs not in known and (per is None or str(values[per]) == share):
            study.enqueue_trial(knobs)


def take_back(study: optuna.Study, trials: Sequence[FrozenTrial], results: Path, name: str) -> None:
    """Fail the running trials whose owner is gone and enqueue them again. Call with the study's lock."""
    for trial in trials:
        if trial.state != TrialState.RUNNING or is_alive(results, name, trial.user_attrs.get("worker")):
            continue
        study.tell(trial.number, state=TrialState.FAIL)
        attempt = int(trial.user_attrs.get("attempt", 1))
        if attempt < MAX_ATTEMPTS:
            kept = {key: trial.user_attrs[key] for key in ("baseline",) if key in trial.user_attrs}
            knobs = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
            study.enqueue_trial(knobs, user_attrs=kept | {"attempt": attempt + 1, "again": trial.number})


def put_aside(results: Path, name: str) -> Path | None:
    """Move the study out of the way, if there is one: its new place. Raises ValueError while a worker is at it."""
    path = journal_path(results, name)
    workers = [lock.stem.removeprefix("worker-") for lock in lock_folder(results, name).glob("worker-*.lock")]
    if busy := [worker for worker in workers if is_alive(results, name, worker)]:
        raise ValueError(f"{name}: {len(busy)} worker processes are at work on it; stop them before --restart")
    if not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{name}.{number}.journal")).exists():
        number += 1
    return path.rename(target)
