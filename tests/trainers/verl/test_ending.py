"""The record of a run under verl that did not end well: from Ray's errors, and from a dead driver's log."""

from __future__ import annotations

import signal

import pytest

from harness.foundation.process_log import LONGEST
from harness.trainers.verl.outcome import death, outcome, with_its_cause
from tests.foundation.test_process_log import LOG


class RayTaskError(Exception):
    """As Ray's: the text is the worker's traceback, the cause what was raised there."""

    def __init__(self, text: str, cause: BaseException | None = None) -> None:
        super().__init__(text)
        self.cause = cause


class OutOfMemoryError(Exception):
    pass


class Stopped(RuntimeError):  # noqa: N818 - named as the trainer's
    pass


def test_wrappers_are_taken_off() -> None:
    inner = RayTaskError("ray::Worker()\n  at 3", ValueError("algo.x=1: no such\nchoice"))
    found = outcome(RayTaskError("ray::Runner()\n  at 7", inner))
    assert (found["kind"], found["reason"]) == ("failed", "ValueError: algo.x=1: no such choice")
    assert "ray::Runner" in found["traceback"]
    assert outcome(RayTaskError("ray::Runner()", Stopped("step 3")))["kind"] == "stopped"
    assert outcome(None) == {"kind": "ok", "reason": ""}


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (OutOfMemoryError("the node runs low"), "memory", "OutOfMemoryError: the node runs low"),
        (RuntimeError("CUDA out of memory."), "memory", "RuntimeError: CUDA out of memory."),
        (Exception("The current node timed out"), "failed", "Exception: The current node timed out"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
        (RayTaskError("Traceback (most recent call last):\n  File x\nKeyError: 'a'"), "failed",
         "RayTaskError: KeyError: 'a'"),
    ],
)  # fmt: skip
def test_kinds_and_words(error: BaseException, kind: str, reason: str) -> None:
    found = outcome(error)
    assert (found["kind"], found["reason"]) == (kind, reason)


def test_a_reason_is_one_line_of_bounded_length() -> None:
    reason = outcome(RuntimeError("word\n" * 1000))["reason"]
    assert "\n" not in reason
    assert len(reason) <= LONGEST + len("RuntimeError: ")


def test_a_death_is_told_by_its_code_and_its_log() -> None:
    assert death(1, LOG)["reason"] == "verl's driver died: Exception: The current node timed out during startup."
    assert death(1, "")["reason"] == "verl's driver died without a word"
    assert death(1, "OSError: [Errno 12] Cannot allocate memory")["kind"] == "memory"
    killed = death(-signal.SIGKILL, LOG)["reason"]
    assert killed == "verl's driver was killed by SIGKILL, as the kernel does where memory runs out"
    assert death(-signal.SIGSEGV, LOG)["reason"] == "verl's driver was killed by SIGSEGV"


ENGINE_LOG = """
\x1b[36m(Server pid=1)\x1b[0m (Worker pid=2) ERROR 11-22 13:19:42 [multiproc_executor.py:898] Traceback (most recent call last):
\x1b[36m(Server pid=1)\x1b[0m (Worker pid=2) ERROR 11-22 13:19:42 [multiproc_executor.py:898]     raise words
\x1b[36m(Server pid=1)\x1b[0m (Worker pid=2) ERROR 11-22 13:19:42 [multiproc_executor.py:898] torch.AcceleratorError: CUDA error: out of memory
\x1b[36m(Server pid=1)\x1b[0m (EngineCore pid=3) ERROR 11-22 13:19:43 [core.py:1231] Exception: WorkerProc initialization failed
"""  # noqa: E501 - as printed


def test_an_engine_that_ended_is_named_by_its_first_error() -> None:
    told = outcome(RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}"))
    found = with_its_cause(told, ENGINE_LOG)
    assert (found["kind"], found["reason"]) == ("memory", "torch.AcceleratorError: CUDA error: out of memory")
    assert found["traceback"] == told["traceback"]
    assert with_its_cause(told, "step 3") == told
    other = outcome(ValueError("algo.x=1"))
    assert with_its_cause(other, ENGINE_LOG) == other
