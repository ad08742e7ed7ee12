"""`lowbit --version`: the version of the package, with the commit where there is one."""

from __future__ import annotations

import subprocess
import tomllib

import pytest

from harness.cli.main import main
from harness.foundation import provenance
from tests.source_tree import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.mark.parametrize(
    ("commit", "told"),
    [
        ((None, False), ""),
        (("0123456789" * 4, False), f" (commit {'0123456789' * 4})"),
        (("0123456789" * 4, True), f" (commit {'0123456789' * 4}, with changes)"),
    ],
)
def test_version_and_commit(commit, told, monkeypatch, capsys) -> None:
    monkeypatch.setattr(provenance, "commit", lambda: commit)
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"lowbit-rl-bench {VERSION}{told}\n"


def test_the_citation_names_the_same_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_a_checkout_tells_its_own_commit(capsys) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    with pytest.raises(SystemExit):
        main(["--version"])
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert head.stdout.strip() in capsys.readouterr().out
