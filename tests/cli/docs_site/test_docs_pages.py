"""The pages that are made from the code, and links from the documentation to files of the repository."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from posixpath import dirname, join, normpath

import pytest

from harness.api import Method, Part
from harness.cli.docs_site import docs_pages as pages
from harness.cli.main import parser
from harness.config.resolve import known_parts
from methods import METHODS
from methods.flashrl import TIS
from methods.m2po import M2Mask
from methods.mis import GeoRS
from tests.source_tree import ROOT
from tests.toy import small_config


@dataclass(frozen=True, kw_only=True)
class Parent(Part):
    """A part with a knob."""

    cap: float = 2.0
    """Largest weight."""


@dataclass(frozen=True, kw_only=True)
class Child(Parent):
    """One that adds | another."""

    bounds: tuple[float, float] = (0.5, 2.0)
    """Below and above,
    on rho."""
    plain: int = 3


def test_every_link_leads_to_a_file() -> None:
    """README and docs/ as they stand on disk, where GitHub shows them."""
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    links = [
        (path.relative_to(ROOT).as_posix(), target)
        for path in texts
        for target, _ in pages.LINK.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(links) > 100
    assert not [(page, to) for page, to in links if not (ROOT / normpath(join(dirname(page), to))).is_file()]


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_files_outside_docs_are_found_through_pages_outside(tmp_path: Path) -> None:
    """A table links to a picture; addresses, anchors, pages of docs/, README.md and absent files are no such files."""
    texts = {
        "docs/a.md": "[t](../results/t.md#x) [b](b.md) [w](https://x.org/y.md) [here](#z) [no](../absent.md)",
        "docs/b.md": "![](../pictures/p.png) [r](../README.md)",
        "results/t.md": "![](../pictures/q.png) [back](../docs/b.md) [t](t.md)",
        "pictures/p.png": "",
        "pictures/q.png": "",
        "pictures/unused.png": "",
        "README.md": "[u](pictures/unused.png)",
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    assert pages.linked_files(tmp_path) == ["pictures/p.png", "pictures/q.png", "results/t.md"]


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("docs/a.md", "../results/t.md#x", "results/t.md#x"),
        ("docs/a.md", "b.md", "b.md"),
        ("docs/rules/a.md", "../../results/t.md", "../results/t.md"),
        ("results/tables/t.md", "../../docs/verl.md", "../../verl.md"),
        ("LOG.md", "docs/verl.md", "verl.md"),
        ("LOG.md", "README.md", "index.md"),
        ("docs/a.md", "https://x.org/y.md", "https://x.org/y.md"),
        ("docs/a.md", "#here", "#here"),
    ],
)
def test_links_follow_their_files_to_the_site(page: str, link: str, shown: str) -> None:
    assert pages.relinked(f"see [this]({link}).", page) == f"see [this]({shown})."


def test_links_of_the_cases_are_those_of_the_first_page() -> None:
    """README's table stands on a page in `docs/`, which is the site's root."""
    targets = {target for target, _ in pages.LINK.findall(pages.GENERATED["cases"]())}
    assert targets >= {"concepts.md", "your-own-model.md"}
    for target in targets:
        assert (ROOT / target).is_file() or (ROOT / pages.DOCS / target).is_file(), target


def test_commands_are_shown_with_their_arguments() -> None:
    """Positional words, options with and without a value, hidden ones left out, commands of commands."""
    top = argparse.ArgumentParser(prog="lowbit")
    commands = top.add_subparsers()
    run = commands.add_parser("run", description="Run it.")
    run.add_argument("overrides", nargs="*", help="keys, 100 %% of them")
    run.add_argument("--to", choices=("a", "b"), help="where (default: %(default)s)", default="a")
    run.add_argument("--is-dry", action="store_true", help=argparse.SUPPRESS)
    run.add_argument("--workers", type=int)
    run.add_subparsers().add_parser("deep", description="Deeper.")
    text = pages.commands_text(top)
    assert text.splitlines() == [
        "## `lowbit run`", "", "Run it.", "",
        "| argument | meaning |", "|---|---|",
        "| `[overrides ...]` | keys, 100 % of them |", "| `--to a|b` | where (default: a) |",
        "| `--workers WORKERS` |  |",
        "",
        "## `lowbit run [overrides ...] deep`", "", "Deeper.",
    ]  # fmt: skip


def test_every_command_of_the_command_line_has_a_heading() -> None:
    text = pages.commands_text(parser())
    named = [name for name, _ in pages.subparsers(parser())]
    assert "lowbit sweep" in named
    assert "lowbit replay collect" in named
    assert [line for line in text.splitlines() if line.startswith("## ")] == [f"## `{name}`" for name in named]


def test_knobs_have_defaults_and_the_words_below_their_fields() -> None:
    """Those of a parent class too; a tuple is written as a list, as a command takes it."""
    assert pages.knob_rows(Child) == [
        ("cap", "2.0", "Largest weight."),
        ("bounds", "[0.5, 2.0]", "Below and above,\non rho."),
        ("plain", "3", ""),
    ]


def test_a_method_shows_what_it_sets_and_what_is_reconstructed() -> None:
    method = Method(
        name="mine", paper="arXiv 1", parts=(Child(cap=4.0),), precisions=("int8", "int4"), mode="bypass_pg",
        summary="weights <rho>", reconstructed="the cap",
    )  # fmt: skip
    text = pages.methods_text({"mine": method})
    part = "mine.Child"
    assert "| [`mine`](#mine) | reconstructed | weights \\<rho> | arXiv 1 |" in text
    assert f"- Parts: [`{part}`](#{part}) with `cap=4.0`\n" in text
    assert "- Sets: `algo.mode=bypass_pg`\n" in text
    assert "- Formats: `int8`, `int4`\n" in text
    assert "- Reconstructed: the cap\n" in text
    assert "One that adds \\| another." in text
    assert "| `bounds` | `[0.5, 2.0]` | Below and above, on rho. |" in text


def test_every_part_has_the_name_by_which_a_run_takes_it() -> None:
    """That of a method which has the part as it is by itself, where there is one."""
    names = pages.part_names(METHODS)
    assert {kind.__name__: names[kind] for kind in (TIS, GeoRS, M2Mask)} == {
        "TIS": "flashrl.TIS", "GeoRS": "geo_rs.GeoRS", "M2Mask": "m2po_areal.M2Mask",
    }  # fmt: skip
    for kind, name in names.items():
        (part,) = known_parts(small_config(f"parts=[{name}]"))
        assert type(part) is kind


def test_every_method_and_part_has_a_heading() -> None:
    text = pages.methods_text(METHODS)
    lines = text.splitlines()
    for name, method in METHODS.items():
        assert f"### `{name}` {{ #{name} }}" in lines
        assert not method.reconstructed or f"- Reconstructed: {pages.plain(method.reconstructed)}" in lines
    assert lines.count("### `flashrl.TIS` { #flashrl.TIS }") == 1
    cap = next(words for name, _, words in pages.knob_rows(TIS) if name == "cap")
    assert cap
    assert f"| `cap` | `2.0` | {pages.cell(cap)} |" in lines


def test_a_sweep_shows_the_head_of_its_file(tmp_path: Path) -> None:
    """Indented lines of the comment are commands; what follows the comment is not shown."""
    (tmp_path / "b.yaml").write_text(
        "# Why?\n#\n#   lowbit sweep b\n#\n# 3 cells.\nseeds: [0]\n# no\n", encoding="utf-8"
    )
    (tmp_path / "a.yaml").write_text("# One line.\n", encoding="utf-8")
    assert pages.sweeps_text(tmp_path).splitlines() == [
        "## `a`", "", "One line.", "",
        "## `b`", "", "Why?", "", "", "```", "lowbit sweep b", "```", "", "3 cells.",
    ]  # fmt: skip


def test_a_section_ends_at_the_next_heading() -> None:
    assert pages.section("# T\n\n## A\n\none\n\n### deeper\n\n## B\n\ntwo\n", "A") == "one\n\n### deeper"
    assert pages.section("## A\none", "A") == "one"
    with pytest.raises(ValueError, match="no heading '## C'"):
        pages.section("## A\none", "C")


def test_every_marker_is_known() -> None:
    """A page that asks for a text which nobody makes would end the build."""
    asked = {
        name
        for path in (ROOT / "docs").rglob("*.md")
        for name in pages.MARKER.findall(path.read_text(encoding="utf-8"))
    }
    assert asked == set(pages.GENERATED)


def test_signs_of_markdown_are_escaped_outside_of_code() -> None:
    assert pages.plain("w * x < [B, T] `a|b*` _c") == "w \\* x \\< \\[B, T\\] `a|b*` \\_c"
