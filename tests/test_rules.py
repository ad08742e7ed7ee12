"""Rules that the code cites are in docs/rules: every cited file, section and link exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_tree import ROOT

RULES = ROOT / "docs" / "rules"
NUMBERS = r"(\d+(?:\.\d+)*(?:(?:, | and | to )\d+(?:\.\d+)*)*)"
CITED = re.compile(rf"\b(\w+)\.md,? (?:sections? )?{NUMBERS}|\b({'|'.join(p.stem for p in RULES.glob('*.md'))})\.md")
"""Any `name.md` with a section number, and a file of docs/rules without one."""
HEADING = re.compile(r"^(?:#+ |- \*\*|\*\*)(\d+(?:\.\d+)*)\b", re.M)
LINK = re.compile(r"\]\(([^)#:]+)\)")
MARKDOWN_LINK = re.compile(r"\[[^\]]*\]\([^)]*\)")
FOLDERS = ("harness", "methods", "tests", "examples", "notebooks", "sweeps", "docs/rules")


def citations(text: str) -> Iterator[tuple[str, list[str]]]:
    """(rule file without ending, its cited sections) for every citation in a text."""
    for found in CITED.finditer(" ".join(MARKDOWN_LINK.sub("", text).split())):
        yield found[1] or found[3], re.findall(r"\d+(?:\.\d+)*", found[2] or "")


def sections(name: str) -> set[str]:
    """Numbers of the sections of a rule file; empty where there is no such file."""
    path = RULES / f"{name}.md"
    return set(HEADING.findall(path.read_text(encoding="utf-8"))) if path.is_file() else set()


def faults(text: str) -> list[str]:
    """Citations of a text that lead nowhere, or to a whole file where a section has to be named."""
    return [
        f"{name}.md {', '.join(cited) or 'without a section'}"
        for name, cited in citations(text)
        if not cited or not set(cited) <= sections(name)
    ]


def sources() -> list[Path]:
    """Files of ours that may cite a rule."""
    kinds = (".py", ".yaml", ".md")
    found = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")) if p.suffix in kinds]
    return [path for path in found if path != Path(__file__).resolve()]


def test_every_cited_rule_and_section_exists():
    found = {path: list(citations(path.read_text(encoding="utf-8"))) for path in sources()}
    assert sum(len(cited) for path, cited in found.items() if path.suffix == ".py") >= 10
    broken = [f"{path.relative_to(ROOT)}: {fault}" for path in found for fault in faults(path.read_text("utf-8"))]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("path", sorted(RULES.glob("*.md")), ids=lambda path: path.name)
def test_every_link_of_a_rule_file_leads_to_a_file(path):
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert len(links) > 5
    assert not [link for link in links if not (path.parent / link).resolve().is_file()]


def test_a_citation_that_leads_nowhere_is_found():
    assert faults("as losses.md 6.9 and losses.md sections 2 to 5 say") == []
    assert faults("see losses.md, section 6.77") == ["losses.md 6.77"]
    assert faults("the order of\n  engines.md\n  section 4.5") == []
    assert faults("newer.md 6") == ["newer.md 6"]
    assert faults("[losses.md](losses.md), the whole page") == []
    assert faults("precision.md says") == ["precision.md without a section"]
