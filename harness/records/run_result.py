"""Result files: what one run left behind, as strict JSON with its per-step series in Parquet beside it.

JSON is the record, and everything shown (tables, figures, MLflow) is rebuilt from it. Layout:
`results/runs/<sweep>/<run_id>.json` and `<run_id>.parquet`. Grouping runs into arms is in `harness.records.arms`.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from harness.config.validation import in_words
from harness.foundation.whole_file import write_atomic
from harness.records.statuses import FINISHED, Status

Row = Mapping[str, float | Sequence[float]]
"""The metrics of one step; a list is a profile (by response position, by entropy bucket)."""
WriteFile = Callable[[Path, bytes], None]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _settings(value: Any) -> Any:
    """Plain JSON of settings: an infinite bound keeps its meaning as a string, a tuple becomes a list."""
    if isinstance(value, Mapping):
        return {str(key): _settings(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_settings(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


Measured = Annotated[float | None, BeforeValidator(_finite)]
"""A measurement. NaN and infinities are null, since JSON has neither."""
Settings = Annotated[dict[str, Any], BeforeValidator(_settings)]


class Strict(BaseModel):
    """A part of a record: it has no further keys, and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EvalRecord(Strict):
    """One evaluation after `step` steps of the policy: the same fixed questions, one answer each."""

    step: int
    precision: str
    site: Literal["reference", "rollout"]
    """"reference": the trainer's precision, comparable across runs. "rollout": the run's own sampler."""
    accuracy: Measured
    correct: list[Annotated[int, Field(ge=0, le=1)]] = []
    """1 or 0 per question, in the order that `question_hash` stands for."""
    question_hash: str
    length_mean: Measured = None
    """Mean length of the answers in tokens, end token included."""
    truncated_frac: Measured = None
    unparsable_frac: Measured = None
    failures: dict[str, float] = {}
    """Share of the responses by what goes wrong first (`harness.tasks.Score.failure`)."""


class TaskEvalRecord(Strict):
    """One of a run's `evaluations` after `step` steps of the policy: a matrix of its answers, questions x samples."""

    number: int
    """Place in the configuration's list, from 0 on."""
    task: str
    step: int
    site: Literal["reference", "rollout"]
    """As in `EvalRecord`."""
    precision: str
    """Precision of the weights that answered."""
    engine: str
    """Engine that sampled."""
    k: int
    temperature: float
    top_p: float
    max_new_tokens: int
    question_hash: str = ""
    correct: list[list[Annotated[int, Field(ge=0, le=1)]]] = []
    """[Q][k]: 1 where a sample is right; questions in the order that `question_hash` stands for."""
    answers: list[list[Annotated[int, Field(ge=-1)]]] = []
    """[Q][k]: samples of one number gave the same answer, -1 none that could be read (`harness.records.sample_scores`);
    empty where the task does not tell answers apart."""
    greedy: list[Annotated[int, Field(ge=0, le=1)]] = []
    """[Q]: 1 where the greedy answer is right; empty where none was asked for."""
    scores: dict[str, Measured] = {}
    """Means over the questions: avg@k, pass@1, 2, 4 .. k, maj@k, greedy."""
    length_mean: Measured = None
    truncated_frac: Measured = None
    unparsable_frac: Measured = None
    failures: dict[str, float] = {}
    seconds: Measured = None
    error: str | None = None
    """Cause that ended this evaluation; its matrices are then empty."""


class MethodRecord(Strict):
    """The method as it ran."""

    name: str
    paper: str = ""
    parts: Settings = {}
    """Part name -> knob name -> value."""
    reconstructed: str = ""
    """The parts of the rule that are ours because no source gives them."""


class Base(NamedTuple):
    """A base. Weights of one seed that were trained twice, by two recipes or on a GPU, are two."""

    seed: int
    weights: str = ""
    """Hash of the weights; empty where the record has none."""


