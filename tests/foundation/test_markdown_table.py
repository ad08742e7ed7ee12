"""The Markdown table: what a reader of GitHub's Markdown gets is every cell as it was given."""

from __future__ import annotations

import html
import re

import pytest

from harness.foundation.markdown_table import markdown_table
from harness.viewers.site.markdown import to_html


def read(text: str) -> list[list[str]]:
    """Head and rows as a Markdown parser has them."""
    rows = re.findall(r"<tr>(.*?)</tr>", to_html(text), re.S)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in rows]
    return [[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in cells]


def test_lines_of_a_table() -> None:
    assert markdown_table(("a", "b"), [("1", "2"), ("x y", "")]) == "| a | b |\n|---|---|\n| 1 | 2 |\n| x y |  |"
    assert markdown_table(["a"], []) == "| a |\n|---|"
    assert markdown_table(("a", "b"), (row for row in [["1", "2"]])).endswith("\n| 1 | 2 |")


@pytest.mark.parametrize(
    ("align", "marks"),
    [
        ("l", "|---|---|---|"), ("r", "|---:|---:|---:|"), ("lr", "|---|---:|---:|"), ("llr", "|---|---|---:|"),
        ("lrl", "|---|---:|---|"), ("lrlrr", "|---|---:|---|"),
    ],
)  # fmt: skip
def test_the_last_letter_counts_for_the_rest(align: str, marks: str) -> None:
    assert markdown_table(("a", "b", "c"), [], align).splitlines()[1] == marks


@pytest.mark.parametrize(
    "cell", ["a|b", "|", "||", "`x|y`", "a \\| b", "|k1| x length", "*bold* | `code`", "1 < 2 & 3"]
)
def test_a_bar_does_not_end_its_cell(cell: str) -> None:
    head, row = read(markdown_table((cell, "second"), [("first", cell)]))
    plain = cell.replace("\\|", "|").replace("`", "").replace("*", "")
    assert head == [plain, "second"] and row == ["first", plain]


def test_what_the_caller_escaped_is_left_as_it_is() -> None:
    assert markdown_table(["h"], [["a|b"]], is_escaped=True).splitlines()[2] == "| a|b |"
    assert markdown_table(["h"], [["a|b"]]).splitlines()[2] == "| a\\|b |"
    assert markdown_table(["h"], [["a\\|b"]]).splitlines()[2] == "| a\\|b |"  # not twice


@pytest.mark.parametrize("row", [(), ("1",), ("1", "2", "3")])
def test_a_row_of_another_width_is_an_error(row: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"table: a row of {len(row)} cells under a header of 2"):
        markdown_table(("a", "b"), [("1", "2"), row])
