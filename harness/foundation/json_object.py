"""A file that holds one JSON object, read with errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn


class _Object(dict[str, Any]):
    """An object of a file, which it names where it is asked for a key that it lacks."""

    file, end = Path(), ""

    def __missing__(self, key: str) -> NoReturn:
        raise ValueError(f"{self.file}: {key} is missing{self.end}")


def read_json_object(path: Path, cure: str = "") -> dict[str, Any]:
    """The object. Raises ValueError naming a file that cannot be read, is not valid JSON, or holds another value; so
    does `[key]` of the object, or of one inside it, for a key that is not there. `cure` ends every message."""
    end = f"; {cure}" if cure else ""

    def named(values: dict[str, Any]) -> _Object:
        found = _Object(values)
        found.file, found.end = path, end
        return found

    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=named)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}{end}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}{end}") from error
    if not isinstance(value, _Object):
        raise ValueError(f"{path} holds no JSON object{end}")
    return value
