"""The cause of a process's death, read from its log."""

from __future__ import annotations

from pathlib import Path

from harness.foundation.process_log import LONGEST, last_words, one_line, tail

LOG = """
\x1b[36m(Runner pid=7)\x1b[0m step 3
Traceback (most recent call last):
  File "node.py", line 440, in __init__
    raise Exception(
Exception: The current node timed out during startup.
Ray did not start
"""


def test_the_last_words_are_the_last_line_that_names_an_error() -> None:
    assert last_words(LOG) == "Exception: The current node timed out during startup."
    assert last_words("a\n\x1b[31mb\x1b[0m\n\n") == "b"
    native = "x\n[1 C 2] node_manager.cc:3576: Check failed: Timed out waiting for file\n*** StackTrace ***\n"
    assert last_words(native).endswith("Check failed: Timed out waiting for file")
    assert last_words("") == ""
    assert last_words("", "exit code -9") == "exit code -9"


def test_a_warning_names_no_error() -> None:
    warning = "x.py:69: UserWarning: no engine: ModuleNotFoundError('megatron')"
    assert last_words("a\nTypeError: x\nat exit\n") == "TypeError: x"
    assert last_words(f"TypeError: x\n{warning}\n") == "TypeError: x"
    assert last_words(f"{warning}\nstep 1\n") == "step 1"


def test_one_line_is_short_and_the_end_of_a_traceback() -> None:
    assert one_line("Traceback (most recent call last):\n  File x\nValueError: a\n") == "ValueError: a"
    assert one_line("a\n  b  c") == "a b c"
    assert len(one_line("x" * 1000)) == LONGEST and one_line("x" * 1000).endswith("x...")


def test_a_tail_begins_no_earlier_than_asked_and_is_no_longer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"before|" + b"x" * 100 + b"\xff")
    assert tail(log, start=7) == "x" * 100 + "\ufffd"
    assert tail(log, start=7, limit=3) == "xx\ufffd"
    assert tail(log, start=200) == "" and tail(tmp_path / "absent") == ""
