"""Names in error messages: what was probably meant, what is valid, and long lists cut short."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LONG = 40
"""A longer list of valid names is not printed where something close was found."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """The closest valid names, then all of them where the list is short enough to read."""
    names = list(dict.fromkeys(choices))
    longer = [known for known in names if name and known.startswith((name, name.lower()))]
    alike = [*get_close_matches(name, names, n=3, cutoff=0.5), *get_close_matches(name.lower(), names, cutoff=0.5)]
    close = list(dict.fromkeys([*longer, *alike]))[:3]
    hints = [f"nearest: {', '.join(close)}"] if close else []
    if len(names) <= LONG or not close:
        hints.append(f"valid: {', '.join(names) or 'none'}")
    return "; ".join(hints)


def listed(names: Iterable[str], most: int = 4) -> str:
    """The first few names, and how many more; "none" for none."""
    known = [*names]
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return f"{', '.join(known[:most]) or 'none'}{more}"
