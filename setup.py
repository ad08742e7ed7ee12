"""Build step beside pyproject.toml: wheel and sdist also carry the project's own files that commands read.

Their patterns are `tool.lowbit.shipped` in pyproject.toml, and they lie in `harness/shipped` of the wheel, under the
names that they have in a clone. `harness.foundation.project_files` finds them there.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def shipped() -> dict[str, list[str]]:
    """Pattern -> the files that fit it, as sorted paths from the root of the project."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["lowbit"]["shipped"]
    return {
        pattern: sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern) if path.is_file())
        for pattern in patterns
    }


class BuildPy(build_py):
    """The build of Python files, and copies of the shipped ones; an editable installation reads the clone's."""

    def run(self) -> None:
        """Raises FileNotFoundError for a pattern that fits no file: the wheel would lack what it names."""
        super().run()
        if self.editable_mode:
            return
        for pattern, names in shipped().items():
            if not names:
                raise FileNotFoundError(f"pyproject.toml: tool.lowbit.shipped: no file fits {pattern}")
            for name in names:
                target = Path(self.build_lib, "harness", "shipped", name)
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(ROOT / name), str(target), preserve_mode=False)

    def get_source_files(self) -> list[str]:
        """What an sdist holds."""
        return [*super().get_source_files(), *(name for names in shipped().values() for name in names)]


setup(cmdclass={"build_py": BuildPy})
