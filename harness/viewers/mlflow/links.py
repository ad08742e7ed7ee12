"""Addresses inside MLflow's pages: a filtered and ordered list of runs, and the description that lists them.

An address starts at `#`, so that it holds on whatever host and port the server is reached. A saved view is what the
"Share" button of MLflow writes: JSON in a tag of the experiment, named by the address.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from urllib.parse import quote, urlencode

from harness.records.folder import Comparison, pair_words

ORDER = "metrics.`scores/auc`"
ARMS = "tags.kind = 'arm'"
PAIRS = "pairs"
ARM_COLUMNS = (
    "metrics.`scores/auc`", "metrics.`scores/auc_low`", "metrics.`scores/auc_high`", "metrics.`scores/accuracy`",
    "metrics.`scores/rollout_accuracy`", "metrics.`summary/k3_max`", "metrics.`verdict/difference`",
    "metrics.`verdict/p_adjusted`", "tags.`verdict`", "tags.`seeds`",
)  # fmt: skip
CELL_COLUMNS = (
    "metrics.`scores/auc`", "metrics.`scores/accuracy`", "metrics.`scores/rollout_accuracy`",
    "metrics.`summary/k3_max`",
    "metrics.`time/total_s`", "tags.`seed`", "tags.`status`", "tags.`reason`",
)  # fmt: skip
PAGES = {
    "All arms": (ARMS, ARM_COLUMNS),
    "Single runs": ("tags.kind = 'cell'", CELL_COLUMNS),
    "Diverged or failed": ("tags.kind = 'cell' AND tags.status != 'ok'", CELL_COLUMNS),
    "Tables and figures": ("tags.kind = 'overview'", ()),
}
"""Title -> (filter, columns) of the views that every sweep has."""
TAG = "mlflow.sharedViewState."
WORKFLOW = {"workflowType": "machine_learning"}
"""MLflow's pages otherwise open on traces of language models."""
MAX_NOTE = 19_000
"""Characters of a description; MLflow takes 20000."""


def condition(comparison: Comparison) -> str:
    """The arms of a comparison as an MLflow filter, on the tags that arms have.

    MLflow's filters have no OR and no list of names, so that every arm's tag PAIRS lists the pairs that it is part of.
    """
    words = [ARMS, f"tags.precision = '{comparison.precision}'" if comparison.precision else ""]
    words.append(f"tags.context = '{comparison.context}'" if comparison.context else "")
    if len(comparison.methods) == 1:
        words.append(f"tags.method = '{comparison.methods[0]}'")
    elif comparison.methods:
        words.append(f"tags.{PAIRS} LIKE '%|{pair_words(comparison.methods)}|%'")
    return " AND ".join(filter(None, words))


def pairs_of(arm: str, comparisons: Sequence[Comparison]) -> str:
    """The value of an arm's tag PAIRS: `|qurl against naive|qurl against flashrl|`."""
    pairs = dict.fromkeys(pair_words(c.methods) for c in comparisons if len(c.methods) > 1 and arm in c.arms)
    return f"|{'|'.join(pairs)}|"[:8000]


def runs_page(experiment_id: str, filter_words: str) -> str:
    """The list of runs that meet a filter, best first, with whatever columns the browser showed last."""
    words = {"searchFilter": filter_words, "orderByKey": ORDER, "orderByAsc": "false", "startTime": "ALL"}
    return f"#/experiments/{experiment_id}/runs?{urlencode(words | WORKFLOW, quote_via=quote)}"


def view_page(experiment_id: str, key: str) -> str:
    """A saved view: a filter, an order and columns, kept in a tag of the experiment."""
    return f"#/experiments/{experiment_id}/runs?{urlencode({'viewStateShareKey': key} | WORKFLOW)}"


def view_key(title: str) -> str:
    """A comparison's title as the key of its view: `qurl-against-flashrl-at-int8-n-8`."""
    return re.sub(r"[^a-z0-9_.]+", "-", title.lower()).strip("-")


def views(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """Key -> the view as MLflow's "Share" button writes it."""
    found = {view_key(title): _view(words, columns) for title, (words, columns) in PAGES.items()}
    return found | {view_key(c.title): _view(condition(c), ARM_COLUMNS) for c in comparisons}


def _view(filter_words: str, columns: Sequence[str]) -> str:
    state = {
        "searchFilter": filter_words, "orderByKey": ORDER, "orderByAsc": False, "startTime": "ALL",
        "lifecycleFilter": "Active", "datasetsFilter": [], "modelVersionFilter": "All Runs",
        "selectedColumns": ["attributes.`Run Name`", *columns],
    }  # fmt: skip
    return json.dumps(state)


def note(question: str, experiment_id: str, comparisons: Sequence[Comparison]) -> str:
    """The Markdown description of an experiment; comparisons that do not fit are counted."""
    head = f"{question}\n\n" if question else ""
    head += " · ".join(f"[{title}]({view_page(experiment_id, view_key(title))})" for title in PAGES) + "\n\n"
    head += (
        "An arm is the mean over its seeds with 95 % intervals; its tag `verdict` compares it with the control. "
        "Select arms and press Compare.\n"
    )
    lines, size, num_left = [head], len(head), 0
    for group, members in groupby(comparisons, key=lambda comparison: comparison.group):
        for index, comparison in enumerate(members):
            link = f"[{comparison.title}]({view_page(experiment_id, view_key(comparison.title))})"
            line = (" · " if index else f"\n\n**{group}**: ") + link
            num_left += size + len(line) > MAX_NOTE
            if not num_left:
                lines.append(line)
                size += len(line)
    return "".join(lines) + (f"\n\n{num_left} more: `comparisons.md` of the run `overview`." if num_left else "") + "\n"
