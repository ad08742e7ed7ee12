"""A sweep's experiment from its result files: arms with their aggregates first, then the cells that are missing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any
from zlib import crc32

from harness.records.arms import arm_labels
from harness.records.folder import readable, saved_comparisons
from harness.records.looks import level_of
from harness.records.paths import figures_folder, runs_folder, tables_folder
from harness.records.run_result import RunResult, read_series
from harness.records.sweep_file import Purpose, purpose
from harness.report.verdicts import shown_verdict
from harness.studies.search.tags import trial_tags
from harness.viewers.mlflow import links
from harness.viewers.mlflow.store import KEY, outages, runs_of
from harness.viewers.mlflow.tracker import MAX_POINTS, Tracker, log_params, log_points
from harness.viewers.tracking import facts
from harness.viewers.tracking.facts import Point
from harness.viewers.tracking.tracker import cell_key, log_cells

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    from harness.records.folder import Comparison

Row = Mapping[str, Any]
SUMMARY = ("k3_max", "k3_median", "ess_token_min", "entropy_last", "grad_norm_max", "base_accuracy")
"""Columns of the leaderboard that a run's summary has under the same name."""
VERDICT = ("difference", "difference_low", "difference_high", "p_adjusted", "pairs", "further_seeds")
MEMBERS = "lowbit.members"
"""Tag of an arm: the content of the runs that its curves are the mean of."""
DIGEST = "lowbit.digest"
"""Tag of the overview: the content of everything that the experiment was built from."""


def log_sweep(tracker: Tracker, results: Path, sweep: str) -> int:
    """Log what is missing of one sweep, with a progress bar on a terminal; files that are no results are named and
    passed over."""
    runs = log_arms(tracker, results, sweep)
    folder, labels, tags = runs_folder(results, sweep), arm_labels(runs), trial_tags(results, sweep)
    return log_cells(tracker, sweep, runs, folder, labels, tags)


def log_arms(tracker: Tracker, results: Path, sweep: str) -> list[RunResult]:
    """The arms of a sweep, its overview and the experiment's description, where the results changed since. Returns the
    results whose cells are not logged yet."""
    folder, aim, level = runs_folder(results, sweep), purpose(sweep, results), level_of(results, sweep)
    runs, problems = readable(folder)
    for line in problems:
        print(f"warning: left alone: {line}", file=sys.stderr)
    if tracker.client is None or not runs:
        return []
    try:
        tables = (tables_folder(results) / f"{sweep}.{end}" for end in ("md", "csv"))
        extra = [*sorted(figures_folder(results, sweep).glob("*.png")), *filter(Path.exists, tables)]
        keys = {run.run_id: cell_key(sweep, folder / f"{run.run_id}.json") for run in runs}
        shown = [f"{p.name}{crc32(p.read_bytes())}" for p in extra]
        content = "".join([*keys.values(), *shown, aim.control, *aim.endpoints, f"{level:g}"])
        if _digest(tracker.client, tracker, sweep) != (digest := f"{crc32(content.encode()):08x}-{len(runs)}"):
            _write_arms(tracker.client, tracker, sweep, runs, aim, level, extra, digest, keys, folder)
        return [run for run in runs if keys[run.run_id] not in tracker.place(sweep).known]
    except outages() as error:
        tracker.give_up(error)
        return []


def _digest(client: MlflowClient, tracker: Tracker, sweep: str) -> str | None:
    overview = tracker.place(sweep).known.get(sweep)
    return client.get_run(overview).data.tags.get(DIGEST) if overview else None


def _write_arms(
    client: MlflowClient, tracker: Tracker, sweep: str, runs: Sequence[RunResult], aim: Purpose,
    level: float, extra: Sequence[Path], digest: str, keys: Mapping[str, str], folder: Path,
) -> None:  # fmt: skip
    from harness.report.leaderboard import leaderboard

    rows = leaderboard(runs, aim.control, aim.endpoints, level).to_dict("records")
    labels, members = arm_labels(runs), dict[str, list[RunResult]]()
    for run in runs:
        members.setdefault(labels[run.run_id], []).append(run)
    place, comparisons = tracker.place(sweep), saved_comparisons(rows, aim.baselines)
    parents: dict[str, str] = {}
    for row in rows:
        own = members[row["arm"]]
        content = crc32("".join(sorted(keys[run.run_id] for run in own)).encode())
        tags = {links.PAIRS: links.pairs_of(row["arm"], comparisons), MEMBERS: f"{content:08x}"}
        parents[row["arm"]] = _write_arm(client, tracker, sweep, row, own, tags, folder)
    _rename_cells(client, tracker, sweep, labels, parents)
    words = links.note(aim.question, place.experiment_id, comparisons)
    client.set_experiment_tag(place.experiment_id, "mlflow.note.content", words)
    saved = client.get_experiment(place.experiment_id).tags
    for key, view in links.views(comparisons).items():
        if saved.get(links.TAG + key) != view:
            client.set_experiment_tag(place.experiment_id, links.TAG + key, view)
    overview = place.known.get(sweep)
    if overview is None:
        tags = {"kind": "overview", "lowbit.sweep": sweep, KEY: sweep}
        overview = client.create_run(place.experiment_id, tags=tags, run_name="overview").info.run_id
        place.known[sweep] = overview
    client.set_tag(overview, "mlflow.note.content", words[:7900])
    client.log_text(overview, _list(place.experiment_id, comparisons), "comparisons.md")
    for path in extra:
        client.log_artifact(overview, str(path), "figures" if path.suffix == ".png" else "tables")
    client.set_tag(overview, DIGEST, digest)
    client.set_terminated(overview)


