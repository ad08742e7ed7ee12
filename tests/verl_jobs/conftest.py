"""One folder for all jobs, so that every base is trained once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results folder of the jobs."""
    return tmp_path_factory.mktemp("jobs")
