"""The report of the longest files and functions, on two small files."""

import re
import sys
from pathlib import Path

import pytest

from harness.devtools import longest
from harness.devtools.longest import lengths


def test_lines_are_counted_and_the_longest_is_first(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "short.py").write_text("def f():\n    pass\n")
    (tmp_path / "a" / "long.py").write_text("class A:\n    def g(self):\n        x = 1\n        return x\n\n\ny = 2\n")
    files, functions = lengths(tmp_path, ("a",))
    assert list(files.items()) == [("a/long.py", 7), ("a/short.py", 2)]
    assert list(functions.items()) == [("a/long.py::g", 3), ("a/short.py::f", 2)]


def test_the_report_is_of_the_project_wherever_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["longest"])
    longest.main()
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[11], len(lines)] == ["longest files:", "longest functions:", 22]
    assert all(
        re.fullmatch(r" +\d+ (harness|methods|tests)/[\w/]+\.py(::\w+)?", line) for line in lines if line[0] == " "
    )
    monkeypatch.setattr(sys, "argv", ["longest", "--foo"])
    with pytest.raises(SystemExit, match="2"):
        longest.main()