def _list(experiment_id: str, comparisons: Sequence[Comparison]) -> str:
    lines = [f"- {c.title}: {links.runs_page(experiment_id, links.condition(c))}" for c in comparisons]
    return "Open these behind the server's address, as in http://127.0.0.1:5000/#/...\n\n" + "\n".join(lines) + "\n"


def _write_arm(
    client: MlflowClient, tracker: Tracker, sweep: str, row: Row, runs: Sequence[RunResult], tags: dict[str, str],
    folder: Path,
) -> str:  # fmt: skip
    """One arm: its MLflow run. Its aggregates replace older ones, for MLflow shows the latest value of a metric.

    A curve keeps every point that was ever logged, so an arm whose runs changed is made anew.
    """
    from mlflow.entities import RunTag

    run, known = runs[0], tracker.place(sweep).known
    num_known = len(known)
    run_id = tracker.arm(sweep, run, row["arm"])
    old = None if len(known) > num_known else client.get_run(run_id)
    has_curves = old is not None and old.data.tags.get(MEMBERS) == tags[MEMBERS]
    if old is not None and MEMBERS in old.data.tags and not has_curves:
        client.delete_run(known.pop(f"{sweep}:{facts.arm_key(run)}"))
        run_id, old = tracker.arm(sweep, run, row["arm"]), None
    if not has_curves:
        log_points(client, run_id, arm_curves(runs, folder))
    tags |= facts.setting_tags(run) | {
        "arm": row["arm"], "variant": row["variant"], "context": row["context"], "verdict": shown_verdict(row),
        "status": row["status"], "control": row["control"], "seeds": str(row["seeds"]),
        "is_preliminary": str(row["is_preliminary"]).lower(), "is_draft": str(row["is_draft"]).lower(),
        "commit": run.commit or "", "mlflow.note.content": arm_words(row),
    }  # fmt: skip
    values = {k: v for k, v in facts.cell_params(run).items() if k not in ("seed", "base_seed")}
    client.log_batch(run_id, metrics=arm_metrics(row), tags=[RunTag(name, value) for name, value in tags.items()])
    if old is None or not old.data.params:
        log_params(client, run_id, values)
    if old and old.info.run_name != row["arm"]:
        client.update_run(run_id, name=row["arm"])
    ends = [stamp for run in runs if (stamp := facts.milliseconds(run.ended_at)) is not None]
    client.set_terminated(run_id, "FINISHED" if row["seeds"] else "FAILED", max(ends, default=None))
    return run_id


def arm_curves(runs: Sequence[RunResult], folder: Path) -> list[Point]:
    """Curves and evaluations of an arm: means over its runs that have a series, at steps that all of them reached."""
    drawn: list[RunResult] = []
    series: list[Mapping[str, Sequence[Any]]] = []
    for run in runs:
        if run.num_steps and (folder / f"{run.run_id}.parquet").exists():
            try:
                series.append(read_series(folder, run.run_id))
            except ValueError:  # named when its cell is logged, which is then left alone, too
                continue
            drawn.append(run)
    means = facts.mean_series(series)
    start = min((facts.milliseconds(run.started_at) or 0 for run in drawn), default=0)
    end = max((facts.milliseconds(run.ended_at) or 0 for run in drawn), default=0)
    evaluations = facts.mean_evaluations(drawn)
    scores = [Point(f"eval/accuracy_{site}", value, end, step) for (site, step), value in evaluations.items()]
    return scores + facts.curve_points(means, start, end, MAX_POINTS)


def arm_metrics(row: Row) -> list[Metric]:
    """Means over seeds under the names that cells have, their intervals, and the difference to the control."""
    from mlflow.entities import Metric

    names = {f"scores/{name}{end}": f"{name}{end}" for name in facts.SCORES for end in ("", "_low", "_high")}
    names |= {f"scores/{name}_iqm": f"{name}_iqm" for name in facts.SCORES}
    names |= {f"summary/{name}": name for name in SUMMARY} | {f"verdict/{name}": name for name in VERDICT}
    names |= {"time/total_s": "total_s", "speed/rollout_tokens_per_s": "rollout_tokens_per_s"}
    names |= {"system/peak_memory_gib": "peak_memory_gib"}
    now = int(time() * 1000)
    values = {name: row.get(column) for name, column in names.items()}
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
    return [Metric(name, value, now, 0) for name, value in numbers.items() if abs(value) < float("inf")]


def arm_words(row: Row) -> str:
    """The description of an arm."""
    words = f"Mean over {row['seeds']} seeds ({row['status']})"
    if row["seeds"]:
        words += f": AUC {row['auc']:.3f} [{row['auc_low']:.3f}, {row['auc_high']:.3f}]"
    words += "."
    if row["pairs"]:
        words += (
            f" Against {row['control']}: {row['difference']:+.3f} [{row['difference_low']:+.3f}, "
            f"{row['difference_high']:+.3f}] over {row['pairs']} pairs."
        )
    return f"{words} Verdict: {shown_verdict(row)}."


def _rename_cells(
    client: MlflowClient, tracker: Tracker, sweep: str, labels: Mapping[str, str], parents: Mapping[str, str]
) -> None:
    """Cells that were logged one by one, before the sweep was known as a whole, get their arm's label; those of an arm
    that was made anew get its run."""
    for run in runs_of(client, tracker.place(sweep).experiment_id, "tags.kind = 'cell'"):
        label = labels.get(run.data.tags.get("lowbit.run_id", ""))
        if label and run.data.tags.get("mlflow.parentRunId") != parents[label]:
            client.set_tag(run.info.run_id, "mlflow.parentRunId", parents[label])
        if label and run.data.tags.get("arm") != label:
            client.set_tag(run.info.run_id, "arm", label)
            client.update_run(run.info.run_id, name=f"{label}, seed {run.data.tags.get('seed')}")
