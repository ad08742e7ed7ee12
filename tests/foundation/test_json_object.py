"""Files that hold a JSON object, and every other kind by its message."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from harness.foundation.json_object import read_json_object


def test_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": [1, "\u00e9"]}', encoding="utf-8")
    assert read_json_object(path) == {"a": [1, "\u00e9"]}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "x.json is not valid JSON: Expecting value: line 1 column 1"),
        (b"version https://git-lfs.github.com/spec/v1\n", "x.json is not valid JSON: Expecting value"),
        (b"\xff\xfe", "x.json is not valid JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "x.json is not valid JSON: maximum recursion depth exceeded"),
        (b"null", "x.json holds no JSON object"),
        (b"[1]", "x.json holds no JSON object"),
    ],
)
def test_another_file_is_named(data: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=expected):
        read_json_object(path)


def test_a_key_that_an_object_lacks_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"rows": [{"k3": 1.5}]}', encoding="utf-8")
    found = read_json_object(path, "measure again")
    assert found["rows"][0]["k3"] == 1.5 and found.get("name") is None and "name" not in found
    for one, key in ((found, "name"), (found["rows"][0], "lost")):
        with pytest.raises(ValueError, match=rf"^{path}: {key} is missing; measure again$"):
            one[key]
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^cannot read .*gone.json: No such file or directory$"):
        read_json_object(tmp_path / "gone.json")
    with pytest.raises(ValueError, match=r"^cannot read .*: Is a directory$"):
        read_json_object(tmp_path)
    with pytest.raises(ValueError, match=r"gone.json: No such file or directory; measure it$"):
        read_json_object(tmp_path / "gone.json", "measure it")
