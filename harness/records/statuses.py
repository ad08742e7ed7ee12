"""The statuses a run can end with, and which of them are results."""

from __future__ import annotations

from typing import Literal, get_args

Status = Literal["ok", "diverged", "failed", "cancelled", "skipped"]
"""ok: every step was taken. diverged: the loss became non-finite. failed: an error or a lack of memory. cancelled:
stopped on request, or put aside to run again. skipped: the setting is impossible."""
STATUSES: tuple[Status, ...] = get_args(Status)
TO_RUN_AGAIN = "to run again (--again)"
"""Reason of the cancelled record of a cell whose result was put aside, until it has run."""
FINISHED: tuple[Status, ...] = ("ok", "diverged")
"""A result: it is scored, and another start does not repeat it. The others run again."""