def base_names(bases: Sequence[Base]) -> list[str]:
    """Names of bases by their seeds, with the beginning of the weights' hash where several have one seed."""
    counts = Counter(base.seed for base in bases)
    return [f"base {base.seed}" + f" ({base.weights[:6]})" * (counts[base.seed] > 1) for base in bases]


Pair = tuple[Base, int]
"""(base, run seed)."""


class RunResult(Strict):
    """One cell of a sweep, whatever became of it; `error` is a traceback, times are ISO 8601 in UTC."""

    schema_version: Literal[1] = 1
    run_id: str
    name: str
    sweep: str
    status: Status
    reason: str | None = None
    is_draft: bool = False
    """True where the working tree was dirty: the commit does not tell the code."""
    config: Settings
    method: MethodRecord
    planned: Settings = {}
    passport: Settings | None = None
    seed: int
    base_seed: int
    commit: str | None = None
    is_dirty: bool = False
    packages: dict[str, str] = {}
    hardware: Settings = {}
    hashes: dict[str, str | None] = {}
    launch: Settings = {}
    """Settings of the last attempt's launch that are not the defaults."""
    trainer: Settings = {}
    """Kind of product, by the live modules -> how many linear layers compute so."""
    time_s: dict[str, Measured] = {}
    """Seconds per stage of `clock.STAGES`, and total."""
    tokens_per_s: dict[str, Measured] = {}
    """Tokens per second: rollout, end_to_end."""
    peak_memory_gib: Measured = None
    memory_gib: dict[str, Measured] = {}
    """GiB of a GPU: peaks allocated and reserved by torch's count, less what a sleeping engine has given back (with it
    before 2026-11-25); engine: at its start; given_back. Under verl rest: what the trainer keeps while the engine
    samples; host: the machine's memory in use."""
    num_steps: int = 0
    evals: list[EvalRecord] = []
    evaluations: list[TaskEvalRecord] = []
    """Answers to `evaluations` of the configuration."""
    evaluation_errors: list[str] = []
    """Evaluations of `task` that ended in an error after the last step: they cost their numbers, not the run."""
    summary: dict[str, Measured] = {}
    retries: list[str] = []
    started_at: str | None = None
    ended_at: str | None = None
    error: str | None = None

    @property
    def base(self) -> Base:
        """Base that the run started from."""
        return Base(self.base_seed, self.hashes.get("model") or "")

    @property
    def pair(self) -> Pair:
        """Base and run seed, which two runs share that are compared as a pair."""
        return self.base, self.seed


def accuracies(evals: Iterable[EvalRecord], site: str) -> list[tuple[int, float]]:
    """(step, accuracy) of the evaluations at a site ("reference" or "rollout"), by step."""
    return sorted((e.step, e.accuracy) for e in evals if e.site == site and e.accuracy is not None)


def write_result(
    folder: Path, result: RunResult, series: Sequence[Row] | bytes | None, write_file: WriteFile | None = None
) -> Path:
    """Write `<run_id>.parquet` (a row per step, or its bytes; none without `series`), then `<run_id>.json`, atomically.

    A JSON file therefore never stands without its series. `write_file` stands in for `write_atomic`. Raises ValueError
    naming the file that cannot be written.
    """
    write_file = write_file or write_atomic
    path = folder / f"{result.run_id}.json"
    if series:
        write_file(path.with_suffix(".parquet"), series if isinstance(series, bytes) else series_bytes(series))
    elif path.with_suffix(".parquet").exists():
        path.with_suffix(".parquet").unlink()
    write_file(path, _json(result))
    return path


def read_result(path: Path) -> RunResult:
    """One result. Raises ValueError naming the file and the reason where it is missing, corrupt or misnamed."""
    try:
        result = RunResult.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        raise ValueError(f"{path}: not a result file: {in_words(error)}") from error
    if result.run_id != path.stem:
        raise ValueError(f"{path}: run_id is {result.run_id!r}, the file name says {path.stem!r}")
    return result


