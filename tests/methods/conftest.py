"""Fixtures that several files on mixtures of experts share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder, where runs of one mixture find the base that the first of them trained."""
    return tmp_path_factory.mktemp("mixtures")
