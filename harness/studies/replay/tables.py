"""The records of the replay laboratory as CSV and Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.foundation.json_object import read_json_object
from harness.foundation.markdown_table import markdown_table
from harness.foundation.whole_file import write_atomic
from harness.objective.mismatch import ENTROPY_EDGES
from harness.studies.replay.evaluation import LENGTH_EDGES
from harness.studies.replay.store import CONTROL

Record = dict[str, Any]
LISTS = ("rejected_by_length", "rejected_by_entropy")
READING = (
    "Target: the expected step of the same algorithm with an exact (float32) sampler and no correction, from "
    "independent batches of the training size. A method with an objective of its own is held against its own expected "
    "step with an exact sampler where a line above the tables names it. Lengths are in units of the target's norm.",
    "Bias: |E q - target| with the noise of both means removed, [95 % interval] by a wild bootstrap over batches "
    "(their prompts are disjoint); 0 where the debiased square is negative. Floor: what the bias of row `none` would "
    "show in 95 % of cases if it had none.",
    "Cosine: of the expected step with the target, debiased; between -1 and 1 nothing is known of it where a step is "
    "nearly nothing. Variance: trace of one batch's covariance over that of the exact sampler. Error: "
    "sqrt(bias^2 + variance) of one training step.",
    "Age 0: the policy that is updated is the one that was sampled (R = 1), where the clips of the ratio cannot act "
    "and several rules coincide. Age 1: it is one optimizer step further, and the target is the algorithm's clipped "
    "step.",
    "`control` is the exact sampler with other random numbers: no bias but by chance, so 1 interval in 40 may miss 0.",
    "Every batch is a first step: rules with a memory start empty. Yardsticks without a cap are no methods, and no "
    "oracles: group advantages are those of the sampler's own groups, and an interval knows nothing of responses that "
    "the exact sampler gives and these batches never saw.",
)


def read_records(folder: Path) -> list[Record]:
    """All records, shortest responses first, the control before the formats. Raises ValueError without or for a damaged
    one."""
    found = [read_json_object(path, "delete it and evaluate again") for path in sorted(folder.glob("*.json"))]
    if not found:
        raise ValueError(f"{folder}: no records; run `lowbit replay evaluate` first")
    return sorted(found, key=lambda r: (r["sampler"]["length"] or 0, r["context"], r["age"], r["sampler"]["order"]))


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row per context, sampler, age and arm; lists become one column per bucket."""
    rows: list[dict[str, Any]] = []
    for record in records:
        sampler = record["sampler"]
        shared = {
            "context": record["context"], "length": sampler["length"], "sampler": sampler["sampler"],
            "age": record["age"],
            "accuracy": sampler["accuracy"], "k3": sampler["mismatch"]["kl_k3"],
            "ess_token_raw": sampler["mismatch"]["ess_token_raw"], "ess_seq_raw": sampler["mismatch"]["ess_seq_raw"],
            "num_batches": sampler["num_batches"],
        }  # fmt: skip
        for row in record["rows"]:
            target = record["reference"][row.get("target", row["agg"])]
            buckets = {
                f"{name}_{edge:g}": row[name][i] if row[name] else None
                for name, edges in zip(LISTS, (LENGTH_EDGES, ENTROPY_EDGES), strict=True)
                for i, edge in enumerate(edges)
            }
            plain = {name: value for name, value in row.items() if name not in LISTS}
            rows.append(shared | plain | buckets | {f"reference_{name}": value for name, value in target.items()})
    return pd.DataFrame(rows)


def write_tables(records: Sequence[Record], folder: Path) -> list[Path]:
    """`replay.csv` with everything, `replay.md` to read."""
    texts = {"replay.csv": frame(records).to_csv(index=False, float_format="%.5g"), "replay.md": markdown(records)}
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
    return [folder / name for name in texts]


def markdown(records: Sequence[Record]) -> str:
    """Per context and age: bias, cosine, variance and error of every arm that differs from the ones before it."""
    blocks = ["# replay", "\n".join(f"- {line}" for line in _setup(records))]
    for context, age in dict.fromkeys((record["context"], record["age"]) for record in records):
        inside = [record for record in records if (record["context"], record["age"]) == (context, age)]
        rows: list[Record] = frame(inside).to_dict("records")
        blocks += [f"## {context}, age {age}", _samplers(inside, rows)]
        distinct, groups = coinciding(rows)
        if own := [arm for arm in distinct if any(row["arm"] == arm and has_own_target(row) for row in rows)]:
            blocks.append(f"Held against their own exact step: {', '.join(own)}.")
        for title, show in COLUMNS:
            blocks += [f"### {title}", _grid(rows, distinct, show)]
        if groups:
            blocks.append("Coincide here on every format: " + "; ".join(" = ".join(group) for group in groups) + ".")
    skipped = {name: reason for record in records for name, reason in record["skipped"].items()}
    if skipped:
        lines = "\n".join(f"- {name}: {reason}" for name, reason in skipped.items())
        blocks += ["## Methods that are left out", lines]
    return "\n\n".join([*blocks, "## How to read it", "\n".join(f"- {line}" for line in READING)]) + "\n"