def read_results(folder: Path | str) -> list[RunResult]:
    """Every result under `folder` (a sweep's folder, or `results/runs`), ordered by path; none where it is absent.

    Raises ValueError for a file, such as a packed sweep, which `harness.records.folder.runs_of` reads.
    """
    if Path(folder).is_file():
        raise ValueError(f"{folder}: no folder of results; harness.records.folder.runs_of reads a packed sweep")
    return [read_result(path) for path in sorted(Path(folder).rglob("*.json"))]


def read_series(folder: Path, run_id: str, names: Collection[str] | None = None) -> dict[str, list[Any]]:
    """Column -> one value per step: floats (NaN where a step has none), or lists of floats; of all columns, or of those
    of `names` that there are.

    Raises ValueError naming the file where it is missing or corrupt.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / f"{run_id}.parquet"
    try:
        # By no `read_table`: its threads may still hold these bytes when the interpreter ends, which aborts it.
        with pq.ParquetFile(pa.BufferReader(path.read_bytes()), page_checksum_verification=True) as file:
            wanted = None if names is None else [name for name in file.schema_arrow.names if name in names]
            table = file.read(columns=wanted, use_threads=False)
        values = table.to_pydict()
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read: {reason}") from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a Parquet file: {' '.join(str(error).split())}") from error
    columns: dict[str, list[Any]] = {}
    for name, column in values.items():
        missing = [] if pa.types.is_list(table.schema.field(name).type) else math.nan
        columns[name] = [missing if value is None else value for value in column]
    return columns


def check_series(path: Path, result: RunResult) -> None:
    """Raises ValueError, one line, where the series beside the record `path` is corrupt, or missing though all steps
    were taken."""
    if path.with_suffix(".parquet").exists():
        read_series(path.parent, path.stem)
    elif result.status == "ok":
        raise ValueError(f"{path}: its series {path.stem}.parquet is missing")


def verify(folder: Path) -> list[str]:
    """One line per bad file under `folder`; an empty list where everything is readable and consistent."""
    bad: list[str] = []
    paths = sorted(folder.rglob("*.json"))
    for path in paths:
        try:
            result = read_result(path)
            if result.status != "ok" and not result.reason:
                bad.append(f"{path}: status is {result.status} without a reason")
            check_series(path, result)
        except ValueError as error:
            bad.append(str(error))
    alone = [path for path in sorted(folder.rglob("*.parquet")) if not path.with_suffix(".json").exists()]
    return bad + [f"{path}: a series without its result" for path in alone]


def import_results(paths: Iterable[Path], destination: Path) -> tuple[list[str], list[str]]:
    """Merge results into `<destination>/<sweep>/`: (ids added, ids already there).

    A run that is there already, or among `paths` twice, must be the same file, or one of the two did not finish
    (failed, cancelled, skipped); otherwise ValueError naming the ids, before anything is copied. So for a series that
    is missing or corrupt.
    """
    added: dict[Path, tuple[Path, RunResult]] = {}
    known: list[str] = []
    conflicts: list[str] = []
    for path in paths:
        result = read_result(path)
        target = destination / result.sweep / path.name
        held = added[target][0] if target in added else target
        if held.exists() and held.read_bytes() == path.read_bytes():
            known.append(result.run_id)
        elif not held.exists() or read_result(held).status not in FINISHED:
            check_series(path, result)
            added[target] = path, result
        elif result.status not in FINISHED:
            known.append(result.run_id)
        else:
            conflicts.append(f"{result.sweep}/{result.run_id}")
    if conflicts:
        raise ValueError(f"{destination}: another result of {', '.join(conflicts)} is there; remove one of the two")
    for target, (path, _) in added.items():
        series = path.with_suffix(".parquet")
        if series.exists():
            write_atomic(target.with_suffix(".parquet"), series.read_bytes())
        else:  # that of an attempt which the new one replaces
            target.with_suffix(".parquet").unlink(missing_ok=True)
        write_atomic(target, path.read_bytes())
    return [result.run_id for _, result in added.values()], known


SUMMARY: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "reward_last": ("reward/mean", lambda values: fmean(values[-5:])),
    "reward_accuracy_last": ("reward/accuracy", lambda values: fmean(values[-5:])),
    "best_of_group_last": ("reward/best_of_group", lambda values: fmean(values[-20:])),
    "k3_max": ("mismatch/kl_k3", max),
    "k3_median": ("mismatch/kl_k3", median),
    "ess_token_min": ("mismatch/ess_token", min),
    "ess_token_raw_min": ("mismatch/ess_token_raw", min),
    "ess_token_raw_median": ("mismatch/ess_token_raw", median),
    "entropy_last": ("train/entropy", lambda values: fmean(values[-5:])),
    "grad_norm_max": ("train/grad_norm", max),
}
"""Summary name -> (column of the series, reduction over its finite values)."""
MAY_BE_NAN = frozenset({"sync/code_flip_rate"})
"""Columns that say nothing in some rows: no codes stand before the first push of a process, nor ever where weights have
none."""


def summarise(series: Sequence[Row], evals: Sequence[EvalRecord]) -> dict[str, float | None]:
    """The few numbers of a run that tables rank: accuracies as fractions, mismatch in nats, None where not measured.

    `auc` is the mean accuracy of the evaluations after step 0, `*_last` the mean of the last five steps, but of the
    last twenty for `best_of_group_last`, which has one value a prompt. `num_nonfinite` counts NaN and
    infinite scalars of the series, which every reduction leaves out; NaN of a column in `MAY_BE_NAN` is none of them.
    """
    summary: dict[str, float | None] = {}
    for site, suffix in (("reference", ""), ("rollout", "_rollout")):
        curve = accuracies(evals, site)
        after = [accuracy for step, accuracy in curve if step > 0]
        summary[f"base_accuracy{suffix}"] = curve[0][1] if curve and curve[0][0] == 0 else None
        summary[f"auc{suffix}"] = fmean(after) if after else None
        summary[f"final_accuracy{suffix}"] = after[-1] if after else None
    for name, (column, reduce) in SUMMARY.items():
        values = [row[column] for row in series if column in row]
        finite = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
        summary[name] = reduce(finite) if finite else None
    scalars = [(name, value) for row in series for name, value in row.items() if isinstance(value, float)]
    bad = [
        name for name, value in scalars if not math.isfinite(value) and not (math.isnan(value) and name in MAY_BE_NAN)
    ]
    summary["num_nonfinite"] = float(len(bad))
    return summary


def _json(result: RunResult) -> bytes:
    """One line per field and per evaluation, so that a diff of two results can be read."""
    dumps = partial(json.dumps, allow_nan=False, ensure_ascii=False)
    fields = result.model_dump(mode="json")
    dense = partial(dumps, separators=(",", ":"))  # hundreds of answers per evaluation

    def written(key: str, value: Any) -> str:
        if key not in ("evals", "evaluations"):
            return dumps(value)
        return "[" + ",".join(f"\n  {dense(record)}" for record in value) + "]"

    lines = [f' "{key}": {written(key, value)}' for key, value in fields.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def series_bytes(series: Sequence[Row]) -> bytes:
    """A series as the content of its Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in series for name in row))
    columns: dict[str, Any] = {} if "step" in names else {"step": pa.array(range(len(series)), pa.float32())}
    for name in names:
        values: list[Any] = [row.get(name) for row in series]
        is_list = any(isinstance(value, Sequence) for value in values)
        columns[name] = pa.array(values, pa.list_(pa.float32()) if is_list else pa.float32(), from_pandas=False)
    sink = io.BytesIO()
    pq.write_table(
        pa.table(columns), sink, compression="zstd", use_dictionary=False, write_statistics=False,
        write_page_checksum=True,
    )  # fmt: skip
    return sink.getvalue()
