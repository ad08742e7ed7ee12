"""Files that appear whole or not at all: writers at once, what a failure leaves, permissions."""

from __future__ import annotations

import os
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.foundation.whole_file import write_atomic

SIZE, TIMES = 200_000, 30


def write_often(path: Path, byte: bytes) -> None:
    for _ in range(TIMES):
        write_atomic(path, byte * SIZE)


@pytest.mark.parametrize("pool", [ProcessPoolExecutor, ThreadPoolExecutor])
def test_two_that_write_one_file_at_once_both_succeed(tmp_path: Path, pool: type[Executor]) -> None:
    path, seen = tmp_path / "report.md", set[bytes]()
    path.write_bytes(b"a" * SIZE)
    with pool() as executor:
        writers = [executor.submit(write_often, path, byte) for byte in (b"a", b"b")]
        while not all(writer.done() for writer in writers):
            seen.add(path.read_bytes())
    assert [writer.result() for writer in writers] == [None, None]
    assert seen <= {b"a" * SIZE, b"b" * SIZE}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_writer_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def stop(_: int) -> None:
        raise error

    path = tmp_path / "report.md"
    write_atomic(path, b"old")
    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(error):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named_and_nothing_stays(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    path.mkdir()
    with pytest.raises(ValueError, match=f"^{path}: cannot be written: Is a directory$"):
        write_atomic(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=f"^{tmp_path}/file/report.md: cannot be written: File exists$"):
        write_atomic(tmp_path / "file" / "report.md", b"new")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_are_those_of_any_new_file(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "report.md", b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "report.md").stat().st_mode & 0o777 == mode
