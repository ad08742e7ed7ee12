"""The report of the longest files and functions, on two small files."""

from pathlib import Path

from harness.devtools.longest import lengths


def test_lines_are_counted_and_the_longest_is_first(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "short.py").write_text("def f():\n    pass\n")
    (tmp_path / "a" / "long.py").write_text("class A:\n    def g(self):\n        x = 1\n        return x\n\n\ny = 2\n")
    files, functions = lengths(tmp_path, ("a",))
    assert list(files.items()) == [("a/long.py", 7), ("a/short.py", 2)]
    assert list(functions.items()) == [("a/long.py::g", 3), ("a/short.py::f", 2)]