def coinciding(rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """(arms to show, groups of arms that are equal on every format) of one context and age."""
    formats = [row for row in rows if row["sampler"] != CONTROL] or rows
    firsts: dict[str, list[str]] = {}
    for row in formats:
        firsts.setdefault(row["arm"], []).append(row["same_as"] or row["arm"])
    groups: dict[tuple[str, ...], list[str]] = {}
    for arm, same in firsts.items():
        groups.setdefault(tuple(same), []).append(arm)
    return [group[0] for group in groups.values()], [group for group in groups.values() if len(group) > 1]


def has_own_target(row: Record) -> bool:
    """Is an arm held against the step of its own objective? Records of before version 2 name no target."""
    return str(row.get("target", "")).startswith("own ")


def _setup(records: Sequence[Record]) -> Iterator[str]:
    config, sampler = records[0]["config"], records[0]["sampler"]
    algo, model = config["algo"], config["model"]
    yield (
        f"Model {model['name']}, task {config['task']['name']}, channel spread {model['spread']:g}; {algo['name']}, "
        f"batches of {algo['num_prompts']} prompts x {algo['group_size']} samples; policy: the base"
        + (f" after {sampler['step']['index']} steps with bf16 rollouts" if sampler["step"]["index"] else "")
    )
    formats = dict.fromkeys(r["sampler"]["sampler"] for r in records if r["sampler"]["order"] >= 0)
    lengths = dict.fromkeys(str(r["sampler"]["length"]) for r in records if r["sampler"]["length"])
    target = next(iter(records[0]["reference"].values()))
    factor = target["num_batches"] // sampler["num_batches"]
    yield (
        f"The batches are not kept here; `lowbit replay collect --precisions {','.join(formats)}"
        + (f" --lengths {','.join(lengths)}" if lengths else "")
        + f" --prompts {sampler['num_batches'] * sampler['num_prompts']} --reference-factor {factor}"
        + (f" --warmup {sampler['step']['index']}" if sampler["step"]["index"] else "")
        + "` and `lowbit replay evaluate` make them and this table again"
    )
    commits = dict.fromkeys((record["sampler"]["commit"] or "unknown")[:10] for record in records)
    yield f"Commit {', '.join(commits)}; torch {sampler['torch']}"


def _samplers(records: Sequence[Record], rows: Sequence[Record]) -> str:
    """Lines on what was sampled: one line per sampler of one context and age."""
    target = rows[0]
    lines = [
        f"Target from {target['reference_num_batches']:.0f} batches: relative error of its norm "
        f"{_number(target['reference_norm_error'])}, variance of a batch "
        f"{_number(target['reference_variance'])}; two halves differ by "
        f"{_number(target['reference_half_distance'])}, cosine {_number(target['reference_half_cosine'])}.",
        "",
    ]
    head = ("sampler", "batches", "accuracy", "k3, nats", "raw ESS, token", "raw ESS, sequence", "floor of the bias")
    shown = list[list[str]]()
    for record in records:
        s, m = record["sampler"], record["sampler"]["mismatch"]
        floor = next(r["bias_floor"] for r in rows if (r["sampler"], r["arm"]) == (s["sampler"], "none"))
        cells = [s["sampler"], str(s["num_batches"]), _number(s["accuracy"]), f"{m['kl_k3']:.1e}"]
        cells += [_number(m["ess_token_raw"]), _number(m["ess_seq_raw"]), _number(floor)]
        shown.append(cells)
    return "\n".join([*lines, markdown_table(head, shown, align="lr")])


def _grid(rows: Sequence[Record], distinct: Sequence[str], show: Callable[[Record], str]) -> str:
    names = list(dict.fromkeys(row["sampler"] for row in rows))
    cells = {(row["arm"], row["sampler"]): row for row in rows}
    lines = list[list[str]]()
    for arm in distinct:
        mark = " †" if any(cells[arm, name]["reconstructed"] for name in names) else ""
        lines.append([f"{arm}{mark}", *(show(cells[arm, name]) for name in names)])
    return markdown_table(["arm", *names], lines, align="lr")


def _number(value: Any) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2g}" if abs(value) < 0.1 else f"{value:.2f}"


def _bracketed(name: str) -> Callable[[Record], str]:
    return lambda r: f"{_number(r[name])} [{_number(r[f'{name}_low'])}, {_number(r[f'{name}_high'])}]"


COLUMNS: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("Bias", _bracketed("bias")),
    ("Cosine", _bracketed("cosine")),
    (
        "Variance over the exact sampler's; rejected tokens",
        lambda r: f"{_number(r['variance_ratio'])}; {_number(r['rejected'])}",
    ),
    ("Error of one step", lambda r: _number(math.sqrt(r["mse"]))),
)
"""(title, cell)."""
