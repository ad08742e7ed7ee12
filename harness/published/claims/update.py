"""Update tests: speed of a whole update in one arithmetic over another, by records of `bench long_sequences`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.published.claims.kinds import Test, Update
from harness.records.paths import bench_folder
from harness.studies.stage_rates import read_json

Seconds = Mapping[str, float]
"""Option of a record -> median seconds of an update; those that failed are left out."""


def seconds_of(tests: Iterable[Test], results: Path) -> dict[str, Seconds]:
    """File -> its options, for every update test whose file there is. Raises ValueError for one that is damaged, lacks
    a key, or is of another size than the test says."""
    found: dict[str, Seconds] = {}
    for test in tests:
        if not isinstance(test, Update) or not (path := bench_folder(results) / test.file).is_file():
            continue
        record = read_json(path)
        if record["size"] != test.size:
            raise ValueError(f"{path}: size={record['size']}; the test says size={test.size}")
        found[test.file] = {row["option"]: row["s"] for row in record["rows"] if "s" in row}
    return found


def factor_of(test: Update, seconds: Mapping[str, Seconds]) -> float | None:
    """Seconds of `over` divided by those of `option`; None where one was not measured."""
    rows = seconds.get(test.file, {})
    return rows[test.over] / rows[test.option] if test.option in rows and test.over in rows else None


def place_words(test: Update) -> str:
    """Options that a test compares, in words."""
    return f"{test.size}, {test.option!r} over {test.over!r}"
