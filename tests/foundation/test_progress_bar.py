"""Progress bars of what takes seconds."""

import io
import sys

import pytest

from harness.foundation import progress_bar as module


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "patience_s", "is_shown"),
    [(Terminal(), 0.0, True), (Terminal(), 60.0, False), (io.StringIO(), 0.0, False)],
    ids=["terminal", "quick", "pipe"],
)
def test_a_bar_is_shown_on_a_terminal_alone_and_only_of_what_lasts(monkeypatch, stream, patience_s, is_shown) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "PATIENCE_S", patience_s)
    assert list(module.progress_bar(["a", "b", "c"], "sweep")) == ["a", "b", "c"]
    *written, last = stream.getvalue().rstrip("\r").split("\r")
    assert any("0/3 [" in line and " sweep/s" in line for line in written) == is_shown == bool(written)
    assert not last.strip(), "it stays behind"
