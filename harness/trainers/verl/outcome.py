"""End of a run under verl, in the words of its record: from what Ray raised, or from what a dead driver printed.

Kinds: ok, stopped, diverged, memory (another attempt may ask for less), failed. Pure.
"""

from __future__ import annotations

import re
import signal
import traceback

from harness.foundation.process_log import COLOURS, last_words, one_line

DIED = "verl's driver died without a word"
KINDS = {"Stopped": "stopped", "Diverged": "diverged", "OutOfMemoryError": "memory", "MemoryError": "memory"}
"""Class of what was raised -> kind; by name, for Ray brings classes of its own."""
MEMORY = re.compile(r"out of memory|can(?:'t|not) allocate memory", re.IGNORECASE)
ELSEWHERE = "See root cause above"
"""Message of vLLM's engine where one of its processes ended."""
LOGGED = re.compile(r"\[\w+\.py:\d+\] ((?:\w+\.)*\w+(?:Error|Exception): .*)")
"""Line that this process has logged: the end of its traceback."""


def outcome(error: BaseException | None) -> dict[str, str]:
    """Outcome of a run by the error that ended it; Ray's wrappers around an error of a worker are taken off."""
    if error is None:
        return {"kind": "ok", "reason": ""}
    cause = error
    while isinstance(inner := getattr(cause, "cause", None), BaseException):
        cause = inner
    name, words = type(cause).__name__, one_line(str(cause))
    kind = KINDS.get(name, "memory" if MEMORY.search(words) else "failed")
    reason = words if kind in ("stopped", "diverged") else f"{name}: {words}" if words else name
    return {"kind": kind, "reason": reason, "traceback": "".join(traceback.format_exception(error))}


def death(code: int, log: str) -> dict[str, str]:
    """Outcome of a driver that left none: its exit code, minus the signal, and what it printed."""
    words = last_words(log)
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", as the kernel does where memory runs out" if -code == signal.SIGKILL else ""
        return {"kind": "failed", "reason": f"verl's driver was killed by {name}{hint}"}
    kind = "memory" if MEMORY.search(words) else "failed"
    return {"kind": kind, "reason": f"verl's driver died: {words}" if words else DIED}


def with_its_cause(found: dict[str, str], log: str) -> dict[str, str]:
    """An outcome of `outcome`; where it only points to the log, in the words of the first error there."""
    errors = LOGGED.findall(COLOURS.sub("", log)) if ELSEWHERE in found["reason"] else []
    if not errors:
        return found
    reason = one_line(errors[0])
    return found | {"kind": "memory" if MEMORY.search(reason) else found["kind"], "reason": reason}
