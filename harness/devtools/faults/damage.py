"""Damage to a file, and the file that fills a volume."""

from __future__ import annotations

from pathlib import Path

BALLAST = "ballast"
"""File that fills a volume."""


def damage(path: Path, form: str) -> None:
    """Cut a file, flip a bit in its middle, or empty it."""
    data = bytearray(path.read_bytes())
    if form == "flipped":
        data[len(data) // 2] ^= 4
    path.write_bytes({"truncated": bytes(data[: len(data) * 2 // 3]), "flipped": bytes(data)}.get(form, b""))
